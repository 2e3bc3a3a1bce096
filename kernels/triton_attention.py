"""Variable-length attention in Triton, forward and backward, with dropout from the counter of ``kernels.random``.

Shape legend in ``kernels/__init__.py``; the definition is ``kernels.reference.varlen_attention``. The forward pass is the
online softmax of FlashAttention-2 (Dao, arXiv 2307.08691) and keeps the output and the logarithm of each row's sum. The
backward pass is a kernel for the gradient of the queries and one for those of keys and values; each computes scores and
random numbers again, so that nothing is added atomically and every result is the same at every run.

Keys stand in an order of their own inside a block. A draw of the generator serves 8 neighbouring keys; with key 8 g + j in
column j * (BLOCK_K / 8) + g, the thread that draws also holds, in a matrix product's result, the scores that it draws for.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN202  (what a kernel is given, and gives, has types of the compiler's own)

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.random import PLACES_A_DRAW, Dropout

if TYPE_CHECKING:
    from kernels.ahead_of_time import Configuration

_HEAD_SIZES = (16, 32, 64)
_GRID_LIMIT = 65535
_PLACES = tl.constexpr(PLACES_A_DRAW)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class _Launch:
    """Block sizes and pipeline of one kernel."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


# By bytes of an element. Those for 2 bytes spill no registers on sm_80, sm_90 and sm_100; 4 bytes are for tests.
_FORWARD = {2: _Launch(64, 64, 4, 2), 4: _Launch(32, 32, 4, 2)}
_BACKWARD = {2: _Launch(128, 64, 8, 2), 4: _Launch(32, 32, 4, 1)}


def varlen_attention(
    query_QHE: Tensor,
    key_THE: Tensor,
    value_THE: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,
    dropout: Dropout | None,
) -> Tensor:
    """Softmax attention inside each sequence; returns [Q, H, E] in the dtype of the inputs.

    int32 ``cu_seqlens`` [S + 1]; no sequence has more than ``max_seqlen`` queries or keys. Rows past the last sequence are 0
    in the output and in every gradient. The element of query row q, head h and key position c (inside its sequence) has row
    ``q * H + h`` and column c of the dropout mask. Saved for the backward pass: inputs, output, fp32 [H, Q].
    """
    state, p, stream = _dropout_arguments(dropout)
    return _attention(query_QHE, key_THE, value_THE, cu_seqlens_q, cu_seqlens_k, max_seqlen, state, p, stream)[0]


def varlen_attention_packed(qkv_T3HE: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: Dropout | None) -> Tensor:
    """``varlen_attention`` of the three parts of one tensor [T, 3, H, E], with one gradient of the same shape."""
    state, p, stream = _dropout_arguments(dropout)
    return _attention_packed(qkv_T3HE, cu_seqlens, max_seqlen, state, p, stream)[0]


def unsupported_reasons(
    query_QHE: Tensor,
    key_THE: Tensor,
    value_THE: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,  # noqa: ARG001  the signature is the op's
    dropout: Dropout | None,
) -> list[str]:
    """Why ``varlen_attention`` cannot take these inputs; empty where it can."""
    reasons = []
    if query_QHE.device.type != "cuda" and not _INTERPRETED.value:
        reasons.append(f"tensors on {query_QHE.device.type}; Triton runs on cuda")
    dtypes = {x.dtype for x in (query_QHE, key_THE, value_THE)}
    if len(dtypes) > 1 or not dtypes <= {torch.bfloat16, torch.float16, torch.float32}:
        reasons.append(f"dtypes {sorted(map(str, dtypes))}; expected one of bfloat16, float16 and float32")
    if {cu_seqlens_q.dtype, cu_seqlens_k.dtype} != {torch.int32}:
        reasons.append(f"cu_seqlens in {cu_seqlens_q.dtype} and {cu_seqlens_k.dtype}; expected int32")
    if query_QHE.shape[-1] not in _HEAD_SIZES:
        reasons.append(f"head size {query_QHE.shape[-1]}; expected one of {', '.join(map(str, _HEAD_SIZES))}")
    if max(len(cu_seqlens_q), query_QHE.shape[1]) > _GRID_LIMIT:
        reasons.append(f"{len(cu_seqlens_q) - 1} sequences of {query_QHE.shape[1]} heads; a grid has {_GRID_LIMIT}")
    if dropout is not None and dropout.state.device != query_QHE.device:
        reasons.append(f"dropout state on {dropout.state.device}; expected {query_QHE.device}")
    return reasons


