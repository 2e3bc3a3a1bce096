"""FP8 with one scale per tensor: reference implementations of casts, products, ops between products and delayed scaling.

Forward values use E4M3 and gradients use E5M2 (Micikevicius et al. 2022, arXiv 2209.05433). A tensor x is stored as
``q = x * scale``, rounded to nearest even and saturated at the largest finite value. Every cast also raises ``amax`` in
place to the largest magnitude so far. The device computes the next step's scale from ``amax`` without copying ``amax``
to the host. Scales are powers of two, so that scales and their inverses add no rounding error.

Shape legend in ``kernels/__init__.py``; in addition, R rows, C columns, and M, N and K of a matrix product. ``scale``,
``amax`` and ``inverse_*`` are fp32 tensors [] on the device of the other tensors. Inputs are converted to fp32, unless they
are fp64. A transposed result has ``padded(R)`` columns, with zeros from column R on, because the inner dimension of a scaled
product must be a multiple of 16. None of these functions has a gradient.

The ops between products are GELU, self-attention, and dropout with residual and layer norm. They compute ops of
``kernels.reference.ops`` or their gradients, and cast results to FP8 for the neighbouring products. Before this cast, the
layer norm rounds values to the type of the output in the forward pass, and to the type of x in the backward pass.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import op
from kernels.reference.ops import dropout_rows, varlen_self_attention
from kernels.reference.random import Dropout

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
"""Largest finite value of each type."""

HEADROOM_BITS = {E4M3: 2, E5M2: 4}
"""Bits of headroom for growth from one step to the next: forward values may grow by a factor of 4 before they saturate, and
gradients by a factor of 16.

In practice, the largest magnitude of a gradient sometimes grows by a factor of 9 in one step, and the largest magnitude of
inputs and weights by less than a third.
"""

ALIGNMENT = 16
"""The dimensions N and K of scaled matrix products must be multiples of this."""

_MANTISSA_BITS, _EXPONENT_BIAS = 23, 127  # the format of fp32


def padded(rows: int) -> int:
    """Return the row length of a transposed result: ``rows`` rounded up to a multiple of 16."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


def largest_scaled(dtype: torch.dtype) -> float:
    """Return the limit of ``scale * amax``: the largest finite value of ``dtype``, divided by the headroom."""
    return LARGEST[dtype] / 2 ** HEADROOM_BITS[dtype]


