"""Choice of an op's implementation: automatic by default, or explicit.

An op has one signature and several implementations. The choice ``auto`` takes the implementation that was measured to be
fastest (``kernels.tuning.autotune``). Without measurements, it takes the first implementation in the device's order that
supports the inputs. The choice is cached for calls of the same kind, so that a call costs one dictionary look-up. If an
explicitly chosen implementation cannot compute a call, the call raises an error with the reasons.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

AUTO = "auto"

_DEVICES = ("cuda", "cpu")
_BY_VALUE = (bool, str, torch.dtype)  # a signature has the values of these types, but only the types of numbers
_LOG = logging.getLogger(__name__)

Observer = Callable[["Op[..., Any]", tuple[Any, ...], dict[str, Any]], None]


@dataclass(frozen=True)
class Implementation:
    """An implementation of one or more ops by a library."""

    name: str
    functions: str | Mapping[str, Callable[..., Any]]
    """Functions of the library by name, or the name of a module that contains them. The module is imported when a function
    is first needed. The function with an op's name computes the op."""
    reasons: str | None = None
    """Name of the function that takes an op's arguments and returns the reasons why the library cannot handle them, or an
    empty list if it can. None if the library can handle all arguments."""
    requires: str | None = None
    """Package that must be installed, if any."""
    capturable: bool = True
    """Whether a CUDA graph can capture the implementation. It must then copy no values from the device to the host."""
    repeatable: bool = True
    """Whether a second call can draw the same dropout mask inside a CUDA graph. This requires that the mask does not come
    from PyTorch's generator."""
    last_on_cpu: bool = False
    """Whether the definition precedes this implementation on a CPU, because the definition is faster there."""

    def function(self, name: str) -> Callable[..., Any]:
        """Import the library if necessary, and return its function with this name, usually the name of an op."""
        functions = self.functions
        return (vars(import_module(functions)) if isinstance(functions, str) else functions)[name]

    def unsupported_reasons(self, *args: Any, **kwargs: Any) -> list[str]:
        if self.requires is not None and find_spec(self.requires) is None:
            return [f"{self.requires} is not installed"]
        return self.function(self.reasons)(*args, **kwargs) if self.reasons else []


