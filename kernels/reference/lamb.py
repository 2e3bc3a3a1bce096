# pyright: reportPrivateImportUsage=false
"""Reference implementation of LAMB on flat vectors: a pass for the moments, a norm per segment, and a pass for the step.

Shape legend in ``kernels/__init__.py``; in addition, A is the number of adapted segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import op
from kernels.reference.fp8 import cast_transpose_into_fp8

PIECE = 1 << 16
"""Number of elements that are squared and summed at a time. Their copies in double precision fit into a core's cache."""


@dataclass(frozen=True)
class LambSegments:
    """Division of the flat parameter vector into segments, and their properties.

    A segment is usually one tensor. The fused query, key and value tensor is three segments, so that each part has its own
    trust ratio, as in the MLPerf reference, where they are three tensors.
    """

    sizes: tuple[int, ...]
    """Number of elements in each segment, in order. The sum is P."""
    adapted: tuple[bool, ...]
    """Whether weight decay and the trust ratio apply to each segment. They do not apply to biases and layer norms."""
    overwritten: tuple[bool, ...] = ()
    """Whether the next step overwrites each segment's gradient, which then need not be cleared. Empty if all gradients must
    be cleared."""

    def views(self, flat_P: Tensor) -> list[Tensor]:
        return list(torch.split(flat_P, list(self.sizes)))

    def adapted_views(self, flat_P: Tensor) -> list[Tensor]:
        return [view for view, adapted in zip(self.views(flat_P), self.adapted, strict=True) if adapted]

    def clear_(self, gradients_P: Tensor) -> None:
        """Set the gradients to zero in place, except in segments whose gradients the next step overwrites."""
        if not self.overwritten:
            gradients_P.zero_()
            return
        for view, overwritten in zip(self.views(gradients_P), self.overwritten, strict=True):
            if not overwritten:
                view.zero_()


@dataclass(frozen=True)
class LambHyperparameters:
    """Hyperparameters of LAMB that are the same in every step."""

    beta_1: float
    beta_2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float
    """Global norm to which gradients are clipped."""


@dataclass(frozen=True)
class LambState:
    """The optimizer's flat vectors, all fp32 [P] on the parameters' device, and the number of skipped steps."""

    momentum_P: Tensor
    variance_P: Tensor
    update_P: Tensor
    """Buffer for the update direction, kept between steps so that no step allocates memory."""
    skipped: Tensor
    """int64 [], the number of steps that were skipped because a gradient was not finite."""

    @classmethod
    def zeros_like(cls, parameters_P: Tensor) -> "LambState":
        momentum_P, variance_P, update_P = (torch.zeros_like(parameters_P) for _ in range(3))
        return cls(momentum_P, variance_P, update_P, torch.zeros((), dtype=torch.int64, device=parameters_P.device))


@dataclass(frozen=True)
class WeightCast:
    """FP8 copies of a weight [N, K] in the flat parameter vector, and the scale of the copies."""

    start: int
    """Index of the weight's first element in the vector."""
    scale: Tensor
    amax: Tensor
    q_NK: Tensor
    q_KN: Tensor

    def weight(self, parameters_P: Tensor) -> Tensor:
        return parameters_P[self.start : self.start + self.q_NK.numel()].view(self.q_NK.shape)


@op
def lamb_step(
    parameters_P: Tensor,
    gradients_P: Tensor,
    state: LambState,
    segments: LambSegments,
    hyperparameters: LambHyperparameters,
    *,
    step: Tensor,
    learning_rate: Tensor,
    copies_P: Tensor | None = None,
    casts: tuple[WeightCast, ...] = (),
) -> Tensor:
    """Update the parameters with LAMB in place, clear the gradient and return its global norm before clipping, [].

    In overwritten segments, the gradient is not cleared and may have any content afterwards. If ``copies_P`` is given, the
    parameters are copied to it in its own type for the next step's products. The FP8 copies in ``casts`` are updated by
    ``cast_transpose_into_fp8``.

    ``step``, int64 [], counts from 1. It and ``learning_rate``, fp32 [], are on the parameters' device, so that a captured
    step can be replayed. As in the MLPerf reference, gradients are clipped by their global norm, moments are bias-corrected,
    epsilon is outside the root, and the step of an adapted segment is scaled by ||w|| / ||u|| (1 if either is zero).

    If the norm is not finite, the step is skipped: parameters and moments do not change, and ``state.skipped`` is
    incremented. The caller then passes the same ``step`` again.

    Source: You et al., arXiv 1904.00962. As in the MLPerf reference, weight decay and adaptation apply only to adapted
    segments.
    """
    norm = sum_of_squares.definition(gradients_P).sqrt().to(gradients_P.dtype)
    squares_2A = lamb_directions.definition(
        parameters_P, gradients_P, state, segments, hyperparameters, norm=norm, step=step
    )
    lamb_apply.definition(parameters_P, state, segments, squares_2A, norm=norm, learning_rate=learning_rate)
    if copies_P is not None:
        copies_P.copy_(parameters_P)
    for cast in casts:
        cast_transpose_into_fp8.definition(cast.weight(parameters_P), cast.scale, cast.amax, cast.q_NK, cast.q_KN)
    return norm


