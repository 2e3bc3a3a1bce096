"""Variable-length attention in Triton, forward and backward, with dropout from the counter of ``kernels.reference.random``.

Shape legend in ``kernels/__init__.py``; the definition is ``kernels.reference.ops.varlen_attention``. The forward pass is
the online softmax of FlashAttention-2 (Dao, arXiv 2307.08691) and keeps the output and the logarithm of each row's sum. The
backward pass is a kernel for the gradient of the queries and one for those of keys and values; each computes scores again,
so that nothing is added atomically and every result is the same at every run.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.reference.random import Dropout
from kernels.triton.attention.launches import fake_saved, launch_backward, launch_forward

_HEAD_SIZES = (16, 32, 64)
_GRID_LIMIT = 65535  # programs along the second and the third axis of a CUDA grid


def varlen_attention(
    query_QHE: Tensor,
    key_THE: Tensor,
    value_THE: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,
    dropout: Dropout | None = None,
) -> Tensor:
    """Return softmax attention inside each sequence, [Q, H, E] in the dtype of the inputs.

    int32 ``cu_seqlens`` [S + 1]; no sequence has more than ``max_seqlen`` queries or keys. Rows past the last sequence are 0
    in the output and in every gradient. The element of query row q, head h and key position c (inside its sequence) has row
    ``q * H + h`` and column c of the dropout mask. Saved for the backward pass: inputs, output, fp32
    [H, Q], and a bit for each element of the mask.
    """
    state, p, stream = dropout_arguments(dropout)
    return _attention(query_QHE, key_THE, value_THE, cu_seqlens_q, cu_seqlens_k, max_seqlen, state, p, stream)[0]


def varlen_self_attention(
    qkv_T3HE: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: Dropout | None = None
) -> Tensor:
    """Return ``varlen_attention`` of the three parts of one tensor [T, 3, H, E], with one gradient of the same shape."""
    state, p, stream = dropout_arguments(dropout)
    return _self_attention(qkv_T3HE, cu_seqlens, max_seqlen, state, p, stream)[0]


def unsupported_reasons(
    query_QHE: Tensor,
    key_THE: Tensor,
    value_THE: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,  # noqa: ARG001  the signature is the op's
    dropout: Dropout | None = None,
) -> list[str]:
    """Return the reasons why ``varlen_attention`` cannot take these inputs; empty where it can."""
    reasons = []
    if query_QHE.device.type != "cuda" and not triton.knobs.runtime.interpret:
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


def varlen_self_attention_unsupported_reasons(
    qkv_T3HE: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: Dropout | None = None
) -> list[str]:
    """Return the reasons why ``varlen_self_attention`` cannot take these inputs; empty where it can."""
    return unsupported_reasons(*qkv_T3HE.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, dropout)


def dropout_arguments(dropout: Dropout | None) -> tuple[Tensor | None, float, int]:
    """Return state, probability and stream; no state where nothing is dropped."""
    if dropout is None or dropout.p == 0:
        return None, 0.0, 0
    return dropout.state, dropout.p, dropout.stream


# The schema of a custom op has tensors and plain numbers only: dropout comes as state, probability and stream.
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
) -> tuple[Tensor, Tensor, Tensor]:
    return launch_forward([query, key, value], cu_seqlens_q, cu_seqlens_k, max_seqlen, state, p, stream)


@_attention.register_fake
def _(query: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, max_seqlen, state, _p, _stream = others
    return query.new_empty(query.shape), *fake_saved(query, max_seqlen, state)


@torch.library.custom_op("mlperf_bert::varlen_attention_backward", mutates_args=())
def _attention_backward(
    output_gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    output: Tensor,
    lse: Tensor,
    kept: Tensor,
    max_seqlen: int,
    p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    qkv = [query, key, value]
    # Contiguous, as the fake says: empty_like would keep the order of an input's strides.
    d_query, d_key, d_value = gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in qkv]
    bounds = cu_seqlens_q, cu_seqlens_k
    launch_backward(output_gradient, qkv, output, lse, kept, gradients, *bounds, max_seqlen, p)
    return d_query, d_key, d_value


@_attention_backward.register_fake
def _(_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


@torch.library.custom_op("mlperf_bert::varlen_self_attention", mutates_args=())
def _self_attention(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, state: Tensor | None, p: float, stream: int
) -> tuple[Tensor, Tensor, Tensor]:
    return launch_forward(list(qkv.unbind(1)), cu_seqlens, cu_seqlens, max_seqlen, state, p, stream)


@_self_attention.register_fake
def _(qkv: Tensor, _cu_seqlens: Tensor, max_seqlen: int, state: Tensor | None, *_: object) -> tuple[Tensor, ...]:
    query = qkv[:, 0]
    return query.new_empty(query.shape), *fake_saved(query, max_seqlen, state)


@torch.library.custom_op("mlperf_bert::varlen_self_attention_backward", mutates_args=())
def _self_attention_backward(
    output_gradient: Tensor,
    qkv: Tensor,
    cu_seqlens: Tensor,
    output: Tensor,
    lse: Tensor,
    kept: Tensor,
    max_seqlen: int,
    p: float,
) -> Tensor:
    gradient = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    parts, gradients = list(qkv.unbind(1)), list(gradient.unbind(1))
    bounds = cu_seqlens, cu_seqlens
    launch_backward(output_gradient, parts, output, lse, kept, gradients, *bounds, max_seqlen, p)
    return gradient


@_self_attention_backward.register_fake
def _(_gradient: Tensor, qkv: Tensor, *_: object) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save what backward needs of either op: tensors come first, then ``max_seqlen, state, p, stream``."""
    *tensors, max_seqlen, _state, p, _stream = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.scalars = max_seqlen, p
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else zeros would be written as gradients of what is saved


def _differentiate(ctx: Any, output_gradient: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    gradients = _attention_backward(output_gradient, *ctx.saved_tensors, *ctx.scalars)
    return *gradients, None, None, None, None, None, None


def _differentiate_self_attention(ctx: Any, output_gradient: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    gradient = _self_attention_backward(output_gradient, *ctx.saved_tensors, *ctx.scalars)
    return gradient, None, None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_save)
_self_attention.register_autograd(_differentiate_self_attention, setup_context=_save)
