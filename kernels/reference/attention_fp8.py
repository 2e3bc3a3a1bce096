"""The definition of self-attention between products in FP8, forward and backward.

It computes ``kernels.reference.ops.varlen_self_attention`` and its gradient, and casts both to FP8 for the next products.
None of these functions has a gradient.
"""

import torch
from torch import Tensor

from kernels.reference.fp8 import E4M3, E5M2, cast_transpose_fp8, cast_transpose_sum_fp8
from kernels.reference.ops import varlen_self_attention
from kernels.reference.random import Dropout


def attention_cast_fp8(
    qkv_T3HE: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: Dropout | None, scale: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``varlen_self_attention`` [T, H, E], its cast to E4M3 [T, HE], the transpose [HE, padded(T)], and two tensors.

    The two tensors are for the backward pass of the same implementation. The definition does not need them.
    """
    context_THE = varlen_self_attention(qkv_T3HE, cu_seqlens, max_seqlen, dropout)
    casts = cast_transpose_fp8(context_THE.flatten(1), scale, amax, E4M3)
    # The definition computes the forward pass again instead of keeping log-sums and masks.
    return context_THE, *casts, context_THE.new_empty(0), context_THE.new_empty(0)


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
    """Return the gradient of query, key and value in E5M2 [T, 3HE], its transpose [3HE, padded(T)] and its sums [3HE].

    ``gradient_THE`` is the output's gradient. ``context_THE``, ``lse_HT`` and ``kept`` are what the forward pass returned.
    """
    del context_THE, lse_HT, kept
    # A backward pass calls this, with gradients off.
    with torch.enable_grad():
        qkv_T3HE = qkv_T3HE.detach().requires_grad_()
        output_THE = varlen_self_attention(qkv_T3HE, cu_seqlens, max_seqlen, dropout)
    (qkv_gradient_T3HE,) = torch.autograd.grad(output_THE, qkv_T3HE, gradient_THE)
    # Sums before rounding: the bias gradient must not have the error of E5M2.
    return cast_transpose_sum_fp8(qkv_gradient_T3HE.flatten(1), scale, amax, E5M2)
