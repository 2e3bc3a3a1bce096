"""Which implementation of an op runs: the first that can, or the one that was asked for.

An op has one signature and several implementations. ``auto`` takes the first in the order for the device that has nothing
against the inputs, and remembers its choice by what matters of them, so that a call costs one look-up. An explicit choice
works or raises, with the reasons.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

AUTO = "auto"


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op, imported when it is first needed."""

    name: str
    module: str
    """Module that has a function of the op's name, and ``unsupported_reasons`` or ``{op}_unsupported_reasons`` with the same
    arguments where it cannot do everything."""
    requires: str | None = None
    """Package without which the module cannot be imported."""

    def missing(self) -> list[str]:
        """Why this cannot be imported here, or nothing."""
        try:
            there = self.requires is None or importlib.util.find_spec(self.requires) is not None
        except ModuleNotFoundError:  # a parent of it is missing
            there = False
        return [] if there else [f"{self.requires} is not installed"]

    def function(self, op: str) -> Callable[..., Any]:
        """The function."""
        return getattr(importlib.import_module(self.module), op)

    def unsupported_reasons(self, op: str, *args: Any, **kwargs: Any) -> list[str]:
        """Why this cannot compute the op for these arguments, or nothing."""
        if missing := self.missing():
            return missing
        module = importlib.import_module(self.module)
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
        """Runs the chosen implementation; ValueError where an explicit choice cannot do it."""
        key = tuple(_trait(value) for value in (*args, *kwargs.values()))
        function = self._chosen.get(key)
        if function is None:
            function = self._chosen[key] = self.chosen(*args, **kwargs).function(self.name)
        return function(*args, **kwargs)

    def chosen(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Implementation:
        """The implementation for these arguments.

        Raises:
            ValueError: the one asked for cannot compute them; the message has the reasons.
        """
        if self._asked != AUTO:
            asked = self.implementations[self._asked]
            if reasons := asked.unsupported_reasons(self.name, *args, **kwargs):
                raise ValueError(
                    f"{self.name}={self._asked} cannot be used: {'; '.join(reasons)}; set it to {AUTO} or to another of "
                    f"{', '.join(self.implementations)}"
                )
            return asked
        for implementation in self.order(device_type(*args, **kwargs)):
            if not implementation.unsupported_reasons(self.name, *args, **kwargs):
                return implementation
        raise AssertionError(f"{self.name}: no implementation, not even the definition")

    def ask_for(self, name: str) -> None:
        """Makes ``name`` the explicit choice; ``auto`` takes it back. ValueError for an unknown name."""
        if name != AUTO and name not in self.implementations:
            raise ValueError(
                f"{self.name} has no implementation {name!r}; expected {AUTO}, {', '.join(self.implementations)}"
            )
        self._asked = name
        self._chosen.clear()

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """``ask_for`` for the length of a block."""
        before = self._asked
        self.ask_for(name)
        try:
            yield
        finally:
            self.ask_for(before)


def device_type(*args: Any, **kwargs: Any) -> str:
    """``cuda`` when a tensor among the arguments is there, otherwise ``cpu``."""
    return "cuda" if any(isinstance(value, Tensor) and value.is_cuda for value in (*args, *kwargs.values())) else "cpu"


def _trait(value: object) -> object:
    """What of an argument may decide which implementations can compute the op."""
    if isinstance(value, Tensor):
        return value.device.type, value.dtype, value.shape[1:], value.requires_grad
    return type(value)
