"""Parts of Triton's layer norms: tiles of rows, statistics and gradients, sums over programs, and the launch.

A program processes tiles of shape [ROWS, BLOCK / 8, 8]. A thread holds eight neighbouring columns, which are 16 bytes
in bf16. All sums are in fp32. In a backward pass, a fixed number of programs share the rows. Each program sums the
gradients of vectors (biases, gains, the two segment rows) over its rows in registers, and a second kernel adds the sums
of all programs.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configuration import Configuration
from kernels.triton.dropout import PLACES as DRAW
from kernels.triton.dropout import draw_kept

MAX_COLUMNS = 4096
PLACES = tl.constexpr(8)
# Triton must not specialize kernels on these integers. By default, it compiles again for 1 and for multiples of 16.
VARYING = ["tokens", "threshold", "stream"]


@triton.jit
def columns_of(BLOCK: tl.constexpr):
    """Return the indices of a tile's columns, [1, BLOCK / 8, 8]."""
    columns = tl.arange(0, BLOCK // PLACES)[:, None] * PLACES + tl.arange(0, PLACES)[None, :]
    return columns[None, :, :]


@triton.jit
def places_of(first, tokens, columns, D: tl.constexpr, ROWS: tl.constexpr):
    """Return row numbers [ROWS] from ``first`` on, a mask of existing rows [ROWS, 1, 1], and the elements' offsets."""
    rows = first + tl.arange(0, ROWS)
    return rows, (rows < tokens)[:, None, None], rows.to(tl.int64)[:, None, None] * D + columns


@triton.jit
def load_fp32(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def row_means(tile, D: tl.constexpr):
    """Return the means [ROWS, 1, 1] of a tile's rows, [ROWS, BLOCK / 8, 8], which must be zero past the last column."""
    return (tl.sum(tl.sum(tile, axis=2), axis=1) / D)[:, None, None]


@triton.jit
def load_state(state):
    """Load dropout's seed and step, or return two zeros if ``state`` is None.

    Kernels call this before a pipelined loop. Inside, Triton would copy the loads to shared memory in every iteration.
    """
    return (0, 0) if state is None else (tl.load(state), tl.load(state + 1))


@triton.jit
def kept_places(rows, state, threshold, stream, BLOCK: tl.constexpr):
    """Return ``Dropout.mask`` for a tile, bool [ROWS, BLOCK / 8, 8]. ``state`` comes from ``load_state``.

    A draw covers 16 columns, but a thread has only eight, so two neighbouring threads make the same draw.
    """
    eights = tl.arange(0, BLOCK // PLACES)[None, :]
    drawn = draw_kept(state[0], state[1], stream, threshold, rows[:, None], eights // (DRAW // PLACES))
    drawn >>= eights % (DRAW // PLACES) * PLACES
    return ((drawn[:, :, None] >> tl.arange(0, PLACES)[None, None, :]) & 1) != 0


@triton.jit
def normalised_rows(summed, inside, eps, D: tl.constexpr):
    """Return the normalised rows, their means and their reciprocal standard deviations, both [ROWS, 1, 1]."""
    mean = row_means(summed, D)
    # In fp32, the mean of squares minus the squared mean would lose digits to cancellation.
    centred = tl.where(inside, summed - mean, 0.0)
    rstd = tl.rsqrt(row_means(centred * centred, D) + eps)
    return centred * rstd, mean, rstd


@triton.jit
def store_statistics(statistics, mean, rstd, rows, tokens):
    """Store the rows' means and reciprocal standard deviations in ``statistics`` [2, T], in this order."""
    rows = rows[:, None, None]
    tl.store(statistics + rows, mean, mask=rows < tokens)
    tl.store(statistics + tokens + rows, rstd, mask=rows < tokens)


@triton.jit
def load_statistics(statistics, rows, tokens):
    """Load the rows' means and reciprocal standard deviations, both [ROWS, 1, 1].

    Both are 0 for rows past the end, which makes the gradients of these rows 0. The values get a tile's dimensions
    after the load, because otherwise a thread would load a row's values once for each of its columns.
    """
    mean, rstd = load_fp32(statistics + rows, rows < tokens), load_fp32(statistics + tokens + rows, rows < tokens)
    return mean[:, None, None], rstd[:, None, None]


@triton.jit
def norm_gradient(dy, normalised, weight, rstd, D: tl.constexpr):
    """Return the gradient of a layer norm's input. ``dy`` is the gradient of its output."""
    gradient = dy * weight
    along = row_means(gradient * normalised, D)
    return (gradient - row_means(gradient, D) - normalised * along) * rstd


@triton.jit
def store_partial(pointers, accumulator, inside):
    """Store the sum over the rows of ``accumulator`` [ROWS, BLOCK / 8, 8]."""
    tl.store(pointers, tl.sum(accumulator, axis=0)[None, :, :], mask=inside)


@triton.jit
def store_vectors(partials, dbias, dweight, dnorm_bias, columns, inside, D: tl.constexpr):
    """Store a program's sums of the gradients of bias, weight and norm_bias in ``partials`` [programs, 3, D]."""
    partial = partials + tl.program_id(0) * 3 * D + columns
    store_partial(partial, dbias, inside)
    store_partial(partial + D, dweight, inside)
    store_partial(partial + 2 * D, dnorm_bias, inside)


@triton.jit
def sum_partials(partials, sums, programs, width, PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum ``partials`` [programs, width] into ``sums`` [width]."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([PROGRAMS, COLUMNS], tl.float32)
    for start in range(0, programs, PROGRAMS):
        rows = start + tl.arange(0, PROGRAMS)
        mask = (rows < programs)[:, None] & (columns < width)[None, :]
        total += tl.load(partials + rows[:, None] * width + columns[None, :], mask=mask, other=0.0)
    tl.store(sums + columns, tl.sum(total, axis=0), mask=columns < width)


@dataclass(frozen=True)
class Layout:
    """Tile size and number of warps of a kernel for rows of one width."""

    block: int
    rows: int
    num_warps: int

    @classmethod
    def of(cls, columns: int) -> "Layout":
        """Choose the layout for rows with this many columns. A tile has at least 1024 values, and a thread has eight."""
        block = max(64, triton.next_power_of_2(columns))
        # A warp's 32 threads have eight columns each, which makes 256.
        return cls(block, max(1, 1024 // block), max(4, block // 256))

    def options(self, columns: int, dropout: bool) -> dict[str, Any]:
        tile = {"D": columns, "BLOCK": self.block, "ROWS": self.rows, "DROPOUT": dropout}
        return {**tile, "num_warps": self.num_warps, "num_stages": 1}


SUM_TILE = {"PROGRAMS": 64, "COLUMNS": 32}
SUM_PIPELINE = {"num_warps": 4, "num_stages": 1}


def backward_programs(device: torch.device, tokens: int, layout: Layout, warps: int) -> int:
    """Return the number of programs of a backward kernel that has ``warps`` warps per multiprocessor.

    A CPU counts as one multiprocessor.
    """
    on_gpu = device.type == "cuda"
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
    return max(1, min(multiprocessors * (warps // layout.num_warps), triton.cdiv(tokens, layout.rows)))


def forward_grid(tokens: int, layout: Layout) -> tuple[int]:
    return (max(1, triton.cdiv(tokens, layout.rows)),)


def sums_over_programs(partials_PND: Tensor, dtype: torch.dtype) -> Tensor:
    """Add the sums that the programs of a backward kernel stored, and return the totals, [N, D]."""
    programs, vectors, columns = partials_PND.shape
    sums_ND = partials_PND.new_empty(vectors, columns, dtype=dtype)
    width = vectors * columns
    grid = (triton.cdiv(width, SUM_TILE["COLUMNS"]),)
    sum_partials[grid](partials_PND, sums_ND, programs, width, **SUM_TILE, **SUM_PIPELINE)
    return sums_ND


def width_reasons(columns: int) -> list[str]:
    if columns % PLACES.value or not 0 < columns <= MAX_COLUMNS:
        return [f"a hidden size of {columns}; expected a multiple of {PLACES.value} up to {MAX_COLUMNS}"]
    return []


_TYPES = dict.fromkeys(("input_ids", "position_ids", "segment_ids", "state"), "*i64")
_TYPES |= dict.fromkeys(("x", "residual", "dresidual", "dx"), "*bf16")
_TYPES |= dict.fromkeys(("bias", "weight", "norm_bias", "word", "position", "segment"), "*fp32")
_TYPES |= dict.fromkeys(("statistics", "partials", "dword", "dposition", "sums"), "*fp32")
_TYPES |= {"tokens": "i32", "eps": "fp32", "threshold": "i32", "scale": "fp32", "stream": "i32"}
_TYPES |= {"programs": "i32", "width": "i32"}


def norm_configurations(
    hidden: str,
    *kernels: Any,
    types: Mapping[str, str] = {},
    fixed: Mapping[str, object] = {},
    **devices: Any,
) -> list[Configuration]:
    """Return the configurations of ``kernels`` in training under autocast, for BERT-Large and the small default model.

    Parameters and embeddings are fp32, and y and dy have the type ``hidden``. ``types`` and ``fixed`` describe further
    parameters of the kernels. ``devices`` is passed to ``Configuration.of``.
    """
    found = []
    for columns, kernel, dropout in product((128, 1024), kernels, (True, False)):
        options = Layout.of(columns).options(columns, dropout)
        num_warps, num_stages = options.pop("num_warps"), options.pop("num_stages")
        constants = {**options, **fixed} if dropout else {**options, **fixed, "state": None}
        kinds = {**_TYPES, "y": f"*{hidden}", "dy": f"*{hidden}", **types}
        name = f"{hidden}, D = {columns}{', dropout' if dropout else ''}"
        found.append(Configuration.of(name, kernel, kinds, constants, num_warps, num_stages, **devices))
    return found


def configurations() -> list[Configuration]:
    """Return the configuration of ``sum_partials``, which the backward passes of all norms launch."""
    return [Configuration.of("fp32", sum_partials, _TYPES, SUM_TILE, **SUM_PIPELINE)]
