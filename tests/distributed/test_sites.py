"""Sites that take several steps by themselves: the exchange, and runs with it."""

import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from bert.checkpoints.training_state import World, changes
from bert.configuration.recipes import tiny_cpu
from bert.configuration.sections import ReduceDtype, SiteDtype
from bert.execution.stopwatch import Stopwatch
from bert.guards.preflight import check
from bert.optimizer import FlatParameters
from bert.parallel.environment import SITE, site
from bert.parallel.mesh import Mesh
from bert.parallel.reduction.gradients import Communicators, Reduction
from bert.parallel.rendezvous import Identity, group_by_host
from bert.parallel.sites import BLOCK, SiteExchange, decoded, encoded
from bert.parallel.watchdog.watchdog import FAULT_STATUS
from bert.train import parse
from tests.bert.small_models import drawn_model
from tests.conftest import SmallRun
from tests.convergence.test_golden_losses import MODEL
from tests.distributed.at_sites import at_sites
from tests.distributed.ranks import ENDLESS, assert_aborted, compare_steps, records, run_on_ranks, train
from tests.distributed.test_reduction import contribution

SITES = ("one", "two", "two", "three", "three", "three")
"""Site of each rank in tests of the exchange itself."""
SIZE, STEPS, APART = 1500, 7, 3


def with_sites(joined: Mesh) -> Mesh:
    return replace(joined, nodes=tuple((rank,) for rank in range(joined.world_size)), sites=SITES)


@pytest.mark.parametrize("dtype", get_args(SiteDtype))
def test_a_code_is_as_exact_as_its_type(dtype: SiteDtype) -> None:
    change_K = torch.randn(4 * BLOCK, generator=torch.Generator().manual_seed(0)).mul_(1e-4)
    change_K[BLOCK : 2 * BLOCK] = 0
    code_C = encoded(change_K, dtype)
    assert len(code_C) == {"fp32": 4 * 4 * BLOCK, "bf16": 2 * 4 * BLOCK, "int8": 4 * (BLOCK + 4)}[dtype]
    found_K = decoded(code_C, dtype)
    assert torch.equal(found_K[BLOCK : 2 * BLOCK], change_K[BLOCK : 2 * BLOCK])
    largest = change_K.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
    bound = {"fp32": 0.0, "bf16": 2.0**-8, "int8": 0.501 / 127}[dtype]
    assert ((found_K - change_K).abs() <= bound * largest).all()


def own_step(site: int, step: int, weights: Tensor) -> Tensor:
    """Return a step that depends on the weights, as a step of training does."""
    noise = torch.randn(len(weights), generator=torch.Generator().manual_seed(100 * site + step), dtype=torch.float64)
    return 0.01 * (noise - weights.double() + site)


def independent(lr: float, momentum: float) -> Tensor:
    """Compute the weights after ``STEPS`` steps and a last exchange in fp64, with all sites in one process."""
    shares = [SITES.count(name) / len(SITES) for name in dict.fromkeys(SITES)]
    shared = torch.zeros(SIZE, dtype=torch.float64)
    velocity = torch.zeros_like(shared)
    weights = [shared.clone() for _ in shares]
    sent: list[Tensor] = []

    def begin() -> None:
        nonlocal shared
        sent[:] = [each.clone() for each in weights]
        mean = sum(share * (shared - each) for share, each in zip(shares, sent, strict=True))
        velocity.mul_(momentum).add_(mean)
        shared = shared - lr * (mean + momentum * velocity)

    def apply() -> None:
        for place, before in enumerate(sent):
            weights[place] += shared - before
        sent.clear()

    for step in range(1, STEPS + 1):
        for place, each in enumerate(weights):
            each += own_step(place, step, each)
        if step % APART == APART // 2 and sent:
            apply()
        if step % APART == 0:
            begin()
    for act in (apply,) if STEPS % APART == 0 else (*([apply] if sent else []), begin, apply):
        act()
    assert all(torch.allclose(weights[0], each) for each in weights)
    return weights[0]


def exchanged(joined: Mesh) -> dict[str, tuple[Tensor, int]]:
    """Return rank 0's weights and the bytes that all ranks have sent, for each type."""
    mesh = with_sites(joined)
    place = list(dict.fromkeys(SITES)).index(SITES[mesh.rank])
    found = {}
    for dtype in get_args(SiteDtype):
        config = replace(
            tiny_cpu().training, site_steps=APART, site_dtype=dtype, site_learning_rate=0.8, site_momentum=0.6
        )
        weights_P = torch.zeros(SIZE)
        exchange = SiteExchange(weights_P, config, mesh, Stopwatch())
        for step in range(1, STEPS + 1):
            weights_P += own_step(place, step, weights_P).float()
            exchange.after_step(step)
        exchange.settle()
        everyones = [torch.empty_like(weights_P) for _ in range(mesh.world_size)]
        dist.all_gather(everyones, weights_P)
        assert all(torch.equal(everyones[0], other) for other in everyones), dtype
        assert not exchange.settle(), "nothing has changed"
        found[dtype] = weights_P, exchange.take_bytes()
    return found


