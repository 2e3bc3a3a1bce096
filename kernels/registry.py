"""Choice of the implementation of an op: the first that can compute a call, or the one that was asked for.

An op has one signature and several implementations. ``auto`` takes the implementation that was measured to be fastest
(``kernels.tuning.autotune``), otherwise the first in the order for the device that supports the inputs. It remembers its
choice for calls of the same kind, so that a call costs one look-up. An explicit choice works or raises with the reasons.
"""

import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

AUTO = "auto"

_DEVICES = ("cuda", "cpu")
_BY_VALUE = (bool, str, torch.dtype)  # of other numbers, such as rates, only the type counts
_LOG = logging.getLogger(__name__)

Observer = Callable[["Op[..., Any]", tuple[Any, ...], dict[str, Any]], None]


Functions = Mapping[str, tuple[Callable[..., Any], Callable[..., list[str]] | None]]
"""Functions of a library by op. The second one of each takes the same arguments, and returns the reasons why the first
cannot compute them; None if it can compute all."""


@dataclass(frozen=True)
class Implementation:
    """Way to compute ops."""

    name: str
    functions: Callable[[], Functions]
    """Imports and returns the functions."""
    requires: str | None = None
    """Package without which the functions cannot be imported."""
    capturable: bool = True
    """Whether a CUDA graph can capture it: it hands no value from the device to the host."""
    repeatable: bool = True
    """Whether a second call draws the same dropout inside a CUDA graph too: PyTorch's generator draws nothing."""

    def function(self, op: str) -> Callable[..., Any]:
        """Return the function that computes the op."""
        return self.functions()[op][0]

    def unsupported_reasons(self, op: str, *args: Any, **kwargs: Any) -> list[str]:
        """Return the reasons why this cannot compute the op for these arguments; empty if it can."""
        if self.requires is not None and importlib.util.find_spec(self.requires) is None:
            return [f"{self.requires} is not installed"]
        reasons = self.functions()[op][1]
        return reasons(*args, **kwargs) if reasons is not None else []


