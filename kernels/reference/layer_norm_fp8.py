"""Reference implementation of dropout, residual and layer norm between FP8 products, forward and backward.

It computes ``kernels.reference.ops.dropout_add_layer_norm`` and its gradients, and casts results to FP8 for the
neighbouring products. Both the next residual connection and the next FP8 products use the output, so its gradient is a
sum of two parts.

Before the cast to FP8, values are rounded to the type of the output in the forward pass, and to the type of x in the
backward pass. None of these functions has a gradient.
"""

import torch
from torch import Tensor

from kernels.reference.fp8 import E4M3, E5M2, cast_transpose_fp8
from kernels.reference.ops import dropout_rows
from kernels.reference.random import Dropout


def add_norm_cast_fp8(
    x_TD: Tensor,
    bias_D: Tensor,
    residual_TD: Tensor,
    weight_D: Tensor,
    norm_bias_D: Tensor,
    eps: float,
    dropout: Dropout | None,
    scale: Tensor | None,
    amax: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return ``layer_norm(residual + dropout(x + bias))`` [T, D], its statistics, and two FP8 casts.

    The statistics, fp32 [2, T], are means and reciprocal standard deviations. The casts are the output in E4M3 [T, D] and
    its transpose [D, padded(T)], or None if ``scale`` is None.
    """
    summed_TD = residual_TD + dropout_rows(x_TD + bias_D, dropout)
    y_TD, *statistics_T1 = torch.native_layer_norm(summed_TD, weight_D.shape, weight_D, norm_bias_D, eps)
    statistics_2T = torch.stack([each_T1.flatten() for each_T1 in statistics_T1])
    if scale is None or amax is None:
        return y_TD, statistics_2T, None, None
    return y_TD, statistics_2T, *cast_transpose_fp8(y_TD, scale, amax, E4M3)


def add_norm_backward_cast_fp8(
    dy_TD: Tensor,
    shortcut_dy_TD: Tensor | None,
    x_TD: Tensor,
    bias_D: Tensor,
    residual_TD: Tensor,
    weight_D: Tensor,
    statistics_2T: Tensor,
    dropout: Dropout | None,
    scale: Tensor,
    amax: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return all gradients for the output's gradient ``dy + shortcut_dy``.

    ``dy`` comes from the next products and ``shortcut_dy`` from the next residual connection; the latter may be None. The
    results are the gradient of x in E5M2 [T, D] and its transpose [D, padded(T)], the gradient of the residual [T, D], and
    the gradients of bias, weight and norm_bias, each [D].
    """
    dy_TD = dy_TD if shortcut_dy_TD is None else dy_TD + shortcut_dy_TD
    summed_TD = residual_TD + dropout_rows(x_TD + bias_D, dropout)
    mean_T1, rstd_T1 = statistics_2T[:, :, None]
    # Pass bias_D in place of the norm's bias, because PyTorch uses only its shape and type.
    dsummed_TD, dweight_D, dnorm_bias_D = torch.ops.aten.native_layer_norm_backward(
        dy_TD.to(summed_TD.dtype), summed_TD, weight_D.shape, mean_T1, rstd_T1, weight_D, bias_D, [True, True, True]
    )
    dbiased_TD = dropout_rows(dsummed_TD, dropout)
    casts = cast_transpose_fp8(dbiased_TD.to(x_TD.dtype), scale, amax, E5M2)
    return *casts, dsummed_TD.to(residual_TD.dtype), dbiased_TD.sum(0).to(bias_D.dtype), dweight_D, dnorm_bias_D
