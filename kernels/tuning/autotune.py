"""The fastest implementation of each op, measured on the calls that a run makes.

    with observed() as requests:     # what is called, of what kind and size
        step(batch)
    choices = tune(requests)         # on one process: from the cache, or measured now
    apply(choices)                   # on every process: what ``auto`` takes from here on

A request keeps shapes, strides and types of the floating-point tensors and makes new ones to measure with, so that nothing
of the run is changed or kept alive. What was measured is kept between runs, one file for each kind of call on each device,
until a version or the source of an implementation changes. A pin, kept beside it, overrides what is measured.
"""

import dataclasses
import json
import logging
import math
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import OPS
from kernels.registry import AUTO, Implementation, Op, device_type
from kernels.tuning.cache import Cache, fingerprint, package_version
from kernels.tuning.contest import Timer, contest, fastest
from kernels.tuning.request import CallKind

SECONDS = 3.0
"""Time that one request may take beyond the first calls, in which implementations are compiled."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class KernelChoice:
    """Measurements of one kind of call, and what follows from it."""

    op: str
    signature: str
    label: str
    taken: str
    milliseconds: dict[str, float]
    """Median of each implementation that ran."""
    errors: dict[str, str]
    """What the others raised."""

    @classmethod
    def of(cls, found: object) -> "KernelChoice":
        """Read parsed JSON; ValueError where it is anything else than a choice for an op that there is."""
        types = {"op": str, "signature": str, "label": str, "taken": str, "milliseconds": dict, "errors": dict}
        if not isinstance(found, dict) or {name: type(value) for name, value in found.items()} != types:
            raise ValueError(f"expected an object with {', '.join(types)}, the last two by implementation")
        # A file may hold NaN or infinity, by which everything would be fastest.
        if not all(type(value) in (int, float) and 0 < value < math.inf for value in found["milliseconds"].values()):
            raise ValueError("a time that is not a positive number")
        if not all(isinstance(value, str) for value in found["errors"].values()):
            raise ValueError("an error that is not text")
        if (
            # An implementation that is gone, or that never ran, cannot be taken.
            found["op"] not in OPS
            or found["taken"] not in OPS[found["op"]].implementations.keys() & found["milliseconds"]
        ):
            raise ValueError(f"unknown op or implementation: {found['op']}, {found['taken']}")
        return cls(**found)

    # What is taken comes first, the others by time.
    def __str__(self) -> str:
        fastest_first = sorted(self.milliseconds.items(), key=lambda item: (item[0] != self.taken, item[1]))
        times = [f"{name} {milliseconds:.3g} ms" for name, milliseconds in fastest_first]
        return f"{self.label}: {', '.join([*times, *(f'{name} failed ({why})' for name, why in self.errors.items())])}"


@dataclass(frozen=True)
class Choices:
    """Implementations that every process of a run is to take."""

    measured: tuple[KernelChoice, ...] = ()
    pins: dict[str, str] = dataclasses.field(default_factory=dict)
    """Implementation by op, in place of what was measured."""

    def to_json(self) -> str:
        """Write JSON for other processes of the run."""
        return json.dumps({"measured": [dataclasses.asdict(choice) for choice in self.measured], "pins": self.pins})

    @classmethod
    def from_json(cls, text: str) -> "Choices":
        """Read what ``to_json`` wrote; ValueError for anything else."""
        found = json.loads(text)
        if not isinstance(found, dict) or set(found) != {"measured", "pins"}:
            raise ValueError("expected an object with measured and pins")
        if not isinstance(found["measured"], list) or not isinstance(found["pins"], dict):
            raise ValueError("expected a list of what was measured, and pins by op")
        for op, name in found["pins"].items():
            check_names(op, name)
        return cls(tuple(KernelChoice.of(choice) for choice in found["measured"]), found["pins"])

    def text(self) -> str:
        """A line for each kind of call and each pin, what is taken first."""
        pins = [f"{op}: {name}, pinned" for op, name in self.pins.items()]
        return "\n".join([*pins, *(str(choice) for choice in self.measured if choice.op not in self.pins)])


def check_names(op: str, name: str | None = None) -> None:
    """Raise ``ValueError`` unless there is this op, with this implementation."""
    if op not in OPS:
        raise ValueError(f"there is no op {op!r}; expected one of {', '.join(OPS)}")
    if name is not None and name not in OPS[op].implementations:
        raise ValueError(f"{op} has no implementation {name!r}; expected one of {', '.join(OPS[op].implementations)}")


@contextmanager
def observed() -> Iterator[list[CallKind]]:
    """Collect, for the length of a block, a request for each kind of call that is made to the ops."""
    requests: list[CallKind] = []

    # Called once a kind of call: the registry remembers the choice from then on.
    def note(op: Op[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        requests.append(CallKind.of(op.name, args, kwargs))

    with ExitStack() as stack:
        for op in OPS.values():
            stack.enter_context(op.observed(note))
        yield requests


def tune(requests: Iterable[CallKind], cache: Cache | None = None, *, seconds: float = SECONDS) -> Choices:
    """The choice for each request, from the cache where it is there and otherwise measured now; with the pins.

    For one process: the others get its ``Choices``, so that all take the same. An op that was asked for by name, or that is
    pinned, is not measured.
    """
    cache = cache or Cache()
    pins = _pins(cache)
    choices: dict[tuple[str, str], KernelChoice] = {}
    for request in requests:
        place = request.op, request.signature
        # A kind of call that two layers make is measured once.
        if place in choices or request.op in pins or OPS[request.op].asked != AUTO:
            continue
        choice = _cached(cache, request)
        if choice is None and (choice := measure(request, seconds)):
            keep(request, choice, cache)
        if choice:
            choices[place] = choice
    return Choices(tuple(choices.values()), pins)


def apply(choices: Choices) -> None:
    """Make ``auto`` take what was chosen, in place of what an earlier call said.

    A pin is an explicit choice: a call that it cannot compute raises, with the reasons. An op that the run itself asked for
    by name keeps that.
    """
    for op in OPS.values():
        of_op = [choice for choice in choices.measured if choice.op == op.name]
        # Also where nothing was measured: an earlier call's choices are forgotten.
        op.prefer({choice.signature: choice.taken for choice in of_op})
        if op.name in choices.pins and op.asked == AUTO:
            remedy = f"it is pinned on rank 0's machine: python -m kernels clear {op.name} there takes the pin back"
            op.ask_for(choices.pins[op.name], remedy)


def measure(request: CallKind, seconds: float = SECONDS) -> KernelChoice | None:
    """Time the implementations that can compute the request; None where none of them ran.

    They take turns, and medians count. On a GPU each call finds the L2 cache empty and the host ahead of the device, as in a
    captured step. Random states are as they were afterwards, and cached memory is given back.
    """
    op = OPS[request.op]
    devices = [request.device] if request.device.type == "cuda" else []
    try:
        # Random states are those of the run, and dropout draws from them: measuring must not move them.
        # Only the device's generator and the CPU's: forking all devices would make a context on each.
        with torch.random.fork_rng(devices):
            args, kwargs = request.arguments()
            usable, errors = _usable(request, args, kwargs)
            works = {each.name: partial(_run, each, request, args, kwargs) for each in usable}
            times, failed = contest(works, Timer(request.device), seconds)
            del works, args, kwargs  # else empty_cache below would find their memory in use
    except torch.OutOfMemoryError:
        _LOG.warning("%s is not measured: its arguments do not fit into the memory that is left", request.label)
        return None
    finally:
        # Memory that measuring has cached is not left to the run.
        if devices:
            torch.cuda.empty_cache()
    errors |= failed
    taken = _taken(request, times)
    for name, error in errors.items():
        _LOG.warning("%s=%s failed while it was measured: %s", op.name, name, error)
    if taken is None:
        return None
    return KernelChoice(
        op.name, request.signature, request.label, taken, {name: 1e3 * each for name, each in times.items()}, errors
    )


def keep(request: CallKind, choice: KernelChoice, cache: Cache | None = None) -> None:
    """Put what was measured for a request into the cache."""
    (cache or Cache()).store(request.op, _cache_key(request), dataclasses.asdict(choice))


def _taken(request: CallKind, seconds: Mapping[str, float]) -> str | None:
    """The fastest that may be chosen now: one that was measured may be none that can be captured."""
    op = OPS[request.op]
    permitted = [name for name in seconds if op.permits(op.implementations[name], request.device.type)]
    return fastest({name: seconds[name] for name in permitted})


def _usable(
    request: CallKind, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Implementation], dict[str, str]]:
    """The implementations worth measuring, in order, and the errors of those that could not even be asked.

    Not the definition on a GPU, nor Triton's interpreter on a CPU, as long as there is another: at full size they take
    seconds to minutes, and are for tests.
    """
    found, errors = [], {}
    device = device_type(*args, **kwargs)
    for each in OPS[request.op].order(device):
        try:
            with request.state():
                reasons = each.unsupported_reasons(request.op, *args, **kwargs)
            if not reasons:
                found.append(each)
        except Exception as error:  # a library that is there and cannot be loaded
            # chr(10): before Python 3.12 no backslash may stand inside an f-string's braces.
            errors[each.name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    for_tests = "reference" if device == "cuda" else "triton"
    return [each for each in found if each.name != for_tests] or found, errors


def _run(implementation: Implementation, request: CallKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make one call, and the gradients of what it gave where the call asks for them."""
    with request.state():
        returned = implementation.function(request.op)(*args, **kwargs)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    outputs = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
    if outputs:
        leaves = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.requires_grad]
        # Ones in the output's type: values do not matter for time.
        upstream = [torch.ones_like(output) for output in outputs]
        # Not by backward(), which would also add to .grad in the time that is measured.
        torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)