def configurations() -> "list[Configuration]":
    """Every kernel as BERT-Large (H = 16, E = 64) and the small default model (H = 4, E = 32) launch it in bf16."""
    from kernels.ahead_of_time import Configuration

    kernels = {
        "forward": (_forward, _FORWARD[2]),
        "dq": (_backward_queries, _BACKWARD[2]),
        "dkv": (_backward_keys, _BACKWARD[2]),
    }
    chosen = []
    for (model, heads, size), last_layer, dropout in product(
        (("large", 16, 64), ("small", 4, 32)), (False, True), (False, True)
    ):
        # the last layer has the queries by themselves, keys and values packed, and gradients of each by itself
        packed = (2 if last_layer else 3) * heads * size
        strides = [heads * size if last_layer else packed, packed, packed]
        gradient_strides = [heads * size] * 3 if last_layer else strides
        case = f"{model}{', last layer' if last_layer else ''}{', dropout' if dropout else ''}"
        for name, (kernel, launch) in kernels.items():
            constants = _constants(kernel, strides, gradient_strides, heads, size, dropout, launch)
            constants |= {} if dropout else {"state": None}
            types = {a: "constexpr" if a in constants else _TYPES.get(a, "*bf16") for a in kernel.arg_names}
            chosen.append(
                Configuration(f"{name}, {case}", kernel, types, constants, launch.num_warps, launch.num_stages)
            )
    return chosen


_TYPES = dict.fromkeys(("lse", "delta"), "*fp32") | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "*i32")
_TYPES |= dict.fromkeys(("queries", "keys", "stream", "threshold"), "i32") | {"state": "*i64", "kept_scale": "fp32"}


def _constants(
    kernel: Any,
    strides: list[int],
    gradient_strides: list[int],
    heads: int,
    head_size: int,
    dropout: bool,
    launch: _Launch,
) -> dict[str, Any]:
    """Those of a kernel's constants that it has; ``strides`` from row to row of query, key and value."""
    names = ("QUERY", "KEY", "VALUE")
    constants = {f"{name}_STRIDE": stride for name, stride in zip(names, strides, strict=True)}
    constants |= {f"{name}_GRADIENT_STRIDE": stride for name, stride in zip(names, gradient_strides, strict=True)}
    constants |= {"HEADS": heads, "HEAD_SIZE": head_size, "DROPOUT": dropout}
    constants |= {"BLOCK_Q": launch.block_q, "BLOCK_K": launch.block_k}
    return {name: value for name, value in constants.items() if name in kernel.arg_names}


def _dropout_arguments(dropout: Dropout | None) -> tuple[Tensor | None, float, int]:
    if dropout is None or dropout.p == 0:
        return None, 0.0, 0
    return dropout.state, dropout.p, dropout.stream


@triton.jit
def _kept(state, stream, threshold, rows, draws):
    """Dropout's mask, bool [rows, 8 * draws]: column j * len(draws) + g is place j of draw g."""
    seed, step = tl.load(state), tl.load(state + 1).to(tl.uint32)
    word_0, word_1, word_2, word_3 = tl.philox(seed, draws[None, :], stream, rows[:, None], step)
    words = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))
    halves = tl.join(words & 0xFFFF, words >> 16).to(tl.int32)
    kept = tl.permute(halves, (0, 2, 3, 4, 1)) >= threshold  # [rows, word's high bit, its low bit, half, draws]
    return tl.reshape(kept, (rows.shape[0], 8 * draws.shape[0]))


