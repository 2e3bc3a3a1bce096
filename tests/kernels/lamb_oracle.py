"""LAMB in float64 NumPy, and LAMB on several shards of a vector in one process."""

import math
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import LambHyperparameters, LambSegments, LambState

HYPERPARAMETERS = LambHyperparameters(beta_1=0.9, beta_2=0.999, epsilon=1e-6, weight_decay=0.01, max_grad_norm=1.0)


class NumpyLamb:
    """LAMB by the MLPerf reference's formulas in float64, tensor by tensor."""

    def __init__(self, flat: Tensor, segments: LambSegments, hyper: LambHyperparameters = HYPERPARAMETERS) -> None:
        self.segments = segments
        self.hyper = hyper
        self.weights = self._parts(flat)
        self.momentum = [np.zeros_like(weight) for weight in self.weights]
        self.variance = [np.zeros_like(weight) for weight in self.weights]
        self.steps = 0

    def _parts(self, flat: Tensor) -> list[np.ndarray]:
        return [part.double().numpy().copy() for part in self.segments.views(flat)]

    def step(self, gradient: Tensor, rate: float) -> float:
        self.steps += 1
        hyper, gradients = self.hyper, self._parts(gradient)
        norm = math.sqrt(sum(float((part**2).sum()) for part in gradients))
        scale = hyper.max_grad_norm / max(norm, hyper.max_grad_norm)
        for i, part in enumerate(gradients):
            clipped = part * scale
            self.momentum[i] = hyper.beta_1 * self.momentum[i] + (1 - hyper.beta_1) * clipped
            self.variance[i] = hyper.beta_2 * self.variance[i] + (1 - hyper.beta_2) * clipped**2
            momentum_hat = self.momentum[i] / (1 - hyper.beta_1**self.steps)
            variance_hat = self.variance[i] / (1 - hyper.beta_2**self.steps)
            update = momentum_hat / (np.sqrt(variance_hat) + hyper.epsilon)
            ratio = 1.0
            if self.segments.adapted[i]:
                update = update + hyper.weight_decay * self.weights[i]
                weight_norm, update_norm = np.linalg.norm(self.weights[i]), np.linalg.norm(update)
                ratio = weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else 1.0
            self.weights[i] = self.weights[i] - rate * ratio * update
        return norm


def at(step: int, rate: float) -> dict[str, Any]:
    """Return the LAMB arguments that change from step to step."""
    return {"step": torch.tensor(step), "learning_rate": torch.tensor(rate)}


def pieces_of(segments: LambSegments, start: int, stop: int) -> tuple[LambSegments, list[int]]:
    """Return the pieces of segments in a range, and each adapted piece's segment index among adapted segments."""
    pieces: list[tuple[int, bool]] = []
    owners: list[int] = []
    place, begin = 0, 0
    for size, adapted in zip(segments.sizes, segments.adapted, strict=True):
        if (length := min(begin + size, stop) - max(begin, start)) > 0:
            pieces.append((length, adapted))
            owners += [place] * adapted
        place, begin = place + adapted, begin + size
    return LambSegments(tuple(size for size, _ in pieces), tuple(adapted for _, adapted in pieces)), owners


class Shards:
    """LAMB on pieces of the flat vector and a piece of padding. It calls an implementation's two halves separately."""

    def __init__(self, lamb: ModuleType, flat: Tensor, segments: LambSegments, cuts: tuple[int, ...]) -> None:
        self.lamb, self.segments = lamb, segments
        self.bounds = list(pairwise([0, *cuts, len(flat)]))
        self.weights = [*(flat[start:stop].clone() for start, stop in self.bounds), flat.new_zeros(5)]
        padding = LambSegments((5,), (False,)), []
        self.layouts = [*(pieces_of(segments, start, stop) for start, stop in self.bounds), padding]
        self.states = [LambState.zeros_like(weights) for weights in self.weights]

    def step(self, gradient: Tensor, *, step: Tensor, learning_rate: Tensor) -> Tensor:
        """Take a step on all shards and return the whole vector."""
        norm = torch.linalg.vector_norm(gradient)
        gradients = [*(gradient[start:stop].clone() for start, stop in self.bounds), gradient.new_zeros(5)]
        sums_2A = torch.zeros(2, sum(self.segments.adapted), dtype=torch.float64)
        shards = list(zip(self.weights, self.states, self.layouts, strict=True))
        for own, (weights, state, (layout, owners)) in zip(gradients, shards, strict=True):
            squares_2A = self.lamb.lamb_directions(weights, own, state, layout, HYPERPARAMETERS, norm=norm, step=step)
            assert squares_2A.shape == (2, len(owners))
            assert not own.any()
            sums_2A.index_add_(1, torch.tensor(owners, dtype=torch.int64), squares_2A)
        for weights, state, (layout, owners) in shards:
            self.lamb.lamb_apply(weights, state, layout, sums_2A[:, owners], norm=norm, learning_rate=learning_rate)
        assert not self.weights[-1].any()
        return torch.cat(self.weights[:-1])
