"""Copies of the model in stages on several ranks, over gloo: the numbers of one rank in every shape, and the same runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bert.parallel.watchdog.watchdog import FAULT_STATUS
from tests.conftest import SmallRun
from tests.distributed.ranks import Ranks
from tests.distributed.test_tensor_parallel import (
    checkpoints,
    differences,
    goes_on,
    same_results,
    without_dropout,
)

EIGHT = [
    "2,2,1,sharded,block,8,2,6,fp64",
    "1,2,1,flat,cyclic,2,2,3,fp64",
    "1,2,1,sharded,block,4,2,3,fp32",
    "1,4,1,hierarchical,block,2,4,3,fp64",  # each copy on two hosts
    "2,2,2,sharded_world,cyclic,4,2,3,fp64",
    "4,2,1,flat,block,4,2,3,fp64",
    "2,2,1,sharded,block,8,2,1,deep",
    "1,2,1,sharded,cyclic,4,2,3,fp64",
]
FOUR = [
    "1,4,1,flat,block,4,4,3,dropout",
    "2,2,1,flat,cyclic,2,2,3,recomputed",
    "1,2,2,sharded,block,4,4,3,fp64",
]
TWO = ["1,2,1,flat,block,1,2,6,fp64", "1,2,1,flat,block,1,3,3,accumulating", "1,2,2,sharded,block,2,4,3,dropout"]
ALONE = {
    shape: f"1,1,1,flat,block,1,{accumulation},{shape.split(',')[7]},{precision.replace('accumulating', 'fp64')}"
    for shape in EIGHT + FOUR + TWO
    for precision in [shape.rpartition(",")[2]]
    for accumulation in [{"dropout": 4, "fp32": 8}.get(precision, 1)]  # each micro-batch draws anew, and rounds
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return what every shape came to, on as many ranks as it is for."""
    folder, results = tmp_path_factory.mktemp("pipeline"), {}
    for ranks, shapes in ((1, sorted(set(ALONE.values()))), (2, TWO), (4, FOUR), (8, EIGHT)):
        out = folder / f"{ranks}.pt"
        with Ranks([str(out), *shapes], ranks, "tests.distributed.workers.pipeline_worker") as started:
            assert started.ends() == [0] * ranks, started.output
        results |= torch.load(out)
    return results


@pytest.mark.parametrize("shape", EIGHT + FOUR + TWO)
def test_every_shape_trains_as_one_rank(found: dict[str, dict[str, Any]], shape: str) -> None:
    """Losses and norms of every step; gradients, as the first step's moments have them; weights, and moments in fp64."""
    precise = not shape.endswith("fp32")
    one, other = found[ALONE[shape]], found[shape]
    assert len(one["means"]) == len(other["means"])
    for step, (mean, means) in enumerate(zip(one["means"], other["means"], strict=True)):
        for name in ("masked_lm_loss", "next_sentence_loss", "gradient_norm"):
            assert means[name] == pytest.approx(mean[name], rel=1e-12 if precise else 1e-5), (step, name)
        assert (means["tokens"], means["skipped_steps"]) == (mean["tokens"], 0), step
    for when in ("first", "last"):
        by_name = differences(one[when], other[when])
        worst = {name: each for name, each in by_name.items() if precise or name.startswith("weight ")}
        assert max(worst.values()) < (1e-10 if precise else 1e-5), (when, max(worst, key=worst.__getitem__))
    assert other["correct"] == one["correct"]
    assert one["correct"] > 0 or shape.endswith("deep")  # which has hardly begun
    assert other["agreed"], "all ranks bring the same together, to the last bit"
    assert other["returns"], "what a rank has of a whole vector is what it was"
    for name, tensor in other["saved"].items():
        assert torch.equal(tensor, other["last"][f"weight {name}"].float()), name
    assert other["skips"]
    assert other["elements"] < one["elements"] * 0.72, "no rank has all layers"


def test_a_run_in_stages_is_the_run_of_one_rank(small_run: SmallRun, tmp_path: Path) -> None:
    """Steps, evaluations and log; from a checkpoint of either, the other goes on."""
    ended = {}
    common = checkpoints(tmp_path) | without_dropout() | {"model__num_hidden_layers": 4}
    steps = "training__gradient_accumulation_steps"
    shape = {"parallel__tensor": 2, "parallel__pipeline": 2, steps: 2}
    for name, ranks, changes in (("one", 1, {}), ("staged", 4, shape)):
        folder = tmp_path / name
        settings = common | checkpoints(folder) | changes | {"save_checkpoint": folder / "saved"}
        with Ranks(small_run.arguments(folder, **settings), ranks) as started:
            assert started.ends() == [1] * ranks, started.output
        ended[name] = folder
        if ranks > 1:
            assert started.output.count("data 1 x pipeline 2 x tensor 2, reduction: flat (one rank)") == 1
    correct, count = same_results(ended["one"], ended["staged"])
    log = (ended["staged"] / "tiny_cpu" / "bert" / "result_0.txt").read_text()
    assert "threads, data 1 x pipeline 2 x tensor 2\n" in log
    values = {key: re.search(rf'"key": "{key}", "value": (\d+)', log) for key in ("global_batch_size", "d_batch_size")}
    assert {key: value and value[1] for key, value in values.items()} == {
        "global_batch_size": "16",
        "d_batch_size": "8",
    }
    assert '"key": "gradient_accumulation_steps", "value": 2' in log
    evaluated = shape | {"data__initial_checkpoint": ended["staged"] / "saved", "model__num_hidden_layers": 4}
    with Ranks(small_run.arguments(tmp_path, **evaluated), 4, "bert.evaluate") as started:
        assert started.ends() == [0] * 4, started.output
    assert f"{correct:,} of {count:,} masked tokens" in started.output
    again = {"parallel__pipeline": 2, "parallel__virtual_stages": 2, steps: 2, "training__reduction": "sharded"}
    for source, ranks, changes in (("one", 4, again), ("staged", 1, {})):
        goes_on(small_run, ended[source], tmp_path / f"from {source}", ranks, common | changes)


ENDLESS = {
    "training__max_samples": 10_000_000,
    "training__gradient_accumulation_steps": 2,
    "evaluation__interval_samples": 320,
    "parallel__pipeline": 2,
}


@pytest.mark.measured
def test_a_stage_that_stands_still_is_named_and_not_those_that_wait(small_run: SmallRun, tmp_path: Path) -> None:
    arguments = small_run.arguments(tmp_path, **ENDLESS, training__fault_seconds=4.0)
    with Ranks(["compute:1", *arguments], 4, "tests.distributed.workers.faulty_worker") as started:
        assert started.ends() == [FAULT_STATUS] * 4
        [message] = started.errors
    place = r"error: rank 1 on host \S+ \(data 0, pipeline 1, tensor 0\)"
    waiting = r"standing still for \d+ s in forward_backward of step \d+, and the others wait for it in reduce of"
    assert re.match(rf"{place}: {waiting}", message), message


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"parallel__pipeline": 2},
            "parallel.pipeline is 2, but training.gradient_accumulation_steps is 1: a step needs",
        ),
        (
            {"parallel__pipeline": 2, "training__gradient_accumulation_steps": 2},
            "parallel.pipeline is 2, but 1 host of 1 rank do not divide into copies of the model: set it to 1",
        ),
    ],
)
def test_impossible_shapes_are_refused(
    small_run: SmallRun, tmp_path: Path, changes: dict[str, object], complaint: str
) -> None:
    with Ranks(small_run.arguments(tmp_path, **changes), 1) as started:
        assert started.ends() == [2]
    assert complaint in started.output