@op
def lamb_directions(
    parameters_P: Tensor,
    gradients_P: Tensor,
    state: LambState,
    segments: LambSegments,
    hyperparameters: LambHyperparameters,
    *,
    norm: Tensor,
    step: Tensor,
) -> Tensor:
    """Compute moments and update directions, the first half of ``lamb_step``, and clear the gradient as ``lamb_step`` does.

    Returns the sums of squares of the parameters and of the directions in each adapted segment, fp64 [2, A]. ``norm``, [],
    is the norm of the whole gradient. If the vectors are a shard, ``segments`` describes the pieces of segments in the
    shard, including padding, and the caller must add the sums over pieces and shards before calling ``lamb_apply``.
    """
    momentum_P, variance_P, update_P = state.momentum_P, state.variance_P, state.update_P
    beta_1, beta_2, limit = hyperparameters.beta_1, hyperparameters.beta_2, hyperparameters.max_grad_norm
    root_factor, epsilon_factor = bias_corrections(step, hyperparameters)
    # A skipped step runs the same operations with factors that change nothing, so that the host need not read the norm.
    taken = norm < torch.inf  # False for infinity and NaN
    clip = torch.where(taken, limit / norm.clamp(min=limit), 0.0)  # exactly 1 if the norm is below the limit
    torch.nan_to_num(gradients_P, out=gradients_P)  # because a skipped step multiplies by 0, and NaN times 0 is NaN
    gradients_P.mul_(clip)
    # Use lerp: as fp32 numbers, beta and 1 - beta do not add up to 1, so a sum of two products would let the variance
    # drift by 1.3e-5.
    momentum_P.lerp_(gradients_P, (1 - beta_1) * taken.to(momentum_P.dtype))
    torch.square(gradients_P, out=update_P)
    variance_P.lerp_(update_P, (1 - beta_2) * taken.to(variance_P.dtype))
    segments.clear_(gradients_P)
    state.skipped.add_(~taken)
    torch.sqrt(variance_P, out=update_P)
    update_P.mul_(root_factor).add_(hyperparameters.epsilon * epsilon_factor)
    torch.div(momentum_P, update_P, out=update_P)
    weights, updates = segments.adapted_views(parameters_P), segments.adapted_views(update_P)
    if not updates:  # torch._foreach_add_ refuses empty lists
        return root_factor.new_zeros(2, 0)
    # As in the MLPerf reference, weight decay is part of the direction and of its norm.
    torch._foreach_add_(updates, weights, alpha=hyperparameters.weight_decay)
    return _sums_of_squares([*weights, *updates]).view(2, -1)


@op
def lamb_apply(
    parameters_P: Tensor,
    state: LambState,
    segments: LambSegments,
    squares_2A: Tensor,
    *,
    norm: Tensor,
    learning_rate: Tensor,
) -> None:
    """Update the parameters along the directions, the second half of ``lamb_step``.

    ``squares_2A`` are the squared norms that ``lamb_directions`` returns. For a shard, each piece must have the squared
    norms of its whole segment.
    """
    updates = segments.adapted_views(state.update_P)
    if updates:
        weight_norms_A, update_norms_A = squares_2A.sqrt().to(state.update_P.dtype).unbind()
        usable_A = (weight_norms_A > 0) & (update_norms_A > 0)
        trust_ratios_A = torch.where(usable_A, weight_norms_A / update_norms_A, 1.0)
        torch._foreach_mul_(updates, list(trust_ratios_A.unbind()))
    # The learning rate of a skipped step is 0.
    parameters_P.addcmul_(state.update_P, learning_rate * (norm < torch.inf), value=-1)


@op
def sum_of_squares(vector_P: Tensor) -> Tensor:
    """Return the sum of the squares of a vector, fp64 [], with a relative error of at most 1e-6 at any length.

    On a CPU, PyTorch's own norms accumulate fp32 numbers in a few SIMD lanes, which makes the norm of BERT-Large's 335
    million parameters 5.7 % too small.
    """
    return _sums_of_squares([vector_P])[0]


def _sums_of_squares(vectors: Sequence[Tensor]) -> Tensor:
    pieces = [vector.split(PIECE) for vector in vectors]
    norms = torch._foreach_norm([piece for parts in pieces for piece in parts], 2, torch.float64)
    squares = torch.stack(norms).square()
    return torch.stack([parts.sum() for parts in squares.split([len(parts) for parts in pieces])])


def bias_corrections(step: Tensor, hyperparameters: LambHyperparameters) -> tuple[Tensor, Tensor]:
    """Return the factors of the variance's square root and of epsilon at ``step``, both float64 [].

    The direction is momentum / (root_factor * root + epsilon_factor * epsilon). Both factors include the momentum's bias
    correction, which saves a pass. They need double precision because 1 - beta^step loses digits to cancellation.
    """
    steps = step.double()
    epsilon_factor = 1 - hyperparameters.beta_1**steps
    return (1 - hyperparameters.beta_2**steps).rsqrt() * epsilon_factor, epsilon_factor
