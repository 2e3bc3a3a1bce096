"""The experiments that decide how FP8 adds up and how much room its scales leave: what they compute, that they run."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.training import fp8_accumulation, fp8_headroom
from benchmarks.training.fp8_accumulation import accumulated, cut
from kernels.reference.fp8 import E4M3, E5M2, HEADROOM_BITS
from tests.conftest import REPOSITORY, SmallRun

FIGURES = REPOSITORY / "benchmarks" / "results" / "cpu_2cores"


def row(*values: float) -> Tensor:
    """[1, K], filled up with zeros to the terms of one instruction."""
    return torch.tensor([[*values, *[0.0] * (-len(values) % fp8_accumulation.TERMS)]])


@pytest.mark.parametrize("bits", [13, 14])
def test_a_sum_keeps_so_many_bits_below_the_first(bits: int) -> None:
    ones = torch.ones(1, 32)
    for exponent in (bits, bits + 1):
        found = accumulated(row(1.0, 2.0**-exponent), ones, bits, None).item()
        assert found == (1 + 2.0**-bits if exponent == bits else 1), "what is cut off is not rounded"
    assert accumulated(row(-1.0, -(2.0 ** -(bits + 1))), ones, bits, None).item() == -1
    assert accumulated(row(3.0, 2.0**-bits), ones, bits, None).item() == 3, "the largest has its first bit at 2"


def test_what_is_too_small_beside_the_sum_is_lost_until_it_is_promoted() -> None:
    """2^14 and 511 ones: beside it a sum of 13 bits loses each of them, also of those that come together."""
    a, b = torch.ones(1, 512), torch.ones(1, 512)
    a[0, 0] = 2.0**14
    assert accumulated(a, b, 13, None).item() == 2.0**14
    assert accumulated(a, b, 13, 128).item() == 2.0**14 + 384
    assert accumulated(a, b, 15, None).item() == 2.0**14 + 511


def test_sums_that_fit_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-3, 4, (rows, 200), generator=generator).float() for rows in (5, 7))
    for promoted in (None, 128):
        assert torch.equal(accumulated(a, b, 13, promoted), a @ b.t())


def test_cutting_goes_towards_zero() -> None:
    x = torch.tensor([1.75, -1.75, 0.75, 0.0])
    assert cut(x, torch.tensor(1.0), 1).tolist() == [1.5, -1.5, 0.5, 0.0]


def test_the_sums_of_a_layer(small_run: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sums.json"
    data = small_run.folder / "train"
    fp8_accumulation.main(fp8_accumulation.Settings(steps=1, tokens=200, sample=4, hidden=64, data=data, out=out))
    found = json.loads(out.read_text())["products"]
    assert len(found) == 12
    assert {product["terms"] for product in found if product["kind"] == "forward"} == {64, 256}
    for product in found:
        assert 0.005 < product["rounding to FP8"] < 0.2
        assert product["fp32 every 128, 14 bits"] <= product["tensor cores alone, 13 bits"] < 0.02
    assert "weight gradient" in capsys.readouterr().out


def test_the_room_of_scales(small_run: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "room.json"
    fp8_headroom.main(fp8_headroom.Settings(steps=3, sequences=2, data=small_run.folder / "train", out=out))
    found = json.loads(out.read_text())
    assert [line["kind"] for line in found["growth of amax"]] == ["input", "weight", "gradient"]
    for line in found["error of gradients"]:
        assert 0.01 < line["median"] < 0.3
    for line in found["saturated"]:
        shares = [line[f"headroom {bits}"] for bits in fp8_headroom.HEADROOMS]
        assert shares == sorted(shares, reverse=True)
    assert "error of rounding" in capsys.readouterr().out


def test_headroom_costs_what_becomes_too_small_and_no_precision() -> None:
    by_largest = {(line["format"], line["largest"]): line for line in fp8_headroom.costs()}
    for format_, near, far in (("e4m3fn", "1.76 x 2^8", "1.76 x 2^12"), ("e5m2", "1.76 x 2^16", "1.76 x 2^24")):
        assert by_largest[format_, near]["headroom 2"] == pytest.approx(
            by_largest[format_, near]["headroom 0"], rel=0.01
        )
        assert float(by_largest[format_, far]["headroom 6"]) > 0.2
    assert torch.finfo(E4M3).smallest_normal == 2.0**-6
    assert torch.finfo(E5M2).smallest_normal == 2.0**-14


def test_who_adds_up_follows_from_the_figures() -> None:
    """As ``bert.products.fp8`` has it: by more than how much the error would grow if the tensor cores were left alone."""
    growth: dict[str, float] = {}
    for product in json.loads((FIGURES / "fp8_accumulation.json").read_text())["products"]:
        rounding, kind = product["rounding to FP8"], product["kind"]
        more = math.hypot(rounding, product["tensor cores alone, 13 bits"]) / rounding - 1
        growth[kind] = max(more, growth.get(kind, 0.0))
    assert growth["forward"] < 0.02
    assert growth["input gradient"] < 0.002
    assert growth["weight gradient"] > 0.25


def test_headroom_follows_from_the_figures() -> None:
    figures = json.loads((FIGURES / "fp8_headroom.json").read_text())
    for line in figures["saturated"]:
        if line["steps looked back on"] == "1":
            assert line[f"headroom {HEADROOM_BITS[fp8_headroom.KINDS[line['kind']]]}"] == 0
    median = {line["inputs weights gradients"]: line["median, doubled"] for line in figures["error of gradients"]}
    assert median["2 2 4"] < 0.9 * median["0 0 0"]
