"""A kind of call to an op, kept so that calls like it can be made and measured later."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.registry import signature

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments by position and by name."""


@dataclass(frozen=True)
class CallKind:
    """A kind of call to choose an implementation for."""

    op: str
    signature: str
    device: torch.device
    autocast: torch.dtype | None
    """What autocast computes in, where it is on."""
    gradients: bool
    """Whether the call was made with gradients enabled; then both ways are measured."""
    args: tuple[Any, ...]
    """With ``_Like`` for tensors of floating-point numbers."""
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "CallKind":
        """The request for a call with these arguments in the present state of autograd and autocast."""
        # The first tensor stands for all of the call.
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        kept = tuple(_template(value) for value in args), {name: _template(value) for name, value in kwargs.items()}
        return cls(op, signature(*args, **kwargs), device, autocast, torch.is_grad_enabled(), *kept)

    @property
    def label(self) -> str:
        """Op, size and way, for people."""
        first = next(value for value in self.args if isinstance(value, (_Like, Tensor)))
        size = " x ".join(map(str, first.shape)) or "scalar"
        return f"{self.op} ({size}, {str(first.dtype).removeprefix('torch.')}{'' if self.gradients else ', forward'})"

    def arguments(self) -> Arguments:
        """Arguments like those of the call, in memory of their own; random between 0 and 1."""
        return tuple(_made(value) for value in self.args), {name: _made(value) for name, value in self.kwargs.items()}

    @contextmanager
    def state(self) -> Iterator[None]:
        """Autograd and autocast as they were at the call."""
        with (
            torch.set_grad_enabled(self.gradients),
            torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None),
        ):
            yield


@dataclass(frozen=True)
class _Like:
    """A tensor of floating-point numbers, without the numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def make(self) -> Tensor:
        """Such a tensor, a leaf."""
        # Strides as they were: some implementations copy what is not contiguous, and that belongs to their time.
        reach = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        numbers = torch.rand(0 if 0 in self.shape else reach + 1, device=self.device).to(self.dtype)
        return numbers.as_strided(self.shape, self.stride).requires_grad_(self.requires_grad)


def _template(value: Any) -> Any:
    """The value to keep in a request: numbers that steer a call, such as lengths and rates, stay as they are."""
    if isinstance(value, Tensor):
        # Scalars, such as rates and scales, and integers, such as ids and lengths, must have values that make sense.
        if value.dim() and value.is_floating_point():
            return _Like(tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad)
        return value.detach().clone()
    return _rebuilt(value, _template)


def _made(value: Any) -> Any:
    if isinstance(value, _Like):
        return value.make()
    # Cloned at each use: ops may change a tensor in place, such as an amax.
    return value.clone() if isinstance(value, Tensor) else _rebuilt(value, _made)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with ``change`` applied to the items of a tuple or the fields of a dataclass."""
    if isinstance(value, tuple):
        return tuple(change(each) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: change(each) for name, each in fields.items()})
    return value
