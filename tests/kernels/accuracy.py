"""Accuracy rule for implementations of ops: at most twice plain PyTorch's error, measured against float64."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

CPU = torch.device("cpu")
Arguments = tuple[Sequence[Any], dict[str, Any]]


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
    """Call a function with copies of the arguments, cast to ``dtype`` if given, and backpropagate fixed gradients."""
    args, kwargs = arguments
    args = [_copy(value, dtype) for value in args]
    kwargs = {name: _copy(value, dtype) for name, value in kwargs.items()}
    inputs = [*tensors_of(args, "update_P"), *tensors_of(list(kwargs.values()))]  # LAMB's scratch values do not matter
    before = [tensor.detach().clone() for tensor in inputs]
    returned = list(tensors_of(function(*args, **kwargs)))
    written = [now.detach() for now, then in zip(inputs, before, strict=True) if not same_bits(now, then)]
    outputs = [output for output in returned if output.requires_grad]
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(output.shape, generator=generator).to(output.dtype) for output in outputs]
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
    # Keep views as views, so that strides are tested.
    copied = value.detach().to(wide, copy=value.is_contiguous())
    return copied.requires_grad_(value.requires_grad)


def same_bits(now: Tensor, then: Tensor) -> bool:
    return torch.equal(*(tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in (now, then)))


def rms(x: Tensor) -> float:
    return (x.double().norm() / max(1, x.numel()) ** 0.5).item()


def assert_within_twice(
    function: Callable[..., Any],
    definition: Callable[..., Any],
    draws: Sequence[Arguments],
    free: float,
    steps: float = 0,
) -> None:
    """Check that a function's error against float64 is at most twice the definition's error plus ``free``.

    An error is a root mean square over several draws, because the largest error of a few values is random. ``free`` is
    relative to the root mean square of the exact values. FP8 results must equal the definition's results, except that
    a fraction ``steps`` of the elements may differ by one FP8 step.
    """
    found = [outcome(function, draw).tensors for draw in draws]
    plain = [outcome(definition, draw).tensors for draw in draws]
    exact = [outcome(definition, draw, torch.float64).tensors for draw in draws]
    for place, (mine, theirs, truth) in enumerate(
        zip(*(list(zip(*each, strict=True)) for each in (found, plain, exact)), strict=True)
    ):
        if not theirs[0].numel():  # empty, or of interest only to the kernel's own backward pass
            continue
        assert [(x.shape, x.dtype) for x in mine] == [(x.shape, x.dtype) for x in theirs], place
        if mine[0].is_floating_point() and mine[0].element_size() == 1:
            for ours, plains in zip(mine, theirs, strict=True):
                assert_same_fp8(ours, plains, steps)
            continue
        ours, plains, exacts = (torch.cat([x.double().flatten() for x in each]) for each in (mine, theirs, truth))
        unit = rms(exacts) if rms(exacts) > 1e-6 else 1.0
        assert rms(ours - exacts) <= 2 * rms(plains - exacts) + free * unit, f"result {place}"


def assert_same_fp8(found: Tensor, expected: Tensor, steps: float) -> None:
    """Check that FP8 numbers are equal. A fraction ``steps`` of the elements may differ by one FP8 step."""
    kind, mine, truth = torch.finfo(found.dtype), found.double(), expected.double()
    assert torch.equal(mine.isnan(), truth.isnan())
    mine, truth = mine.nan_to_num(), truth.nan_to_num()
    spacing = kind.eps * torch.maximum(mine.abs(), truth.abs()).clamp(min=kind.tiny)
    assert ((mine - truth).abs() <= spacing).all()
    assert (mine != truth).sum() <= (max(2, steps * mine.numel()) if steps else 0)
