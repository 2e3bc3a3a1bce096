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
    """Kind of call, for which one implementation is chosen."""

    op: str
    signature: str
    device: torch.device
    autocast: torch.dtype | None
    """Type of autocast, if it is on."""
    gradients: bool
    """Whether the call was made with gradients enabled. Then forward and backward pass are measured."""
    args: tuple[Any, ...]
    """Arguments, with ``_Like`` in place of floating-point tensors."""
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "CallKind":
        """Describe a call with these arguments in the present state of autograd and autocast."""
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        kept = tuple(_template(value) for value in args), {name: _template(value) for name, value in kwargs.items()}
        return cls(op, signature(*args, **kwargs), device, autocast, torch.is_grad_enabled(), *kept)

    @property
    def label(self) -> str:
        """Op, size, type and direction, for logs."""
        first = next(value for value in self.args if isinstance(value, (_Like, Tensor)))
        size = " x ".join(map(str, first.shape)) or "scalar"
        return f"{self.op} ({size}, {str(first.dtype).removeprefix('torch.')}{'' if self.gradients else ', forward'})"

    def arguments(self) -> Arguments:
        """Return new arguments like those of the call; floating-point tensors are random between 0 and 1."""
        return tuple(_made(value) for value in self.args), {name: _made(value) for name, value in self.kwargs.items()}

    @contextmanager
    def state(self) -> Iterator[None]:
        """Restore the state of autograd and autocast at the call inside a block."""
        with (
            torch.set_grad_enabled(self.gradients),
            torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None),
        ):
            yield


@dataclass(frozen=True)
class _Like:
    """Shape, layout and type of a floating-point tensor, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def make(self) -> Tensor:
        """Return a leaf tensor with random values."""
        # The strides count: some implementations copy tensors that are not contiguous, which takes time.
        reach = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        numbers = torch.rand(0 if 0 in self.shape else reach + 1, device=self.device).to(self.dtype)
        return numbers.as_strided(self.shape, self.stride).requires_grad_(self.requires_grad)


def _template(value: Any) -> Any:
    if isinstance(value, Tensor):
        # Scalars, such as rates and scales, and integers, such as ids and lengths, need their values.
        if value.dim() and value.is_floating_point():
            return _Like(tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad)
        return value.detach().clone()
    return _rebuilt(value, _template)


def _made(value: Any) -> Any:
    if isinstance(value, _Like):
        return value.make()
    # Ops may change a tensor in place, such as an amax.
    return value.clone() if isinstance(value, Tensor) else _rebuilt(value, _made)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to the items of a tuple or the fields of a dataclass."""
    if isinstance(value, tuple):
        return tuple(change(each) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: change(each) for name, each in fields.items()})
    return value
