"""LAMB over the model's parameters: flat buffers, segments and learning rate schedule.

Shape legend: P is the number of elements of all parameters with their padding; N is P rounded up to equal shards.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from bert.configuration.sections import OptimizerConfig
from bert.model import BertForPreTraining, EncoderLayer
from kernels import LambHyperparameters, LambSegments, LambState, WeightCast, lamb_step

ALIGNMENT = 16
"""Every parameter, and every rank's shard of a bucket, starts at a multiple of this many elements (64 bytes), so that
kernels can read 16 bytes at a time."""


@dataclass(frozen=True)
class FlatParameters:
    """Weights and gradients as two flat vectors; the model's parameters are views of them.

    With one vector, the reduction sends one message and the optimizer makes a few passes. Padding stays zero, because it
    has no gradient.
    """

    weights_P: Tensor
    gradients_P: Tensor
    """Empty, like ``gradients_N``, if ranks keep only a shard of the gradients."""
    segments: LambSegments
    """Division of the vectors into LAMB's tensors. Padding after a parameter belongs to the parameter's last segment."""
    weights_N: Tensor
    """``weights_P``, followed by zeros up to N elements."""
    gradients_N: Tensor
    places: Mapping[nn.Parameter, slice]
    """Slice of each parameter in the vectors, in the order of the model's parameters."""
    names: tuple[str, ...] = ()
    """Name of each parameter, in the order of ``places``."""

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        model: BertForPreTraining,
        shards: int = 1,
        overwritten: Collection[nn.Parameter] = (),
        gradients: bool = True,
    ) -> "FlatParameters":
        """Move the model's parameters into flat buffers on their device, without changing their values.

        The buffers are padded with zeros to a multiple of ``shards``, so that ranks can divide them equally. The gradients
        of ``overwritten`` are not set to zero after a step, because the next step overwrites them. Without ``gradients``,
        autograd allocates each parameter's gradient separately.
        """
        segments = lamb_segments(model, overwritten)
        size = sum(segments.sizes)
        # The padding must be zero, because it counts in the norms of its segment and of the gradient.
        weights_N = next(model.parameters()).new_zeros(padded(size, shards))
        gradients_N = torch.zeros_like(weights_N) if gradients else weights_N.new_zeros(0)
        slices = places_of([parameter.shape for parameter in model.parameters()])
        places = dict(zip(model.parameters(), slices, strict=True))
        for parameter, place in places.items():
            weights_N[place] = parameter.flatten()
            # Only the data moves: modules and hooks keep referring to the parameter object.
            parameter.data = weights_N[place].view_as(parameter)
            if gradients:
                # Autograd adds to an existing gradient in place, so gradients stay in the vector.
                parameter.grad = gradients_N[place].view_as(parameter)
        names = tuple(name for name, _ in model.named_parameters())
        return cls(weights_N[:size], gradients_N[:size], segments, weights_N, gradients_N, places, names)


def padded(size: int, shards: int = 1) -> int:
    """Round ``size`` up to a number of elements that divides into equal and aligned shards."""
    multiple = ALIGNMENT * shards
    return -(-size // multiple) * multiple


def places_of(shapes: Iterable[tuple[int, ...]]) -> list[slice]:
    """Return the slice of each parameter in the flat vectors, given the parameters' shapes in their order."""
    sizes = [math.prod(shape) for shape in shapes]
    starts = accumulate(map(padded, sizes), initial=0)
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]


