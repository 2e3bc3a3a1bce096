# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
"""LAMB on flat buffers in Triton: the norm, one pass for the moments and the direction, one for the step.

Shape legend in ``kernels/__init__.py``; in addition, G segments, A adapted segments and C chunks. A chunk is up to ``CHUNK``
adjacent elements of one segment, which one program processes. There are no atomic sums, so equal inputs give equal results.
The kernels are in ``kernels.triton.lamb_passes``.

The step of a segment needs the norm of its whole direction. Both passes run for one group of segments before they run for
the next group, so that parameters and directions are still in the L2 cache when they are read again. All groups write their
directions to the same memory, which seldom leaves the cache. Bytes of memory traffic per parameter if a group fits in it:

| pass | reads | writes |
|---|---|---|
| norm | gradient 4 | |
| directions | parameter, gradient, momentum, variance: 16 | both moments 8; zeros 4, unless the gradient is overwritten |
| step | | parameter 4, its copy 2 |
| FP8 casts, in place of the copy | | cast and transpose 2 |

The sum is 34 bytes, or 38 if zeros are written. If a group does not fit in the cache, the sum is 12 bytes more.
"""

from dataclasses import astuple
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.configuration import Configuration
from kernels.reference.lamb import LambHyperparameters, LambSegments, LambState, WeightCast, bias_corrections
from kernels.triton.fp8 import cast_transpose_into_fp8
from kernels.triton.inputs import vector_reasons  # noqa: F401  for the table in kernels/ops.py
from kernels.triton.lamb_passes import apply_kernel, direction_kernel, squares_kernel
from kernels.triton.squares import sum_of_squares

# A thread uses 62 registers, so that a multiprocessor holds 32 warps. With chunks twice as long, it would hold only 16.
CHUNK = 2048
ALIGNMENT = 16
"""Chunks start at multiples of this many elements, so that whole chunks are read in vectors of 16 bytes."""
WARPS = 8
REDUCTION = 1024
"""Number of partial sums that are added at once."""
GROUP = (1 << 22) + (1 << 16)
"""Maximum number of elements in a group of segments, unless a single segment has more. A group can hold a
feed-forward weight of BERT-Large and the adjacent biases. Its parameters and directions take up to 34 MB. The L2 cache has
40 MB on an A100 and 50 MB on an H100."""


def lamb_step(
    parameters_P: Tensor,
    gradients_P: Tensor,
    state: LambState,
    segments: LambSegments,
    hyperparameters: LambHyperparameters,
    *,
    step: Tensor,
    learning_rate: Tensor,
    copies_P: Tensor | None = None,
    casts: tuple[WeightCast, ...] = (),
) -> Tensor:
    """Fused version of ``kernels.reference.lamb.lamb_step`` for fp32 buffers. Copies may have any floating-point type.

    The first call for given segments creates tables on the device, so make one call before capturing a graph.
    """
    norm = sum_of_squares(gradients_P).sqrt().float()
    arguments = parameters_P, gradients_P, state, hyperparameters, norm, bias_corrections(step, hyperparameters)
    start = 0
    for group in _groups(segments, parameters_P.device, GROUP):
        squares_2A = _group_directions(group, *arguments)
        _apply(parameters_P, state.update_P, copies_P, squares_2A, group.table_C4, group.traits_G2, norm, learning_rate)
        # Cast while the weights are still in the cache. A weight of several segments is cast after its last segment's step.
        for cast in casts:
            if start < cast.start + cast.q_NK.numel() <= group.stop:
                cast_transpose_into_fp8(cast.weight(parameters_P), cast.scale, cast.amax, cast.q_NK, cast.q_KN)
        start = group.stop
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
    """Fused version of ``kernels.reference.lamb.lamb_directions`` for fp32 buffers.

    Like ``lamb_step``, this function must be called once before a graph is captured.
    """
    (group,) = _groups(segments, parameters_P.device)
    corrections = bias_corrections(step, hyperparameters)
    return _group_directions(group, parameters_P, gradients_P, state, hyperparameters, norm, corrections)


def lamb_apply(
    parameters_P: Tensor,
    state: LambState,
    segments: LambSegments,
    squares_2A: Tensor,
    *,
    norm: Tensor,
    learning_rate: Tensor,
) -> None:
    """Fused version of ``kernels.reference.lamb.lamb_apply`` for fp32 buffers.

    Like ``lamb_step``, this function must be called once before a graph is captured.
    """
    (group,) = _groups(segments, parameters_P.device)
    squares_2A = squares_2A.contiguous()
    _apply(parameters_P, state.update_P, None, squares_2A, group.table_C4, group.traits_G2, norm, learning_rate)


def configurations() -> list[Configuration]:
    types = dict.fromkeys(("parameters", "gradients", "momentum", "variance", "update", "partial_sums"), "*fp32")
    types |= {"norm": "*fp32", "learning_rate": "*fp32", "skipped": "*i64"}
    types |= dict.fromkeys(("squares", "root_correction", "epsilon_correction"), "*fp64")
    types |= dict.fromkeys(("table", "traits", "spans"), "*i32") | {"chunks": "i32", "adapted": "i32"}
    numbers = ("weight_1", "weight_2", "epsilon", "weight_decay", "max_grad_norm")
    types |= dict.fromkeys(numbers, "fp32")

    fixed = {"CHUNK": CHUNK, "ALIGNMENT": ALIGNMENT, "REDUCTION": REDUCTION, "FAST_1": False, "FAST_2": False}
    return [
        Configuration.of(f"lamb, {name}", kernel, types | {"copies": "*bf16"}, fixed | copies, warps, 1)
        for name, kernel, warps, copies in (
            ("direction", direction_kernel, WARPS, {}),
            ("sums of squares", squares_kernel, 4, {}),
            ("step", apply_kernel, WARPS, {"copies": None}),
            ("step, bf16 copies", apply_kernel, WARPS, {}),
        )
    ]


