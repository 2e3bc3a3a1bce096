"""Reference implementation of self-attention between FP8 products, forward and backward.

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

    The last two tensors are saved for the backward pass of the same implementation. This implementation leaves them empty.
    """
    context_THE = varlen_self_attention(qkv_T3HE, cu_seqlens, max_seqlen, dropout)
    casts = cast_transpose_fp8(context_THE.flatten(1), scale, amax, E4M3)
    # The backward pass below recomputes the forward pass, so it needs neither the logarithms of softmax's sums nor masks.
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
    """Return the gradient of the packed input in E5M2 [T, 3HE], its transpose [3HE, padded(T)] and its column sums [3HE].

    ``gradient_THE`` is the output's gradient. ``context_THE``, ``lse_HT`` and ``kept`` were returned by the forward pass.
    """
    del context_THE, lse_HT, kept
    # Autograd disables gradients while it runs a backward pass.
    with torch.enable_grad():
        qkv_T3HE = qkv_T3HE.detach().requires_grad_()
        output_THE = varlen_self_attention(qkv_T3HE, cu_seqlens, max_seqlen, dropout)
    (qkv_gradient_T3HE,) = torch.autograd.grad(output_THE, qkv_T3HE, gradient_THE)
    # The column sums are taken before rounding, so that the bias gradient does not have the error of E5M2.
    return cast_transpose_sum_fp8(qkv_gradient_T3HE.flatten(1), scale, amax, E5M2)
