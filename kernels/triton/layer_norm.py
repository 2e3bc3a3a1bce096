"""Dropout, residual and layer norm in one pass each way, and embeddings with theirs, in Triton.

Shape legend in ``kernels/__init__.py``; the definitions are in ``kernels.reference.ops``, the mask in
``kernels.reference.random``.

Nothing of a token's width is kept for the backward pass but the inputs: it makes the normalised sum and the mask anew. In
rows of D elements that move, ``dropout_add_layer_norm`` reads x and residual and writes y (3), its backward reads dy, x and
residual and writes dx and dresidual (5): 8 together, 16 KiB a token of BERT-Large in bf16. Keeping the sum would be 4 + 4:
no fewer, one more where there is no gradient, and the sum would be rounded. Without dropout dx and dresidual are one row.
``embedding_layer_norm`` gathers 3 rows and writes 1; its backward gathers 3, reads 1 and adds to 2 in fp32.

A program's tile is [ROWS, BLOCK / 8, 8]: eight neighbouring columns are a thread's 16 bytes of bf16, and one draw of the
generator. Statistics and gradients are summed in fp32: those of vectors (biases, gains, the two segment rows) in registers
by a fixed number of programs that walk over the rows, then over the programs by a second small kernel; those of the word
and position tables by atomics, so that their last bits depend on the order of arrival.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false
# ruff: noqa: ANN001, ANN202  (what a kernel is given, and gives, has types of the compiler's own)

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.random import PLACES_A_DRAW, ROUNDS, Dropout

if TYPE_CHECKING:
    from kernels.ahead_of_time import Configuration

MAX_COLUMNS = 4096
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PLACES = tl.constexpr(PLACES_A_DRAW)
_ROUNDS = tl.constexpr(ROUNDS)
# A captured graph or a new length must not compile anew because a number happens to be 1 or a multiple of 16.
_VARYING = ["tokens", "threshold", "stream"]


@triton.jit
def _columns(BLOCK: tl.constexpr):
    """[1, BLOCK / 8, 8] column numbers."""
    columns = tl.arange(0, BLOCK // _PLACES)[:, None] * _PLACES + tl.arange(0, _PLACES)[None, :]
    return columns[None, :, :]


@triton.jit
def _load(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _row_means(tile, D: tl.constexpr):
    """[ROWS, 1, 1] from [ROWS, BLOCK / 8, 8], zero past the last column."""
    return (tl.sum(tl.sum(tile, axis=2), axis=1) / D)[:, None, None]


@triton.jit
def _kept(rows, state, threshold, stream, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, BLOCK / 8, 8] what ``Dropout.mask`` keeps, one draw for each eight columns."""
    zeros = tl.zeros([ROWS, BLOCK // _PLACES], tl.int32)
    draws, calls = zeros + tl.arange(0, BLOCK // _PLACES)[None, :], zeros + stream
    steps = zeros + tl.load(state + 1).to(tl.int32)
    places = draws, calls, zeros + rows[:, None], steps
    word_0, word_1, word_2, word_3 = tl.philox(tl.load(state), *places, n_rounds=_ROUNDS)
    # The last dimension that join adds is the fastest: bits of the word's number, high to low, then the half.
    words = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))
    halves = tl.join(words & 0xFFFF, words >> 16).to(tl.int32)
    return tl.reshape(halves, [ROWS, BLOCK // _PLACES, _PLACES]) >= threshold


@triton.jit
def _normalised(summed, inside, eps, D: tl.constexpr):
    """The normalised rows and their mean and reciprocal deviation, both [ROWS, 1, 1]."""
    mean = _row_means(summed, D)
    centred = tl.where(inside, summed - mean, 0.0)
    rstd = tl.rsqrt(_row_means(centred * centred, D) + eps)
    return centred * rstd, mean, rstd


@triton.jit
def _store_statistics(statistics, mean, rstd, rows, tokens):
    """``statistics`` [2, T]: means, then reciprocal deviations."""
    rows = rows[:, None, None]
    tl.store(statistics + rows, mean, mask=rows < tokens)
    tl.store(statistics + tokens + rows, rstd, mask=rows < tokens)


@triton.jit
def _load_statistics(statistics, rows, tokens):
    """Zeros past the last row, so that its gradients are zero too."""
    rows = rows[:, None, None]
    return _load(statistics + rows, rows < tokens), _load(statistics + tokens + rows, rows < tokens)


@triton.jit
def _norm_gradient(dy, normalised, weight, rstd, D: tl.constexpr):
    """Gradient of what was normalised."""
    gradient = dy * weight
    along = _row_means(gradient * normalised, D)
    return (gradient - _row_means(gradient, D) - normalised * along) * rstd


@triton.jit
def _store_partial(pointers, accumulator, inside):
    tl.store(pointers, tl.sum(accumulator, axis=0)[None, :, :], mask=inside)


@triton.jit(do_not_specialize=_VARYING)
def _add_norm_forward(
    x, bias, residual, weight, norm_bias, y, statistics,
    state, tokens, eps, threshold, scale, stream,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = (rows < tokens)[:, None, None]
    columns = _columns(BLOCK)
    inside = columns < D
    places = rows.to(tl.int64)[:, None, None] * D + columns
    summed = _load(x + places, live & inside) + _load(bias + columns, inside)
    shortcut = _load(residual + places, live & inside)
    gain, shift = _load(weight + columns, inside), _load(norm_bias + columns, inside)
    if DROPOUT:
        kept = _kept(rows, state, threshold, stream, ROWS, BLOCK)
        summed = tl.where(kept, summed * scale, 0.0)
    normalised, mean, rstd = _normalised(summed + shortcut, inside, eps, D)
    tl.store(y + places, normalised * gain + shift, mask=live & inside)
    _store_statistics(statistics, mean, rstd, rows, tokens)


@triton.jit(do_not_specialize=_VARYING)
def _add_norm_backward(
    dy, x, bias, residual, weight, statistics, dx, dresidual, partials,
    state, tokens, threshold, scale, stream,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """``partials`` [programs, 3, D]: of bias, weight and norm_bias. Without dropout ``dx`` is not written."""
    columns = _columns(BLOCK)
    inside = columns < D
    offset, gain = _load(bias + columns, inside), _load(weight + columns, inside)
    dbias = tl.zeros([ROWS, BLOCK // _PLACES, _PLACES], tl.float32)
    dweight = tl.zeros_like(dbias)
    dnorm_bias = tl.zeros_like(dbias)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        live = (rows < tokens)[:, None, None]
        places = rows.to(tl.int64)[:, None, None] * D + columns
        upstream = _load(dy + places, live & inside)
        summed = _load(x + places, live & inside) + offset
        shortcut = _load(residual + places, live & inside)
        mean, rstd = _load_statistics(statistics, rows, tokens)
        if DROPOUT:
            kept = _kept(rows, state, threshold, stream, ROWS, BLOCK)
            summed = tl.where(kept, summed * scale, 0.0)
        normalised = (summed + shortcut - mean) * rstd
        dweight += upstream * normalised
        dnorm_bias += upstream
        gradient = _norm_gradient(upstream, normalised, gain, rstd, D)
        tl.store(dresidual + places, gradient, mask=live & inside)
        if DROPOUT:
            gradient = tl.where(kept, gradient * scale, 0.0)
            tl.store(dx + places, gradient, mask=live & inside)
        dbias += gradient
    partial = partials + tl.program_id(0) * 3 * D + columns
    _store_partial(partial, dbias, inside)
    _store_partial(partial + D, dweight, inside)
    _store_partial(partial + 2 * D, dnorm_bias, inside)


@triton.jit
def _summed_embeddings(word, position, segment, words, positions, segments, columns, mask, D: tl.constexpr):
    """[ROWS, BLOCK / 8, 8] from ids [ROWS, 1, 1]."""
    summed = _load(word + words * D + columns, mask) + _load(position + positions * D + columns, mask)
    return summed + _load(segment + segments * D + columns, mask)


@triton.jit
def _ids(pointer, rows, live):
    return tl.load(pointer + rows[:, None, None], mask=live, other=0).to(tl.int64)


@triton.jit(do_not_specialize=_VARYING)
def _embedding_norm_forward(
    input_ids, position_ids, segment_ids, word, position, segment, weight, bias, y, statistics,
    state, tokens, eps, threshold, scale, stream,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = (rows < tokens)[:, None, None]
    columns = _columns(BLOCK)
    inside = columns < D
    words, positions = _ids(input_ids, rows, live), _ids(position_ids, rows, live)
    segments = _ids(segment_ids, rows, live)
    summed = _summed_embeddings(word, position, segment, words, positions, segments, columns, live & inside, D)
    gain, shift = _load(weight + columns, inside), _load(bias + columns, inside)
    normalised, mean, rstd = _normalised(summed, inside, eps, D)
    output = normalised * gain + shift
    if DROPOUT:
        kept = _kept(rows, state, threshold, stream, ROWS, BLOCK)
        output = tl.where(kept, output * scale, 0.0)
    tl.store(y + rows.to(tl.int64)[:, None, None] * D + columns, output, mask=live & inside)
    _store_statistics(statistics, mean, rstd, rows, tokens)


@triton.jit(do_not_specialize=_VARYING)
def _embedding_norm_backward(
    dy, input_ids, position_ids, segment_ids, word, position, segment, weight, statistics, dword, dposition, partials,
    state, tokens, threshold, scale, stream,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """``partials`` [programs, 4, D]: of weight, bias and the two segments; ``dword``, ``dposition`` fp32, added to."""
    columns = _columns(BLOCK)
    inside = columns < D
    gain = _load(weight + columns, inside)
    dweight = tl.zeros([ROWS, BLOCK // _PLACES, _PLACES], tl.float32)
    dbias = tl.zeros_like(dweight)
    dsegment_0 = tl.zeros_like(dweight)
    dsegment_1 = tl.zeros_like(dweight)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        live = (rows < tokens)[:, None, None]
        words, positions = _ids(input_ids, rows, live), _ids(position_ids, rows, live)
        segments = _ids(segment_ids, rows, live)
        upstream = _load(dy + rows.to(tl.int64)[:, None, None] * D + columns, live & inside)
        summed = _summed_embeddings(word, position, segment, words, positions, segments, columns, live & inside, D)
        mean, rstd = _load_statistics(statistics, rows, tokens)
        if DROPOUT:
            kept = _kept(rows, state, threshold, stream, ROWS, BLOCK)
            upstream = tl.where(kept, upstream * scale, 0.0)
        normalised = (summed - mean) * rstd
        dweight += upstream * normalised
        dbias += upstream
        gradient = _norm_gradient(upstream, normalised, gain, rstd, D)
        tl.atomic_add(dword + words * D + columns, gradient, mask=live & inside, sem="relaxed")
        tl.atomic_add(dposition + positions * D + columns, gradient, mask=live & inside, sem="relaxed")
        dsegment_0 += tl.where(segments == 0, gradient, 0.0)
        dsegment_1 += tl.where(segments == 1, gradient, 0.0)
    partial = partials + tl.program_id(0) * 4 * D + columns
    _store_partial(partial, dweight, inside)
    _store_partial(partial + D, dbias, inside)
    _store_partial(partial + 2 * D, dsegment_0, inside)
    _store_partial(partial + 3 * D, dsegment_1, inside)


@triton.jit
def _sum_partials(partials, sums, programs, width, PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr):
    """``sums`` [width] from ``partials`` [programs, width]."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([PROGRAMS, COLUMNS], tl.float32)
    for start in range(0, programs, PROGRAMS):
        rows = start + tl.arange(0, PROGRAMS)
        mask = (rows < programs)[:, None] & (columns < width)[None, :]
        total += tl.load(partials + rows[:, None] * width + columns[None, :], mask=mask, other=0.0)
    tl.store(sums + columns, tl.sum(total, axis=0), mask=columns < width)


@dataclass(frozen=True)
class _Layout:
    """Tile and warps of a kernel for rows of one width."""

    block: int
    rows: int
    num_warps: int

    @classmethod
    def of(cls, columns: int) -> "_Layout":
        """At least 1024 values a tile, eight of them a thread's."""
        block = max(64, triton.next_power_of_2(columns))
        return cls(block, max(1, 1024 // block), max(4, block // 256))

    def options(self, columns: int, dropout: bool) -> dict[str, Any]:
        """Keyword arguments of the launch."""
        tile = {"D": columns, "BLOCK": self.block, "ROWS": self.rows, "DROPOUT": dropout}
        return {**tile, "num_warps": self.num_warps, "num_stages": 1}


ADD_NORM_WARPS, EMBEDDING_NORM_WARPS = 20, 16
"""Warps a multiprocessor of the backward kernels: as many as their registers let be there at once, so that none waits."""
_SUM_TILE = {"PROGRAMS": 64, "COLUMNS": 32}
_SUM_PIPELINE = {"num_warps": 4, "num_stages": 1}


def _backward_programs(device: torch.device, tokens: int, layout: _Layout, warps: int) -> int:
    """How many programs share the rows."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(1, min(multiprocessors * (warps // layout.num_warps), triton.cdiv(tokens, layout.rows)))


def _forward_grid(tokens: int, layout: _Layout) -> tuple[int]:
    return (max(1, triton.cdiv(tokens, layout.rows)),)


def _sums(partials_PND: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, D] over the programs."""
    programs, vectors, columns = partials_PND.shape
    sums_ND = partials_PND.new_empty(vectors, columns, dtype=dtype)
    width = vectors * columns
    grid = (triton.cdiv(width, _SUM_TILE["COLUMNS"]),)
    _sum_partials[grid](partials_PND, sums_ND, programs, width, **_SUM_TILE, **_SUM_PIPELINE)
    return sums_ND


_Scalars = tuple[Tensor | None, int, float, int]


def _scalars(dropout: Dropout | None) -> _Scalars:
    """State, threshold, scale and stream; no state where nothing is dropped."""
    if dropout is None or dropout.p == 0:
        return None, 0, 1.0, 0
    return dropout.state, dropout.threshold, dropout.scale, dropout.stream


@torch.library.custom_op("mlperf_bert::dropout_add_layer_norm", mutates_args=())
def _add_norm(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    state: Tensor | None,
    threshold: int,
    scale: float,
    stream: int,
) -> tuple[Tensor, Tensor]:
    """Output [T, D]; means and reciprocal deviations, fp32 [2, T]."""
    (tokens, columns), layout = x.shape, _Layout.of(x.shape[1])
    inputs = (tensor.contiguous() for tensor in (x, bias, residual, weight, norm_bias))
    outputs = x.new_empty(tokens, columns), x.new_empty(2, tokens, dtype=torch.float32)
    scalars, options = (tokens, eps, threshold, scale, stream), layout.options(columns, state is not None)
    _add_norm_forward[_forward_grid(tokens, layout)](*inputs, *outputs, state, *scalars, **options)
    return outputs


@_add_norm.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(2, len(x), dtype=torch.float32)


@torch.library.custom_op("mlperf_bert::dropout_add_layer_norm_backward", mutates_args=())
def _add_norm_gradients(
    dy: Tensor,
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    statistics: Tensor,
    state: Tensor | None,
    threshold: int,
    scale: float,
    stream: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x [T, D] ([0, D] without dropout: the residual's), of the residual, of bias, weight, norm_bias [3, D]."""
    (tokens, columns), layout = x.shape, _Layout.of(x.shape[1])
    programs = _backward_programs(x.device, tokens, layout, ADD_NORM_WARPS)
    inputs = (tensor.contiguous() for tensor in (dy, x, bias, residual, weight, statistics))
    dx, dresidual = x.new_empty(tokens if state is not None else 0, columns), x.new_empty(tokens, columns)
    partials = x.new_empty(programs, 3, columns, dtype=torch.float32)
    scalars, options = (tokens, threshold, scale, stream), layout.options(columns, state is not None)
    _add_norm_backward[(programs,)](*inputs, dx, dresidual, partials, state, *scalars, **options)
    return dx, dresidual, _sums(partials, weight.dtype)


@_add_norm_gradients.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, x, _, _, weight, _, state, *_ = inputs
    tokens, columns = x.shape
    dx = x.new_empty(tokens if state is not None else 0, columns)
    return dx, x.new_empty(tokens, columns), weight.new_empty(3, columns)


def _save_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, bias, residual, weight, _, _, state, *ctx.scalars = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, bias, residual, weight, output[1], state)


def _add_norm_autograd(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
    dx, dresidual, vectors_3D = _add_norm_gradients(dy, *ctx.saved_tensors, *ctx.scalars)
    dbias, dweight, dnorm_bias = vectors_3D.unbind()
    # Without dropout both branches of the sum have one gradient.
    return dx if len(dx) else dresidual, dbias, dresidual, dweight, dnorm_bias, *(None,) * 5


_add_norm.register_autograd(_add_norm_autograd, setup_context=_save_add_norm)


def dropout_add_layer_norm(
    x_TD: Tensor,
    bias_D: Tensor,
    residual_TD: Tensor,
    weight_D: Tensor,
    norm_bias_D: Tensor,
    eps: float,
    dropout: Dropout | None = None,
) -> Tensor:
    """``layer_norm(residual + dropout(x + bias))``; row t of the mask is token t. Returns [T, D] in x's dtype.

    x and residual share a dtype, and the three vectors another or the same. Kept for the backward pass: the inputs and
    8 bytes a token.
    """
    return _add_norm(x_TD, bias_D, residual_TD, weight_D, norm_bias_D, eps, *_scalars(dropout))[0]


def dropout_add_layer_norm_unsupported_reasons(
    x_TD: Tensor,
    bias_D: Tensor,
    residual_TD: Tensor,
    weight_D: Tensor,
    norm_bias_D: Tensor,
    eps: float,  # noqa: ARG001
    dropout: Dropout | None = None,
) -> list[str]:
    """Why these inputs cannot be computed here, or nothing."""
    reasons = _unsupported_reasons(x_TD, dropout)
    reasons += _different_dtypes("x and residual", x_TD, residual_TD)
    return reasons + _different_dtypes("bias, weight and norm_bias", weight_D, bias_D, norm_bias_D)


def _unsupported_reasons(rows: Tensor, dropout: Dropout | None) -> list[str]:
    reasons = []
    if not rows.is_cuda and not triton.knobs.runtime.interpret:
        reasons.append(f"the inputs are on {rows.device.type}, and Triton needs a CUDA device")
    if rows.shape[1] % PLACES_A_DRAW or not 0 < rows.shape[1] <= MAX_COLUMNS:
        reasons.append(f"a hidden size of {rows.shape[1]}; expected a multiple of {PLACES_A_DRAW} up to {MAX_COLUMNS}")
    if dropout is not None and dropout.state.device != rows.device:
        reasons.append(f"the dropout's state is on {dropout.state.device}, the inputs on {rows.device}")
    return reasons


def _different_dtypes(names: str, *tensors: Tensor) -> list[str]:
    """Why these do not share one dtype that the kernels take, or nothing."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) == 1 and dtypes <= set(_DTYPES):
        return []
    found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    return [f"{names} are {found}; expected one of bfloat16, float16, float32 for all"]


@torch.library.custom_op("mlperf_bert::embedding_layer_norm", mutates_args=())
def _embedding_norm(
    input_ids: Tensor,
    position_ids: Tensor,
    segment_ids: Tensor,
    word: Tensor,
    position: Tensor,
    segment: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    state: Tensor | None,
    threshold: int,
    scale: float,
    stream: int,
) -> tuple[Tensor, Tensor]:
    """Output [T, D]; means and reciprocal deviations, fp32 [2, T]."""
    tokens, columns = len(input_ids), word.shape[1]
    layout = _Layout.of(columns)
    inputs = (input_ids, position_ids, segment_ids, word, position, segment, weight, bias)
    outputs = word.new_empty(tokens, columns), word.new_empty(2, tokens, dtype=torch.float32)
    scalars, options = (tokens, eps, threshold, scale, stream), layout.options(columns, state is not None)
    _embedding_norm_forward[_forward_grid(tokens, layout)](
        *(tensor.contiguous() for tensor in inputs), *outputs, state, *scalars, **options
    )
    return outputs


@_embedding_norm.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    input_ids, _, _, word, *_ = inputs
    tokens = len(input_ids)
    return word.new_empty(tokens, word.shape[1]), word.new_empty(2, tokens, dtype=torch.float32)


@torch.library.custom_op("mlperf_bert::embedding_layer_norm_backward", mutates_args=())
def _embedding_norm_gradients(
    dy: Tensor,
    input_ids: Tensor,
    position_ids: Tensor,
    segment_ids: Tensor,
    word: Tensor,
    position: Tensor,
    segment: Tensor,
    weight: Tensor,
    statistics: Tensor,
    state: Tensor | None,
    threshold: int,
    scale: float,
    stream: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the word table [V, D], the position table [L, D], and of weight, bias and both segments [4, D]."""
    (tokens, columns), layout = dy.shape, _Layout.of(dy.shape[1])
    programs = _backward_programs(dy.device, tokens, layout, EMBEDDING_NORM_WARPS)
    inputs = (dy, input_ids, position_ids, segment_ids, word, position, segment, weight, statistics)
    dword, dposition = (table.new_zeros(table.shape, dtype=torch.float32) for table in (word, position))
    partials = dy.new_empty(programs, 4, columns, dtype=torch.float32)
    scalars, options = (tokens, threshold, scale, stream), layout.options(columns, state is not None)
    _embedding_norm_backward[(programs,)](
        *(tensor.contiguous() for tensor in inputs), dword, dposition, partials, state, *scalars, **options
    )
    return dword.to(word.dtype), dposition.to(position.dtype), _sums(partials, weight.dtype)


@_embedding_norm_gradients.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, _, _, _, word, position, _, weight, *_ = inputs
    return word.new_empty(word.shape), position.new_empty(position.shape), weight.new_empty(4, word.shape[1])


def _save_embedding_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, _, _, state, threshold, scale, stream = inputs
    ctx.scalars = threshold, scale, stream
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1], state)


def _embedding_norm_autograd(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
    dword, dposition, vectors_4D = _embedding_norm_gradients(dy, *ctx.saved_tensors, *ctx.scalars)
    return None, None, None, dword, dposition, vectors_4D[2:], vectors_4D[0], vectors_4D[1], *(None,) * 5


_embedding_norm.register_autograd(_embedding_norm_autograd, setup_context=_save_embedding_norm)


def embedding_layer_norm(
    input_ids_T: Tensor,
    position_ids_T: Tensor,
    segment_ids_T: Tensor,
    word_VD: Tensor,
    position_LD: Tensor,
    segment_2D: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    dropout: Dropout | None = None,
) -> Tensor:
    """Sum of the three embeddings, layer norm, dropout; row t of the mask is token t. Returns [T, D] in the tables' dtype.

    Ids are int32 or int64 and inside their tables, which is not checked. Tables and vectors share a dtype. Kept for the
    backward pass: the inputs and 8 bytes a token.
    """
    tables = (word_VD, position_LD, segment_2D)
    return _embedding_norm(
        input_ids_T, position_ids_T, segment_ids_T, *tables, weight_D, bias_D, eps, *_scalars(dropout)
    )[0]


def embedding_layer_norm_unsupported_reasons(
    input_ids_T: Tensor,
    position_ids_T: Tensor,
    segment_ids_T: Tensor,
    word_VD: Tensor,
    position_LD: Tensor,
    segment_2D: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,  # noqa: ARG001
    dropout: Dropout | None = None,
) -> list[str]:
    """Why these inputs cannot be computed here, or nothing."""
    reasons = _unsupported_reasons(word_VD, dropout)
    reasons += _different_dtypes("tables, weight and bias", word_VD, position_LD, segment_2D, weight_D, bias_D)
    if len(segment_2D) != 2:
        reasons.append(f"a segment table of {len(segment_2D)} rows; expected 2")
    ids = {ids.dtype for ids in (input_ids_T, position_ids_T, segment_ids_T)}
    if not ids <= {torch.int32, torch.int64}:
        reasons.append("ids that are neither int32 nor int64")
    return reasons


_TYPES = dict.fromkeys(("input_ids", "position_ids", "segment_ids", "state"), "*i64")
_TYPES |= dict.fromkeys(("x", "residual", "dresidual", "dx"), "*bf16")
_TYPES |= dict.fromkeys(("bias", "weight", "norm_bias", "word", "position", "segment"), "*fp32")
_TYPES |= dict.fromkeys(("statistics", "partials", "dword", "dposition", "sums"), "*fp32")
_TYPES |= {"tokens": "i32", "eps": "fp32", "threshold": "i32", "scale": "fp32", "stream": "i32"}
_TYPES |= {"programs": "i32", "width": "i32"}


def configurations() -> "list[Configuration]":
    """Every kernel as training launches it under autocast, for the hidden sizes of BERT-Large and the small default.

    Parameters and embeddings are fp32, and the residual stream is bf16.
    """
    from kernels.ahead_of_time import Configuration

    found = []
    for columns in (128, 1024):
        for kernel, stream in (
            (_add_norm_forward, "bf16"),
            (_add_norm_backward, "bf16"),
            (_embedding_norm_forward, "fp32"),
            (_embedding_norm_backward, "fp32"),
        ):
            for dropout in (True, False):
                options = _Layout.of(columns).options(columns, dropout)
                num_warps, num_stages = options.pop("num_warps"), options.pop("num_stages")
                constexprs = options if dropout else options | {"state": None}
                types = _TYPES | {"y": f"*{stream}", "dy": f"*{stream}"} | dict.fromkeys(constexprs, "constexpr")
                signature = {name: types[name] for name in kernel.arg_names}
                name = f"{stream}, D = {columns}{', dropout' if dropout else ''}"
                found.append(Configuration(name, kernel, signature, constexprs, num_warps, num_stages))
    types = _TYPES | dict.fromkeys(_SUM_TILE, "constexpr")
    signature = {name: types[name] for name in _sum_partials.arg_names}
    return [*found, Configuration("fp32", _sum_partials, signature, dict(_SUM_TILE), **_SUM_PIPELINE)]
