# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportPrivateImportUsage=false
# ruff: noqa: ANN001, ANN202
"""LAMB on flat buffers in Triton: the norm, one pass for the moments and the direction, one for the step.

Shape legend in ``kernels/__init__.py``; besides, G segments, A of them adapted, and C chunks. A chunk is what one program
works on: up to ``CHUNK`` neighbouring elements of one segment. Bytes of memory traffic a parameter: 4 for the norm, 32 for
moments, direction and the gradient's zeros, 12 for the step, 2 more with a low-precision copy: 48 or 50 in all. Nothing is
added atomically: equal inputs give equal results.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.lamb import LambSegments, LambState, bias_corrections
from kernels.triton.squares import sum_of_squares

if TYPE_CHECKING:
    from kernels.ahead_of_time import Configuration

CHUNK = 4096
ALIGNMENT = 16
"""Chunks start at multiples of this many elements, so that whole chunks are read in vectors of 16 bytes."""
WARPS = 8
REDUCTION = 1024
"""Partial sums that are added at once."""


def lamb_step(
    parameters_P: Tensor,
    gradients_P: Tensor,
    state: LambState,
    segments: LambSegments,
    *,
    step: Tensor,
    learning_rate: Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    weight_decay: float,
    max_grad_norm: float,
    low_precision_P: Tensor | None = None,
) -> Tensor:
    """As ``kernels.reference.lamb.lamb_step``, on fp32 buffers.

    The first call for some segments makes their table of chunks on the device: make one before capturing a graph.
    """
    norm = sum_of_squares(gradients_P).sqrt().float()
    squares_2A = lamb_directions(
        parameters_P,
        gradients_P,
        state,
        segments,
        norm=norm,
        step=step,
        beta_1=beta_1,
        beta_2=beta_2,
        epsilon=epsilon,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
    )
    lamb_apply(
        parameters_P,
        state,
        segments,
        squares_2A,
        norm=norm,
        learning_rate=learning_rate,
        low_precision_P=low_precision_P,
    )
    return norm


def lamb_directions(
    parameters_P: Tensor,
    gradients_P: Tensor,
    state: LambState,
    segments: LambSegments,
    *,
    norm: Tensor,
    step: Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    weight_decay: float,
    max_grad_norm: float,
) -> Tensor:
    """As ``kernels.reference.lamb.lamb_directions``, on fp32 buffers, with a first call as in ``lamb_step``."""
    chunks = _chunks(segments, parameters_P.device)
    return _lamb_directions(
        parameters_P,
        gradients_P,
        state.momentum_P,
        state.variance_P,
        state.update_P,
        state.skipped,
        chunks.table_C4,
        chunks.places_G,
        chunks.spans_A2,
        norm,
        step,
        beta_1,
        beta_2,
        epsilon,
        weight_decay,
        max_grad_norm,
    )


def lamb_apply(
    parameters_P: Tensor,
    state: LambState,
    segments: LambSegments,
    squares_2A: Tensor,
    *,
    norm: Tensor,
    learning_rate: Tensor,
    low_precision_P: Tensor | None = None,
) -> None:
    """As ``kernels.reference.lamb.lamb_apply``, on fp32 buffers, with a first call as in ``lamb_step``."""
    chunks = _chunks(segments, parameters_P.device)
    _lamb_apply(
        parameters_P,
        state.update_P,
        low_precision_P,
        squares_2A,
        chunks.table_C4,
        chunks.places_G,
        norm,
        learning_rate,
    )


def lamb_step_unsupported_reasons(
    parameters_P: Tensor,
    gradients_P: Tensor,
    state: LambState,
    segments: LambSegments,
    *,
    step: Tensor,
    learning_rate: Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    weight_decay: float,
    max_grad_norm: float,
    low_precision_P: Tensor | None = None,
) -> list[str]:
    """Why ``lamb_step`` cannot work on these arguments; empty when it can."""
    del beta_1, beta_2, epsilon, weight_decay, max_grad_norm  # any numbers will do
    flat = (gradients_P, state.momentum_P, state.variance_P, state.update_P)
    return _reasons(segments, parameters_P, flat, low_precision_P, (step, learning_rate, state.skipped))


def lamb_directions_unsupported_reasons(
    parameters_P: Tensor,
    gradients_P: Tensor,
    state: LambState,
    segments: LambSegments,
    *,
    norm: Tensor,
    step: Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    weight_decay: float,
    max_grad_norm: float,
) -> list[str]:
    """Why ``lamb_directions`` cannot work on these arguments; empty when it can."""
    del beta_1, beta_2, epsilon, weight_decay, max_grad_norm  # any numbers will do
    flat = (gradients_P, state.momentum_P, state.variance_P, state.update_P)
    return _reasons(segments, parameters_P, flat, None, (norm, step, state.skipped))


def lamb_apply_unsupported_reasons(
    parameters_P: Tensor,
    state: LambState,
    segments: LambSegments,
    squares_2A: Tensor,
    *,
    norm: Tensor,
    learning_rate: Tensor,
    low_precision_P: Tensor | None = None,
) -> list[str]:
    """Why ``lamb_apply`` cannot work on these arguments; empty when it can."""
    reasons = _reasons(segments, parameters_P, (state.update_P,), low_precision_P, (squares_2A, norm, learning_rate))
    if squares_2A.shape != (2, sum(segments.adapted)):
        reasons.append(f"squares of shape {list(squares_2A.shape)} for {sum(segments.adapted)} adapted segments")
    return reasons


def _reasons(
    segments: LambSegments,
    parameters_P: Tensor,
    buffers: tuple[Tensor, ...],
    low_precision_P: Tensor | None,
    others: tuple[Tensor, ...],
) -> list[str]:
    reasons = []
    if not parameters_P.is_cuda and not triton.knobs.runtime.interpret:
        reasons.append(f"parameters on {parameters_P.device.type}, expected a CUDA device")
    if sum(segments.sizes) != len(parameters_P):
        reasons.append(f"segments of {sum(segments.sizes)} elements for {len(parameters_P)} parameters")
    flat = (parameters_P, *buffers)
    if any(buffer_P.dtype != torch.float32 for buffer_P in flat):
        reasons.append("a buffer that is not float32")
    copies = () if low_precision_P is None else (low_precision_P,)
    if any(copy_P.dtype not in (torch.bfloat16, torch.float16) for copy_P in copies):
        reasons.append("a low-precision copy that is neither bfloat16 nor float16")
    if any(buffer_P.shape != parameters_P.shape or not buffer_P.is_contiguous() for buffer_P in (*flat, *copies)):
        reasons.append("buffers of different shapes, or not contiguous")
    if any(tensor.device != parameters_P.device for tensor in (*flat, *copies, *others)):
        reasons.append("tensors on more than one device")
    return reasons


def configurations() -> "list[Configuration]":
    """Every kernel as it is launched."""
    from kernels.ahead_of_time import Configuration

    constants = {"CHUNK": CHUNK, "ALIGNMENT": ALIGNMENT}
    types = dict.fromkeys(("parameters", "gradients", "momentum", "variance", "update", "partial_sums"), "*fp32")
    types |= {"norm": "*fp32", "learning_rate": "*fp32", "low_precision": "*bf16", "skipped": "*i64"}
    types |= dict.fromkeys(("squares", "root_correction", "epsilon_correction"), "*fp64")
    types |= dict.fromkeys(("table", "places", "spans"), "*i32") | {"chunks": "i32", "adapted": "i32"}
    numbers = ("weight_1", "weight_2", "epsilon", "weight_decay", "max_grad_norm")
    types |= dict.fromkeys(numbers, "fp32")

    def configuration(name: str, kernel: Any, constants: dict[str, object], warps: int) -> Configuration:
        signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
        return Configuration(name, kernel, signature, constants, warps, 1)

    return [
        configuration("lamb, direction", _direction_kernel, {**constants, "FAST_1": False, "FAST_2": False}, WARPS),
        configuration("lamb, sums of squares", _squares_kernel, {"REDUCTION": REDUCTION}, 4),
        configuration("lamb, step", _apply_kernel, {**constants, "low_precision": None}, WARPS),
        configuration("lamb, step and bf16 copy", _apply_kernel, {**constants}, WARPS),
    ]


@dataclass(frozen=True)
class _Chunks:
    """How programs divide the flat buffers among them; no chunk crosses a segment's bounds. All int32."""

    table_C4: Tensor
    """Of each chunk: its segment, its start in units of ``ALIGNMENT``, and the first and the end of the places after the
    start that are the segment's. Only a segment's first and last chunk can be less than whole."""
    places_G: Tensor
    """Of each segment: its place among the adapted ones, or -1."""
    spans_A2: Tensor
    """Of each adapted segment: its first chunk, and the one after its last."""