class _Group(NamedTuple):
    """Consecutive segments, and the division of their elements among programs. All tables are int32."""

    table_C4: Tensor
    """Each row describes a chunk: its segment, its start in units of ``ALIGNMENT``, and the range of its elements in the
    segment. Only the first and last chunk of a segment can be partial. No chunk crosses a segment's bounds."""
    traits_G2: Tensor
    """Each row describes a segment of the whole vector. The first number is its index among the adapted segments of its
    group, or -1 if it is not adapted. The second number is 1 if its gradient is overwritten, otherwise 0."""
    spans_A2: Tensor
    """Each row has the first chunk of an adapted segment and the chunk after its last one, numbered within the group."""
    stop: int
    """Index of the first element after the group in the flat buffers."""


@lru_cache(maxsize=8)
def _groups(segments: LambSegments, device: torch.device, most: int | None = None) -> list[_Group]:
    """Divide segments into groups of up to ``most`` elements. Without ``most``, there is one group."""
    traits: list[tuple[int, bool]] = []
    groups: list[tuple[list[tuple[int, ...]], list[tuple[int, int]], int]] = []
    rows, spans, begin = [], [], 0
    for segment, (start, stop) in enumerate(pairwise(accumulate(segments.sizes, initial=0))):
        if rows and most is not None and stop - begin > most:
            groups.append((rows, spans, start))
            rows, spans, begin = [], [], start
        before = len(rows)
        # The first chunk of a segment starts at an aligned element, so it may begin in the previous segment. The
        # kernels mask the elements of the previous segment.
        for chunk in range(start // ALIGNMENT * ALIGNMENT, stop, CHUNK):
            rows.append((segment, chunk // ALIGNMENT, max(start - chunk, 0), min(stop - chunk, CHUNK)))
        adapted = segments.adapted[segment]
        traits.append((len(spans) if adapted else -1, bool(segments.overwritten) and segments.overwritten[segment]))
        if adapted:
            spans.append((before, len(rows)))
    groups.append((rows, spans, sum(segments.sizes)))

    def table(values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    traits_G2 = table(traits)
    return [_Group(table(rows), traits_G2, table(spans).view(-1, 2), stop) for rows, spans, stop in groups]


def _group_directions(
    group: _Group,
    parameters_P: Tensor,
    gradients_P: Tensor,
    state: LambState,
    hyperparameters: LambHyperparameters,
    norm: Tensor,
    corrections: tuple[Tensor, Tensor],
) -> Tensor:
    vectors = parameters_P, gradients_P, state.momentum_P, state.variance_P, state.update_P, state.skipped
    tables = group.table_C4, group.traits_G2, group.spans_A2
    return _directions(*vectors, *tables, norm, *corrections, *astuple(hyperparameters))


@torch.library.custom_op(
    "mlperf_bert::lamb_directions",
    mutates_args=("gradients_P", "momentum_P", "variance_P", "update_P", "skipped"),
)
def _directions(
    parameters_P: Tensor,
    gradients_P: Tensor,
    momentum_P: Tensor,
    variance_P: Tensor,
    update_P: Tensor,
    skipped: Tensor,
    table_C4: Tensor,
    traits_G2: Tensor,
    spans_A2: Tensor,
    norm: Tensor,
    root_correction: Tensor,
    epsilon_correction: Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    weight_decay: float,
    max_grad_norm: float,
) -> Tensor:
    """Write a group's moments, and its directions to the start of ``update_P``. Return sums of squares, fp64 [2, A]."""
    chunks, adapted = len(table_C4), len(spans_A2)
    partial_sums = parameters_P.new_empty(2 * chunks)
    squares_2A = parameters_P.new_empty(2, adapted, dtype=torch.float64)
    fast_1, fast_2 = beta_1 < 0.5, beta_2 < 0.5
    # Compute 1 - beta in double precision. Like torch.lerp, the kernel starts from the nearer of the old and new values.
    weights = beta_1 if fast_1 else 1 - beta_1, beta_2 if fast_2 else 1 - beta_2
    direction_kernel[(chunks,)](
        parameters_P, gradients_P, momentum_P, variance_P, update_P, skipped, partial_sums, table_C4, traits_G2, norm,
        root_correction, epsilon_correction, *weights, epsilon, weight_decay, max_grad_norm,
        CHUNK=CHUNK, ALIGNMENT=ALIGNMENT, FAST_1=fast_1, FAST_2=fast_2, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    if adapted:
        squares_kernel[(adapted,)](
            partial_sums, squares_2A, spans_A2, chunks, adapted, REDUCTION=REDUCTION, num_warps=4, num_stages=1
        )
    return squares_2A


_directions.register_fake(lambda parameters_P, *others: parameters_P.new_empty(2, len(others[7]), dtype=torch.float64))


@torch.library.custom_op("mlperf_bert::lamb_apply", mutates_args=("parameters_P", "copies_P"))
def _apply(
    parameters_P: Tensor,
    update_P: Tensor,
    copies_P: Tensor | None,
    squares_2A: Tensor,
    table_C4: Tensor,
    traits_G2: Tensor,
    norm: Tensor,
    learning_rate: Tensor,
) -> None:
    """Update a group's parameters along its directions, which are at the start of ``update_P``."""
    apply_kernel[(len(table_C4),)](
        parameters_P, update_P, copies_P, squares_2A, table_C4, traits_G2, norm, learning_rate, squares_2A.shape[1],
        CHUNK=CHUNK, ALIGNMENT=ALIGNMENT, num_warps=WARPS, num_stages=1,
    )  # fmt: skip


_apply.register_fake(lambda *_: None)
