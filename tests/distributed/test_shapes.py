"""Ranks that divide the model and sum gradients in various ways, over gloo, compared with one rank."""

from importlib import import_module
from typing import Any

import pytest
import torch

from tests.bert.parallel.forked import on_ranks, trains_in_forks
from tests.distributed.shapes import DROPPING, alone, require_same_training, train_all

pytestmark = trains_in_forks

FP8 = ["4,1,1,flat,block,4,1,1,fp8", "2,1,1,sharded,block,4,1,1,fp8"]
SHAPES = {
    2: [
        "1,2,1,flat,block,1,3,3,accumulating",
        "1,2,2,sharded,block,2,4,3,dropout",
    ],
    4: [
        "1,1,1,hierarchical,block,2,2,4,fp64",
        "1,1,1,sharded,cyclic,2,1,4,fp64",
        DROPPING,
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
def found() -> dict[str, dict[str, Any]]:
    """Train in every shape, and return the results of rank 0 by shape."""
    for name in ("torch._dynamo", "bert.pipeline_step"):
        import_module(name)  # import them before forking, because each import takes a second
    one = sorted({alone(shape) for shapes in SHAPES.values() for shape in shapes})
    results: dict[str, dict[str, Any]] = {}
    for ranks, shapes in ({1: one} | SHAPES).items():
        results |= on_ranks(ranks, lambda mesh, shapes=shapes: train_all(mesh, *shapes))[0]
    return results


@pytest.mark.parametrize("shape", [shape for shapes in SHAPES.values() for shape in shapes if shape not in FP8])
def test_every_shape_trains_like_one_rank(found: dict[str, dict[str, Any]], shape: str) -> None:
    require_same_training(shape, found[alone(shape)], found[shape])


def test_losses_with_dropout_vary_as_on_one_rank(found: dict[str, dict[str, Any]]) -> None:
    """Over many draws of dropout, losses have the mean and about the deviation of losses on one rank. No two are equal."""
    one, other = (torch.tensor(found[shape]["dropped"]) for shape in (alone(DROPPING), DROPPING))
    error = ((one.var() + other.var()) / len(other)).sqrt()
    assert abs(other.mean() - one.mean()) < 3 * error
    assert 0.6 < other.std() / one.std() < 1.6
    assert len(set(other.tolist())) == len(other)


@pytest.mark.parametrize("shape", FP8)
def test_fp8_scales_and_losses_match_one_rank(found: dict[str, dict[str, Any]], shape: str) -> None:
    one, other = found[alone(shape)], found[shape]
    assert torch.equal(other["scales"], one["scales"])
    assert len(set(one["scales"].tolist())) > 3
    for name in ("masked_lm_loss", "next_sentence_loss", "gradient_norm"):
        assert other["means"][0][name] == pytest.approx(one["means"][0][name], rel=2e-2)
