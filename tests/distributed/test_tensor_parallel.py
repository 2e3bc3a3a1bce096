"""Ranks that share a copy of the model, over gloo: the numbers of one rank in every shape, and the same runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import SmallRun
from tests.distributed.ranks import Ranks, records, result_of
from tests.distributed.workers.tensor_worker import ALONE, ALONE_FP8, ALONE_FP32, DROPPING, MODEL

FP64 = [
    "2,flat,block,4,1,fp64",
    DROPPING,
    "2,sharded,block,4,2,fp64",
    "2,hierarchical,cyclic,2,1,fp64",
    "2,sharded_world,block,2,2,fp64",
    "2,sharded_world,cyclic,2,2,fp64",
]
FP32 = ["4,sharded,cyclic,4,2,fp32"]
FP8 = ["4,flat,block,4,1,fp8", "2,sharded,block,4,1,fp8"]


def worker(out: Path, ranks: int, shapes: list[str]) -> dict[str, dict[str, Any]]:
    with Ranks([str(out), *shapes], ranks, "tests.distributed.workers.tensor_worker") as started:
        assert started.ends() == [0] * ranks, started.output
    return torch.load(out)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return worker(tmp_path_factory.mktemp("alone") / "out.pt", 1, [ALONE, ALONE_FP32, ALONE_FP8])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return worker(tmp_path_factory.mktemp("shared") / "out.pt", 4, FP64 + FP32 + FP8)


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    """Compare each tensor by the norm; keys' biases, which no softmax sees, have gradients of rounding alone."""
    assert one.keys() == other.keys()
    kept = {name: torch.ones_like(tensor) for name, tensor in one.items()}
    for name, ones in kept.items():
        if name.endswith("query_key_value.bias"):
            ones[len(ones) // 3 : 2 * len(ones) // 3] = 0
    return {
        name: float(((other[name] - tensor) * kept[name]).norm() / (tensor * kept[name]).norm().clamp(min=1e-30))
        for name, tensor in one.items()
    }


@pytest.mark.parametrize("shape", FP64 + FP32)
def test_every_shape_trains_as_one_rank(
    alone: dict[str, dict[str, Any]], shared: dict[str, dict[str, Any]], shape: str
) -> None:
    """Losses and norms of every step; gradients, as the first step's moments have them; weights, and moments in fp64."""
    precise = shape.endswith("fp64")
    one, found = alone[ALONE if precise else ALONE_FP32], shared[shape]
    for step, (mean, other) in enumerate(zip(one["means"], found["means"], strict=True)):
        for name in ("masked_lm_loss", "next_sentence_loss", "gradient_norm"):
            assert other[name] == pytest.approx(mean[name], rel=1e-12 if precise else 1e-5), (step, name)
        assert (other["tokens"], other["skipped_steps"]) == (mean["tokens"], 0), step
    assert one["means"][-1]["masked_lm_loss"] < 0.8 * one["means"][0]["masked_lm_loss"]
    for when in ("first", "last"):
        found_differences = differences(one[when], found[when])
        worst = {name: each for name, each in found_differences.items() if precise or name.startswith("weight ")}
        assert max(worst.values()) < (1e-10 if precise else 1e-5), (when, max(worst, key=worst.__getitem__))
    assert found["correct"] == one["correct"] > 10
    assert found["agreed"], "all ranks bring the same together, to the last bit"
    assert found["returns"], "shards of a whole vector are what they were"
    for name, tensor in found["saved"].items():
        assert torch.equal(tensor, found["last"][f"weight {name}"].float()), name
    assert one["skips"]
    assert found["skips"]
    ranks = int(shape[0])
    assert found["words"] == -(-MODEL.vocab_size // (8 * ranks)) * 8, "no rank has all words, or all logits"


def test_dropout_is_as_random_as_on_one_rank(
    alone: dict[str, dict[str, Any]], shared: dict[str, dict[str, Any]]
) -> None:
    """The mean loss of a batch over many draws, and how far draws lie apart; not that of no dropout, nor always the same."""
    one, other = (torch.tensor(found["dropped"]) for found in (alone[ALONE], shared[DROPPING]))
    error = ((one.var() + other.var()) / len(other)).sqrt()
    assert abs(other.mean() - one.mean()) < 3 * error
    assert 0.6 < other.std() / one.std() < 1.6
    assert len(set(other.tolist())) == len(other)


@pytest.mark.parametrize("shape", FP8)
def test_fp8_has_the_scales_of_whole_tensors(
    alone: dict[str, dict[str, Any]], shared: dict[str, dict[str, Any]], shape: str
) -> None:
    one, found = alone[ALONE_FP8], shared[shape]
    assert torch.equal(found["scales"], one["scales"])
    assert len(set(one["scales"].tolist())) > 3
    assert found["agreed"]
    for name in ("masked_lm_loss", "next_sentence_loss", "gradient_norm"):
        assert found["means"][0][name] == pytest.approx(one["means"][0][name], rel=2e-2)


def test_a_run_that_shares_copies_is_the_run_of_one_rank(small_run: SmallRun, tmp_path: Path) -> None:
    """Steps, evaluations and log; from a checkpoint of either, the other goes on."""
    ended = {}
    for name, ranks, tensor, reduction in (("one", 1, 1, "auto"), ("shared", 4, 2, "sharded")):
        folder = tmp_path / name
        changes = {"parallel__tensor": tensor, "training__reduction": reduction, "save_checkpoint": folder / "saved"}
        settings = changes | checkpoints(folder) | without_dropout()
        with Ranks(small_run.arguments(folder, **settings), ranks) as started:
            assert started.ends() == [1] * ranks, started.output
        ended[name] = folder
        if ranks > 1:
            assert started.output.count("data 2 x tensor 2, reduction: sharded (as set)") == 1
    correct, count = same_results(ended["one"], ended["shared"])
    log = result_of(ended["shared"]).read_text()
    assert "# data 2 x tensor 2, reduction: sharded (as set)" in log
    assert "# config.parallel.tensor: 2" in log
    logged = {record["key"]: record["value"] for line in log.splitlines() if (record := _record(line))}
    assert (logged["global_batch_size"], logged["d_batch_size"], logged["gradient_accumulation_steps"]) == (16, 8, 1)
    evaluated = {"parallel__tensor": 2, "data__initial_checkpoint": ended["shared"] / "saved"}
    with Ranks(small_run.arguments(tmp_path, **evaluated), 2, "bert.evaluate") as started:
        assert started.ends() == [0, 0], started.output
    assert f"{correct:,} of {count:,} masked tokens" in started.output
    for source, ranks, tensor in (("one", 2, 2), ("shared", 1, 1)):
        settings = without_dropout() | {"parallel__tensor": tensor}
        goes_on(small_run, ended[source], tmp_path / f"from {source}", ranks, settings)


def checkpoints(folder: Path) -> dict[str, object]:
    return {"checkpoint__folder": folder / "checkpoints", "checkpoint__every_steps": 4, "checkpoint__keep": 9}


def without_dropout() -> dict[str, object]:
    return {"model__hidden_dropout": 0.0, "model__attention_dropout": 0.0}


def _record(line: str) -> dict[str, Any] | None:
    return json.loads(line.removeprefix(":::MLLOG ")) if line.startswith(":::MLLOG ") else None


def same_results(one: Path, other: Path) -> tuple[int, int]:
    """The steps, evaluations and saved weights of two runs; returns what the last evaluation counted."""
    same_steps(one, other)
    expected, found = (
        [(each["correct"], each["count"]) for each in records(folder, "eval")] for folder in (one, other)
    )
    assert found == expected
    saved = load_file(other / "saved")
    for name, tensor in load_file(one / "saved").items():
        torch.testing.assert_close(saved[name], tensor, rtol=2e-5, atol=1e-5)
    return expected[-1]


def goes_on(small_run: SmallRun, source: Path, folder: Path, ranks: int, settings: dict[str, object]) -> None:
    """A run from the fourth step of another, in another shape: its next step is that one's."""
    settings = settings | checkpoints(folder) | {"checkpoint__every_steps": 1, "training__max_steps": 5}
    settings |= {"training__seed": None, "resume": source / "checkpoints" / "step_00000004"}
    with Ranks(small_run.arguments(folder, **settings), ranks) as started:
        assert started.ends() == [1] * ranks, started.output
    same_steps(source, folder, since=5)


def same_steps(one: Path, other: Path, since: int = 1) -> None:
    expected = {record["step"]: record for record in records(one, "step")}
    found = records(other, "step")
    assert found[0]["step"] == since
    for record in found:
        for name in ("masked_lm_loss", "next_sentence_loss", "gradient_norm", "learning_rate"):
            assert record[name] == pytest.approx(expected[record["step"]][name], rel=2e-5, abs=2e-6), record["step"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"parallel__tensor": 3}, "parallel.tensor is 3, which does not divide model.num_attention_heads 2 and "),
        ({"parallel__tensor": 2}, "parallel.tensor is 2, but 1 host of 1 rank do not divide into groups of that size"),
    ],
)
def test_impossible_shapes_are_refused(
    small_run: SmallRun, tmp_path: Path, changes: dict[str, object], complaint: str
) -> None:
    with Ranks(small_run.arguments(tmp_path, **changes), 1) as started:
        assert started.ends() == [2]
    assert complaint in started.output
