"""Errors of sums over many ranks: added in fp32 the same at 4,096 ranks as at 8, and not so if rounded on their way."""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.training.reduction_error import ORDERS, Settings, contributions, main, measure
from bert.parallel.reduction.sums import add_contributions

RANKS = (8, 64, 512, 4096)


@cache
def gradients() -> dict[str, Tensor]:
    """Gradients of four micro-batches, over 8 binary orders of magnitude."""
    generator = torch.Generator().manual_seed(2)
    sizes = torch.exp2(-8 * torch.rand(600, generator=generator))
    return {"weight": (torch.randn(4, 600, generator=generator) + 0.5) * sizes}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("means", [True, False], ids=["agree", "differ"])
def test_sums_in_fp32_round_a_fixed_number_of_times(ranks: int, means: bool) -> None:
    """2^-9 at most each time, 0.17 % in the norm; where ranks agree, the errors of contributions average out."""
    bounds = {"sharded_world": 1.9e-3, "flat": 2.6e-3, "hierarchical and sharded": 3.2e-3}
    orders = {name: ORDERS[f"bf16, fp32 sums, {name}"] for name in bounds}
    for name, figures in measure(gradients(), ranks, means, orders).items():
        assert figures.worst_error < bounds[name], name
        assert means or figures.worst_error > 0.6 * bounds[name], name  # so that the bound says something


def test_what_is_rounded_at_every_hop_gets_worse_with_the_ranks() -> None:
    orders = {name: ORDERS[name] for name in ("bf16, ring", "bf16, ring in the node, ring of nodes", "bf16, tree")}
    measured = [measure(gradients(), ranks, False, orders) for ranks in RANKS]
    hops = [figures["bf16, ring"].worst_error for figures in measured]
    assert hops[0] > 3.2e-3
    assert all(more > 1.9 * less for less, more in pairwise(hops))
    assert hops[-1] > 0.05
    assert measured[-1]["bf16, ring in the node, ring of nodes"].worst_error > 0.02
    assert measured[-1]["bf16, tree"].worst_error > 5e-3


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_contributions_of_4096_ranks_are_added_in_fp32(spread: float) -> None:
    """Equal terms, where a bf16 sum would stop growing at 256 of them, and terms of either sign."""
    generator = torch.Generator().manual_seed(3)
    contributions_RW = (1 + 3 * spread * torch.randn(4096, 400, generator=generator)).bfloat16()
    whole_W = torch.full((402,), torch.nan)
    add_contributions(contributions_RW, whole_W[1:401])
    exact_W = contributions_RW.double().sum(0)
    assert (whole_W[1:401] - exact_W).norm() < 1e-6 * exact_W.norm()
    assert whole_W[[0, -1]].isnan().all()


def test_contributions_have_the_mean_and_the_variance_of_the_gradients() -> None:
    gradients_KW = gradients()["weight"]
    drawn_RW = 1024 * contributions(gradients_KW, 1024, True, torch.Generator().manual_seed(4))
    deviation_W = gradients_KW.std(0, correction=0)
    assert ((drawn_RW.mean(0) - gradients_KW.mean(0)) / deviation_W).abs().max() < 5 / 32
    torch.testing.assert_close(drawn_RW.std(0), deviation_W, rtol=0.2, atol=0)


def test_the_benchmark_measures_gradients_of_the_small_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text(
        "\n\n".join(f"The module number {n} reads a file.\nIt returns {n} lines of text." for n in range(9))
    )
    main(Settings(text=(text,), ranks=(8,), micro_batches=2, sequences=1, elements=50, out=out))
    printed = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in printed if not line[0]] == 2 * list(ORDERS)
    figures = json.loads(out.read_text())["figures"]
    assert list(figures) == ["8 ranks that agree", "8 ranks that differ"]
    for orders in figures.values():
        assert orders["fp32, ring"]["worst_error"] < 1e-6
        assert 1e-3 < orders["bf16, fp32 sums, flat"]["median_error"] < 3e-3


def test_the_benchmark_refuses_what_no_tree_has(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--ranks 12: expected powers of two from 8"):
        Settings(ranks=(64, 12))
    (tmp_path / "text.txt").write_text("One sentence.\nAnd another one.\n")
    with pytest.raises(ValueError, match="the text has 2 samples: expected at least 32; give more of it by --text"):
        main(Settings(text=(tmp_path / "text.txt",)))
