# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
"""LAMB on flat buffers in Triton: the norm, one pass for the moments and the direction, one for the step.

Shape legend in ``kernels/__init__.py``; besides, G segments, A of them adapted, and C chunks. A chunk is up to ``CHUNK``
neighbouring elements of one segment, the work of one program. There are no atomic sums: equal inputs give equal results. The
kernels are in ``kernels.triton.lamb_passes``.

The step of a segment needs the norm of all its directions. Both passes run for a group of segments before the next group, so
that parameters and directions are still in the L2 cache when they are read again. All groups keep directions in the same
memory, which seldom leaves the cache. Bytes of memory traffic for one parameter of a group that fits:

| pass | reads | writes |
|---|---|---|
| norm | gradient 4 | |
| directions | parameter, gradient, momentum, variance: 16 | both moments 8; zeros 4, unless the gradient is overwritten |
| step | | parameter 4, its copy 2 |
| FP8 casts, in place of the copy | | cast and transpose 2 |

The sum is 34 or 38, and 46 or 50 for a group that does not fit.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.configuration import Configuration
from kernels.reference.lamb import LambHyperparameters, LambSegments, LambState, WeightCast, bias_corrections
from kernels.triton.fp8 import cast_transpose_into_fp8
from kernels.triton.inputs import tensor_reasons
from kernels.triton.lamb_passes import apply_kernel, direction_kernel, squares_kernel
from kernels.triton.squares import sum_of_squares

# A thread has 62 registers, so that 32 warps reside on a multiprocessor; with twice as many elements only 16 would.
CHUNK = 2048
ALIGNMENT = 16
"""Chunks start at multiples of this many elements, so that whole chunks are read in vectors of 16 bytes."""
WARPS = 8
REDUCTION = 1024
"""Partial sums that are added at once."""
GROUP = (1 << 22) + (1 << 16)
"""Most elements of a group of segments, unless one segment has more: a feed-forward weight of BERT-Large and the biases
beside it. Their parameters and directions take 34 MB; the L2 cache has 40 MB on an A100 and 50 MB on an H100."""


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
    """Do what ``kernels.reference.lamb.lamb_step`` does, on fp32 buffers; copies may be of any floating-point type.

    The first call for some segments makes their table of chunks on the device: make one before capturing a graph.
    """
    norm = sum_of_squares(gradients_P).sqrt().float()
    chunks = _chunks(segments, parameters_P.device, GROUP)
    flat = parameters_P, gradients_P, state.momentum_P, state.variance_P, state.update_P
    tables = chunks.table_C4, chunks.traits_G2, chunks.spans_A2, chunks.groups
    numbers = norm, step, learning_rate, *astuple(hyperparameters)
    fp8 = [[cast.start for cast in casts], [cast.scale for cast in casts], [cast.amax for cast in casts]]
    fp8 += [[cast.q_NK for cast in casts], [cast.q_KN for cast in casts]]
    _lamb_step(*flat, copies_P, state.skipped, *fp8, *tables, *numbers)
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
    tables = chunks.table_C4, chunks.traits_G2, chunks.spans_A2
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
    tables = chunks.table_C4, chunks.traits_G2
    _lamb_apply(parameters_P, state.update_P, squares_2A, *tables, norm, learning_rate)


def unsupported_reasons(parameters_P: Tensor, *_: Any, **__: Any) -> list[str]:
    """Return the reasons why LAMB cannot work on these parameters; empty if it can."""
    return tensor_reasons(parameters_P, dtypes=(torch.float32,))


def configurations() -> list[Configuration]:
    """Return every kernel as it is launched."""
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


@dataclass(frozen=True)
class _Chunks:
    """Division of the flat buffers among programs, in int32. No chunk crosses a segment's bounds."""

    table_C4: Tensor
    """For each chunk its segment, its start in units of ``ALIGNMENT``, and the range of its elements that belong to the
    segment. Only the first and last chunk of a segment can be partial."""
    traits_G2: Tensor
    """For each segment its place among the adapted ones, or -1; and 1 if its gradient is overwritten, else 0."""
    spans_A2: Tensor
    """For each adapted segment the range of its chunks, counted from the first chunk of its group."""
    groups: list[int]
    """First chunk, adapted segment and element of each group, one after the other, and then the ends of all three."""


