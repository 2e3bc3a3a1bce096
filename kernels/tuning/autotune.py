"""Autotuning: measure the calls that a run makes, and choose the fastest implementation of each op.

    with observed() as requests:     # the kinds of calls, with their shapes and types
        step(batch)
    choices = tune(requests)         # on one process
    apply(choices)                   # on every process: from now on, ``auto`` takes these implementations

A request describes a kind of call. It stores only the shapes, strides and types of floating-point tensors (except scalars),
and creates new tensors for the measurement. Measuring therefore does not change the run's tensors or keep their memory.
Results are not stored between runs.
"""

import dataclasses
import json
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import (
    OPS,
    attention_backward_cast_fp8,
    attention_cast_fp8,
    cast_transpose_fp8,
    cast_transpose_sum_fp8,
    varlen_self_attention,
)
from kernels.reference.fp8 import E4M3, E5M2
from kernels.registry import AUTO, Implementation, Op, device_type, signature

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Work = Callable[[], None]
Timing = Callable[[Callable[[], object]], float]
Run = Callable[["CallKind", Arguments], None]

SAME = 0.03
"""Times that differ by less than this fraction count as equal, so the first implementation in the op's order is taken."""
ROUNDS = 11
HEAD_START_CYCLES = 2_000_000
"""Clock cycles (about a millisecond) that the device waits while the host queues the work, so that launch latency does
not count."""
_LAST_RESORT = "reference"  # measured only if no earlier implementation works, because it can take seconds
_WITH = " with "
FUSED, SEPARATE = f"{_WITH}fused casts", f"{_WITH}separate casts"
"""Suffixes of an implementation's name that say how attention's results are cast for FP8 products."""
_LOG = logging.getLogger(__name__)


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
    """Positional arguments. Tensors without values, on the device "meta", replace floating-point tensors except scalars."""
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
        """Return new arguments like the call's. Floating-point tensors, except scalars, hold random values from 0 to 1."""
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
        # An op's time depends on scalars (such as rates) and integers (such as ids and lengths), so keep their values.
        if value.dim() and value.is_floating_point():
            like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            return like.requires_grad_(value.requires_grad)
        return value.detach().clone()
    return _rebuilt(value, _template)