class Op(Generic[Parameters, Returned]):
    """A public op, which is called with the signature of its definition."""

    def __init__(self, definition: Callable[Parameters, Returned], order: tuple[Implementation, ...]) -> None:
        """Create an op from its definition and its implementations, in their order of preference on a GPU."""
        self.name = definition.__name__
        self.definition = definition
        """The definition as a plain function. Other definitions call it, and tests compare implementations with it."""
        update_wrapper(self, definition)  # makes `help` and `inspect.signature` show the definition
        self.orders = {"cuda": order, "cpu": tuple(sorted(order, key=lambda each: each.last_on_cpu))}
        """Order in which ``auto`` tries implementations on ``cpu`` and on ``cuda``."""
        self.implementations = {each.name: each for each in order}
        self.asked = AUTO
        """``auto``, or the name of the explicitly chosen implementation."""
        self._measured: Mapping[str, str] = {}
        self._dropped: Mapping[str, str] = {}
        self._warned: set[str] = set()
        self._observer: Observer | None = None
        self._captured = self._recomputed = False
        # The end of an ``only_capturable`` block does not clear this cache, so later calls keep choices from the block.
        self._chosen: dict[tuple[object, ...], Callable[Parameters, Returned]] = {}

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        """Run the chosen implementation. Raises ``ValueError`` if an explicit choice cannot compute the call."""
        key = _key(args, kwargs)
        function = self._chosen.get(key)
        if function is None:
            function = self._chosen[key] = self.decide(*args, **kwargs).function(self.name)
        return function(*args, **kwargs)

    def decide(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Implementation:
        """Pass the arguments to the observer, if any, and return the ``chosen`` implementation.

        Warns if ``auto``, without measurements, does not choose the first implementation of the order on a GPU.
        """
        self.show(*args, **kwargs)
        chosen = self.chosen(*args, **kwargs)
        self._warn_of_fall_back(chosen, *args, **kwargs)
        return chosen

    def show(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        """Pass the arguments to the observer, if any, as a call does."""
        if self._observer is not None:
            self._observer(self, args, kwargs)

    def takes(self, name: str, *args: Parameters.args, **kwargs: Parameters.kwargs) -> bool:
        """Return whether the implementation ``name`` is chosen for these arguments.

        Raises ``ValueError`` with the reasons if ``name`` is the explicit choice and cannot compute the call. Unlike
        ``chosen``, this raises no error if another implementation is the explicit choice and cannot compute the call.
        """
        if self.asked != AUTO:
            return self.asked == name and self.chosen(*args, **kwargs).name == name
        order = self.orders[device_type(*args, **kwargs)]
        usable = [each.name for each in order if not self.unsupported_reasons(each, *args, **kwargs)]
        measured = self._fastest(*args, **kwargs)
        return usable[:1] == [name] if measured is None else measured == name and name in usable

    def chosen(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Implementation:
        """Return the implementation for these arguments.

        Raises ``ValueError`` with the reasons if the explicitly chosen implementation cannot compute the call, or if a
        CUDA graph must capture the call and no implementation allows it.
        """
        if self.asked != AUTO:
            asked = self.implementations[self.asked]
            if reasons := self.unsupported_reasons(asked, *args, **kwargs):
                raise ValueError(
                    f"{self.name}={self.asked} cannot be used: {'; '.join(reasons)}; "
                    f"set it to {AUTO} or to another of {', '.join(self.implementations)}"
                )
            return asked
        measured = self._fastest(*args, **kwargs)
        against = []
        # Try the measured implementation first. The sort is stable, so the other implementations keep their order.
        for each in sorted(self.orders[device_type(*args, **kwargs)], key=lambda each: each.name != measured):
            reasons = self.unsupported_reasons(each, *args, **kwargs)
            if not reasons:
                return each
            against.append(f"{each.name}: {', '.join(reasons)}")
        # This happens only inside an ``only_capturable`` block. Elsewhere, the op's definition can compute any call.
        raise ValueError(
            f"{self.name} has no implementation that a CUDA graph can capture for such inputs ({'; '.join(against)}): "
            "set training.cuda_graphs to False, or use inputs that an implementation supports"
        )

    def unsupported_reasons(
        self, implementation: Implementation, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> list[str]:
        """Return the reasons why ``implementation`` may not be chosen for these arguments, or an empty list."""
        if error := self._dropped.get(implementation.name):
            return [f"it failed when it was measured ({error})"]
        permitted = implementation.capturable and (implementation.repeatable or not self._recomputed)
        if self._captured and not permitted and device_type(*args, **kwargs) == "cuda":
            return [
                "it draws dropout from PyTorch's generator, so training.recompute cannot repeat its mask in a CUDA graph"
                if implementation.capturable
                else "it copies values from the device to the host, which no CUDA graph can capture"
            ]
        return implementation.unsupported_reasons(*args, **kwargs)

    def ask_for(self, name: str) -> None:
        """Choose the implementation ``name`` explicitly, or return to automatic choice if ``name`` is ``auto``.

        Raises ``ValueError`` for an unknown name.
        """
        self.check(name)
        self.asked = name
        self._chosen.clear()

    def check(self, name: str) -> None:
        """Raise ``ValueError`` unless ``name`` is ``auto`` or the name of an implementation."""
        if name != AUTO and name not in self.implementations:
            raise ValueError(
                f"{self.name} has no implementation {name!r}; use {AUTO} or one of {', '.join(self.implementations)}"
            )

    def prefer(self, measured: Mapping[str, str], dropped: Mapping[str, str] | None = None) -> None:
        """Make ``auto`` prefer the implementations in ``measured``, a map from signatures of calls to implementations.

        ``dropped`` maps implementations that must not be chosen to the reasons. Both maps replace earlier preferences.
        """
        self._measured, self._dropped = dict(measured), dict(dropped or {})
        self._chosen.clear()

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Pass the arguments of the first call of each kind inside a ``with`` block to ``observer``."""
        self._observer = observer
        self._chosen.clear()
        try:
            yield
        finally:
            self._observer = None

    @contextmanager
    def only_capturable(self, recomputed: bool = False) -> Iterator[None]:
        """Restrict choices on a GPU to implementations that a CUDA graph can capture, inside a ``with`` block.

        Choices made inside the block remain in effect afterwards. If the op is ``recomputed`` in the backward pass, the
        implementation must also be able to repeat its dropout mask.
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
        """Choose the implementation ``name`` explicitly inside a ``with`` block."""
        before = self.asked
        self.ask_for(name)
        try:
            yield
        finally:
            self.ask_for(before)

    def _fastest(self, *args: Any, **kwargs: Any) -> str | None:
        return self._measured.get(signature(*args, **kwargs)) if self._measured else None

    def _warn_of_fall_back(self, chosen: Implementation, *args: Any, **kwargs: Any) -> None:
        first = self.orders["cuda"][0]
        if self.asked != AUTO or self._measured or chosen is first or device_type(*args, **kwargs) != "cuda":
            return
        reasons = "; ".join(self.unsupported_reasons(first, *args, **kwargs))
        # Warn once for each set of reasons, because every layer of every step makes the call.
        if reasons not in self._warned:
            self._warned.add(reasons)
            _LOG.warning("%s: %s instead of %s: %s", self.name, chosen.name, first.name, reasons)


def device_type(*args: Any, **kwargs: Any) -> str:
    """Return ``cuda`` if a tensor among the arguments is on a GPU, otherwise ``cpu``."""
    return "cuda" if any(isinstance(value, Tensor) and value.is_cuda for value in (*args, *kwargs.values())) else "cpu"


def signature(*args: Any, **kwargs: Any) -> str:
    """Return a text with all properties of a call that may affect which implementation is usable or fastest."""
    autocast, gradients, names, *traits = _key(args, kwargs)
    texts = [trait.__name__ if isinstance(trait, type) else str(trait) for trait in traits]
    return f"autocast {autocast}, {'with' if gradients else 'without'} gradients, {names}: {'; '.join(texts)}"


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the properties of ``signature`` as a tuple, which is fast enough to compute on every call.

    Reasons against an implementation are computed once per key, so they may depend only on properties in the key.
    """
    autocast = [torch.get_autocast_dtype(device) for device in _DEVICES if torch.is_autocast_enabled(device)]
    traits = [_trait(value) for value in (*args, *kwargs.values())]
    return tuple(autocast), torch.is_grad_enabled(), tuple(kwargs), *traits


def _trait(value: object) -> object:
    if isinstance(value, Tensor):
        # Micro-batches differ in their numbers of tokens, so the first dimension is rounded up to a power of two.
        shape = value.shape
        # Handle empty tensors separately, because (-1).bit_length() equals (1).bit_length().
        doublings = (shape[0] - 1).bit_length() if shape and shape[0] else shape[:1]
        return value.device.type, value.dtype, doublings, shape[1:], value.requires_grad
    return value if isinstance(value, _BY_VALUE) else type(value)
