"""Autotuning: measure the calls that a run makes, and choose the fastest implementation of each op.

    with observed() as requests:     # the kinds of calls, with their shapes and types
        step(batch)
    choices = tune(requests)         # on one process
    apply(choices)                   # on every process: from now on, ``auto`` takes these implementations

A request stores only the shapes, strides and types of floating-point tensors, and creates new tensors for the measurement.
Measuring therefore does not change the run's tensors or keep their memory. Results are not stored between runs.
"""

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.ops import OPS, attention_cast_fp8, cast_transpose_fp8, cast_transpose_sum_fp8, varlen_self_attention
from kernels.reference.fp8 import E4M3, E5M2
from kernels.registry import AUTO, Implementation, Op, device_type
from kernels.tuning.contest import Timer, fastest, medians
from kernels.tuning.request import Arguments, CallKind

Work = Callable[[], None]
Timing = Callable[[Callable[[], object]], float]

_LAST_RESORT = "reference"  # measured only if no other implementation works, because it takes seconds at full size
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class KernelChoice:
    """Measured times of one kind of call, and the resulting choice."""

    op: str
    signature: str
    label: str
    milliseconds: dict[str, float]
    """Median time of each implementation that ran. The chosen implementation comes first, then the others by time."""
    errors: dict[str, str]
    """Reason of the failure, for each implementation that failed to run or could not be captured."""

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
    # In FP8, Triton's attention also casts its results, as encoder layers need. Other implementations need separate
    # passes for these casts, so their times include the passes.
    in_fp8 = any(request.op == attention_cast_fp8.name for request in requests)
    kinds = {(request.op, request.signature): request for request in requests if OPS[request.op].asked == AUTO}
    choices = []
    for request in kinds.values():
        between_products = in_fp8 and request.op == varlen_self_attention.name and request.gradients
        run = _run_between_fp8_products if between_products else _run
        if choice := _measure(request, run, repeatable, timed):
            choices.append(choice)
    return choices


def apply(choices: Iterable[KernelChoice]) -> None:
    """Make ``auto`` take the fastest implementations and avoid those that failed. This replaces earlier choices."""
    choices = list(choices)
    for op in OPS.values():
        of_op = [choice for choice in choices if choice.op == op.name]
        taken = {choice.signature: next(iter(choice.milliseconds)) for choice in of_op if choice.milliseconds}
        op.prefer(taken, {name: why for choice in of_op for name, why in choice.errors.items()})


def _measure(
    request: CallKind, run: Callable[..., None], repeatable: Callable[[Work], Work], timed: Timing | None
) -> KernelChoice | None:
    """Time the implementations that the run may use for one kind of call.

    Returns None if there is only one such implementation or too little memory to measure. Restores random states and frees
    cached memory.
    """
    devices = [request.device] if request.device.type == "cuda" else []
    works: dict[str, Work] = {}
    errors: dict[str, str] = {}
    try:
        # By default, fork_rng would create a CUDA context on every device.
        with torch.random.fork_rng(devices):
            arguments = request.arguments()
            candidates = _candidates(request, arguments)
            if len(candidates) < 2:
                return None
            for each in candidates:
                if each.name == _LAST_RESORT and works:
                    break
                try:
                    works[each.name] = repeatable(partial(run, each, request, arguments))
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # an error in a library must not stop the run
                    errors[each.name] = _first_line(error)
                    _LOG.warning("%s=%s is not used: %s", request.op, each.name, errors[each.name])
            if len(works) == 1 and not errors:
                return None
            seconds = medians(works, timed or Timer(request.device))
            works.clear()
            del arguments  # so that empty_cache below frees their memory
    except torch.OutOfMemoryError:
        _LOG.warning("%s is not measured: too little memory is left for its arguments", request.label)
        return None
    finally:
        if devices:
            torch.cuda.empty_cache()
    taken = fastest(seconds) if seconds else None
    by_time = sorted(seconds, key=lambda name: (name != taken, seconds[name]))
    milliseconds = {name: 1e3 * seconds[name] for name in by_time}
    return KernelChoice(request.op, request.signature, request.label, milliseconds, errors)


def _candidates(request: CallKind, arguments: Arguments) -> list[Implementation]:
    """Return the implementations that the run may use for this kind of call, up to and including the reference."""
    op = OPS[request.op]
    args, kwargs = arguments
    order = op.orders[device_type(*args, **kwargs)]
    with request.state():
        usable = [each for each in order if not op.unsupported_reasons(each, *args, **kwargs)]
    names = [each.name for each in usable]
    # On a CPU, Triton runs in its interpreter. It comes after the reference, and is too slow to be measured.
    return usable[: names.index(_LAST_RESORT) + 1] if _LAST_RESORT in names else usable


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


def _run_between_fp8_products(implementation: Implementation, request: CallKind, arguments: Arguments) -> None:
    """Run self-attention forward and backward, including the casts for the FP8 products before and after it."""
    (qkv_T3HE, cu_seqlens, max_seqlen, dropout), _ = arguments
    scale, amax = (torch.ones((), device=request.device) for _ in range(2))
    if casting := attention_cast_fp8.implementations.get(implementation.name):
        qkv_T3HE = qkv_T3HE.detach()
        forward, backward = map(casting.function, ("attention_cast_fp8", "attention_backward_cast_fp8"))
        context_THE, _, _, *kept = forward(qkv_T3HE, cu_seqlens, max_seqlen, dropout, scale, amax)
        inputs = torch.ones_like(context_THE), qkv_T3HE, cu_seqlens, context_THE, *kept
        backward(*inputs, max_seqlen, dropout, scale, amax)
        return
    with request.state():
        context_THE = implementation.function(request.op)(qkv_T3HE, cu_seqlens, max_seqlen, dropout)
        cast_transpose_fp8(context_THE.detach().flatten(1), scale, amax, E4M3)
        (gradient_T3HE,) = torch.autograd.grad(context_THE, qkv_T3HE, torch.ones_like(context_THE))
        cast_transpose_sum_fp8(gradient_T3HE.flatten(1), scale, amax, E5M2)


def _first_line(error: BaseException) -> str:
    # A failed graph capture raises a second error that does not name the cause, so go back to the first error.
    while error.__context__ is not None:
        error = error.__context__
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line[:200]}"
