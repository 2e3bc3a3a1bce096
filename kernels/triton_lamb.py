# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportPrivateImportUsage=false
# ruff: noqa: ANN001, ANN202
"""LAMB on flat buffers in Triton: the norm, one pass for the moments and the direction, one for the step.

Shape legend in ``kernels/__init__.py``; besides, G segments and C chunks. A chunk is what one program works on: up to
``CHUNK`` neighbouring elements of one segment. Bytes of memory traffic a parameter: 4 for the norm, 28 for moments and
direction, 12 for the step, 2 more with a low-precision copy: 44 or 46 in all. Nothing is added atomically: equal inputs give
equal results.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.lamb import LambSegments, LambState, bias_corrections, clip_factor

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
    """As ``kernels.lamb.lamb_step``, on fp32 buffers; ``gradients_P`` is left as it is.

    The first call for some segments makes their table of chunks on the device: make one before capturing a graph.
    """
    chunks = _chunks(segments, parameters_P.device)
    return _lamb_step(
        parameters_P,
        gradients_P,
        state.momentum_P,
        state.variance_P,
        state.update_P,
        low_precision_P,
        chunks.table_C4,
        chunks.bounds_G1,
        chunks.adapted_G,
        step,
        learning_rate,
        beta_1,
        beta_2,
        epsilon,
        weight_decay,
        max_grad_norm,
    )


def unsupported_reasons(
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
    reasons = []
    if not parameters_P.is_cuda and not triton.knobs.runtime.interpret:
        reasons.append(f"parameters on {parameters_P.device.type}, expected a CUDA device")
    if sum(segments.sizes) != len(parameters_P):
        reasons.append(f"segments of {sum(segments.sizes)} elements for {len(parameters_P)} parameters")
    flat = (parameters_P, gradients_P, state.momentum_P, state.variance_P, state.update_P)
    if any(buffer_P.dtype != torch.float32 for buffer_P in flat):
        reasons.append("a buffer that is not float32")
    copies = () if low_precision_P is None else (low_precision_P,)
    if any(copy_P.dtype not in (torch.bfloat16, torch.float16) for copy_P in copies):
        reasons.append("a low-precision copy that is neither bfloat16 nor float16")
    if any(buffer_P.shape != parameters_P.shape or not buffer_P.is_contiguous() for buffer_P in (*flat, *copies)):
        reasons.append("buffers of different shapes, or not contiguous")
    if any(tensor.device != parameters_P.device for tensor in (*flat, *copies, step, learning_rate)):
        reasons.append("tensors on more than one device")
    return reasons


def configurations() -> "list[Configuration]":
    """Every kernel as it is launched."""
    from kernels.ahead_of_time import Configuration

    constants = {"CHUNK": CHUNK, "ALIGNMENT": ALIGNMENT}
    types = dict.fromkeys(("parameters", "gradients", "momentum", "variance", "update", "partial_sums"), "*fp32")
    types |= {"step_sizes": "*fp32", "scalars": "*fp32", "low_precision": "*bf16"}
    types |= dict.fromkeys(("table", "adapted", "bounds"), "*i32") | {"chunks": "i32"}
    types |= dict.fromkeys(("beta_1", "rest_1", "beta_2", "rest_2", "epsilon", "weight_decay"), "fp32")

    def configuration(name: str, kernel: Any, constants: dict[str, object], warps: int) -> Configuration:
        signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
        return Configuration(name, kernel, signature, constants, warps, 1)

    return [
        configuration("lamb, direction", _direction_kernel, {**constants}, WARPS),
        configuration("lamb, step sizes", _step_sizes_kernel, {"REDUCTION": REDUCTION}, 4),
        configuration("lamb, step", _apply_kernel, {**constants, "low_precision": None}, WARPS),
        configuration("lamb, step and bf16 copy", _apply_kernel, {**constants}, WARPS),
    ]


@dataclass(frozen=True)
class _Chunks:
    """How programs divide the flat buffers among them; no chunk crosses a segment's bounds. All int32."""

    table_C4: Tensor
    """Of each chunk: its segment, its start in units of ``ALIGNMENT``, and the first and the end of the places after the
    start that are the segment's. Only a segment's first and last chunk can be less than whole."""
    bounds_G1: Tensor
    """First chunk of each segment, and C."""
    adapted_G: Tensor
    """1 or 0."""


