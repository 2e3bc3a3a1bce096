"""Results of a call and how far they are from the exact results, which a definition computes in float64."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Arguments = tuple[Sequence[Any], dict[str, Any]]
_CHUNK = 256


class Outcome(NamedTuple):
    """Tensors that a call returns or writes, and the gradients of its inputs."""

    results: list[Tensor]
    gradients: list[Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.results, *self.gradients]


def tensors_of(value: Any, omitted: str = "") -> Iterator[Tensor]:
    """Yield the tensors in a tuple or in the fields of a dataclass, except the ``omitted`` field."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_of(each, omitted)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name != omitted:
                yield from tensors_of(getattr(value, field.name), omitted)


def outcome(function: Callable[..., Any], arguments: Arguments, dtype: torch.dtype | None = None) -> Outcome:
    """Call a function with copies of the arguments, in ``dtype`` if it is given. Then backpropagate fixed gradients."""
    args, kwargs = arguments
    args = [_copy(value, dtype) for value in args]
    kwargs = {name: _copy(value, dtype) for name, value in kwargs.items()}
    inputs = [*tensors_of(args, "update_P"), *tensors_of(list(kwargs.values()))]  # omit LAMB's scratch memory
    before = [tensor.detach().clone() for tensor in inputs]
    returned = list(tensors_of(function(*args, **kwargs)))
    written = [now.detach() for now, then in zip(inputs, before, strict=True) if not same_bits(now, then)]
    outputs = [output for output in returned if output.requires_grad]
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    generator = torch.Generator().manual_seed(1)
    # Round to bf16, so that the gradients are equal in every data type.
    upstream = [torch.randn(output.shape, generator=generator).bfloat16().to(output) for output in outputs]
    gradients = torch.autograd.grad(outputs, leaves, upstream) if outputs else map(torch.zeros_like, leaves)
    return Outcome([tensor.detach() for tensor in (*returned, *written)], list(gradients))


def _copy(value: Any, dtype: torch.dtype | None) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _copy(getattr(value, name), dtype) for name in names})
    if not isinstance(value, Tensor):
        return value
    # Do not convert FP8 tensors and integer tensors.
    wide = dtype if dtype is not None and value.is_floating_point() and value.element_size() > 1 else value.dtype
    # Do not copy views, so that ops are tested with the strides of views.
    copied = value.detach().to(wide, copy=value.is_contiguous())
    return nn.Parameter(copied) if isinstance(value, nn.Parameter) else copied.requires_grad_(value.requires_grad)


def same_bits(now: Tensor, then: Tensor) -> bool:
    return torch.equal(*(tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in (now, then)))


@contextmanager
def uninitialized_memory_is_nan() -> Iterator[None]:
    """Fill new tensors with NaN or the largest integer, so that an element that a kernel forgets is not right by chance."""
    # torch.use_deterministic_algorithms does this too, but imports PyTorch's compiler first.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(False)


def rms(x: Tensor) -> float:
    return (x.double().norm() / max(1, x.numel()) ** 0.5).item()


def largest_ratio(
    ours: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor], tolerance: float
) -> tuple[float, int]:
    """Return the largest error as a fraction of the allowed error, and the index of its tensor.

    The allowed root mean square of a tensor's errors is twice that of the ``plain`` results, plus ``tolerance`` times the
    root mean square of the exact values. A second limit finds errors in a few places: the largest root mean square of 256
    neighbouring errors may be four times that of ``plain``, plus twice the term with ``tolerance``. A result that is
    missing, of another shape, or NaN where it should not be has an infinite error. Integers may differ by one.
    """
    # Skip empty tensors, which only the backward pass of the same implementation reads.
    compared = [three for three in zip(ours, plain, exact, strict=False) if three[1].numel()]
    if len(ours) != len(plain) or not compared:
        return math.inf, 0
    ratios = [_ratio(*three, tolerance) for three in compared]
    place = max(range(len(ratios)), key=ratios.__getitem__)
    return ratios[place], place


def _ratio(ours: Tensor, plain: Tensor, exact: Tensor, tolerance: float) -> float:
    if ours.shape != exact.shape:
        return math.inf
    if not exact.is_floating_point():
        return 0.0 if (ours - exact).abs().max() <= 1 else math.inf
    if exact.element_size() == 1:
        # Rounding to bf16 before the cast to FP8 changes about one value in a hundred to its neighbour, so allow this error.
        tolerance = max(tolerance, torch.finfo(exact.dtype).eps / 4)
    exact = exact.double()
    if not torch.equal(ours.double().isnan(), exact.isnan()):
        return math.inf
    unit = rms(exact.nan_to_num())
    allowed = tolerance * (unit if unit > 1e-30 else 1.0)
    mine, theirs = ((x.double() - exact).nan_to_num().flatten() for x in (ours, plain))
    whole = rms(mine) / (2 * rms(theirs) + allowed)
    return max(whole, _worst_chunk(mine) / (4 * _worst_chunk(theirs) + 2 * allowed))


def _worst_chunk(errors: Tensor) -> float:
    """Return the largest root mean square of 256 neighbouring errors."""
    chunks = F.pad(errors, (0, -len(errors) % _CHUNK)).view(-1, _CHUNK)
    return (chunks.square().sum(1).max() / min(_CHUNK, len(errors))).sqrt().item()