def lamb_segments(model: BertForPreTraining, overwritten: Collection[nn.Parameter] = ()) -> LambSegments:
    """Return the segments of the flat vector: each of the reference's tensors, with the padding after it, in model order.

    Biases and layer norms, the one-dimensional tensors, are neither decayed nor adapted. The fused query-key-value weight
    counts as three tensors, as in the reference. The gradients of the parameters ``overwritten`` are marked.
    """
    # Compare parameters by ``id``, here and below, because == would compare their elements.
    fused = {id(layer.query_key_value.weight) for layer in model.layers if isinstance(layer, EncoderLayer)}
    sizes: list[int] = []
    adapted: list[bool] = []
    replaced: list[bool] = []
    ids = {id(parameter) for parameter in overwritten}
    for parameter in model.parameters():
        parts = 3 if id(parameter) in fused else 1
        sizes += [parameter.numel() // parts] * parts
        # Segments leave no gaps, because LAMB splits the whole vector by their sizes.
        sizes[-1] += padded(parameter.numel()) - parameter.numel()
        adapted += [parameter.ndim > 1] * parts
        replaced += [id(parameter) in ids] * parts
    # If no gradient is overwritten, pass no flags, so that one fill clears the whole gradient instead of one per segment.
    return LambSegments(tuple(sizes), tuple(adapted), tuple(replaced) if ids else ())


def learning_rate(config: OptimizerConfig, step: Tensor) -> Tensor:
    """Return the learning rate of an optimizer step in fp64. Steps count from 0, like the reference's ``global_step``.

    The rate rises linearly from ``start_warmup_step`` over ``num_warmup_steps``. Then it is the base rate times
    1 - step / ``learning_rate_training_steps``, and at least 0. It jumps if the two lines do not meet. The result has the
    shape and device of ``step``.
    """
    steps = step.double()
    since_start = steps - config.start_warmup_step
    # ``where`` computes both lines, so this one must not divide by zero if there is no warm-up.
    warm_up = config.base_learning_rate * since_start / max(1, config.num_warmup_steps)
    # The rate stays 0 if a run is longer than its schedule.
    decay = config.base_learning_rate * (1 - steps / config.learning_rate_training_steps).clamp(min=0)
    return torch.where(since_start < config.num_warmup_steps, warm_up, decay)


def hyperparameters(config: OptimizerConfig) -> LambHyperparameters:
    return LambHyperparameters(
        config.beta_1, config.beta_2, config.epsilon, config.weight_decay_rate, config.max_grad_norm
    )


class Lamb:
    """LAMB on flat parameters. The parameters, their moments and the step count are all on the device.

    The host passes no values that change between steps, so that a captured step can be replayed.
    """

    steps: Tensor
    """int64 [], number of steps taken."""

    def __init__(
        self,
        flat: FlatParameters,
        config: OptimizerConfig,
        copies_P: Tensor | None = None,
        casts: tuple[WeightCast, ...] = (),
    ) -> None:
        """Every step also overwrites ``copies_P``, the 16-bit copies of the weights, and ``casts``, their FP8 copies."""
        self.flat = flat
        self.casts = casts
        self.copies_P = copies_P
        self.config = config
        self.state = LambState.zeros_like(flat.weights_P)
        # Count steps on the device, because only the device knows whether a step is skipped.
        self.steps = torch.zeros((), dtype=torch.int64, device=flat.weights_P.device)
        self.refresh_copies_()

    @torch.no_grad()
    def step(self) -> Tensor:
        """Apply the gradients and set them to zero; return their global norm before clipping, [] on the device.

        If a gradient is not finite, only ``state.skipped`` changes.
        """
        # The learning rate schedule counts steps from 0, but the bias corrections of the moments count them from 1.
        rate = learning_rate(self.config, self.steps).float()
        norm = lamb_step(
            self.flat.weights_P,
            self.flat.gradients_P,
            self.state,
            self.flat.segments,
            hyperparameters(self.config),
            step=self.steps + 1,
            learning_rate=rate,
            copies_P=self.copies_P,
            casts=self.casts,
        )
        self.steps += norm < torch.inf  # an infinite or NaN norm means that the step was skipped
        return norm

    @torch.no_grad()
    def refresh_copies_(self) -> None:
        """Refresh the 16-bit copies of the weights after anything but an optimizer step has changed the weights."""
        if self.copies_P is not None:
            self.copies_P.copy_(self.flat.weights_P)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return momentum and variance of all parameters, [P] each, without copying them."""
        return self.state.momentum_P, self.state.variance_P

    @torch.no_grad()
    def set_moments_(self, momentum_P: Tensor, variance_P: Tensor) -> None:
        """Overwrite momentum and variance in place, because captured graphs read them."""
        self.state.momentum_P.copy_(momentum_P)
        self.state.variance_P.copy_(variance_P)

    @torch.no_grad()
    def reset(self) -> None:
        """Reset moments, gradients and counts after the warm-up, in place, because captured steps contain the addresses."""
        state = self.state
        for tensor in (state.momentum_P, state.variance_P, state.skipped, self.flat.gradients_P, self.steps):
            tensor.zero_()
