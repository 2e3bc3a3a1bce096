"""The launches of a traced step, in BERT-Large's shapes."""

import importlib.util
from collections import Counter

import pytest

from cluster.budget.launches import StepLaunch
from tests.cluster.budget.five_layers import SEQUENCES, launches

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
LAYERS = 24


def gflop(found: tuple[StepLaunch, ...], part: str, layer: int | None) -> float:
    chosen = (each.launch for each in found if each.part == part and each.layer == layer)
    return 2 * sum(launch.multiply_adds for launch in chosen) / 1e9 / SEQUENCES


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_work_of_a_sequence_is_that_of_the_model(precision: str) -> None:
    found = launches(precision)
    assert LAYERS * gflop(found, "encoder products", 1) == pytest.approx(463.5, rel=0.005)
    # Forward two products of a score, back seven, where three times the forward pass would be six in all.
    assert LAYERS * gflop(found, "attention", 1) == pytest.approx(29.1 * 9 / 6, rel=0.01)
    heads = [
        each.launch
        for each in found
        if 30_522 in (*each.launch.shapes.get("out", ()), *each.launch.shapes.get("self", ()))
    ]
    assert 6e-9 * sum(each.multiply_adds for each in heads) / 3 / SEQUENCES == pytest.approx(7.4, rel=0.05)


@pytest.mark.parametrize(("precision", "kib"), [("bf16", 92), ("fp8", 82)])
def test_inner_layers_launch_the_same_and_pass_over_few_bytes(precision: str, kib: int) -> None:
    """The first is given what embeddings make, and the last inner one gives to a layer of another precision.

    In FP8 the others hand casts to one another.
    """
    found = launches(precision)
    kinds = [
        Counter((each.launch.kernel, each.bytes, each.part) for each in found if each.layer == at) for at in (1, 2)
    ]
    assert kinds[0] == kinds[1]
    assert {each.layer for each in found} == {None, 0, 1, 2, 3}
    [tokens] = {each.launch.shapes["query"][0] for each in found if each.part == "attention"}
    traffic = sum(each.bytes for each in found if each.part == "element-wise" and each.layer == 1)
    assert traffic / tokens / 1024 < kib


def test_fp8_layers_launch_no_cast_of_their_own_and_no_sum_of_gradients() -> None:
    """But for what comes from the embeddings: five of seven passes over tokens are gone, and the sums."""
    found = launches("fp8")
    passes = Counter(each.launch.kernel for each in found if each.part == "element-wise" and each.layer == 1)
    norms = {"_add_norm_cast_forward": 2, "_add_norm_cast_backward": 2}
    assert passes == {**norms, "_gelu_kernel": 1, "_gelu_backward_kernel": 1, "aten.new_zeros": 1}


def test_fp8_multiplies_in_fp8_and_bf16_casts_weights() -> None:
    fp8, bf16 = (Counter(each.launch.kernel for each in launches(precision)) for precision in ("fp8", "bf16"))
    assert fp8["aten._scaled_mm"] == 4 * 4 * 3
    assert "aten._scaled_mm" not in bf16
    assert bf16["aten.mm"] + bf16["aten.addmm"] > 4 * 4 * 3


@pytest.mark.parametrize(("precision", "megabytes"), [("bf16", 0), ("fp8", 188)])
def test_passes_over_the_word_table(precision: str, megabytes: int) -> None:
    """Besides products, and kernels that touch the rows of tokens: the cast where LAMB leaves no copy."""
    table = (30_522, 1024)
    passes = [
        each
        for each in launches(precision)
        if each.part == "ends" and not each.launch.multiply_adds and table in each.launch.shapes.values()
    ]
    passes = [each for each in passes if "input_ids" not in each.launch.shapes]
    assert sum(each.bytes for each in passes) / 1e6 == pytest.approx(megabytes, abs=1)


def test_the_update_is_lamb_and_its_bytes_are_those_of_the_parameters() -> None:
    update = [each for each in launches("bf16") if each.part == "update"]
    steps = [each.launch for each in update if each.launch.kernel == "apply_kernel"]
    [parameters] = steps[0].shapes["parameters"]
    assert 30 < sum(each.bytes for each in update) / parameters < 52


def test_without_triton_there_is_nothing_to_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match="triton is not installed"):
        launches("bf16", sequences=3)