@lru_cache(maxsize=8)
def _chunks(segments: LambSegments, device: torch.device, group: int | None = None) -> _Chunks:
    """Divide segments into chunks, and into groups of up to ``group`` elements; by default into one group."""
    rows: list[tuple[int, int, int, int]] = []
    traits: list[tuple[int, int]] = []
    spans: list[tuple[int, int]] = []
    groups: list[int] = []
    filled = 0
    for segment, (start, stop) in enumerate(pairwise(accumulate(segments.sizes, initial=0))):
        filled += stop - start
        if not groups or (group is not None and filled > group):
            groups += [len(rows), len(spans), start]
            filled = stop - start
        before = len(rows)
        # The first chunk starts at an aligned place. Elements of the segment before are masked.
        for chunk in range(start // ALIGNMENT * ALIGNMENT, stop, CHUNK):
            rows.append((segment, chunk // ALIGNMENT, max(start - chunk, 0), min(stop - chunk, CHUNK)))
        overwritten = bool(segments.overwritten) and segments.overwritten[segment]
        traits.append((len(spans) if segments.adapted[segment] else -1, overwritten))
        if segments.adapted[segment]:
            spans.append((before - groups[-3], len(rows) - groups[-3]))  # each group overwrites the partial sums
    tables = (torch.tensor(values, dtype=torch.int32, device=device) for values in (rows, traits, spans))
    table_C4, traits_G2, flat_spans = tables
    return _Chunks(table_C4, traits_G2, flat_spans.view(-1, 2), [*groups, len(rows), len(spans), sum(segments.sizes)])


@torch.library.custom_op(
    "mlperf_bert::lamb_step",
    mutates_args=(
        *("parameters_P", "gradients_P", "momentum_P", "variance_P", "update_P", "copies_P", "skipped"),
        *("amaxes", "casts_NK", "casts_KN"),
    ),
)
def _lamb_step(
    parameters_P: Tensor,
    gradients_P: Tensor,
    momentum_P: Tensor,
    variance_P: Tensor,
    update_P: Tensor,
    copies_P: Tensor | None,
    skipped: Tensor,
    starts: Sequence[int],
    scales: Sequence[Tensor],
    amaxes: Sequence[Tensor],
    casts_NK: Sequence[Tensor],
    casts_KN: Sequence[Tensor],
    table_C4: Tensor,
    traits_G2: Tensor,
    spans_A2: Tensor,
    groups: Sequence[int],
    norm: Tensor,
    step: Tensor,
    learning_rate: Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    weight_decay: float,
    max_grad_norm: float,
) -> None:
    """Step and cast group by group; all groups keep their directions at the start of ``update_P``."""
    vectors = parameters_P, gradients_P, momentum_P, variance_P, update_P, skipped
    numbers = _Numbers.of(norm, step, beta_1, beta_2, epsilon, weight_decay, max_grad_norm)
    squares_2A = parameters_P.new_empty(2, len(spans_A2), dtype=torch.float64)
    casts = [WeightCast(*each) for each in zip(starts, scales, amaxes, casts_NK, casts_KN, strict=True)]
    bounds = list(pairwise(zip(groups[::3], groups[1::3], groups[2::3], strict=True)))
    partial_sums = parameters_P.new_empty(2 * max(stop - start for (start, *_), (stop, *_) in bounds))
    for (first, first_adapted, begin), (stop, stop_adapted, end) in bounds:
        own_C4, adapted = table_C4[first:stop], slice(first_adapted, stop_adapted)
        _launch_directions(vectors, partial_sums, squares_2A, (own_C4, traits_G2), spans_A2, adapted, numbers)
        _launch_apply(parameters_P, update_P, copies_P, squares_2A, own_C4, traits_G2, norm, learning_rate)
        # The weights are still in the cache. A weight of several segments is cast after its last segment's step.
        for cast in casts:
            if begin < cast.start + cast.q_NK.numel() <= end:
                weight_NK = cast.weight(parameters_P)
                cast_transpose_into_fp8(weight_NK, cast.scale, cast.amax, cast.q_NK, cast.q_KN)


_lamb_step.register_fake(lambda *_: None)


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
    traits_G2: Tensor,
    spans_A2: Tensor,
    norm: Tensor,
    step: Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    weight_decay: float,
    max_grad_norm: float,
) -> Tensor:
    vectors = parameters_P, gradients_P, momentum_P, variance_P, update_P, skipped
    numbers = _Numbers.of(norm, step, beta_1, beta_2, epsilon, weight_decay, max_grad_norm)
    squares_2A = parameters_P.new_empty(2, len(spans_A2), dtype=torch.float64)
    partial_sums = parameters_P.new_empty(2 * len(table_C4))
    everything = slice(0, len(spans_A2))
    _launch_directions(vectors, partial_sums, squares_2A, (table_C4, traits_G2), spans_A2, everything, numbers)
    return squares_2A


_lamb_directions.register_fake(
    lambda parameters_P, *others: parameters_P.new_empty(2, len(others[7]), dtype=torch.float64)
)


@torch.library.custom_op("mlperf_bert::lamb_apply", mutates_args=("parameters_P",))
def _lamb_apply(
    parameters_P: Tensor,
    update_P: Tensor,
    squares_2A: Tensor,
    table_C4: Tensor,
    traits_G2: Tensor,
    norm: Tensor,
    learning_rate: Tensor,
) -> None:
    _launch_apply(parameters_P, update_P, None, squares_2A.contiguous(), table_C4, traits_G2, norm, learning_rate)


_lamb_apply.register_fake(lambda *_: None)


class _Numbers(NamedTuple):
    """Arguments of ``direction_kernel`` that are the same for all chunks."""

    norm: Tensor
    root_correction: Tensor
    epsilon_correction: Tensor
    weight_1: float
    weight_2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float
    fast_1: bool
    fast_2: bool

    @classmethod
    def of(cls, norm: Tensor, step: Tensor, beta_1: float, beta_2: float, *others: float) -> "_Numbers":
        fast_1, fast_2 = beta_1 < 0.5, beta_2 < 0.5
        # 1 - beta in double precision; like torch.lerp, the kernel interpolates from the nearer end.
        weights = beta_1 if fast_1 else 1 - beta_1, beta_2 if fast_2 else 1 - beta_2
        return cls(norm, *bias_corrections(step, beta_1, beta_2), *weights, *others, fast_1, fast_2)


def _launch_directions(
    vectors: Sequence[Tensor],
    partial_sums: Tensor,
    squares_2A: Tensor,
    tables: tuple[Tensor, Tensor],
    spans_A2: Tensor,
    adapted: slice,
    numbers: _Numbers,
) -> None:
    """Compute the directions of a group's chunks, and the sums of its ``adapted`` segments.

    ``vectors``: parameters, gradients, momentum, variance, update, and the count of skipped steps.
    """
    *arguments, fast_1, fast_2 = numbers
    chunks = len(tables[0])
    direction_kernel[(chunks,)](
        *vectors, partial_sums, *tables, *arguments,
        CHUNK=CHUNK, ALIGNMENT=ALIGNMENT, FAST_1=fast_1, FAST_2=fast_2, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    if adapted.start < adapted.stop:
        own_squares = squares_2A.view(-1)[adapted.start :]  # the second row is A elements further
        squares_kernel[(adapted.stop - adapted.start,)](
            partial_sums, own_squares, spans_A2[adapted], chunks, len(spans_A2),
            REDUCTION=REDUCTION, num_warps=4, num_stages=1,
        )  # fmt: skip


def _launch_apply(
    parameters_P: Tensor,
    update_P: Tensor,
    copies_P: Tensor | None,
    squares_2A: Tensor,
    table_C4: Tensor,
    traits_G2: Tensor,
    norm: Tensor,
    learning_rate: Tensor,
) -> None:
    apply_kernel[(len(table_C4),)](
        parameters_P, update_P, copies_P, squares_2A, table_C4, traits_G2, norm, learning_rate, squares_2A.shape[1],
        CHUNK=CHUNK, ALIGNMENT=ALIGNMENT, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
