# pyright: reportPrivateImportUsage=false
"""LAMB on flat buffers: one pass for the moments, one norm a segment, one pass for the step.

Shape legend in ``kernels/__init__.py``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LambSegments:
    """How the flat parameter vector divides into tensors, and which of them are adapted.

    A fused tensor that the reference holds as several (query, key and value) is several segments, so that each has its
    own trust ratio.
    """

    sizes: tuple[int, ...]
    """Elements of each segment, in order; they add up to P."""
    adapted: tuple[bool, ...]
    """Whether weight decay and the trust ratio apply: False for biases and layer norms."""

    def views(self, flat_P: Tensor) -> list[Tensor]:
        """The segments of a flat vector, as views."""
        return list(torch.split(flat_P, list(self.sizes)))


@dataclass(frozen=True)
class LambState:
    """The optimizer's flat vectors, all fp32 [P] on the parameters' device."""

    momentum_P: Tensor
    variance_P: Tensor
    update_P: Tensor
    """Scratch for the update direction, kept so that no step allocates."""

    @classmethod
    def zeros_like(cls, parameters_P: Tensor) -> "LambState":
        """Fresh state for a flat parameter vector."""
        return cls(*(torch.zeros_like(parameters_P) for _ in range(3)))


def lamb_step(
    parameters_P: Tensor,
    gradients_P: Tensor,
    state: LambState,
    segments: LambSegments,
    *,
    step: Tensor,
    learning_rate: Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    weight_decay: float,
    max_grad_norm: float,
    low_precision_P: Tensor | None = None,
) -> Tensor:
    """One LAMB update in place; returns the gradient's global norm before clipping, [].

    ``step``, int64 [], counts from 1; with ``learning_rate``, fp32 [], it lies on the parameters' device, so that a captured
    step can be replayed. As the MLPerf reference defines it: gradients are clipped by their global norm, moments are
    bias-corrected, epsilon stands outside the root, and the step of an adapted segment is scaled by ||w|| / ||u|| (1 where
    either is zero). ``gradients_P`` is used up. ``low_precision_P`` [P], if given, becomes a copy of the new parameters.

    Source: You et al., arXiv 1904.00962, with the reference's weight-decay and adaptation exclusions.
    """
    momentum_P, variance_P, update_P = state.momentum_P, state.variance_P, state.update_P
    momentum_correction, root_correction = bias_corrections(step, beta_1, beta_2)
    norm = torch.linalg.vector_norm(gradients_P)
    gradients_P.mul_(clip_factor(norm, max_grad_norm))
    momentum_P.lerp_(gradients_P, 1 - beta_1)
    variance_P.mul_(beta_2).addcmul_(gradients_P, gradients_P, value=1 - beta_2)
    torch.sqrt(variance_P, out=update_P)
    update_P.mul_(root_correction).add_(epsilon)
    torch.div(momentum_P, update_P, out=update_P)
    update_P.mul_(momentum_correction)
    if any(segments.adapted):  # the batched ops refuse empty lists
        weights, updates = _adapted(segments, parameters_P), _adapted(segments, update_P)
        # torch._foreach_*: the batched ops that torch.optim is built on
        torch._foreach_add_(updates, weights, alpha=weight_decay)
        torch._foreach_mul_(updates, _trust_ratios(weights, updates))
    parameters_P.addcmul_(update_P, learning_rate, value=-1)
    if low_precision_P is not None:
        low_precision_P.copy_(parameters_P)
    return norm


def bias_corrections(step: Tensor, beta_1: float, beta_2: float) -> tuple[Tensor, Tensor]:
    """What the momentum, and the root of the variance, are multiplied by at ``step``; both float64 [].

    In double precision, since 1 - beta^step cancels in single.
    """
    steps = step.double()
    return (1 - beta_1**steps).reciprocal(), (1 - beta_2**steps).rsqrt()


def clip_factor(norm: Tensor, max_grad_norm: float) -> Tensor:
    """What brings a gradient of this norm down to ``max_grad_norm``, and leaves a smaller one as it is; []."""
    return max_grad_norm / norm.clamp(min=max_grad_norm)


def _adapted(segments: LambSegments, flat_P: Tensor) -> list[Tensor]:
    return [view for view, adapted in zip(segments.views(flat_P), segments.adapted, strict=True) if adapted]


def _trust_ratios(weights: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
    weight_norms = torch.stack(torch._foreach_norm(weights))
    update_norms = torch.stack(torch._foreach_norm(updates))
    usable = (weight_norms > 0) & (update_norms > 0)
    return list(torch.where(usable, weight_norms / update_norms, 1.0).unbind())
