# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false
"""FP8 casts in Triton: the cast, its transpose and column sums in one pass over an input.

A program reads a tile once, computes in fp32, and writes the tile in FP8. If the op needs them, it also writes the
transpose and the column sums of the tile. Bytes of memory traffic for one element of bf16 inputs:

| op | reads | writes |
|---|---|---|
| ``cast_fp8`` | 2 | 1 |
| ``cast_transpose_fp8``, ``cast_transpose_into_fp8``, ``bias_gelu_cast_fp8`` | 2 | 2 |
| ``cast_transpose_sum_fp8`` | 2 | 2, and 4 / 128 of partial sums, which are read again |
| ``bias_gelu_backward_cast_fp8`` | 4 | 2, and 4 / 128 of partial sums, which are read again |

Reading an fp32 weight takes 4 bytes, but LAMB has left the weight in the cache. The ops are defined in
``kernels.reference.fp8``, which also has the shape legend. In addition, P is the number of tiles in a column of tiles.
Results equal the definitions bit for bit, except after a GELU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configuration import Configuration
from kernels.reference.fp8 import ALIGNMENT, E4M3, E5M2, LARGEST
from kernels.triton.dense import gelu_derivative, gelu_gates
from kernels.triton.inputs import tensor_reasons
from kernels.triton.quantize import POINTERS, SCALARS, aligned, cast_reasons, fp8_pair, quantized, raise_amax

# A row of a tile has 128 bytes in bf16, 64 bytes in FP8, and 128 bytes in the transpose, which are whole sectors of
# memory. A thread has 32 elements and 48 to 75 registers, so that a multiprocessor holds three or more blocks. No tile
# size has been timed.
_ROWS = 128
_COLUMNS = 64
_WARPS = 8
_STAGES = 1
_ONCE = "evict_first"
"""Eviction hint for data that is not read again soon. Without the hint, this data would evict LAMB's next group of
segments from the L2 cache."""


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _cast_kernel(
    x, scale, amax, q, transposed, partials, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVICTION: tl.constexpr = "",
):  # fmt: skip
    """Cast one tile, and write its transpose and column sums unless ``transposed`` and ``partials`` are None."""
    value = _tile(x, rows, columns, ROWS, COLUMNS, EVICTION)
    _write(value, scale, amax, q, transposed, partials, rows, columns, ROWS, COLUMNS, EVICTION)


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _gelu_kernel(
    product, bias, scale, amax, q, transposed, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast one tile of ``gelu(product + bias)``, and write its transpose."""
    y = _tile(product, rows, columns, ROWS, COLUMNS, "") + _bias(bias, columns, ROWS, COLUMNS)
    gate, _ = gelu_gates(y)
    _write(y * gate, scale, amax, q, transposed, None, rows, columns, ROWS, COLUMNS, "")


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _gelu_backward_kernel(
    output_gradient, product, bias, scale, amax, q, transposed, partials, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast one tile of the gradient of ``product`` in ``gelu(product + bias)``; write its transpose and column sums."""
    upstream = _tile(output_gradient, rows, columns, ROWS, COLUMNS, "")
    y = _tile(product, rows, columns, ROWS, COLUMNS, "") + _bias(bias, columns, ROWS, COLUMNS)
    gradient = upstream * gelu_derivative(y)
    _write(gradient, scale, amax, q, transposed, partials, rows, columns, ROWS, COLUMNS, "")


@triton.jit
def _tile(x, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVICTION: tl.constexpr):
    """Load this program's tile [ROWS, COLUMNS] of ``x`` [rows, columns] in fp32, with zeros outside of ``x``."""
    places, inside = _places(x, rows, columns, ROWS, COLUMNS)
    return tl.load(places, mask=inside, other=0.0, eviction_policy=EVICTION).to(tl.float32)


@triton.jit
def _places(x, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return pointers to this program's tile of ``x`` [rows, columns], and a mask of the pointers inside ``x``.

    Only the offset of the tile's start needs 64 bits. Offsets inside the tile have 32 bits, which saves registers.
    """
    columns = aligned(columns)
    first_row, first_column = _first(columns, ROWS, COLUMNS)
    row, column = tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    inside = (first_row + row < rows)[:, None] & (column < columns)[None, :]
    return x + first_row.to(tl.int64) * columns + (row[:, None] * columns + column[None, :]), inside


@triton.jit
def _first(columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the first row and column of this program's tile. Consecutive programs process tiles side by side."""
    across = tl.cdiv(columns, COLUMNS)
    return tl.program_id(0) // across * ROWS, tl.program_id(0) % across * COLUMNS


@triton.jit
def _bias(bias, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = aligned(columns)
    _, first = _first(columns, ROWS, COLUMNS)
    column = first + tl.arange(0, COLUMNS)
    return tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _write(
    value, scale, amax, q, transposed, partials, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    """Write a tile's cast, transpose and column sums, and raise ``amax``, which points to the bits of an fp32 number.

    ``transposed`` and ``partials`` may be None.
    """
    places, inside = _places(q, rows, columns, ROWS, COLUMNS)
    # Outside of the tensor, ``value`` may be the GELU of a bias. Set it to 0 there, so that amax and the sums ignore it and
    # the padding of the transpose is 0.
    value = tl.where(inside, value, 0.0)
    raise_amax(amax, tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF))
    cast = quantized(value * tl.load(scale), q.dtype.element_ty)
    tl.store(places, cast, mask=inside, eviction_policy=EVICTION)
    columns, padded_rows = aligned(columns), aligned(rows)
    first_row, first_column = _first(columns, ROWS, COLUMNS)
    row, column = first_row + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    in_columns = first_column + column < columns
    if transposed is not None:
        transposed += first_column.to(tl.int64) * padded_rows
        # Also store the zeros in the padding, because matrix products read them.
        inside = in_columns[:, None] & (row < padded_rows)[None, :]
        places = transposed + (column[:, None] * padded_rows + row[None, :])
        tl.store(places, tl.trans(cast), mask=inside, eviction_policy=EVICTION)
    if partials is not None:
        partials += (first_row // ROWS).to(tl.int64) * columns + first_column
        tl.store(partials + column, tl.sum(value, axis=0), mask=in_columns)  # sums of values before rounding to FP8


@torch.library.custom_op("mlperf_bert::cast_fp8", mutates_args=("amax",))
def cast_fp8(x_RC: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
    q_RC = x_RC.new_empty(x_RC.shape, dtype=dtype)
    _launch(_cast_kernel, (x_RC,), scale, amax, q_RC, None, None)
    return q_RC


@torch.library.custom_op("mlperf_bert::cast_transpose_fp8", mutates_args=("amax",))
def cast_transpose_fp8(x_RC: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q_RC, q_CR = fp8_pair(x_RC, dtype)
    _launch(_cast_kernel, (x_RC,), scale, amax, q_RC, q_CR, None)
    return q_RC, q_CR


@torch.library.custom_op("mlperf_bert::cast_transpose_into_fp8", mutates_args=("amax", "q_RC", "q_CR"))
def cast_transpose_into_fp8(x_RC: Tensor, scale: Tensor, amax: Tensor, q_RC: Tensor, q_CR: Tensor) -> None:
    """Write the cast of a weight to ``q_RC`` and its transpose to ``q_CR``. LAMB has left the weight in the cache."""
    _launch(_cast_kernel, (x_RC,), scale, amax, q_RC, q_CR, None, EVICTION=_ONCE)


@torch.library.custom_op("mlperf_bert::cast_transpose_sum_fp8", mutates_args=("amax",))
def cast_transpose_sum_fp8(
    x_RC: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    q_RC, q_CR = fp8_pair(x_RC, dtype)
    partials_PC = _partials(x_RC)
    _launch(_cast_kernel, (x_RC,), scale, amax, q_RC, q_CR, partials_PC)
    return q_RC, q_CR, partials_PC.sum(0)


@torch.library.custom_op("mlperf_bert::bias_gelu_cast_fp8", mutates_args=("amax",))
def bias_gelu_cast_fp8(product_TF: Tensor, bias_F: Tensor, scale: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    q_TF, q_FT = fp8_pair(product_TF, E4M3)
    _launch(_gelu_kernel, (product_TF, bias_F), scale, amax, q_TF, q_FT)
    return q_TF, q_FT


@torch.library.custom_op("mlperf_bert::bias_gelu_backward_cast_fp8", mutates_args=("amax",))
def bias_gelu_backward_cast_fp8(
    output_gradient_TF: Tensor, product_TF: Tensor, bias_F: Tensor, scale: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q_TF, q_FT = fp8_pair(product_TF, E5M2)
    partials_PF = _partials(product_TF)
    _launch(_gelu_backward_kernel, (output_gradient_TF, product_TF, bias_F), scale, amax, q_TF, q_FT, partials_PF)
    return q_TF, q_FT, partials_PF.sum(0)


# Fake functions return only the shapes and types of results, for tensors without values.
cast_fp8.register_fake(lambda x_RC, _scale, _amax, dtype: x_RC.new_empty(x_RC.shape, dtype=dtype))
cast_transpose_fp8.register_fake(lambda x_RC, _scale, _amax, dtype: fp8_pair(x_RC, dtype))
cast_transpose_into_fp8.register_fake(lambda *_: None)
cast_transpose_sum_fp8.register_fake(
    lambda x_RC, _scale, _amax, dtype: (*fp8_pair(x_RC, dtype), _partials(x_RC).sum(0))
)
bias_gelu_cast_fp8.register_fake(lambda product_TF, *_: fp8_pair(product_TF, E4M3))
bias_gelu_backward_cast_fp8.register_fake(lambda x_TF, *_: (*fp8_pair(x_TF, E5M2), _partials(x_TF).sum(0)))


def _partials(x_RC: Tensor) -> Tensor:
    """Allocate column sums for each row of tiles, fp32 [P, C]."""
    return x_RC.new_empty((-(-len(x_RC) // _ROWS), x_RC.shape[1]), dtype=torch.float32)


def _launch(
    kernel: triton.JITFunction,
    inputs: tuple[Tensor, ...],
    scale: Tensor,
    amax: Tensor,
    q_RC: Tensor,
    *results: Tensor | None,
    **options: str,
) -> None:
    rows, columns = q_RC.shape
    assert columns % ALIGNMENT == 0
    kernel[(-(-rows // _ROWS) * -(-columns // _COLUMNS),)](
        *(x.contiguous() for x in inputs), scale, amax.view(torch.int32), q_RC, *results, rows, columns,
        ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=_WARPS, num_stages=_STAGES, **options,
    )  # fmt: skip


def unsupported_reasons(x_RC: Tensor, *others: object) -> list[str]:
    inputs = (x for x in others if isinstance(x, Tensor) and x.dtype not in LARGEST)
    return tensor_reasons(x_RC, *inputs) + cast_reasons(x_RC)


def configurations() -> list[Configuration]:
    """Return BERT-Large's configurations. Activations and gradients are bf16, weights are fp32, and biases are either."""

    def configuration(name: str, kernel: triton.JITFunction, types: dict[str, str], fp8: torch.dtype) -> Configuration:
        fixed: dict[str, object] = {"ROWS": _ROWS, "COLUMNS": _COLUMNS}
        fixed |= {parameter: None for parameter, kind in types.items() if kind == "None"}
        fixed["EVICTION"] = _ONCE if types.get("x") == "*fp32" else ""  # fp32 means a weight
        types = {"scale": "*fp32", "amax": "*i32", "partials": "*fp32", "rows": "i32", "columns": "i32", **types}
        types |= dict.fromkeys(("q", "transposed"), POINTERS[fp8])
        return Configuration.of(name, kernel, types, fixed, _WARPS, _STAGES, capabilities=(90, 100))

    none = {"transposed": "None", "partials": "None"}
    found = [
        configuration("cast, bf16 to E4M3", _cast_kernel, {"x": "*bf16", **none}, E4M3),
        configuration("cast + transpose, bf16 to E4M3", _cast_kernel, {"x": "*bf16", "partials": "None"}, E4M3),
        configuration("cast + transpose, fp32 to E4M3", _cast_kernel, {"x": "*fp32", "partials": "None"}, E4M3),
        configuration("cast + transpose, bf16 to E5M2", _cast_kernel, {"x": "*bf16", "partials": "None"}, E5M2),
        configuration("cast + transpose + sum, bf16 to E5M2", _cast_kernel, {"x": "*bf16"}, E5M2),
    ]
    for bias in ("bf16", "fp32"):
        types = {"output_gradient": "*bf16", "product": "*bf16", "bias": f"*{bias}"}
        found += [
            configuration(f"bias_gelu_cast, bias {bias}", _gelu_kernel, types, E4M3),
            configuration(f"bias_gelu_backward_cast, bias {bias}", _gelu_backward_kernel, types, E5M2),
        ]
    return found