def _pins(cache: Cache) -> dict[str, str]:
    pins = {}
    for op, name in cache.pins().items():
        try:
            check_names(op, name)
        except ValueError as error:
            _LOG.warning("a pin is ignored: %s", error)
        else:
            pins[op] = name
    return pins


def _cached(cache: Cache, request: CallKind) -> KernelChoice | None:
    found = cache.load(request.op, _cache_key(request))
    if found is None:
        return None
    try:
        choice = KernelChoice.of(found)
        if (choice.op, choice.signature) != (request.op, request.signature):
            raise ValueError("it is of another call")
    except ValueError as error:
        _LOG.warning("what was measured for %s earlier is ignored: %s", request.op, error)
        return None
    # Chosen again among the times: the file may be of a run that captured nothing, and this one may capture.
    taken = _taken(request, choice.milliseconds)
    return None if taken is None else dataclasses.replace(choice, taken=taken)


def _cache_key(request: CallKind) -> dict[str, object]:
    """Collect all that a measured time depends on, as far as it can be known."""
    if request.device.type == "cuda":
        capability = "{}.{}".format(*torch.cuda.get_device_capability(request.device))
        device = f"{torch.cuda.get_device_name(request.device)}, {capability}, CUDA {torch.version.cuda}"
    else:
        device = f"{platform.machine()} {platform.processor()}, {torch.get_num_threads()} threads"
    return {
        # Anything that may move a time is in the key: a change makes a new file, and the old one is left.
        "device": device,
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "signature": request.signature,
        "implementations": {name: fingerprint(each) for name, each in OPS[request.op].implementations.items()},
    }
