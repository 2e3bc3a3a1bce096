# pyright: reportPrivateImportUsage=false
"""LAMB on flat buffers: one pass for the moments, one norm a segment, one pass for the step.

Shape legend in ``kernels/__init__.py``; besides, A adapted segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.fp8 import cast_transpose_into_fp8

PIECE = 1 << 16
"""Elements that are squared and added at a time: what they take in double precision stays in a core's cache."""


@dataclass(frozen=True)
class LambSegments:
    """Division of the flat parameter vector into tensors, and which of them are adapted.

    A fused tensor that the reference holds as several (query, key and value) is several segments, so that each has its
    own trust ratio.
    """

    sizes: tuple[int, ...]
    """Elements of each segment, in order; they add up to P."""
    adapted: tuple[bool, ...]
    """Whether weight decay and the trust ratio apply: False for biases and layer norms."""
    overwritten: tuple[bool, ...] = ()
    """Whether the next gradient is written over the last, which then need not be set to zero; none is if empty."""

    def views(self, flat_P: Tensor) -> list[Tensor]:
        """The segments of a flat vector, as views."""
        return list(torch.split(flat_P, list(self.sizes)))

    def adapted_views(self, flat_P: Tensor) -> list[Tensor]:
        """The adapted segments of a flat vector, as views."""
        return [view for view, adapted in zip(self.views(flat_P), self.adapted, strict=True) if adapted]

    def clear_(self, gradients_P: Tensor) -> None:
        """Set a gradient to zero, but for segments that are overwritten."""
        # Without any overwritten segment one fill of the whole is fewer launches.
        if not self.overwritten:
            gradients_P.zero_()
            return
        for view, overwritten in zip(self.views(gradients_P), self.overwritten, strict=True):
            if not overwritten:
                view.zero_()


@dataclass(frozen=True)
class LambHyperparameters:
    """The numbers of a LAMB update that stay the same from step to step."""

    beta_1: float
    beta_2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float
    """The global norm that gradients are clipped to."""


@dataclass(frozen=True)
class LambState:
    """The optimizer's flat vectors, all fp32 [P] on the parameters' device, and a count."""

    momentum_P: Tensor
    variance_P: Tensor
    update_P: Tensor
    """Scratch for the update direction, kept so that no step allocates."""
    skipped: Tensor
    """int64 [], the steps that were not taken because a gradient was not finite."""

    @classmethod
    def zeros_like(cls, parameters_P: Tensor) -> "LambState":
        """Fresh state for a flat parameter vector."""
        momentum_P, variance_P, update_P = (torch.zeros_like(parameters_P) for _ in range(3))
        return cls(momentum_P, variance_P, update_P, torch.zeros((), dtype=torch.int64, device=parameters_P.device))


@dataclass(frozen=True)
class WeightCast:
    """FP8 copies of a weight [N, K] that lies in the flat parameters, and the scale that they are made with."""

    start: int
    """Of the weight in the vector."""
    scale: Tensor
    amax: Tensor
    q_NK: Tensor
    q_KN: Tensor

    def weight(self, parameters_P: Tensor) -> Tensor:
        """[N, K], as a view."""
        return parameters_P[self.start : self.start + self.q_NK.numel()].view(self.q_NK.shape)


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
    """Update by LAMB in place; return the gradient's global norm before clipping, [], and set the gradient to zero.

    Where segments are overwritten, the gradient is left with any content. ``copies_P``, if there is one, gets the parameters
    in its own type, in which the next step multiplies with them, and ``casts`` get weights as ``cast_transpose_into_fp8``
    makes them.

    ``step``, int64 [], counts from 1; with ``learning_rate``, fp32 [], it lies on the parameters' device, so that a captured
    step can be replayed. As the MLPerf reference defines it: gradients are clipped by their global norm, moments are
    bias-corrected, epsilon stands outside the root, and the step of an adapted segment is scaled by ||w|| / ||u|| (1 where
    either is zero).

    Where the norm is not finite, the step is skipped: parameters and moments stay, and ``state.skipped`` goes up. The caller
    then gives the same ``step`` again.

    Source: You et al., arXiv 1904.00962, with the reference's weight-decay and adaptation exclusions.
    """
    # Before anything else reads the gradient: clipping and skipping are decided by it.
    norm = sum_of_squares(gradients_P).sqrt().to(gradients_P.dtype)
    # Both halves are ops of their own, so that shards can add up their squares in between.
    squares_2A = lamb_directions(parameters_P, gradients_P, state, segments, hyperparameters, norm=norm, step=step)
    lamb_apply(parameters_P, state, segments, squares_2A, norm=norm, learning_rate=learning_rate)
    if copies_P is not None:
        copies_P.copy_(parameters_P)
    for cast in casts:
        cast_transpose_into_fp8(cast.weight(parameters_P), cast.scale, cast.amax, cast.q_NK, cast.q_KN)
    return norm


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
    """The first half of ``lamb_step``: moments and directions; leaves the parameters, and a gradient as ``lamb_step`` does.

    Returns sums of squares, fp64 [2, A]: of the parameters and of the directions of each adapted segment. ``norm``, [], is
    that of the whole gradient. Where the vectors are a shard of it, ``segments`` are the pieces that segments have in the
    shard, padding among them; their sums are to be added up over pieces and shards before ``lamb_apply``.
    """
    momentum_P, variance_P, update_P = state.momentum_P, state.variance_P, state.update_P
    beta_1, beta_2 = hyperparameters.beta_1, hyperparameters.beta_2
    root_factor, epsilon_factor = bias_corrections(step, beta_1, beta_2)
    # Factors lie on the device: of a step that is skipped they are those that change nothing.
    # `norm < inf` is False for infinity and for NaN: one comparison on the device, and no read by the host.
    taken = norm < torch.inf  # False for NaN
    clip = torch.where(taken, clip_factor(norm, hyperparameters.max_grad_norm), 0.0)
    torch.nan_to_num(gradients_P, nan=0.0, posinf=0.0, neginf=0.0, out=gradients_P)  # NaN times zero is NaN
    gradients_P.mul_(clip)
    # Interpolated, because beta and 1 - beta, each rounded to fp32, do not add up to 1: the variance would drift by 1.3e-5.
    # A step that is not taken interpolates by 0: moments stay without a branch.
    momentum_P.lerp_(gradients_P, (1 - beta_1) * taken.to(momentum_P.dtype))
    torch.square(gradients_P, out=update_P)
    variance_P.lerp_(update_P, (1 - beta_2) * taken.to(variance_P.dtype))
    # Cleared as soon as it has been read: the next backward pass adds to it.
    segments.clear_(gradients_P)
    state.skipped.add_(~taken)
    # `update_P` is scratch, so no step allocates.
    torch.sqrt(variance_P, out=update_P)
    update_P.mul_(root_factor).add_(hyperparameters.epsilon * epsilon_factor)
    torch.div(momentum_P, update_P, out=update_P)
    weights, updates = segments.adapted_views(parameters_P), segments.adapted_views(update_P)
    if not updates:  # the batched ops refuse empty lists
        return root_factor.new_zeros(2, 0)
    # torch._foreach_*: the batched ops that torch.optim is built on
    # Decay is part of the direction and so of its norm, as in the reference.
    torch._foreach_add_(updates, weights, alpha=hyperparameters.weight_decay)
    return _sums_of_squares([*weights, *updates]).view(2, -1)


