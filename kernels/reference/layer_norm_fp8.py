"""The definition of dropout, residual and layer norm between products in FP8, forward and backward.

It computes ``kernels.reference.ops.dropout_add_layer_norm`` and its gradients, with FP8 casts for the products around it.
Two readers use the output, the next residual and products in FP8, and each of them returns a gradient.

Values are rounded to the type of the output, or of x, before ``cast_transpose_fp8``. None of these functions has a gradient.
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
    """Return ``layer_norm(residual + dropout(x + bias))`` [T, D], its means and reciprocal deviations, and two casts.

    The statistics are fp32 [2, T]. The casts are the output in E4M3 [T, D] and its transpose [D, padded(T)], or None without
    a scale.
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
    """Return all gradients for the output's gradient ``dy + shortcut_dy``: from products, and from the residual or None.

    They are x's in E5M2 [T, D] and its transpose [D, padded(T)], the residual's [T, D], and bias, weight and norm_bias [D].
    """
    dy_TD = dy_TD if shortcut_dy_TD is None else dy_TD + shortcut_dy_TD
    summed_TD = residual_TD + dropout_rows(x_TD + bias_D, dropout)
    mean_T1, rstd_T1 = statistics_2T[:, :, None]
    # bias_D stands in for the norm's bias, of which PyTorch uses only the shape and type.
    dsummed_TD, dweight_D, dnorm_bias_D = torch.ops.aten.native_layer_norm_backward(
        dy_TD.to(summed_TD.dtype), summed_TD, weight_D.shape, mean_T1, rstd_T1, weight_D, bias_D, [True, True, True]
    )
    dbiased_TD = dropout_rows(dsummed_TD, dropout)
    casts = cast_transpose_fp8(dbiased_TD.to(x_TD.dtype), scale, amax, E5M2)
    return *casts, dsummed_TD.to(residual_TD.dtype), dbiased_TD.sum(0).to(bias_D.dtype), dweight_D, dnorm_bias_D