@pytest.mark.slow
def test_sites_of_unequal_size_agree_with_an_independent_computation(tmp_path: Path) -> None:
    found = run_on_ranks(tmp_path, len(SITES), exchanged)
    exact = independent(0.8, 0.6)
    bounds = {"fp32": 1e-6, "bf16": 2e-3, "int8": 4e-3}
    for dtype, (weights_P, sent) in found.items():
        assert (weights_P - exact).norm() <= bounds[dtype] * exact.norm(), dtype
        # Each of three pieces of 512 elements goes from three owners to the two others, in three exchanges.
        assert sent == 3 * 3 * 3 * 2 * {"fp32": 4 * 512, "bf16": 2 * 512, "int8": 512 + 2 * 4}[dtype]


def summed(joined: Mesh) -> None:
    mesh = with_sites(joined)
    flat_groups, communicators = Communicators.create(mesh, is_flat=True), Communicators.create(mesh)
    assert communicators.between is not None
    assert (flat_groups.between, flat_groups.shards) == (None, len(SITES)), "as without sites"
    flat = FlatParameters.of(drawn_model(MODEL, 1), communicators.shards)
    contributions = [contribution(rank, len(flat.gradients_N)) for rank in range(mesh.world_size)]
    exact = torch.stack(contributions).double().sum(0)
    for dtype, bound in zip(get_args(ReduceDtype), (1e-7, 4e-3), strict=True):
        reduction = Reduction(flat, communicators, "hierarchical", dtype, bucket_bytes=200_000)
        flat.gradients_N.copy_(contributions[mesh.rank])
        reduction.finish()
        reduction.close()
        everyones = [torch.empty_like(flat.gradients_N) for _ in range(mesh.world_size)]
        dist.all_gather(everyones, flat.gradients_N)
        assert all(torch.equal(everyones[0], other) for other in everyones), dtype
        assert (flat.gradients_N - exact).norm() / exact.norm() < bound, dtype


@pytest.mark.slow
def test_a_hierarchical_reduction_sums_between_sites_of_unequal_size(tmp_path: Path) -> None:
    run_on_ranks(tmp_path, len(SITES), summed)


def settings(**changes: object) -> dict[str, object]:
    sizes = {"training__site_steps": 4, "training__max_samples": 16 * 20, "evaluation__interval_samples": 16 * 8}
    return {**sizes, **changes}


def run_at(sites: tuple[str, ...], run: SmallRun, results: Path, **changes: object) -> str:
    with at_sites(sites, run.arguments(results, **settings(**changes))) as ranks:
        assert ranks.ends() == [1] * len(sites), ranks.output
        return ranks.output


@pytest.mark.slow
def test_a_run_is_repeated_and_resumed_bit_for_bit(small_run: SmallRun, tmp_path: Path) -> None:
    """A checkpoint after six steps, amid a period of four, gives all sites the same state, as a resumed run has it."""
    sites = ("far", "near", "near", "near")
    keep = {"checkpoint__every_steps": 6, "checkpoint__keep": 9, "model__hidden_dropout": 0.1}
    for name in ("one", "other"):
        output = run_at(sites, small_run, tmp_path / name, checkpoint__folder=tmp_path / name / "kept", **keep)
        assert "sites: far (1 rank), near (3 ranks), each by itself for 4 steps, then int8" in output
    (tmp_path / "start").mkdir()
    shutil.copytree(tmp_path / "one/kept/step_00000006", tmp_path / "start/step_00000006")
    again = {"resume": tmp_path / "start", "checkpoint__folder": tmp_path / "resumed/kept", "training__seed": None}
    run_at(sites, small_run, tmp_path / "resumed", **keep | again)
    steps = {name: records(tmp_path / name, "step") for name in ("one", "other", "resumed")}
    compare_steps(steps["one"], steps["other"], rel=0, abs=0)
    compare_steps(steps["one"][6:], steps["resumed"], rel=0, abs=0)
    for name in ("model", "momentum", "variance", "site_momentum"):
        file = f"kept/step_00000018/{name}.safetensors"
        assert len({(tmp_path / run / file).read_bytes() for run in steps}) == 1, name
        assert any(tensor.any() for tensor in load_file(tmp_path / "one" / file).values()), name
    # A run without sites leaves their momentum out.
    again |= {"checkpoint__folder": None, "training__site_steps": 1}
    assert len(train(small_run, tmp_path / "alone", 1, **settings(**again), model__hidden_dropout=0.1)) == 14