def lamb_apply(
    parameters_P: Tensor,
    state: LambState,
    segments: LambSegments,
    squares_2A: Tensor,
    *,
    norm: Tensor,
    learning_rate: Tensor,
) -> None:
    """The second half of ``lamb_step``: the step along the directions, by the norms that ``squares_2A`` are the squares of.

    Of a shard, the squares are those of the whole segment that each piece belongs to.
    """
    updates = segments.adapted_views(state.update_P)
    if updates:
        torch._foreach_mul_(updates, list(_trust_ratios(squares_2A.sqrt().to(state.update_P.dtype)).unbind()))
    # A rate of 0 for a step that is skipped: no branch, and weights stay bit for bit.
    parameters_P.addcmul_(state.update_P, learning_rate * (norm < torch.inf), value=-1)


def sum_of_squares(vector_P: Tensor) -> Tensor:
    """Sum of the squares of a vector, fp64 []; right to 1e-6 at any length.

    PyTorch's own norms are not: on a CPU they add fp32 numbers in a few lanes, which loses 5.7 % of a norm over the 335
    million of BERT-Large.
    """
    return _sums_of_squares([vector_P])[0]


def _sums_of_squares(vectors: Sequence[Tensor]) -> Tensor:
    """fp64 [len(vectors)]."""
    # Pieces bound what fp64 copies take at a time.
    pieces = [vector.split(PIECE) for vector in vectors]
    norms = torch._foreach_norm([piece for parts in pieces for piece in parts], 2, torch.float64)
    squares = torch.stack(norms).square()
    return torch.stack([parts.sum() for parts in squares.split([len(parts) for parts in pieces])])


def bias_corrections(step: Tensor, beta_1: float, beta_2: float) -> tuple[Tensor, Tensor]:
    """Return what the root of the variance, and epsilon, are multiplied by at ``step``; both float64 [].

    The momentum's own is divided out: the direction is momentum / (root_factor * root + epsilon_factor * epsilon), with a
    rounding less, and a pass. In double precision, since 1 - beta^step cancels in single.
    """
    # fp64 on the device: the step number is there, and a captured graph reads it at each replay.
    steps = step.double()
    epsilon_factor = 1 - beta_1**steps
    return (1 - beta_2**steps).rsqrt() * epsilon_factor, epsilon_factor


def clip_factor(norm: Tensor, max_grad_norm: float) -> Tensor:
    """Return the factor [] that brings a gradient of this norm down to ``max_grad_norm``, and leaves a smaller one alone."""
    # Clamped below, so that a gradient within the limit is multiplied by exactly 1.
    return max_grad_norm / norm.clamp(min=max_grad_norm)


def _trust_ratios(norms_2A: Tensor) -> Tensor:
    weight_norms_A, update_norms_A = norms_2A.unbind()
    # A weight or a direction of norm 0 has no ratio: the reference takes 1.
    usable_A = (weight_norms_A > 0) & (update_norms_A > 0)
    return torch.where(usable_A, weight_norms_A / update_norms_A, 1.0)
