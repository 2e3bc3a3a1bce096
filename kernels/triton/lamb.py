# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
"""LAMB on flat buffers in Triton: the norm, one pass for the moments and the direction, one for the step.

Shape legend in ``kernels/__init__.py``; besides, G segments, A of them adapted, and C chunks. A chunk is what one program
works on: up to ``CHUNK`` neighbouring elements of one segment. Bytes of memory traffic a parameter: 4 for the norm, 32 for
moments, direction and the gradient's zeros, 12 for the step: 48 in all. Nothing is added atomically: equal inputs give
equal results. What one program does is in ``kernels.triton.lamb_passes``.
"""

from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from kernels.reference.lamb import LambHyperparameters, LambSegments, LambState, bias_corrections
from kernels.triton.lamb_passes import apply_kernel, direction_kernel, squares_kernel
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
    hyperparameters: LambHyperparameters,
    *,
    step: Tensor,
    learning_rate: Tensor,
) -> Tensor:
    """Do what ``kernels.reference.lamb.lamb_step`` does, on fp32 buffers.

    The first call for some segments makes their table of chunks on the device: make one before capturing a graph.
    """
    norm = sum_of_squares(gradients_P).sqrt().float()
    squares_2A = lamb_directions(parameters_P, gradients_P, state, segments, hyperparameters, norm=norm, step=step)
    lamb_apply(parameters_P, state, segments, squares_2A, norm=norm, learning_rate=learning_rate)
    return norm


def lamb_directions(
    parameters_P: Tensor,
    gradients_P: Tensor,
    state: LambState,
    segments: LambSegments,
    hyperparameters: LambHyperparameters,
    *,
    norm: Tensor,
    step: Tensor,
) -> Tensor:
    """Do what ``kernels.reference.lamb.lamb_directions`` does, on fp32 buffers, with a first call as in ``lamb_step``."""
    chunks = _chunks(segments, parameters_P.device)
    flat = parameters_P, gradients_P, state.momentum_P, state.variance_P, state.update_P
    tables = chunks.table_C4, chunks.places_G, chunks.spans_A2
    return _lamb_directions(*flat, state.skipped, *tables, norm, step, *astuple(hyperparameters))


def lamb_apply(
    parameters_P: Tensor,
    state: LambState,
    segments: LambSegments,
    squares_2A: Tensor,
    *,
    norm: Tensor,
    learning_rate: Tensor,
) -> None:
    """Do what ``kernels.reference.lamb.lamb_apply`` does, on fp32 buffers, with a first call as in ``lamb_step``."""
    chunks = _chunks(segments, parameters_P.device)
    tables = chunks.table_C4, chunks.places_G
    _lamb_apply(parameters_P, state.update_P, squares_2A, *tables, norm, learning_rate)


def lamb_directions_unsupported_reasons(
    parameters_P: Tensor,
    gradients_P: Tensor,
    state: LambState,
    segments: LambSegments,
    hyperparameters: LambHyperparameters,
    **numbers: Tensor,
) -> list[str]:
    """Return the reasons why ``lamb_directions`` cannot work on these arguments; empty when it can."""
    del hyperparameters  # any will do
    flat = (gradients_P, state.momentum_P, state.variance_P, state.update_P)
    return _reasons(segments, parameters_P, flat, (*numbers.values(), state.skipped))


lamb_step_unsupported_reasons = lamb_directions_unsupported_reasons


def lamb_apply_unsupported_reasons(
    parameters_P: Tensor,
    state: LambState,
    segments: LambSegments,
    squares_2A: Tensor,
    *,
    norm: Tensor,
    learning_rate: Tensor,
) -> list[str]:
    """Return the reasons why ``lamb_apply`` cannot work on these arguments; empty when it can."""
    reasons = _reasons(segments, parameters_P, (state.update_P,), (squares_2A, norm, learning_rate))
    if squares_2A.shape != (2, sum(segments.adapted)):
        reasons.append(f"squares of shape {list(squares_2A.shape)} for {sum(segments.adapted)} adapted segments")
    return reasons


def _reasons(
    segments: LambSegments,
    parameters_P: Tensor,
    buffers: tuple[Tensor, ...],
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
    if any(buffer_P.shape != parameters_P.shape or not buffer_P.is_contiguous() for buffer_P in flat):
        reasons.append("buffers of different shapes, or not contiguous")
    if any(tensor.device != parameters_P.device for tensor in (*flat, *others)):
        reasons.append("tensors on more than one device")
    return reasons


def configurations() -> "list[Configuration]":
    """Return every kernel as it is launched."""
    from kernels.ahead_of_time import Configuration

    types = dict.fromkeys(("parameters", "gradients", "momentum", "variance", "update", "partial_sums"), "*fp32")
    types |= {"norm": "*fp32", "learning_rate": "*fp32", "skipped": "*i64"}
    types |= dict.fromkeys(("squares", "root_correction", "epsilon_correction"), "*fp64")
    types |= dict.fromkeys(("table", "places", "spans"), "*i32") | {"chunks": "i32", "adapted": "i32"}
    numbers = ("weight_1", "weight_2", "epsilon", "weight_decay", "max_grad_norm")
    types |= dict.fromkeys(numbers, "fp32")

    fixed = {"CHUNK": CHUNK, "ALIGNMENT": ALIGNMENT, "REDUCTION": REDUCTION, "FAST_1": False, "FAST_2": False}
    return [
        Configuration.of(f"lamb, {name}", kernel, types, fixed, warps, 1)
        for name, kernel, warps in (
            ("direction", direction_kernel, WARPS),
            ("sums of squares", squares_kernel, 4),
            ("step", apply_kernel, WARPS),
        )
    ]


@dataclass(frozen=True)
class _Chunks:
    """Division of the flat buffers among programs; no chunk crosses a segment's bounds. All int32."""

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
    for segment, (start, stop) in enumerate(pairwise(accumulate(segments.sizes, initial=0))):
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
    direction_kernel[(chunks,)](
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
        squares_kernel[(adapted,)](
            partial_sums_2C, squares_2A, spans_A2, chunks, REDUCTION=REDUCTION, num_warps=4, num_stages=1
        )
    return squares_2A


@_lamb_directions.register_fake
def _(parameters_P: Tensor, *others: Any) -> Tensor:
    spans_A2: Tensor = others[7]
    return parameters_P.new_empty(2, len(spans_A2), dtype=torch.float64)


@torch.library.custom_op("mlperf_bert::lamb_apply", mutates_args=("parameters_P",))
def _lamb_apply(
    parameters_P: Tensor,
    update_P: Tensor,
    squares_2A: Tensor,
    table_C4: Tensor,
    places_G: Tensor,
    norm: Tensor,
    learning_rate: Tensor,
) -> None:
    apply_kernel[(len(table_C4),)](
        parameters_P,
        update_P,
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
