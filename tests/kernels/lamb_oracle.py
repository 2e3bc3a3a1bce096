"""LAMB in float64 NumPy."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import LambHyperparameters, LambSegments

HYPERPARAMETERS = LambHyperparameters(beta_1=0.9, beta_2=0.999, epsilon=1e-6, weight_decay=0.01, max_grad_norm=1.0)


class NumpyLamb:
    """LAMB by the MLPerf reference's formulas in float64, applied to each tensor separately."""

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
    """Return the keyword arguments of ``lamb_step`` that change from step to step."""
    return {"step": torch.tensor(step), "learning_rate": torch.tensor(rate)}
