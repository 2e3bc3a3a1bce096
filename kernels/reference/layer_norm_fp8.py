"""The definition of dropout, residual and layer norm between products in FP8, forward and backward.

As ``kernels.reference.ops.dropout_add_layer_norm`` and its gradients, with what the products around it want of them. The
output is read twice: as the next residual, and by products that take it in FP8. Both readers have a gradient of it.

Casts are of what has been rounded to the type of the output, or of x: they are those of ``cast_transpose_fp8``. None of
these functions has a gradient.
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
    """``layer_norm(residual + dropout(x + bias))`` [T, D], fp32 [2, T] means and reciprocal deviations, and two casts.

    These are the output in E4M3 [T, D] and its transpose [D, padded(T)]; None without a scale, where no product in FP8 reads
    it.
    """
    summed_TD = residual_TD + dropout_rows(x_TD + bias_D, dropout)
    # native_layer_norm returns the statistics that its backward pass needs; F.layer_norm does not.
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
    """Gradients for that of the output, ``dy + shortcut_dy``: of products and of the residual branch, which may be None.

    Returns x's in E5M2 [T, D] and its transpose [D, padded(T)], the residual's [T, D], and [D] of bias, weight, norm_bias.
    """
    dy_TD = dy_TD if shortcut_dy_TD is None else dy_TD + shortcut_dy_TD
    # Drawn again from the counter: no mask was kept.
    summed_TD = residual_TD + dropout_rows(x_TD + bias_D, dropout)
    mean_T1, rstd_T1 = statistics_2T[:, :, None]
    # bias_D stands for the norm's bias, of which only shape and type count.
    dsummed_TD, dweight_D, dnorm_bias_D = torch.ops.aten.native_layer_norm_backward(
        dy_TD.to(summed_TD.dtype), summed_TD, weight_D.shape, mean_T1, rstd_T1, weight_D, bias_D, [True, True, True]
    )
    # Dropout's backward is the same mask and scale on the gradient.
    dbiased_TD = dropout_rows(dsummed_TD, dropout)
    # Rounded to x's type first: other implementations cast what they have stored.
    casts = cast_transpose_fp8(dbiased_TD.to(x_TD.dtype), scale, amax, E5M2)
    return *casts, dsummed_TD.to(residual_TD.dtype), dbiased_TD.sum(0).to(bias_D.dtype), dweight_D, dnorm_bias_D