@triton.jit
def _product(left, right):
    """Matrix product in fp32."""
    if _INTERPRETED:  # the interpreter takes bf16 operands for integers
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _load_rows(base, rows, stop, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """A head's ``rows``, 0 from ``stop`` on."""
    pointers = base + rows[:, None] * STRIDE + tl.arange(0, HEAD_SIZE)[None, :]
    return tl.load(pointers, mask=(rows < stop)[:, None], other=0.0)


@triton.jit
def _store_rows(base, tile, rows, stop, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Store a head's ``rows`` below ``stop``."""
    pointers = base + rows[:, None] * STRIDE + tl.arange(0, HEAD_SIZE)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(rows < stop)[:, None])


@triton.jit
def _zero_rows(base, start, stop, step, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Zero to every ``step``-th block of a head's rows from ``start`` to ``stop``."""
    base += start.to(tl.int64) * STRIDE
    for first in range(0, stop - start, step):
        zeros = tl.zeros((BLOCK, HEAD_SIZE), tl.float32)
        _store_rows(base, zeros, first + tl.arange(0, BLOCK), stop - start, STRIDE, HEAD_SIZE)


@triton.jit
def _forward(
    query,
    key,
    value,
    output,
    lse,
    cu_seqlens_q,
    cu_seqlens_k,
    state,
    queries,
    stream,
    threshold,
    kept_scale,
    QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A block of queries of one head of one sequence; the last program on axis 2 owns the rows past all sequences."""
    DRAWS: tl.constexpr = BLOCK_K // _PLACES
    SCORE_SCALE: tl.constexpr = 1.4426950408889634 / HEAD_SIZE**0.5  # base 2: exp2 is what the hardware has
    head, sequence = tl.program_id(1), tl.program_id(2)
    output += head * HEAD_SIZE
    start_q = tl.load(cu_seqlens_q + sequence)
    first = tl.program_id(0) * BLOCK_Q
    if sequence == tl.num_programs(2) - 1:
        step = tl.num_programs(0) * BLOCK_Q
        _zero_rows(output, start_q + first, queries, step, HEADS * HEAD_SIZE, HEAD_SIZE, BLOCK_Q)
        return
    length_q = tl.load(cu_seqlens_q + sequence + 1) - start_q
    if first >= length_q:
        return
    start_k = tl.load(cu_seqlens_k + sequence)
    length_k = tl.load(cu_seqlens_k + sequence + 1) - start_k

    rows = first + tl.arange(0, BLOCK_Q)
    valid_q = rows < length_q
    query += start_q.to(tl.int64) * QUERY_STRIDE + head * HEAD_SIZE
    key += start_k.to(tl.int64) * KEY_STRIDE + head * HEAD_SIZE
    value += start_k.to(tl.int64) * VALUE_STRIDE + head * HEAD_SIZE
    query_QE = _load_rows(query, rows, length_q, QUERY_STRIDE, HEAD_SIZE)
    places = tl.arange(0, BLOCK_K) % DRAWS * _PLACES + tl.arange(0, BLOCK_K) // DRAWS
    maximum = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    context = tl.zeros((BLOCK_Q, HEAD_SIZE), tl.float32)
    for first_k in range(0, length_k, BLOCK_K):
        positions = first_k + places
        valid_k = positions < length_k
        key_KE = _load_rows(key, positions, length_k, KEY_STRIDE, HEAD_SIZE)
        scores = _product(query_QE, tl.trans(key_KE)) * SCORE_SCALE
        scores = tl.where(valid_k[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, 1)
        if DROPOUT:
            draws = tl.arange(0, DRAWS) + first_k // _PLACES
            weights = tl.where(_kept(state, stream, threshold, (start_q + rows) * HEADS + head, draws), weights, 0.0)
        value_KE = _load_rows(value, positions, length_k, VALUE_STRIDE, HEAD_SIZE)
        if not _INTERPRETED:
            weights = weights.to(value_KE.dtype)
        context = context * rescale[:, None] + _product(weights, value_KE)
        maximum = new_maximum
    total = tl.where(total > 0, total, 1.0)  # a sequence without keys
    if DROPOUT:
        context *= kept_scale
    context /= total[:, None]
    tl.store(lse + head.to(tl.int64) * queries + start_q + rows, maximum + tl.log2(total), mask=valid_q)
    output += start_q.to(tl.int64) * (HEADS * HEAD_SIZE)
    _store_rows(output, context, rows, length_q, HEADS * HEAD_SIZE, HEAD_SIZE)


@triton.jit
def _weights_and_gradients(
    query_QE, key_KE, value_KE, upstream, lse_Q, delta_Q, state, stream, threshold, rows_Q, draws, DROPOUT: tl.constexpr
):
    """Softmax of a tile after dropout and gradient of the scores, without the constants that are the same for all of them.

    ``rows_Q`` and ``draws`` are the places in dropout's mask. Keys past the sequence's end are zero rows here: what they get
    is finite, meets the zeros again and is not stored.
    """
    SCORE_SCALE: tl.constexpr = 1.4426950408889634 / query_QE.shape[1] ** 0.5
    scores = _product(query_QE, tl.trans(key_KE)) * SCORE_SCALE
    weights = tl.exp2(tl.minimum(scores - lse_Q[:, None], 0.0))
    weight_gradient = _product(upstream, tl.trans(value_KE))
    dropped = weights
    if DROPOUT:
        kept = _kept(state, stream, threshold, rows_Q, draws)
        dropped = tl.where(kept, weights, 0.0)
        weight_gradient = tl.where(kept, weight_gradient, 0.0)
    score_gradient = weights * (weight_gradient - delta_Q[:, None])
    if not _INTERPRETED:
        dropped, score_gradient = dropped.to(query_QE.dtype), score_gradient.to(query_QE.dtype)
    return dropped, score_gradient


@triton.jit
def _backward_queries(
    output_gradient,
    query,
    key,
    value,
    output,
    lse,
    delta,
    query_gradient,
    cu_seqlens_q,
    cu_seqlens_k,
    state,
    queries,
    stream,
    threshold,
    kept_scale,
    QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    QUERY_GRADIENT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As ``_forward``; also writes each row's sum of output times its gradient, without dropout's scale, to ``delta``.

    ``delta`` is fp32 [H, Q].
    """
    DRAWS: tl.constexpr = BLOCK_K // _PLACES
    OUTPUT_STRIDE: tl.constexpr = HEADS * HEAD_SIZE
    head, sequence = tl.program_id(1), tl.program_id(2)
    query_gradient += head * HEAD_SIZE
    start_q = tl.load(cu_seqlens_q + sequence)
    first = tl.program_id(0) * BLOCK_Q
    if sequence == tl.num_programs(2) - 1:
        step = tl.num_programs(0) * BLOCK_Q
        _zero_rows(query_gradient, start_q + first, queries, step, QUERY_GRADIENT_STRIDE, HEAD_SIZE, BLOCK_Q)
        return
    length_q = tl.load(cu_seqlens_q + sequence + 1) - start_q
    if first >= length_q:
        return
    start_k = tl.load(cu_seqlens_k + sequence)
    length_k = tl.load(cu_seqlens_k + sequence + 1) - start_k

    rows = first + tl.arange(0, BLOCK_Q)
    valid_q = rows < length_q
    query += start_q.to(tl.int64) * QUERY_STRIDE + head * HEAD_SIZE
    key += start_k.to(tl.int64) * KEY_STRIDE + head * HEAD_SIZE
    value += start_k.to(tl.int64) * VALUE_STRIDE + head * HEAD_SIZE
    output_offset = start_q.to(tl.int64) * OUTPUT_STRIDE + head * HEAD_SIZE
    query_QE = _load_rows(query, rows, length_q, QUERY_STRIDE, HEAD_SIZE)
    upstream = _load_rows(output_gradient + output_offset, rows, length_q, OUTPUT_STRIDE, HEAD_SIZE)
    context = _load_rows(output + output_offset, rows, length_q, OUTPUT_STRIDE, HEAD_SIZE)
    delta_Q = tl.sum(upstream.to(tl.float32) * context.to(tl.float32), 1)
    if DROPOUT:
        delta_Q /= kept_scale
    head_row = head.to(tl.int64) * queries + start_q
    tl.store(delta + head_row + rows, delta_Q, mask=valid_q)
    lse_Q = tl.load(lse + head_row + rows, mask=valid_q, other=float("inf"))
    places = tl.arange(0, BLOCK_K) % DRAWS * _PLACES + tl.arange(0, BLOCK_K) // DRAWS
    rows_Q = (start_q + rows) * HEADS + head
    total = tl.zeros((BLOCK_Q, HEAD_SIZE), tl.float32)
    for first_k in range(0, length_k, BLOCK_K):
        positions = first_k + places
        key_KE = _load_rows(key, positions, length_k, KEY_STRIDE, HEAD_SIZE)
        value_KE = _load_rows(value, positions, length_k, VALUE_STRIDE, HEAD_SIZE)
        draws = tl.arange(0, DRAWS) + first_k // _PLACES
        _, score_gradient = _weights_and_gradients(
            query_QE, key_KE, value_KE, upstream, lse_Q, delta_Q, state, stream, threshold, rows_Q, draws, DROPOUT
        )
        total += _product(score_gradient, key_KE)
    query_gradient += start_q.to(tl.int64) * QUERY_GRADIENT_STRIDE
    total *= 1.0 / HEAD_SIZE**0.5
    if DROPOUT:
        total *= kept_scale
    _store_rows(query_gradient, total, rows, length_q, QUERY_GRADIENT_STRIDE, HEAD_SIZE)


@triton.jit
def _backward_keys(
    output_gradient,
    query,
    key,
    value,
    lse,
    delta,
    key_gradient,
    value_gradient,
    cu_seqlens_q,
    cu_seqlens_k,
    state,
    queries,
    keys,
    stream,
    threshold,
    kept_scale,
    QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    KEY_GRADIENT_STRIDE: tl.constexpr,
    VALUE_GRADIENT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A block of keys of one head of one sequence; after ``_backward_queries``, whose ``delta`` it reads."""
    DRAWS: tl.constexpr = BLOCK_K // _PLACES
    OUTPUT_STRIDE: tl.constexpr = HEADS * HEAD_SIZE
    head, sequence = tl.program_id(1), tl.program_id(2)
    key_gradient += head * HEAD_SIZE
    value_gradient += head * HEAD_SIZE
    start_k = tl.load(cu_seqlens_k + sequence)
    first = tl.program_id(0) * BLOCK_K
    if sequence == tl.num_programs(2) - 1:
        step = tl.num_programs(0) * BLOCK_K
        _zero_rows(key_gradient, start_k + first, keys, step, KEY_GRADIENT_STRIDE, HEAD_SIZE, BLOCK_K)
        _zero_rows(value_gradient, start_k + first, keys, step, VALUE_GRADIENT_STRIDE, HEAD_SIZE, BLOCK_K)
        return
    length_k = tl.load(cu_seqlens_k + sequence + 1) - start_k
    if first >= length_k:
        return
    start_q = tl.load(cu_seqlens_q + sequence)
    length_q = tl.load(cu_seqlens_q + sequence + 1) - start_q

    positions = first + tl.arange(0, BLOCK_K) % DRAWS * _PLACES + tl.arange(0, BLOCK_K) // DRAWS
    query += start_q.to(tl.int64) * QUERY_STRIDE + head * HEAD_SIZE
    output_gradient += start_q.to(tl.int64) * OUTPUT_STRIDE + head * HEAD_SIZE
    key += start_k.to(tl.int64) * KEY_STRIDE + head * HEAD_SIZE
    value += start_k.to(tl.int64) * VALUE_STRIDE + head * HEAD_SIZE
    lse += head.to(tl.int64) * queries + start_q
    delta += head.to(tl.int64) * queries + start_q
    key_KE = _load_rows(key, positions, length_k, KEY_STRIDE, HEAD_SIZE)
    value_KE = _load_rows(value, positions, length_k, VALUE_STRIDE, HEAD_SIZE)
    draws = tl.arange(0, DRAWS) + first // _PLACES
    key_total = tl.zeros((BLOCK_K, HEAD_SIZE), tl.float32)
    value_total = tl.zeros((BLOCK_K, HEAD_SIZE), tl.float32)
    for first_q in range(0, length_q, BLOCK_Q):
        rows = first_q + tl.arange(0, BLOCK_Q)
        valid_q = rows < length_q
        query_QE = _load_rows(query, rows, length_q, QUERY_STRIDE, HEAD_SIZE)
        upstream = _load_rows(output_gradient, rows, length_q, OUTPUT_STRIDE, HEAD_SIZE)
        lse_Q = tl.load(lse + rows, mask=valid_q, other=float("inf"))
        delta_Q = tl.load(delta + rows, mask=valid_q, other=0.0)
        rows_Q = (start_q + rows) * HEADS + head
        dropped, score_gradient = _weights_and_gradients(
            query_QE, key_KE, value_KE, upstream, lse_Q, delta_Q, state, stream, threshold, rows_Q, draws, DROPOUT
        )
        value_total += _product(tl.trans(dropped), upstream)
        key_total += _product(tl.trans(score_gradient), query_QE)
    key_total *= 1.0 / HEAD_SIZE**0.5
    if DROPOUT:
        key_total *= kept_scale
        value_total *= kept_scale
    key_gradient += start_k.to(tl.int64) * KEY_GRADIENT_STRIDE
    value_gradient += start_k.to(tl.int64) * VALUE_GRADIENT_STRIDE
    _store_rows(key_gradient, key_total, positions, length_k, KEY_GRADIENT_STRIDE, HEAD_SIZE)
    _store_rows(value_gradient, value_total, positions, length_k, VALUE_GRADIENT_STRIDE, HEAD_SIZE)


def _rows_of_heads(x: Tensor) -> Tensor:
    """``x`` [N, H, E] itself where the heads of a row are contiguous, as in every part of a packed tensor; else a copy."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _launch_forward(
    qkv: list[Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,
    state: Tensor | None,
    p: float,
    stream: int,
) -> tuple[Tensor, Tensor]:
    qkv = [_rows_of_heads(x) for x in qkv]
    queries, heads, head_size = qkv[0].shape
    output = torch.empty((queries, heads, head_size), dtype=qkv[0].dtype, device=qkv[0].device)
    lse = torch.empty((heads, queries), dtype=torch.float32, device=output.device)
    launch, strides = _FORWARD[output.element_size()], [x.stride(0) for x in qkv]
    numbers = queries, stream, round(p * 65536), 1 / (1 - p)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    constants = _constants(_forward, strides, strides, heads, head_size, state is not None, launch)
    grid = (max(1, triton.cdiv(max_seqlen, launch.block_q)), heads, len(cu_seqlens_q))
    _forward[grid](*qkv, output, lse, cu_seqlens_q, cu_seqlens_k, state, *numbers, **constants, **options)
    return output, lse


def _launch_backward(
    output_gradient: Tensor,
    qkv: list[Tensor],
    output: Tensor,
    lse: Tensor,
    gradients: list[Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,
    state: Tensor | None,
    p: float,
    stream: int,
) -> None:
    qkv = [_rows_of_heads(x) for x in qkv]
    queries, heads, head_size = output.shape
    d_query, d_key, d_value = gradients
    delta, upstream = torch.empty_like(lse), output_gradient.contiguous()
    launch = _BACKWARD[output.element_size()]
    strides = [x.stride(0) for x in qkv], [x.stride(0) for x in gradients]
    bounds, numbers = (cu_seqlens_q, cu_seqlens_k, state), (stream, round(p * 65536), 1 / (1 - p))
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    constants = _constants(_backward_queries, *strides, heads, head_size, state is not None, launch)
    grid = (max(1, triton.cdiv(max_seqlen, launch.block_q)), heads, len(cu_seqlens_q))
    _backward_queries[grid](
        upstream, *qkv, output, lse, delta, d_query, *bounds, queries, *numbers, **constants, **options
    )
    constants = _constants(_backward_keys, *strides, heads, head_size, state is not None, launch)
    grid = (max(1, triton.cdiv(max_seqlen, launch.block_k)), heads, len(cu_seqlens_q))
    _backward_keys[grid](
        upstream, *qkv, lse, delta, d_key, d_value, *bounds, queries, len(qkv[1]), *numbers, **constants, **options
    )


@torch.library.custom_op("mlperf_bert::varlen_attention", mutates_args=())
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,
    state: Tensor | None,
    p: float,
    stream: int,
) -> tuple[Tensor, Tensor]:
    return _launch_forward([query, key, value], cu_seqlens_q, cu_seqlens_k, max_seqlen, state, p, stream)


@_attention.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    queries, heads, _size = query.shape
    return query.new_empty(query.shape), query.new_empty((heads, queries), dtype=torch.float32)


@torch.library.custom_op("mlperf_bert::varlen_attention_backward", mutates_args=())
def _attention_backward(
    output_gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    state: Tensor | None,
    output: Tensor,
    lse: Tensor,
    max_seqlen: int,
    p: float,
    stream: int,
) -> tuple[Tensor, Tensor, Tensor]:
    qkv = [query, key, value]
    d_query, d_key, d_value = gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in qkv]
    bounds = cu_seqlens_q, cu_seqlens_k
    _launch_backward(output_gradient, qkv, output, lse, gradients, *bounds, max_seqlen, state, p, stream)
    return d_query, d_key, d_value


@_attention_backward.register_fake
def _(_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


@torch.library.custom_op("mlperf_bert::varlen_attention_packed", mutates_args=())
def _attention_packed(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, state: Tensor | None, p: float, stream: int
) -> tuple[Tensor, Tensor]:
    return _launch_forward(list(qkv.unbind(1)), cu_seqlens, cu_seqlens, max_seqlen, state, p, stream)


@_attention_packed.register_fake
def _(qkv: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    tokens, _three, heads, head_size = qkv.shape
    return qkv.new_empty((tokens, heads, head_size)), qkv.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.custom_op("mlperf_bert::varlen_attention_packed_backward", mutates_args=())
def _attention_packed_backward(
    output_gradient: Tensor,
    qkv: Tensor,
    cu_seqlens: Tensor,
    state: Tensor | None,
    output: Tensor,
    lse: Tensor,
    max_seqlen: int,
    p: float,
    stream: int,
) -> Tensor:
    gradient = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    parts, gradients = list(qkv.unbind(1)), list(gradient.unbind(1))
    bounds = cu_seqlens, cu_seqlens
    _launch_backward(output_gradient, parts, output, lse, gradients, *bounds, max_seqlen, state, p, stream)
    return gradient


@_attention_packed_backward.register_fake
def _(_gradient: Tensor, qkv: Tensor, *_: object) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Both ops: tensors first, then ``max_seqlen, state, p, stream``."""
    *tensors, max_seqlen, state, p, stream = inputs
    ctx.save_for_backward(*tensors, state, *output)
    ctx.scalars = max_seqlen, p, stream
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, output_gradient: Tensor, _lse_gradient: None) -> tuple[Tensor | None, ...]:
    gradients = _attention_backward(output_gradient, *ctx.saved_tensors, *ctx.scalars)
    return *gradients, None, None, None, None, None, None


def _differentiate_packed(ctx: Any, output_gradient: Tensor, _lse_gradient: None) -> tuple[Tensor | None, ...]:
    gradient = _attention_packed_backward(output_gradient, *ctx.saved_tensors, *ctx.scalars)
    return gradient, None, None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_save)
_attention_packed.register_autograd(_differentiate_packed, setup_context=_save)