@lru_cache(maxsize=8)
def _chunks(segments: LambSegments, device: torch.device) -> _Chunks:
    rows: list[tuple[int, int, int, int]] = []
    bounds = [0]
    starts = accumulate(segments.sizes, initial=0)
    for segment, (start, size) in enumerate(zip(starts, segments.sizes, strict=False)):
        stop = start + size
        for chunk in range(start // ALIGNMENT * ALIGNMENT, stop, CHUNK):
            rows.append((segment, chunk // ALIGNMENT, max(start - chunk, 0), min(stop - chunk, CHUNK)))
        bounds.append(len(rows))
    table_C4, bounds_G1, adapted_G = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in (rows, bounds, segments.adapted)
    )
    return _Chunks(table_C4, bounds_G1, adapted_G)


@torch.library.custom_op(
    "mlperf_bert::lamb_step",
    mutates_args=("parameters_P", "momentum_P", "variance_P", "update_P", "low_precision_P"),
)
def _lamb_step(
    parameters_P: Tensor,
    gradients_P: Tensor,
    momentum_P: Tensor,
    variance_P: Tensor,
    update_P: Tensor,
    low_precision_P: Tensor | None,
    table_C4: Tensor,
    bounds_G1: Tensor,
    adapted_G: Tensor,
    step: Tensor,
    learning_rate: Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    weight_decay: float,
    max_grad_norm: float,
) -> Tensor:
    norm = torch.linalg.vector_norm(gradients_P)
    clip = clip_factor(norm, max_grad_norm)
    corrections = bias_corrections(step, beta_1, beta_2)
    scalars_4 = torch.stack([scalar.float() for scalar in (clip, *corrections, learning_rate)])
    chunks, segments = len(table_C4), len(adapted_G)
    partial_sums_2C = parameters_P.new_empty(2, chunks)
    step_sizes_G = parameters_P.new_empty(segments)
    _direction_kernel[(chunks,)](
        parameters_P,
        gradients_P,
        momentum_P,
        variance_P,
        update_P,
        partial_sums_2C,
        table_C4,
        adapted_G,
        scalars_4,
        beta_1,
        1 - beta_1,
        beta_2,
        1 - beta_2,
        epsilon,
        weight_decay,
        CHUNK=CHUNK,
        ALIGNMENT=ALIGNMENT,
        num_warps=WARPS,
        num_stages=1,
    )
    _step_sizes_kernel[(segments,)](
        partial_sums_2C,
        step_sizes_G,
        bounds_G1,
        adapted_G,
        scalars_4,
        chunks,
        REDUCTION=REDUCTION,
        num_warps=4,
        num_stages=1,
    )
    _apply_kernel[(chunks,)](
        parameters_P,
        update_P,
        low_precision_P,
        step_sizes_G,
        table_C4,
        CHUNK=CHUNK,
        ALIGNMENT=ALIGNMENT,
        num_warps=WARPS,
        num_stages=1,
    )
    return norm


@_lamb_step.register_fake
def _(parameters_P: Tensor, *_others: object) -> Tensor:
    return parameters_P.new_empty(())


# The parameters of kernels have Triton's types, and hence no annotations.


@triton.jit
def _direction_kernel(
    parameters,
    gradients,
    momentum,
    variance,
    update,
    partial_sums,
    table,
    adapted,
    scalars,
    beta_1,
    rest_1,
    beta_2,
    rest_2,
    epsilon,
    weight_decay,
    CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Moments and update direction of a chunk, and its sums of squared parameters and directions."""
    segment, offsets, first, stop = _chunk(table, CHUNK, ALIGNMENT)
    decay = tl.where(tl.load(adapted + segment) != 0, weight_decay, 0.0)
    # Without a mask when the chunk is whole: with one, elements would be read one by one.
    if stop - first == CHUNK:
        _directions(
            parameters, gradients, momentum, variance, update, partial_sums, scalars,
            beta_1, rest_1, beta_2, rest_2, epsilon, decay, offsets, None,
        )  # fmt: skip
    else:
        _directions(
            parameters, gradients, momentum, variance, update, partial_sums, scalars,
            beta_1, rest_1, beta_2, rest_2, epsilon, decay, offsets, _inside(first, stop, CHUNK),
        )  # fmt: skip


@triton.jit
def _directions(
    parameters,
    gradients,
    momentum,
    variance,
    update,
    partial_sums,
    scalars,
    beta_1,
    rest_1,
    beta_2,
    rest_2,
    epsilon,
    decay,
    offsets,
    mask,
):
    clip, momentum_correction, root_correction = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    weight = _load(parameters + offsets, mask)
    gradient = _load(gradients + offsets, mask) * clip
    mean = _load(momentum + offsets, mask) * beta_1 + gradient * rest_1
    square = _load(variance + offsets, mask) * beta_2 + gradient * gradient * rest_2
    tl.store(momentum + offsets, mean, mask=mask)
    tl.store(variance + offsets, square, mask=mask)
    direction = tl.div_rn(mean, tl.sqrt_rn(square) * root_correction + epsilon) * momentum_correction
    direction += decay * weight
    tl.store(update + offsets, direction, mask=mask)
    partial_sum = partial_sums + tl.program_id(0)
    tl.store(partial_sum, tl.sum(weight * weight))
    tl.store(partial_sum + tl.num_programs(0), tl.sum(direction * direction))


@triton.jit
def _step_sizes_kernel(
    partial_sums,
    step_sizes,
    bounds,
    adapted,
    scalars,
    chunks,
    REDUCTION: tl.constexpr,
):
    """Learning rate times trust ratio of a segment."""
    segment = tl.program_id(0)
    step_size = tl.load(scalars + 3)
    if tl.load(adapted + segment) != 0:
        begin, end = tl.load(bounds + segment), tl.load(bounds + segment + 1)
        weights, directions = tl.zeros((REDUCTION,), tl.float32), tl.zeros((REDUCTION,), tl.float32)
        for start in range(begin, end, REDUCTION):
            places = start + tl.arange(0, REDUCTION)
            weights += tl.load(partial_sums + places, mask=places < end, other=0.0)
            directions += tl.load(partial_sums + chunks + places, mask=places < end, other=0.0)
        weight_norm, direction_norm = tl.sqrt_rn(tl.sum(weights)), tl.sqrt_rn(tl.sum(directions))
        if (weight_norm > 0) & (direction_norm > 0):
            step_size *= tl.div_rn(weight_norm, direction_norm)
    tl.store(step_sizes + segment, step_size)


@triton.jit
def _apply_kernel(parameters, update, low_precision, step_sizes, table, CHUNK: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The step of a chunk; ``low_precision`` is None or receives a copy."""
    segment, offsets, first, stop = _chunk(table, CHUNK, ALIGNMENT)
    step_size = tl.load(step_sizes + segment)
    if stop - first == CHUNK:
        _apply(parameters, update, low_precision, step_size, offsets, None)
    else:
        _apply(parameters, update, low_precision, step_size, offsets, _inside(first, stop, CHUNK))


@triton.jit
def _apply(parameters, update, low_precision, step_size, offsets, mask):
    weight = _load(parameters + offsets, mask) - step_size * _load(update + offsets, mask)
    tl.store(parameters + offsets, weight, mask=mask)
    if low_precision is not None:
        tl.store(low_precision + offsets, weight.to(low_precision.dtype.element_ty), mask=mask)


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