@lru_cache(maxsize=8)
def _chunks(segments: LambSegments, device: torch.device) -> _Chunks:
    rows: list[tuple[int, int, int, int]] = []
    places: list[int] = []
    spans: list[tuple[int, int]] = []
    starts = accumulate(segments.sizes, initial=0)
    for segment, (start, size) in enumerate(zip(starts, segments.sizes, strict=False)):
        stop = start + size
        before = len(rows)
        for chunk in range(start // ALIGNMENT * ALIGNMENT, stop, CHUNK):
            rows.append((segment, chunk // ALIGNMENT, max(start - chunk, 0), min(stop - chunk, CHUNK)))
        places.append(len(spans) if segments.adapted[segment] else -1)
        if segments.adapted[segment]:
            spans.append((before, len(rows)))
    table, places_G, flat_spans = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in (rows, places, spans)
    )
    return _Chunks(table.view(-1, 4), places_G, flat_spans.view(-1, 2))


@torch.library.custom_op(
    "mlperf_bert::lamb_directions",
    mutates_args=("gradients_P", "momentum_P", "variance_P", "update_P", "skipped"),
)
def _lamb_directions(
    parameters_P: Tensor,
    gradients_P: Tensor,
    momentum_P: Tensor,
    variance_P: Tensor,
    update_P: Tensor,
    skipped: Tensor,
    table_C4: Tensor,
    places_G: Tensor,
    spans_A2: Tensor,
    norm: Tensor,
    step: Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    weight_decay: float,
    max_grad_norm: float,
) -> Tensor:
    chunks, adapted = len(table_C4), len(spans_A2)
    partial_sums_2C = parameters_P.new_empty(2, chunks)
    squares_2A = parameters_P.new_empty(2, adapted, dtype=torch.float64)
    _direction_kernel[(chunks,)](
        parameters_P,
        gradients_P,
        momentum_P,
        variance_P,
        update_P,
        skipped,
        partial_sums_2C,
        table_C4,
        places_G,
        norm,
        *bias_corrections(step, beta_1, beta_2),
        beta_1 if beta_1 < 0.5 else 1 - beta_1,
        beta_2 if beta_2 < 0.5 else 1 - beta_2,
        epsilon,
        weight_decay,
        max_grad_norm,
        CHUNK=CHUNK,
        ALIGNMENT=ALIGNMENT,
        FAST_1=beta_1 < 0.5,
        FAST_2=beta_2 < 0.5,
        num_warps=WARPS,
        num_stages=1,
    )
    if adapted:
        _squares_kernel[(adapted,)](
            partial_sums_2C, squares_2A, spans_A2, chunks, REDUCTION=REDUCTION, num_warps=4, num_stages=1
        )
    return squares_2A


@_lamb_directions.register_fake
def _(
    parameters_P: Tensor,
    gradients_P: Tensor,
    momentum_P: Tensor,
    variance_P: Tensor,
    update_P: Tensor,
    skipped: Tensor,
    table_C4: Tensor,
    places_G: Tensor,
    spans_A2: Tensor,
    *_others: object,
) -> Tensor:
    del gradients_P, momentum_P, variance_P, update_P, skipped, table_C4, places_G
    return parameters_P.new_empty(2, len(spans_A2), dtype=torch.float64)


@torch.library.custom_op("mlperf_bert::lamb_apply", mutates_args=("parameters_P", "low_precision_P"))
def _lamb_apply(
    parameters_P: Tensor,
    update_P: Tensor,
    low_precision_P: Tensor | None,
    squares_2A: Tensor,
    table_C4: Tensor,
    places_G: Tensor,
    norm: Tensor,
    learning_rate: Tensor,
) -> None:
    _apply_kernel[(len(table_C4),)](
        parameters_P,
        update_P,
        low_precision_P,
        squares_2A.contiguous(),
        table_C4,
        places_G,
        norm,
        learning_rate,
        squares_2A.shape[1],
        CHUNK=CHUNK,
        ALIGNMENT=ALIGNMENT,
        num_warps=WARPS,
        num_stages=1,
    )


@_lamb_apply.register_fake
def _(parameters_P: Tensor, *_others: object) -> None:
    del parameters_P


# The parameters of kernels have Triton's types, and hence no annotations.


@triton.jit
def _direction_kernel(
    parameters,
    gradients,
    momentum,
    variance,
    update,
    skipped,
    partial_sums,
    table,
    places,
    norm,
    root_correction,
    epsilon_correction,
    weight_1,
    weight_2,
    epsilon,
    weight_decay,
    max_grad_norm,
    CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    FAST_1: tl.constexpr,
    FAST_2: tl.constexpr,
):
    """Moments and update direction of a chunk, and its sums of squared parameters and directions."""
    segment, offsets, first, stop = _chunk(table, CHUNK, ALIGNMENT)
    size = tl.load(norm)
    taken = _finite(size)
    if tl.program_id(0) == 0:
        tl.store(skipped, tl.load(skipped) + tl.where(taken, 0, 1))
    clip = tl.div_rn(max_grad_norm, tl.maximum(size, max_grad_norm))
    root_factor = tl.load(root_correction).to(tl.float32)
    epsilon *= tl.load(epsilon_correction).to(tl.float32)
    decay = tl.where(tl.load(places + segment) >= 0, weight_decay, 0.0)
    # Without a mask when the chunk is whole: with one, elements would be read one by one.
    if stop - first == CHUNK:
        _directions(
            parameters, gradients, momentum, variance, update, partial_sums, taken, clip, root_factor,
            weight_1, weight_2, epsilon, decay, offsets, None, FAST_1, FAST_2,
        )  # fmt: skip
    else:
        _directions(
            parameters, gradients, momentum, variance, update, partial_sums, taken, clip, root_factor,
            weight_1, weight_2, epsilon, decay, offsets, _inside(first, stop, CHUNK), FAST_1, FAST_2,
        )  # fmt: skip


@triton.jit
def _directions(
    parameters,
    gradients,
    momentum,
    variance,
    update,
    partial_sums,
    taken,
    clip,
    root_factor,
    weight_1,
    weight_2,
    epsilon,
    decay,
    offsets,
    mask,
    FAST_1: tl.constexpr,
    FAST_2: tl.constexpr,
):
    weight = _load(parameters + offsets, mask)
    gradient = _load(gradients + offsets, mask) * clip
    mean, square = _load(momentum + offsets, mask), _load(variance + offsets, mask)
    # Selected, not multiplied by zero: a gradient that is not finite would go on being so.
    mean = tl.where(taken, _interpolated(mean, gradient, weight_1, FAST_1), mean)
    square = tl.where(taken, _interpolated(square, gradient * gradient, weight_2, FAST_2), square)
    tl.store(momentum + offsets, mean, mask=mask)
    tl.store(variance + offsets, square, mask=mask)
    tl.store(gradients + offsets, tl.zeros_like(gradient), mask=mask)
    direction = tl.div_rn(mean, tl.sqrt_rn(square) * root_factor + epsilon) + decay * weight
    tl.store(update + offsets, direction, mask=mask)
    partial_sum = partial_sums + tl.program_id(0)
    tl.store(partial_sum, tl.sum(weight * weight))
    tl.store(partial_sum + tl.num_programs(0), tl.sum(direction * direction))


@triton.jit
def _interpolated(old, new, weight, FAST: tl.constexpr):
    """``beta * old + (1 - beta) * new``, from the nearer end; ``weight`` is beta where FAST, beta below 0.5, else 1 - beta.

    As sums of two products they drift: fp32(0.999) + fp32(0.001) is not 1, and the variance would become 1.3e-5 too large.
    """
    if FAST:
        return new + weight * (old - new)
    else:  # noqa: RET505  two traces of which one is compiled, not two ways out
        return old + weight * (new - old)


@triton.jit
def _squares_kernel(partial_sums, squares, spans, chunks, REDUCTION: tl.constexpr):
    """Sums of squared parameters and directions of an adapted segment."""
    place = tl.program_id(0)
    begin, end = tl.load(spans + 2 * place), tl.load(spans + 2 * place + 1)
    weights, directions = tl.zeros((REDUCTION,), tl.float64), tl.zeros((REDUCTION,), tl.float64)
    for start in range(begin, end, REDUCTION):
        places = start + tl.arange(0, REDUCTION)
        weights += tl.load(partial_sums + places, mask=places < end, other=0.0)
        directions += tl.load(partial_sums + chunks + places, mask=places < end, other=0.0)
    tl.store(squares + place, tl.sum(weights))
    tl.store(squares + tl.num_programs(0) + place, tl.sum(directions))


@triton.jit
def _apply_kernel(
    parameters,
    update,
    low_precision,
    squares,
    table,
    places,
    norm,
    learning_rate,
    adapted,
    CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """The step of a chunk; ``low_precision`` is None or receives a copy. ``squares`` has rows of ``adapted``."""
    segment, offsets, first, stop = _chunk(table, CHUNK, ALIGNMENT)
    taken = _finite(tl.load(norm))
    step_size = tl.load(learning_rate).to(tl.float32)
    place = tl.load(places + segment)
    if place >= 0:
        weight_norm = tl.sqrt_rn(tl.load(squares + place).to(tl.float32))
        direction_norm = tl.sqrt_rn(tl.load(squares + adapted + place).to(tl.float32))
        if (weight_norm > 0) & (direction_norm > 0):
            step_size *= tl.div_rn(weight_norm, direction_norm)
    if stop - first == CHUNK:
        _apply(parameters, update, low_precision, taken, step_size, offsets, None)
    else:
        _apply(parameters, update, low_precision, taken, step_size, offsets, _inside(first, stop, CHUNK))


@triton.jit
def _apply(parameters, update, low_precision, taken, step_size, offsets, mask):
    weight = _load(parameters + offsets, mask)
    weight = tl.where(taken, weight - step_size * _load(update + offsets, mask), weight)
    tl.store(parameters + offsets, weight, mask=mask)
    if low_precision is not None:
        tl.store(low_precision + offsets, weight.to(low_precision.dtype.element_ty), mask=mask)


@triton.jit
def _finite(norm):
    """Whether a norm is; False for NaN."""
    return norm < float("inf")


@triton.jit
def _chunk(table, CHUNK: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Segment, offsets [CHUNK], and which of the places are the segment's, of this program's chunk."""
    row = table + 4 * tl.program_id(0)
    start = tl.load(row + 1).to(tl.int64) * ALIGNMENT
    return tl.load(row), start + tl.arange(0, CHUNK), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def _inside(first, stop, CHUNK: tl.constexpr):
    places = tl.arange(0, CHUNK)
    return (places >= first) & (places < stop)


@triton.jit
def _load(pointers, mask):
    """0 where the mask is False; no mask: None."""
    if mask is None:
        return tl.load(pointers)
    else:  # noqa: RET505  two traces of which one is compiled, not two ways out
        return tl.load(pointers, mask=mask, other=0.0)
