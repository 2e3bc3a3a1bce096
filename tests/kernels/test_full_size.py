"""Sums and norms at BERT-Large's sizes (31 million elements per tensor, 335 million in all), compared with float64."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from bert.configuration.sections import ModelConfig, OptimizerConfig
from bert.execution.stopwatch import Stopwatch
from bert.model import BertForPreTraining
from bert.optimizer import FlatParameters, Lamb
from bert.parallel.mesh import join_mesh
from bert.parallel.reduction.gradients import Communicators, Reduction
from bert.parallel.reduction.sharded_lamb import ShardedLamb
from bert.parallel.tensor.shards import TensorParallel
from kernels import LambSegments, LambState, lamb_directions, sum_of_squares
from kernels.triton import lamb as triton_lamb
from tests.kernels.lamb_oracle import HYPERPARAMETERS

pytestmark = pytest.mark.slow

EMBEDDING = 30_522 * 1024
PARAMETERS = 336_226_108
NEAR = 1e-6
"""Largest accepted relative error of a sum or norm."""


def normal(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def squares_in_float64(vector: torch.Tensor) -> float:
    pieces = (piece.numpy().astype(np.float64) for piece in vector.split(1 << 20))
    return sum(float(piece @ piece) for piece in pieces)


def test_sum_of_squares_is_accurate_for_as_many_elements_as_bert_large_has() -> None:
    once = normal(EMBEDDING)
    exact = squares_in_float64(once)
    times, rest = divmod(PARAMETERS, EMBEDDING)
    everything = once.repeat(times + 1)[:PARAMETERS]
    exact = times * exact + squares_in_float64(once[:rest])
    assert sum_of_squares.definition(everything).item() == pytest.approx(exact, rel=NEAR)


@pytest.mark.parametrize(
    ("directions", "size"),
    [(lamb_directions.definition, EMBEDDING), (triton_lamb.lamb_directions, EMBEDDING // 40)],
    ids=["definition", "triton"],
)
def test_lambs_sums_of_squares_are_accurate_for_large_tensors(
    directions: Callable[..., torch.Tensor], size: int
) -> None:
    """Check the sums of squares of a tensor's weights and directions. The tensor is as large as the word embedding.

    A fortieth of that size suffices for Triton: a larger tensor has more chunks, which are added in fp64, but each
    fp32 sum inside a chunk has as many terms.
    """
    segments = LambSegments((1000, size), (False, True))
    weights, gradients = normal(1000 + size), normal(1000 + size).flip(0)
    state, norm = LambState.zeros_like(weights), torch.tensor(1e3)
    squares_2A = directions(weights, gradients, state, segments, HYPERPARAMETERS, norm=norm, step=torch.tensor(1))
    for found, vector in zip(squares_2A[:, 0].tolist(), (weights, state.update_P), strict=True):
        assert found == pytest.approx(squares_in_float64(segments.adapted_views(vector)[0]), rel=NEAR)


@pytest.mark.parametrize("sharded", [False, True])
def test_optimizers_return_an_accurate_norm_of_the_gradient(sharded: bool) -> None:
    """For these 4.9 million parameters, PyTorch's own fp32 norm is too low by a relative 1e-4."""
    model = BertForPreTraining(ModelConfig(1, 160, 2, 160, 30_522, 16))
    flat = FlatParameters.of(model)
    if sharded:
        communicators = Communicators.create(join_mesh("cpu"))
        reduction, alone = Reduction(flat, communicators, "sharded"), TensorParallel(model.config, None, Stopwatch())
        optimizer = ShardedLamb(flat, OptimizerConfig(0.1, 10), reduction, alone)
    else:
        optimizer = Lamb(flat, OptimizerConfig(0.1, 10))
    flat.gradients_P.copy_(normal(len(flat.gradients_P)))
    exact = squares_in_float64(flat.gradients_P) ** 0.5
    assert optimizer.step().item() == pytest.approx(exact, rel=NEAR)
