"""Choice of the implementation of an op: the first that can, or the one that was asked for.

An op has one signature and several implementations. ``auto`` takes the implementation that was measured to be fastest
(``kernels.tuning.autotune``), otherwise the first in the order for the device that supports the inputs, and remembers its
choice for calls of the same kind, so that a call costs one look-up. An explicit choice works or raises, with the reasons.
Implementations that are chosen while a step is prepared for capture can be captured.
"""

import importlib
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
# Arguments whose value may decide what is usable; other numbers, such as rates, only have a type.
_BY_VALUE = (bool, str, torch.dtype)
_LOG = logging.getLogger(__name__)

Observer = Callable[["Op[..., Any]", tuple[Any, ...], dict[str, Any]], None]
"""Gets an op and the arguments of a call."""


@dataclass(frozen=True)
class Implementation:
    """Way to compute an op, imported when it is first needed."""

    name: str
    module: str
    """Module that has a function of the op's name, and ``unsupported_reasons`` or ``{op}_unsupported_reasons`` with the same
    arguments where it cannot do everything."""
    requires: str | None = None
    """Package without which the module cannot be imported."""
    capturable: bool = True
    """Whether a CUDA graph can capture it: it hands nothing that is on the device to the host."""
    repeatable: bool = True
    """Whether a second call drops out the same also inside a CUDA graph: nothing is drawn by PyTorch's generator."""

    def missing(self) -> list[str]:
        """Say why this cannot be imported here, or nothing."""
        # find_spec imports parents alone: a library that is there but broken shows when it is used.
        try:
            there = self.requires is None or importlib.util.find_spec(self.requires) is not None
        except (ImportError, ValueError):  # a parent of it is missing, or is another package of the same name
            there = False
        return [] if there else [f"{self.requires} is not installed"]

    def function(self, op: str) -> Callable[..., Any]:
        """The function."""
        return getattr(importlib.import_module(self.module), op)

    def unsupported_reasons(self, op: str, *args: Any, **kwargs: Any) -> list[str]:
        """Say why this cannot compute the op for these arguments, or nothing."""
        if missing := self.missing():
            return missing
        module = importlib.import_module(self.module)
        # The op's own function first: a module may serve several ops with unlike limits.
        reasons = getattr(module, f"{op}_unsupported_reasons", getattr(module, "unsupported_reasons", None))
        return reasons(*args, **kwargs) if reasons is not None else []


