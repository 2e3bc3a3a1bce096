"""Variable-length attention in Triton, forward and backward, with the dropout of ``kernels.reference.random``.

Shape legend in ``kernels/__init__.py``; the definition is ``kernels.reference.ops.varlen_attention``. The forward pass
uses the online softmax of FlashAttention-2 (Dao, arXiv 2307.08691). It saves the output and, for each row, the
logarithm of softmax's sum. The backward pass has a kernel for the gradient of the queries and one for the gradients of
keys and values. Both kernels recompute the scores, so that there are no atomic sums and every run gives the same results.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.reference.random import Dropout
from kernels.triton.attention.launches import empty_saved, launch_backward, launch_forward
from kernels.triton.dropout import dropout_scalars
from kernels.triton.inputs import mixed_reasons, tensor_reasons

_HEAD_SIZES = (16, 32, 64)


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

    The tensors saved for the backward pass are the inputs, the output, one fp32 number for each head and query [H, Q], and
    the dropout mask with one bit per element.
    """
    qkv = [query_QHE, key_THE, value_THE]
    return _attention(qkv, cu_seqlens_q, cu_seqlens_k, max_seqlen, *dropout_scalars(dropout))[0]


def varlen_self_attention(
    qkv_T3HE: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: Dropout | None = None
) -> Tensor:
    """Return ``varlen_attention`` of query, key and value in one tensor [T, 3, H, E], which gets one gradient."""
    return _attention([qkv_T3HE], cu_seqlens, cu_seqlens, max_seqlen, *dropout_scalars(dropout))[0]


def unsupported_reasons(query_QHE: Tensor, key_THE: Tensor, value_THE: Tensor, *_: Any) -> list[str]:
    tensors = query_QHE, key_THE, value_THE
    reasons = tensor_reasons(*tensors) + mixed_reasons("query, key and value", *tensors)
    if query_QHE.shape[-1] not in _HEAD_SIZES:
        reasons.append(f"head size {query_QHE.shape[-1]}; expected one of {', '.join(map(str, _HEAD_SIZES))}")
    return reasons


def fused_reasons(qkv_T3HE: Tensor, *_: Any) -> list[str]:
    return unsupported_reasons(*qkv_T3HE.unbind(1))


def _parts(qkv: Sequence[Tensor]) -> list[Tensor]:
    """Return query, key and value. ``qkv`` has these three tensors, or one fused tensor [T, 3, H, E]."""
    return list(qkv[0].unbind(1) if len(qkv) == 1 else qkv)


# The schema of a custom op allows only tensors and plain numbers, so dropout is passed as ``dropout_scalars``.
@torch.library.custom_op("mlperf_bert::varlen_attention", mutates_args=())
def _attention(
    qkv: Sequence[Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,
    state: Tensor | None,
    threshold: int,
    kept_scale: float,
    stream: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dropout = state, threshold, kept_scale, stream
    return launch_forward(_parts(qkv), cu_seqlens_q, cu_seqlens_k, max_seqlen, *dropout)


@_attention.register_fake
def _(qkv: Sequence[Tensor], *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, _, max_seqlen, state, *_ = others
    query = _parts(qkv)[0]
    return query.new_empty(query.shape), *empty_saved(query, max_seqlen, state)


@torch.library.custom_op("mlperf_bert::varlen_attention_backward", mutates_args=())
def _attention_backward(
    output_gradient: Tensor,
    qkv: Sequence[Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    output: Tensor,
    lse: Tensor,
    kept: Tensor,
    max_seqlen: int,
    kept_scale: float,
) -> list[Tensor]:
    # The results must be contiguous, like the fake function's. empty_like would keep the order of an input's strides.
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in qkv]
    bounds = cu_seqlens_q, cu_seqlens_k
    launch_backward(output_gradient, _parts(qkv), output, lse, kept, _parts(gradients), *bounds, max_seqlen, kept_scale)
    return gradients


_attention_backward.register_fake(lambda _gradient, qkv, *_: [x.new_empty(x.shape) for x in qkv])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    qkv, cu_seqlens_q, cu_seqlens_k, max_seqlen, _state, _threshold, kept_scale, _stream = inputs
    ctx.save_for_backward(*qkv, cu_seqlens_q, cu_seqlens_k, *output)
    ctx.numbers = max_seqlen, kept_scale
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # otherwise autograd would create zero gradients for lse and kept


def _differentiate(ctx: Any, output_gradient: Tensor, *_: None) -> tuple[list[Tensor] | None, ...]:
    *qkv, cu_seqlens_q, cu_seqlens_k, output, lse, kept = ctx.saved_tensors
    saved = cu_seqlens_q, cu_seqlens_k, output, lse, kept
    return _attention_backward(output_gradient, qkv, *saved, *ctx.numbers), *(None,) * 7


_attention.register_autograd(_differentiate, setup_context=_save)