def capability_reasons(device: torch.device) -> list[str]:
    """Return the reasons why a GPU cannot compute in FP8, or an empty list.

    The list is also empty for a CPU, and for fake tensors on a machine without a GPU.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return []
    capability = torch.cuda.get_device_capability(device)
    return [] if capability >= (8, 9) else [f"compute capability {capability[0]}.{capability[1]}, FP8 needs 8.9"]


@op
def cast_fp8(x_RC: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x * scale`` in ``dtype``, E4M3 or E5M2: [R, C].

    Infinities and other values that are too large become the largest finite value, and NaN stays NaN. ``amax`` is set to
    ``max(amax, max |x|)`` in place. If x contains an infinity or NaN, ``amax`` becomes infinite or NaN, so that a bad step
    can be detected.
    """
    x_RC = _full(x_RC)
    # Tensor.amax raises an error for an empty tensor.
    largest = x_RC.abs().amax() if x_RC.numel() else x_RC.new_zeros(())
    torch.maximum(amax, largest, out=amax)  # unlike fmax, maximum propagates NaN
    # Clamp first, because PyTorch's cast to E5M2 turns values that are too large into infinities.
    return (x_RC * scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


@op
def cast_transpose_fp8(x_RC: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``cast_fp8`` [R, C] and its transpose [C, padded(R)]. C must be a multiple of 16."""
    q_RC = cast_fp8.definition(x_RC, scale, amax, dtype)
    rows = len(q_RC)
    # Scaled products need contiguous operands.
    return q_RC, F.pad(q_RC.t(), (0, padded(rows) - rows)).contiguous()


@op
def cast_transpose_into_fp8(x_RC: Tensor, scale: Tensor, amax: Tensor, q_RC: Tensor, q_CR: Tensor) -> None:
    """Write the results of ``cast_transpose_fp8`` to the contiguous tensors ``q_RC`` and ``q_CR``, in their type."""
    for kept, cast in zip((q_RC, q_CR), cast_transpose_fp8.definition(x_RC, scale, amax, q_RC.dtype), strict=True):
        kept.copy_(cast)


@op
def cast_transpose_sum_fp8(
    x_RC: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of ``cast_transpose_fp8`` and the column sums of x, fp32 [C], which are a bias gradient."""
    return *cast_transpose_fp8.definition(x_RC, scale, amax, dtype), _full(x_RC).sum(0)


@op
def bias_gelu_cast_fp8(product_TF: Tensor, bias_F: Tensor, scale: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``gelu(product + bias)`` in the tanh form, cast to E4M3 [T, F], and its transpose [F, padded(T)]."""
    y_TF = _full(product_TF) + _full(bias_F)
    return cast_transpose_fp8.definition(F.gelu(y_TF, approximate="tanh"), scale, amax, E4M3)


@op
def bias_gelu_backward_cast_fp8(
    output_gradient_TF: Tensor, product_TF: Tensor, bias_F: Tensor, scale: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``product`` and ``bias`` in ``gelu(product + bias)``.

    The results are product's gradient in E5M2 [T, F], its transpose [F, padded(T)], and bias's gradient, fp32 [F], which is
    the sum of values before rounding to E5M2.
    """
    y_TF = _full(product_TF) + _full(bias_F)
    gradient_TF = torch.ops.aten.gelu_backward(_full(output_gradient_TF), y_TF, approximate="tanh")
    return cast_transpose_sum_fp8.definition(gradient_TF, scale, amax, E5M2)


@op
def attention_cast_fp8(
    qkv_T3HE: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: Dropout | None, scale: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``varlen_self_attention`` [T, H, E], its cast to E4M3 [T, HE], the transpose [HE, padded(T)], and two tensors.

    The last two tensors are saved for the backward pass of the same implementation. This implementation leaves them empty.
    """
    context_THE = varlen_self_attention.definition(qkv_T3HE, cu_seqlens, max_seqlen, dropout)
    casts = cast_transpose_fp8.definition(context_THE.flatten(1), scale, amax, E4M3)
    # The two tensors for the backward pass are empty, because the backward pass below recomputes the forward pass.
    return context_THE, *casts, context_THE.new_empty(0), context_THE.new_empty(0)


@op
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
    """Return the gradient of ``qkv`` in E5M2 [T, 3HE], its transpose [3HE, padded(T)] and its column sums [3HE].

    ``gradient_THE`` is the output's gradient. ``context_THE``, ``lse_HT`` and ``kept`` were returned by the forward pass.
    """
    del context_THE, lse_HT, kept
    # Enable gradients, which autograd disables while it runs a backward pass.
    with torch.enable_grad():
        qkv_T3HE = qkv_T3HE.detach().requires_grad_()
        output_THE = varlen_self_attention.definition(qkv_T3HE, cu_seqlens, max_seqlen, dropout)
    (qkv_gradient_T3HE,) = torch.autograd.grad(output_THE, qkv_T3HE, gradient_THE)
    # The column sums are taken before rounding, so that the bias gradient does not have the error of E5M2.
    return cast_transpose_sum_fp8.definition(qkv_gradient_T3HE.flatten(1), scale, amax, E5M2)


@op
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
    return y_TD, statistics_2T, *cast_transpose_fp8.definition(y_TD, scale, amax, E4M3)


@op
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
    """Return the gradients of all inputs, given the output's gradient ``dy + shortcut_dy``.

    ``dy`` comes from the next products and ``shortcut_dy`` from the next residual connection; the latter may be None. The
    results are the gradient of x in E5M2 [T, D] and its transpose [D, padded(T)], the gradient of the residual [T, D], and
    the gradients of bias, weight and norm_bias, each [D].
    """
    dy_TD = dy_TD if shortcut_dy_TD is None else dy_TD + shortcut_dy_TD
    summed_TD = residual_TD + dropout_rows(x_TD + bias_D, dropout)
    mean_T1, rstd_T1 = statistics_2T[:, :, None]
    # Pass bias_D in place of the norm's bias, because PyTorch uses only this argument's shape and type.
    dsummed_TD, dweight_D, dnorm_bias_D = torch.ops.aten.native_layer_norm_backward(
        dy_TD.to(summed_TD.dtype), summed_TD, weight_D.shape, mean_T1, rstd_T1, weight_D, bias_D, [True, True, True]
    )
    dbiased_TD = dropout_rows(dsummed_TD, dropout)
    casts = cast_transpose_fp8.definition(dbiased_TD.to(x_TD.dtype), scale, amax, E5M2)
    return *casts, dsummed_TD.to(residual_TD.dtype), dbiased_TD.sum(0).to(bias_D.dtype), dweight_D, dnorm_bias_D


@op
def scaled_matmul(
    a_MK: Tensor,
    b_NK: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    out_dtype: torch.dtype,
    bias_N: Tensor | None = None,
    use_fast_accum: bool = False,
    out_MN: Tensor | None = None,
) -> Tensor:
    """Return ``(a * inverse_a) @ (b * inverse_b).T``, accumulated in fp32, plus the bias: [M, N] in ``out_dtype``.

    If ``out_MN`` is given, the result is written to it. It must be contiguous and have the type ``out_dtype``.

    a and b are E4M3 or E5M2, but not both E5M2, and the inverses are 1 / scale. N and K are multiples of 16. The bias may
    have any floating-point type and is rounded to ``out_dtype``. With ``use_fast_accum``, an implementation may accumulate
    in tensor cores that keep only about 14 bits of the sum.
    """
    del use_fast_accum
    # Turn autocast off, because it would convert the fp32 operands back to 16 bits.
    with torch.autocast(a_MK.device.type, enabled=False):
        product_MN = (a_MK.float() * inverse_a) @ (b_NK.float() * inverse_b).t()
        if bias_N is not None:
            product_MN = product_MN + bias_N.detach().to(out_dtype)
        return product_MN.to(out_dtype) if out_MN is None else out_MN.copy_(product_MN)


def new_scales(amax_N: Tensor, scale_N: Tensor, largest_N: Tensor) -> Tensor:
    """Return the next step's scales, fp32 [N]: the largest powers of two with ``scale * amax <= largest``.

    If ``amax`` is 0 or not finite, the old scale is kept. Scales are at most 2^126, so that their inverses are normal
    numbers. All arguments are fp32 [N]; ``largest_N`` is ``largest_scaled`` of each tensor's type.
    Integer arithmetic makes the result exact.
    """
    amax_fraction_N, amax_exponent_N = torch.frexp(amax_N)
    largest_fraction_N, largest_exponent_N = torch.frexp(largest_N)
    # Fractions are from 0.5 to below 1. If the fraction of amax is the larger one, lower the scale's exponent by 1.
    exponent_N = largest_exponent_N - amax_exponent_N - (amax_fraction_N > largest_fraction_N).int()
    exponent_N = exponent_N.clamp(max=_EXPONENT_BIAS - 1)
    power_N = ((exponent_N + _EXPONENT_BIAS) << _MANTISSA_BITS).view(torch.float32)  # build 2^exponent from its bits
    return torch.where(amax_N.isfinite() & (amax_N > 0), power_N, scale_N)


def _full(x: Tensor) -> Tensor:
    """Return ``x`` detached and in at least fp32."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))