def test_metrics_count_what_crosses_between_sites(small_run: SmallRun, tmp_path: Path) -> None:
    run_at(("a", "b"), small_run, tmp_path)
    steps = records(tmp_path, "step")
    assert [step["step"] for step in steps if step["site_bytes"]] == [4, 8, 12, 16, 20]
    [run] = records(tmp_path, "run")
    parameters = run["parameters"]
    for step in steps[3::4]:
        assert 1.01 * parameters < step["site_bytes"] / 2 < 1.05 * parameters


def test_one_step_apart_is_a_run_without_sites(small_run: SmallRun, tmp_path: Path) -> None:
    run_at(("a", "b"), small_run, tmp_path / "sites", training__site_steps=1)
    run_at(("", ""), small_run, tmp_path / "none", training__site_steps=1)
    found, expected = records(tmp_path / "sites", "step"), records(tmp_path / "none", "step")
    compare_steps(expected, found, rel=0, abs=0)
    assert not any(step["site_bytes"] for step in found)


def refusal(sites: tuple[str, ...], run: SmallRun, results: Path, **changes: object) -> str:
    """Start a run that every rank must refuse in one line before its clock starts, and return the line."""
    with at_sites(sites, run.arguments(results, **settings(**changes))) as ranks:
        assert ranks.ends() == [2] * len(sites), ranks.output
    assert not list(results.glob("**/result_*.txt"))
    [line] = {re.sub("^error: (rank [0-9]+: )?", "", error) for error in ranks.errors}
    assert "Traceback" not in ranks.output
    return line


def test_one_site_is_refused(small_run: SmallRun, tmp_path: Path) -> None:
    for sites in (("a", "a"), ("", "")):
        assert "all ranks are at one site" in refusal(sites, small_run, tmp_path)


def test_a_host_without_a_site_among_others_is_refused(small_run: SmallRun, tmp_path: Path) -> None:
    assert "host h1 states no site" in refusal(("a", ""), small_run, tmp_path)


@pytest.mark.parametrize("name", ["a" * 33, "a b", "../up", "-x", "\x1b[31m", "ünï"])
def test_names_of_sites_are_short_and_plain(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(SITE, name)
    with pytest.raises(ValueError, match=SITE) as refused:
        site()
    assert str(refused.value).isprintable()


def test_a_host_with_two_sites_is_refused() -> None:
    identities = [Identity("h0", "", rank, 2, name) for rank, name in enumerate("ab")]
    with pytest.raises(ValueError, match="host h0 states several sites"):
        group_by_host(identities)


def test_hosts_of_a_site_follow_one_another() -> None:
    identities = [Identity(f"h{rank}", "", 0, 1, name) for rank, name in enumerate("abab")]
    assert group_by_host(identities) == ((0,), (2,), (1,), (3,))


def test_the_closed_division_and_uneven_periods_are_refused(small_run: SmallRun, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"site_steps is 3, which does not divide the 8 steps .* set it to 2, .* multiple of 48"
    ):
        check(parse(small_run.arguments(tmp_path, **settings(training__site_steps=3))), 2)
    with pytest.raises(ValueError, match=r"training\.site_steps is set in the closed division"):
        parse(["dgxa100_8x8", "--training.site-steps", "8"])


@pytest.mark.slow
def test_a_lost_site_is_named(small_run: SmallRun, tmp_path: Path) -> None:
    arguments = small_run.arguments(tmp_path, **ENDLESS | {"training__site_steps": 4})
    with at_sites(("oslo", "rome"), arguments) as ranks:
        ranks.wait_for(lambda: "step " in ranks.output)
        ranks.processes[1].send_signal(signal.SIGKILL)
        assert ranks.ends(0) == [FAULT_STATUS], ranks.output
    [message] = ranks.errors
    assert message.startswith("error: rank 1 on host h1 (site rome): ended without a word")
    assert_aborted(tmp_path, message)


def test_a_host_that_moves_to_another_site_is_reported() -> None:
    config = tiny_cpu()
    before, now = (World.of(["h0", "h1"], config, sites=names) for names in (("a", "b"), ("a", "c")))
    assert changes(before, now) == ["host h1 is at site c; before b"]