class Op(Generic[Parameters, Returned]):
    """A public op: callable with the signature of its definition."""

    def __init__(
        self, definition: Callable[Parameters, Returned], orders: Mapping[str, tuple[Implementation, ...]]
    ) -> None:
        self.name = definition.__name__
        self.definition = definition
        self.__doc__ = definition.__doc__
        self._orders = orders
        self._asked = AUTO
        self._measured: Mapping[str, str] = {}
        self._dropped: Mapping[str, str] = {}
        self._said: set[str] = set()
        self._observer: Observer | None = None
        self._captured = self._recomputed = False
        # By all of a call that can change the choice. Settings that change it clear this; the end of `captured` does
        # not, so that what has warmed up is also what is captured.
        self._chosen: dict[tuple[object, ...], Callable[Parameters, Returned]] = {}

    @property
    def asked(self) -> str:
        """``auto``, or the name of the implementation that was asked for."""
        return self._asked

    @property
    def implementations(self) -> dict[str, Implementation]:
        """All implementations by name."""
        return {implementation.name: implementation for order in self._orders.values() for implementation in order}

    def order(self, device: str) -> tuple[Implementation, ...]:
        """The order in which ``auto`` tries them on ``cpu`` or ``cuda``."""
        return self._orders[device]

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        """Run the chosen implementation; ValueError where an explicit choice cannot do it."""
        key = _key(args, kwargs)
        function = self._chosen.get(key)
        if function is None:
            function = self._chosen[key] = self.decided(*args, **kwargs).function(self.name)
        return function(*args, **kwargs)

    def decided(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Implementation:
        """``chosen``, after the observer was shown the arguments: for those who have a way around some implementations."""
        if self._observer is not None:
            self._observer(self, args, kwargs)
        chosen = self.chosen(*args, **kwargs)
        self._say_fall_back(chosen, *args, **kwargs)
        return chosen

    def chosen(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Implementation:
        """The implementation for these arguments.

        Raises:
            ValueError: the one asked for cannot compute them, or none can be captured; the message has the reasons.
        """
        if self._asked != AUTO:
            asked = self.implementations[self._asked]
            if reasons := self.unsupported_reasons(asked, *args, **kwargs):
                raise ValueError(
                    f"{self.name}={self._asked} cannot be used: {'; '.join(reasons)}; "
                    f"set it to {AUTO} or to another of {', '.join(self.implementations)}"
                )
            return asked
        measured = self._measured.get(signature(*args, **kwargs)) if self._measured else None
        order = self.order(device_type(*args, **kwargs))
        # Reasons are collected, so that the error can give all of them.
        against = []
        # The sort is stable: the measured one first, the others in their order, in case that one cannot.
        for implementation in sorted(order, key=lambda implementation: implementation.name != measured):
            reasons = self.unsupported_reasons(implementation, *args, **kwargs)
            if not reasons:
                return implementation
            against.append(f"{implementation.name}: {', '.join(reasons)}")
        # Outside of a capture the definition, at the latest, can compute any call.
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
        """Tell whether this implementation may be chosen for tensors there, if it can compute them."""
        capturable = implementation.capturable and (implementation.repeatable or not self._recomputed)
        # On a CPU there is nothing to capture, whatever the block asks for.
        return capturable or not self._captured or device != "cuda"

    def ask_for(self, name: str) -> None:
        """Make ``name`` the explicit choice; ``auto`` takes it back. Raises ``ValueError`` for an unknown name."""
        self.check(name)
        self._asked = name
        # Choices made under another wish are void.
        self._chosen.clear()

    def check(self, name: str) -> None:
        """Raise ``ValueError`` unless ``name`` can be asked for."""
        if name != AUTO and name not in self.implementations:
            raise ValueError(
                f"{self.name} has no implementation {name!r}; expected {AUTO}, {', '.join(self.implementations)}"
            )

    def prefer(self, measured: Mapping[str, str], dropped: Mapping[str, str] | None = None) -> None:
        """Make ``auto`` take, for calls with these signatures, these implementations if they can; {} forgets them.

        Implementations that are ``dropped``, for a reason each, are taken for no call.
        """
        if unknown := {*measured.values(), *(dropped or {})} - set(self.implementations):
            raise ValueError(f"{self.name} has no implementation {', '.join(sorted(unknown))}")
        self._measured, self._dropped = dict(measured), dict(dropped or {})
        self._chosen.clear()

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Show ``observer``, for the length of a block, the first call of every kind that the op tells apart."""
        self._observer = observer
        self._chosen.clear()
        try:
            yield
        finally:
            self._observer = None

    @contextmanager
    def captured(self, recomputed: bool = False) -> Iterator[None]:
        """Choose for a GPU, for the length of a block, only what a CUDA graph can capture; such choices stay.

        Where it is ``recomputed`` in the backward pass, only what then drops out the same.
        """
        before = self._captured, self._recomputed
        self._captured, self._recomputed = True, recomputed
        # Choices made before may be such that cannot be captured.
        self._chosen.clear()
        try:
            yield
        finally:
            self._captured, self._recomputed = before

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """``ask_for`` for the length of a block."""
        before = self._asked
        self.ask_for(name)
        try:
            yield
        finally:
            self.ask_for(before)

    # Told once for each set of reasons: a call is made in every layer of every step.
    def _say_fall_back(self, chosen: Implementation, *args: Any, **kwargs: Any) -> None:
        """Say once, with the reasons, that a GPU does not get the implementation meant for it.

        On a CPU the first in the order is what is installed; there nothing was given up.
        """
        first = self.order("cuda")[0]
        if self._asked != AUTO or self._measured or chosen is first or device_type(*args, **kwargs) != "cuda":
            return
        reasons = "; ".join(self.unsupported_reasons(first, *args, **kwargs))
        if reasons not in self._said:
            self._said.add(reasons)
            _LOG.warning("%s: %s instead of %s: %s", self.name, chosen.name, first.name, reasons)


def device_type(*args: Any, **kwargs: Any) -> str:
    """``cuda`` when a tensor among the arguments is there, otherwise ``cpu``."""
    # One tensor on the GPU decides: others, such as a scalar, may be on the host.
    return "cuda" if any(isinstance(value, Tensor) and value.is_cuda for value in (*args, *kwargs.values())) else "cpu"


def signature(*args: Any, **kwargs: Any) -> str:
    """Describe what of a call may decide which implementation is usable or fastest: equal for calls that share a choice."""
    autocast, gradients, names, *traits = _key(args, kwargs)
    texts = [trait.__name__ if isinstance(trait, type) else str(trait) for trait in traits]
    return f"autocast {autocast}, {'with' if gradients else 'without'} gradients, {names}: {'; '.join(texts)}"


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The signature, in the form that is quick to make: a call computes it each time."""
    # Reasons against an implementation are asked once a key: they may depend on nothing that is not in it.
    autocast = [torch.get_autocast_dtype(device) for device in _DEVICES if torch.is_autocast_enabled(device)]
    traits = [_trait(value) for value in args]
    traits += [_trait(value) for value in kwargs.values()]
    return tuple(autocast), torch.is_grad_enabled(), tuple(kwargs), *traits


def _trait(value: object) -> object:
    """Return of a tensor all but the values, its first size up to the next power of two; of a number its type alone."""
    if isinstance(value, Tensor):
        # Micro-batches all differ in their tokens: exact sizes would each be a choice of their own, and measured.
        shape = value.shape
        # Nothing at all is a size of its own: -1 has as many bits as 1.
        doublings = (shape[0] - 1).bit_length() if shape and shape[0] else shape[:1]
        # Whether gradients are wanted decides about both ways, and about what can be derived.
        return value.device.type, value.dtype, doublings, shape[1:], value.requires_grad
    return value if isinstance(value, _BY_VALUE) else type(value)
