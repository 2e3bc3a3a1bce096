"""Description of a kind of call to an op, from which similar calls can be made and measured later."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.registry import signature

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class CallKind:
    """A kind of call to an op. One implementation is chosen for all calls of the same kind."""

    op: str
    signature: str
    device: torch.device
    autocast: torch.dtype | None
    """Type used by autocast, or None if autocast is off."""
    gradients: bool
    """Whether the call was made with gradients enabled. If so, the backward pass is measured too."""
    args: tuple[Any, ...]
    """Positional arguments. Tensors without values, on the device "meta", replace floating-point tensors."""
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "CallKind":
        """Create the description of a call with these arguments in the current state of autograd and autocast."""
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        kept = _template(args), {name: _template(value) for name, value in kwargs.items()}
        return cls(op, signature(*args, **kwargs), device, autocast, torch.is_grad_enabled(), *kept)

    @property
    def label(self) -> str:
        """Description for logs: the op, the first tensor's size and type, and whether only the forward pass is measured."""
        first = next(value for value in self.args if isinstance(value, Tensor))
        size = " x ".join(map(str, first.shape)) or "scalar"
        return f"{self.op} ({size}, {str(first.dtype).removeprefix('torch.')}{'' if self.gradients else ', forward'})"

    def arguments(self) -> Arguments:
        """Return new arguments similar to the call's arguments. Floating-point tensors hold random values from 0 to 1."""
        return _made(self.args, self.device), {name: _made(value, self.device) for name, value in self.kwargs.items()}

    @contextmanager
    def state(self) -> Iterator[None]:
        """Restore, inside a ``with`` block, the state that autograd and autocast had during the call."""
        with (
            torch.set_grad_enabled(self.gradients),
            torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None),
        ):
            yield


def _template(value: Any) -> Any:
    if isinstance(value, Tensor):
        # The values of scalars (such as rates and scales) and of integers (such as ids and lengths) matter, so keep them.
        if value.dim() and value.is_floating_point():
            like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            return like.requires_grad_(value.requires_grad)
        return value.detach().clone()
    return _rebuilt(value, _template)


def _made(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return _rebuilt(value, partial(_made, device=device))
    if not value.is_meta:
        return value.clone()  # because ops may change a tensor in place, such as an amax
    # Keep the strides, because some implementations copy tensors that are not contiguous, which takes time.
    reach = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True)) + 1
    numbers = torch.rand(reach if value.numel() else 0, device=device).to(value.dtype)
    return numbers.as_strided(value.shape, value.stride()).requires_grad_(value.requires_grad)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to the items of a tuple or the fields of a dataclass. Other values are returned unchanged."""
    if isinstance(value, tuple):
        return tuple(change(each) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: change(each) for name, each in fields.items()})
    return value
