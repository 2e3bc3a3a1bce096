"""Self-attention between FP8 products, in Triton. It uses the kernels of ``varlen``, which here also cast to FP8.

The forward pass writes the output in bf16, for the backward pass, and in FP8 with its transpose. The backward pass
writes the gradient of query, key and value only in FP8. The ops are defined in ``kernels.reference.fp8``. The
shape legend is in ``kernels/__init__.py``.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.configuration import Configuration
from kernels.reference.fp8 import E4M3, E5M2
from kernels.reference.random import Dropout
from kernels.triton.attention import launches
from kernels.triton.attention.launches import Casts, empty_saved, launch_backward, launch_forward, smallest_block
from kernels.triton.attention.varlen import fused_reasons
from kernels.triton.dropout import dropout_scalars
from kernels.triton.quantize import POINTERS, cast_reasons, fp8_pair


@torch.library.custom_op("mlperf_bert::attention_cast_fp8", mutates_args=("amax",))
def _forward(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    state: Tensor | None,
    threshold: int,
    kept_scale: float,
    stream: int,
    scale: Tensor,
    amax: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q_TD, q_DT = fp8_pair(qkv[:, 0].flatten(1), E4M3)
    casts = Casts(scale, amax.view(torch.int32), q_TD, q_DT)
    inputs = list(qkv.unbind(1)), cu_seqlens, cu_seqlens, max_seqlen
    context, lse, kept = launch_forward(*inputs, state, threshold, kept_scale, stream, casts)
    return context, q_TD, q_DT, lse, kept


@_forward.register_fake
def _(qkv: Tensor, _cu_seqlens: Tensor, max_seqlen: int, state: Tensor | None, *_: object) -> tuple[Tensor, ...]:
    query = qkv[:, 0]
    saved = empty_saved(query, max_seqlen, state)
    return query.new_empty(query.shape), *fp8_pair(query.flatten(1), E4M3), *saved


@torch.library.custom_op("mlperf_bert::attention_backward_cast_fp8", mutates_args=("amax",))
def _backward(
    gradient: Tensor,
    qkv: Tensor,
    cu_seqlens: Tensor,
    context: Tensor,
    lse: Tensor,
    kept: Tensor,
    max_seqlen: int,
    kept_scale: float,
    scale: Tensor,
    amax: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    q_TN, q_NT = fp8_pair(qkv.flatten(1), E5M2)
    # Allocate at least one row of sums for each block of each sequence.
    rows = len(qkv) // smallest_block(qkv) + len(cu_seqlens)
    sums = qkv.new_zeros((rows, q_TN.shape[1]), dtype=torch.float32)
    casts = Casts(scale, amax.view(torch.int32), q_TN, q_NT, sums)
    parts, gradients = list(qkv.unbind(1)), list(q_TN.view(qkv.shape).unbind(1))
    bounds = cu_seqlens, cu_seqlens
    launch_backward(gradient, parts, context, lse, kept, gradients, *bounds, max_seqlen, kept_scale, casts)
    return q_TN, q_NT, sums.sum(0)


@_backward.register_fake
def _(_gradient: Tensor, qkv: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    columns = qkv.flatten(1)
    return *fp8_pair(columns, E5M2), columns.new_empty(columns.shape[1], dtype=torch.float32)


def attention_cast_fp8(
    qkv_T3HE: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: Dropout | None, scale: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the output, its cast [T, HE], the transposed cast [HE, padded(T)], and two tensors for the backward pass.

    The two tensors are the logarithms of softmax's sums, [H, T], and dropout's mask bits.
    """
    return _forward(qkv_T3HE, cu_seqlens, max_seqlen, *dropout_scalars(dropout), scale, amax)


def attention_backward_cast_fp8(
    gradient_THE: Tensor,
    qkv_T3HE: Tensor,
    cu_seqlens: Tensor,
    context_THE: Tensor,
    lse_HT: Tensor,
    kept: Tensor,
    max_seqlen: int,
    dropout: Dropout | None,
    scale: Tensor,
    amax: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    _state, _threshold, kept_scale, _stream = dropout_scalars(dropout)
    forward = context_THE, lse_HT, kept
    return _backward(gradient_THE, qkv_T3HE, cu_seqlens, *forward, max_seqlen, kept_scale, scale, amax)


def unsupported_reasons(qkv_T3HE: Tensor, *_: Any) -> list[str]:
    return fused_reasons(qkv_T3HE) + cast_reasons(qkv_T3HE[:, 0].flatten(1))


def backward_reasons(*arguments: Any) -> list[str]:
    _gradient, qkv_T3HE, _cu_seqlens, _context, lse_HT, *_ = arguments
    reasons = [] if lse_HT.ndim == 2 else ["another implementation computed the forward pass"]
    return reasons + unsupported_reasons(qkv_T3HE)


def configurations() -> list[Configuration]:
    """Return the configurations of attention kernels that also cast to FP8. Every layer but the last uses such kernels."""
    found = []
    for plain in launches.configurations():
        if "last layer" in plain.name or 90 not in plain.capabilities:  # FP8 needs compute capability 8.9
            continue
        dtype = E4M3 if plain.name.startswith("forward") else E5M2
        types: dict[str, Any] = {"scale": "*fp32", "amax": "*i32", "sums": "*fp32"}
        types |= dict.fromkeys(("cast", "transposed"), POINTERS[dtype])
        without = ("query_gradient", "key_gradient", "value_gradient")
        kept = {name: value for name, value in plain.constexprs.items() if name not in types}
        constexprs = kept | {name: None for name in without if name in plain.signature}
        signature = {
            name: "constexpr" if name in constexprs else types.get(name, kind) for name, kind in plain.signature.items()
        }
        narrow = launches.NARROW.get(int(str(constexprs["HEAD_SIZE"]))) if dtype == E4M3 else None
        settings = {"signature": signature, "constexprs": constexprs, "max_registers": narrow or plain.max_registers}
        found.append(replace(plain, name=f"{plain.name}, casts", **settings))
    return found