class Op(Generic[Parameters, Returned]):
    """Public op: callable with the signature of its definition."""

    def __init__(
        self, definition: Callable[Parameters, Returned], orders: Mapping[str, tuple[Implementation, ...]]
    ) -> None:
        self.name = definition.__name__
        self.definition = definition
        self.__doc__ = definition.__doc__
        self.implementations = {each.name: each for order in orders.values() for each in order}
        self.asked = AUTO
        """``auto``, or the name of the implementation that was asked for."""
        self._orders = orders
        self._measured: Mapping[str, str] = {}
        self._dropped: Mapping[str, str] = {}
        self._warned: set[str] = set()
        self._observer: Observer | None = None
        self._captured = self._recomputed = False
        # The end of a ``captured`` block does not clear it, so that a step is captured with the choices of its warm-up.
        self._chosen: dict[tuple[object, ...], Callable[Parameters, Returned]] = {}

    def order(self, device: str) -> tuple[Implementation, ...]:
        """Return the order in which ``auto`` tries implementations on ``cpu`` or ``cuda``."""
        return self._orders[device]

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        """Run the chosen implementation; raise ValueError if an explicit choice cannot compute the call."""
        key = _key(args, kwargs)
        function = self._chosen.get(key)
        if function is None:
            function = self._chosen[key] = self.decided(*args, **kwargs).function(self.name)
        return function(*args, **kwargs)

    def decided(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Implementation:
        """Show the arguments to the observer, and return ``chosen``."""
        if self._observer is not None:
            self._observer(self, args, kwargs)
        chosen = self.chosen(*args, **kwargs)
        self._warn_of_fall_back(chosen, *args, **kwargs)
        return chosen

    def chosen(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Implementation:
        """Return the implementation for these arguments.

        Raises:
            ValueError: the implementation asked for cannot compute them, or none can be captured; with the reasons.
        """
        if self.asked != AUTO:
            asked = self.implementations[self.asked]
            if reasons := self.unsupported_reasons(asked, *args, **kwargs):
                raise ValueError(
                    f"{self.name}={self.asked} cannot be used: {'; '.join(reasons)}; "
                    f"set it to {AUTO} or to another of {', '.join(self.implementations)}"
                )
            return asked
        measured = self._measured.get(signature(*args, **kwargs)) if self._measured else None
        against = []
        # The sort is stable: the measured one comes first, and the others keep their order in case it cannot be used.
        for each in sorted(self.order(device_type(*args, **kwargs)), key=lambda each: each.name != measured):
            reasons = self.unsupported_reasons(each, *args, **kwargs)
            if not reasons:
                return each
            against.append(f"{each.name}: {', '.join(reasons)}")
        # Outside of a capture the definition can compute any call.
        raise ValueError(
            f"{self.name} has no implementation that a CUDA graph can capture for such inputs ({'; '.join(against)}): "
            "set training.cuda_graphs to False, or change what is asked of it"
        )

    def unsupported_reasons(
        self, implementation: Implementation, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> list[str]:
        """Return the reasons why this implementation must not compute the op for these arguments; empty if it may."""
        if error := self._dropped.get(implementation.name):
            return [f"it failed when it was measured ({error})"]
        if not self.permits(implementation, device_type(*args, **kwargs)):
            return [
                "it draws dropout by PyTorch's generator, which training.recompute cannot repeat in a CUDA graph"
                if implementation.capturable
                else "it reads values of the device on the host, which no CUDA graph can capture"
            ]
        return implementation.unsupported_reasons(self.name, *args, **kwargs)

    def permits(self, implementation: Implementation, device: str) -> bool:
        """Tell whether this implementation may be chosen for tensors on ``device``, if it can compute them."""
        capturable = implementation.capturable and (implementation.repeatable or not self._recomputed)
        return capturable or not self._captured or device != "cuda"

    def ask_for(self, name: str) -> None:
        """Make ``name`` the explicit choice; ``auto`` takes it back. Raise ``ValueError`` for an unknown name."""
        self.check(name)
        self.asked = name
        self._chosen.clear()

    def check(self, name: str) -> None:
        """Raise ``ValueError`` unless ``name`` can be asked for."""
        if name != AUTO and name not in self.implementations:
            raise ValueError(
                f"{self.name} has no implementation {name!r}; expected {AUTO}, {', '.join(self.implementations)}"
            )

    def prefer(self, measured: Mapping[str, str], dropped: Mapping[str, str] | None = None) -> None:
        """Make ``auto`` take these implementations for calls with these signatures if they can compute them.

        ``dropped`` implementations, each with a reason, are not chosen for any call. Both replace earlier preferences.
        """
        self._measured, self._dropped = dict(measured), dict(dropped or {})
        self._chosen.clear()

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Inside the block, show ``observer`` the first call of each kind."""
        self._observer = observer
        self._chosen.clear()
        try:
            yield
        finally:
            self._observer = None

    @contextmanager
    def captured(self, recomputed: bool = False) -> Iterator[None]:
        """Inside the block, choose only what a CUDA graph can capture on a GPU; such choices stay afterwards.

        If the op is ``recomputed`` in the backward pass, also choose only implementations that repeat their dropout.
        """
        before = self._captured, self._recomputed
        self._captured, self._recomputed = True, recomputed
        self._chosen.clear()
        try:
            yield
        finally:
            self._captured, self._recomputed = before

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Inside the block, ``ask_for`` an implementation."""
        before = self.asked
        self.ask_for(name)
        try:
            yield
        finally:
            self.ask_for(before)

    def _warn_of_fall_back(self, chosen: Implementation, *args: Any, **kwargs: Any) -> None:
        first = self.order("cuda")[0]
        if self.asked != AUTO or self._measured or chosen is first or device_type(*args, **kwargs) != "cuda":
            return
        reasons = "; ".join(self.unsupported_reasons(first, *args, **kwargs))
        # Warn once for each set of reasons: every layer of every step makes the call.
        if reasons not in self._warned:
            self._warned.add(reasons)
            _LOG.warning("%s: %s instead of %s: %s", self.name, chosen.name, first.name, reasons)


def device_type(*args: Any, **kwargs: Any) -> str:
    """Return ``cuda`` if a tensor among the arguments is on a GPU, otherwise ``cpu``."""
    return "cuda" if any(isinstance(value, Tensor) and value.is_cuda for value in (*args, *kwargs.values())) else "cpu"


def signature(*args: Any, **kwargs: Any) -> str:
    """Describe everything in a call that may decide which implementation is usable or fastest."""
    autocast, gradients, names, *traits = _key(args, kwargs)
    texts = [trait.__name__ if isinstance(trait, type) else str(trait) for trait in traits]
    return f"autocast {autocast}, {'with' if gradients else 'without'} gradients, {names}: {'; '.join(texts)}"


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the signature in the form that is quick to make, since each call needs it.

    The functions that return reasons run once a key, so that reasons may depend only on what is in it.
    """
    autocast = [torch.get_autocast_dtype(device) for device in _DEVICES if torch.is_autocast_enabled(device)]
    traits = [_trait(value) for value in args]
    traits += [_trait(value) for value in kwargs.values()]
    return tuple(autocast), torch.is_grad_enabled(), tuple(kwargs), *traits


def _trait(value: object) -> object:
    if isinstance(value, Tensor):
        # Micro-batches all differ in their tokens: the first size counts up to the next power of two.
        shape = value.shape
        # An empty tensor has a size of its own: -1 has as many bits as 1.
        doublings = (shape[0] - 1).bit_length() if shape and shape[0] else shape[:1]
        return value.device.type, value.dtype, doublings, shape[1:], value.requires_grad
    return value if isinstance(value, _BY_VALUE) else type(value)