def _made(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return _rebuilt(value, partial(_made, device=device))
    if not value.is_meta:
        return value.clone()  # a copy, because ops may change a tensor such as amax in place
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


@dataclass(frozen=True)
class KernelChoice:
    """Measured times of one kind of call, and the resulting choice."""

    op: str
    signature: str
    label: str
    milliseconds: dict[str, float]
    """Median time of each implementation that ran. The chosen implementation comes first, then the others by time."""
    errors: dict[str, str]
    """Error of each implementation that failed to run or could not be captured."""
    cast_signature: str = ""
    """Signature of the calls of ``attention_cast_fp8`` that this choice also decides, or an empty string.

    If it is not empty, the names in ``milliseconds`` and ``errors`` end in ``FUSED`` or ``SEPARATE``."""

    def __str__(self) -> str:
        times = [f"{name} {milliseconds:.3g} ms" for name, milliseconds in self.milliseconds.items()]
        return f"{self.label}: {', '.join([*times, *(f'{name} failed ({why})' for name, why in self.errors.items())])}"


def to_json(choices: Iterable[KernelChoice]) -> str:
    """Encode choices as JSON, to send them to the other processes of the run."""
    return json.dumps([dataclasses.asdict(choice) for choice in choices])


def from_json(text: str) -> list[KernelChoice]:
    return [KernelChoice(**choice) for choice in json.loads(text)]


@contextmanager
def observed() -> Iterator[list[CallKind]]:
    """Collect a request for each kind of call that the block makes to the ops."""
    requests: list[CallKind] = []

    def note(op: Op[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        requests.append(CallKind.of(op.name, args, kwargs))

    with ExitStack() as stack:
        for op in OPS.values():
            stack.enter_context(op.observed(note))
        yield requests


def run_once(work: Work) -> Work:
    """Run ``work`` once and return ``work`` itself, for ``tune`` to repeat if steps are not captured."""
    work()
    return work


def tune(
    requests: Iterable[CallKind], repeatable: Callable[[Work], Work] = run_once, timed: Timing | None = None
) -> list[KernelChoice]:
    """Measure all kinds of calls that several implementations can compute, and choose the fastest implementations.

    Only one process of a run calls this, and all processes apply the result. Ops with an explicit choice are skipped.
    ``repeatable`` runs a given function and returns a function that repeats it under the conditions of the run, for
    example by replaying its CUDA graph. If ``repeatable`` raises an error, the implementation is dropped. ``timed``
    calls a given function and returns its seconds; the default is a ``Timer`` on the device of the request.
    """
    requests = list(requests)
    in_fp8 = any(request.op == attention_cast_fp8.name for request in requests)
    kinds = {(request.op, request.signature): request for request in requests}
    choices = []
    for request in kinds.values():
        # In FP8, time attention together with the casts of its results. Attention's kernels or separate kernels make them.
        cast = in_fp8 and request.op == varlen_self_attention.name and request.gradients
        if OPS[request.op].asked == AUTO or (cast and attention_cast_fp8.asked == AUTO):
            choices.append(_measure(request, cast, repeatable, timed))
    return [choice for choice in choices if choice is not None]


def apply(choices: Iterable[KernelChoice]) -> None:
    """Make ``auto`` take the fastest implementations and avoid those that failed. This replaces earlier choices."""
    taken, dropped = defaultdict[str, dict[str, str]](dict), defaultdict[str, dict[str, str]](dict)
    for choice in choices:
        for form, why in choice.errors.items():
            op = attention_cast_fp8.name if form.endswith(FUSED) else choice.op
            dropped[op][form.partition(_WITH)[0]] = why
        for form in list(choice.milliseconds)[:1]:
            name = taken[choice.op][choice.signature] = form.partition(_WITH)[0]
            if choice.cast_signature:
                # The reference of `attention_cast_fp8` also makes separate casts, so it is the choice for SEPARATE.
                taken[attention_cast_fp8.name][choice.cast_signature] = name if form.endswith(FUSED) else _LAST_RESORT
    for op in OPS.values():
        op.prefer(taken[op.name], dropped[op.name])


def _measure(
    request: CallKind, cast: bool, repeatable: Callable[[Work], Work], timed: Timing | None
) -> KernelChoice | None:
    """Time the implementations that the run may use for one kind of call.

    Returns None if there is nothing to compare, or too little memory to measure. Restores random states and frees cached
    memory.
    """
    devices = [request.device] if request.device.type == "cuda" else []
    works: dict[str, Work] = {}
    errors: dict[str, str] = {}
    try:
        # Name the device, because fork_rng would otherwise create a CUDA context on every device.
        with torch.random.fork_rng(devices):
            arguments = request.arguments()
            forms = _forms(request, arguments, cast)
            if len(forms) < 2:
                return None
            for name, run in forms.items():
                if name.partition(_WITH)[0] == _LAST_RESORT and works:
                    break
                try:
                    works[name] = repeatable(partial(run, request, arguments))
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # an error in a library must not stop the run
                    errors[name] = _first_line(error)
                    _LOG.warning("%s=%s is not used: %s", request.op, name, errors[name])
            if len(works) == 1 and not errors:
                return None
            seconds = medians(works, timed or Timer(request.device))
            works.clear()
            with request.state(), torch.no_grad():
                cast_signature = signature(*_cast_call(request, arguments)) if cast else ""
            del arguments  # so that empty_cache below frees their memory
    except torch.OutOfMemoryError:
        _LOG.warning("%s is not measured: too little memory is left for its arguments", request.label)
        return None
    finally:
        if devices:
            torch.cuda.empty_cache()
    best = min(seconds.values(), default=0.0)
    taken = next((name for name, each in seconds.items() if each <= best * (1 + SAME)), None)
    by_time = sorted(seconds, key=lambda name: (name != taken, seconds[name]))
    milliseconds = {name: 1e3 * seconds[name] for name in by_time}
    return KernelChoice(request.op, request.signature, request.label, milliseconds, errors, cast_signature)


def _candidates(request: CallKind, arguments: Arguments) -> list[Implementation]:
    """Return the implementations that the run may use for this kind of call, in order of preference up to the reference."""
    op = OPS[request.op]
    args, kwargs = arguments
    order = op.orders[device_type(*args, **kwargs)]
    with request.state():
        usable = [
            each
            for each in order
            if op.asked in (AUTO, each.name) and not op.unsupported_reasons(each, *args, **kwargs)
        ]
    names = [each.name for each in usable]
    # On a CPU, omit Triton, which comes after the reference: its interpreter is too slow to be measured.
    return usable[: names.index(_LAST_RESORT) + 1] if _LAST_RESORT in names else usable


def _forms(request: CallKind, arguments: Arguments, cast: bool) -> dict[str, Run]:
    """Return the functions to measure, by name: one for each implementation.

    With ``cast``, an implementation of attention has up to two functions, with fused and with separate casts.
    """
    candidates = _candidates(request, arguments)
    if not cast:
        return {each.name: partial(_run, each) for each in candidates}
    asked = {attention_cast_fp8.asked, attention_backward_cast_fp8.asked} - {AUTO}
    forms: dict[str, Run] = {}
    for each in candidates:
        casting = attention_cast_fp8.implementations.get(each.name)
        call = _cast_call(request, arguments)
        if casting and asked <= {each.name} and not attention_cast_fp8.unsupported_reasons(casting, *call):
            forms[each.name + FUSED] = partial(_run_with_fused_casts, casting)
        if asked <= {_LAST_RESORT}:
            forms[each.name + SEPARATE] = partial(_run_with_separate_casts, each)
    return forms


def _run(implementation: Implementation, request: CallKind, arguments: Arguments) -> None:
    """Make one call and, if any input requires a gradient, compute the gradients of these inputs."""
    args, kwargs = arguments
    with request.state():
        returned = implementation.function(request.op)(*args, **kwargs)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    outputs = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
    if outputs:
        leaves = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.requires_grad]
        # Unlike backward(), grad() does not add to the inputs' .grad.
        torch.autograd.grad(outputs, leaves, [torch.ones_like(output) for output in outputs], allow_unused=True)


def _cast_call(request: CallKind, arguments: Arguments) -> tuple[Any, ...]:
    """Return the arguments of ``attention_cast_fp8`` for a call of ``varlen_self_attention``."""
    (qkv_T3HE, *others), _ = arguments
    return qkv_T3HE.detach(), *others, *(torch.ones((), device=request.device) for _ in range(2))


def _run_with_fused_casts(implementation: Implementation, request: CallKind, arguments: Arguments) -> None:
    """Run self-attention whose kernels also make the casts for the FP8 products before and after it."""
    forward, backward = map(implementation.function, ("attention_cast_fp8", "attention_backward_cast_fp8"))
    call = qkv_T3HE, cu_seqlens, *others = _cast_call(request, arguments)
    context_THE, _, _, *kept = forward(*call)
    backward(torch.ones_like(context_THE), qkv_T3HE, cu_seqlens, context_THE, *kept, *others)


def _run_with_separate_casts(implementation: Implementation, request: CallKind, arguments: Arguments) -> None:
    """Run self-attention and, in separate passes, the casts for the FP8 products before and after it."""
    (qkv_T3HE, *_), _ = arguments
    *_, scale, amax = _cast_call(request, arguments)
    with request.state():
        context_THE = implementation.function(request.op)(*arguments[0])
        cast_transpose_fp8(context_THE.detach().flatten(1), scale, amax, E4M3)
        (gradient_T3HE,) = torch.autograd.grad(context_THE, qkv_T3HE, torch.ones_like(context_THE))
        cast_transpose_sum_fp8(gradient_T3HE.flatten(1), scale, amax, E5M2)


def _first_line(error: BaseException) -> str:
    # A failed graph capture raises a second error that does not name the cause, so go back to the first error.
    while error.__context__ is not None:
        error = error.__context__
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line[:200]}"


def medians(works: Mapping[str, Work], timed: Timing) -> dict[str, float]:
    """Return the median seconds of each function.

    The functions take turns, so that a change of the device's clock rate affects all of them.
    """
    samples: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            samples[name].append(timed(work))
    return {name: statistics.median(each) for name, each in samples.items()}


class Timer:
    """Timing of functions on a device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            # A buffer of twice the cache's size evicts everything else from the L2 cache.
            size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
            self._cache = torch.empty(size, dtype=torch.int8, device=device)
            self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, work: Callable[[], object]) -> float:
        """Return the seconds that ``work`` takes. On a GPU, the L2 cache is cold, and the work is queued in advance."""
        if not self._on_gpu:
            begun = time.perf_counter()
            work()
            return time.perf_counter() - begun
        self._cache.zero_()
        torch.cuda._sleep(HEAD_START_CYCLES)
        self._start.record()
        work()
        self._stop.record()
        self._stop.synchronize()
        return self._start.elapsed_time(self._stop) / 1e3
