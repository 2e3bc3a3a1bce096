"""Ranks that divide the model and sum gradients in various ways, over gloo, compared with one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import SmallRun
from tests.distributed.ranks import Ranks, compare_steps, records, run_on_ranks, train, trained
from tests.distributed.shapes import DROPPING, alone, require_same_training, train_all

FP8 = ["4,1,1,flat,block,4,1,1,fp8", "2,1,1,sharded,block,4,1,1,fp8"]
SHAPES = {
    2: [
        "1,2,1,flat,block,1,3,3,accumulating",
        "1,2,2,sharded,block,2,4,3,dropout",
    ],
    4: [
        "1,1,1,hierarchical,block,2,2,4,fp64",
        "1,1,1,sharded,cyclic,2,1,4,fp64",
        "1,1,1,sharded_world,block,2,2,4,fp64",
        DROPPING,
        "2,1,1,sharded,block,4,2,4,fp64",
        "1,1,1,sharded+,block,2,2,4,fp64",
        "1,1,1,sharded_world+,cyclic,2,1,4,accumulating",
        "2,1,1,sharded_world+,block,4,2,3,recomputed",
        "1,4,1,flat,block,4,4,3,dropout",
        "2,2,1,flat,cyclic,2,2,3,recomputed",
        "1,2,1,sharded,block,4,2,3,fp32",
        "1,2,1,hierarchical,block,1,2,3,fp64",  # the stages of each copy are on two hosts
        *FP8,
    ],
    8: ["2,2,2,sharded_world,cyclic,4,2,3,fp64"],
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Train in every shape, and return the results by shape."""
    folder = tmp_path_factory.mktemp("shapes")
    one = {alone(shape) for shapes in SHAPES.values() for shape in shapes}
    results = dict(run_on_ranks(folder, 1, train_all, *sorted(one)))
    for ranks, shapes in SHAPES.items():
        results |= run_on_ranks(folder, ranks, train_all, *shapes)
    return results


@pytest.mark.parametrize("shape", [shape for shapes in SHAPES.values() for shape in shapes if shape not in FP8])
def test_every_shape_trains_as_one_rank(found: dict[str, dict[str, Any]], shape: str) -> None:
    require_same_training(shape, found[alone(shape)], found[shape])


def test_dropout_is_as_random_as_on_one_rank(found: dict[str, dict[str, Any]]) -> None:
    """Losses of a batch over many dropout draws have the same mean and a similar deviation, and all differ."""
    one, other = (torch.tensor(found[shape]["dropped"]) for shape in (alone(DROPPING), DROPPING))
    error = ((one.var() + other.var()) / len(other)).sqrt()
    assert abs(other.mean() - one.mean()) < 3 * error
    assert 0.6 < other.std() / one.std() < 1.6
    assert len(set(other.tolist())) == len(other)


@pytest.mark.parametrize("shape", FP8)
def test_fp8_has_the_scales_of_whole_tensors(found: dict[str, dict[str, Any]], shape: str) -> None:
    one, other = found[alone(shape)], found[shape]
    assert torch.equal(other["scales"], one["scales"])
    assert len(set(one["scales"].tolist())) > 3
    for name in ("masked_lm_loss", "next_sentence_loss", "gradient_norm"):
        assert other["means"][0][name] == pytest.approx(one["means"][0][name], rel=2e-2)


def test_a_run_that_shares_copies_is_the_run_of_one_rank(small_run: SmallRun, tmp_path: Path) -> None:
    """Compare steps, evaluations and saved weights, and resume each run from the other run's checkpoint."""
    common = {"model__num_hidden_layers": 4, "checkpoint__keep": 9}
    shape = {"parallel__tensor": 2, "parallel__pipeline": 2, "training__gradient_accumulation_steps": 2}
    for name, ranks, changes in (("one", 1, {}), ("shared", 4, shape)):
        folder = tmp_path / name
        settings = {"checkpoint__folder": folder / "checkpoints", "checkpoint__every_steps": 4}
        settings |= common | changes | {"save_checkpoint": folder / "saved"}
        output = trained(small_run, folder, ranks, **settings)
    assert output.count("data 1 x pipeline 2 x tensor 2, reduction: flat (one rank)") == 1
    one, other = tmp_path / "one", tmp_path / "shared"
    compare_steps(records(one, "step"), records(other, "step"))
    expected, found = ([(row["correct"], row["count"]) for row in records(folder, "eval")] for folder in (one, other))
    assert found == expected
    saved = load_file(other / "saved")
    for name, tensor in load_file(one / "saved").items():
        torch.testing.assert_close(saved[name], tensor, rtol=2e-5, atol=1e-5)
    evaluated = common | shape | {"data__initial_checkpoint": other / "saved"}
    with Ranks(small_run.arguments(tmp_path, **evaluated), 4, "bert.evaluate") as started:
        assert started.ends() == [0] * 4, started.output
    assert "{:,} of {:,} masked tokens".format(*expected[-1]) in started.output
    for source, ranks, changes in (("one", 4, shape), ("shared", 1, {})):
        folder = tmp_path / f"from {source}"
        settings = {"checkpoint__folder": folder / "checkpoints", "training__max_steps": 5, "training__seed": None}
        settings |= {"checkpoint__every_steps": 1, "resume": tmp_path / source / "checkpoints" / "step_00000004"}
        resumed = train(small_run, folder, ranks, **common | changes | settings)
        compare_steps(records(tmp_path / source, "step")[4:5], resumed)
