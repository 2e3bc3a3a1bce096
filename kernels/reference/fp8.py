"""FP8 with one scale a tensor: the definitions of the casts, of the scaled matrix product and of delayed scaling.

Forward values use E4M3 and gradients E5M2 (Micikevicius et al. 2022, arXiv 2209.05433). A tensor x is stored as
``q = x * scale`` rounded to nearest even; values beyond the largest finite value become that value. Every cast also raises
``amax`` in place to the largest magnitude it has seen. The device computes the next step's scale from it, and the host reads
nothing. Scales are powers of two: they and their inverses add no rounding error.

Shape legend in ``kernels/__init__.py``; besides, R rows, C columns, and a product's M, N and K. ``scale``, ``amax`` and
``inverse_*`` are fp32 tensors [] on the device of the other tensors. Inputs are converted to fp32, unless they are fp64. A
transposed result has ``padded(R)`` columns, with zeros after column R, because scaled products contract over multiples of
16. None of these functions has a gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
"""Largest finite value."""

HEADROOM_BITS = {E4M3: 2, E5M2: 4}
"""Bits of headroom: a tensor may grow fourfold from one step to the next before it saturates, a gradient sixteenfold.

A gradient's largest magnitude at times grows ninefold in one step; the largest magnitude of inputs and weights grows by less
than a third.
"""

ALIGNMENT = 16
"""Sizes of scaled matrix products are multiples of this."""

_MANTISSA_BITS, _EXPONENT_BIAS = 23, 127  # of fp32


def padded(rows: int) -> int:
    """Return the next multiple of 16, the length of a transposed result's rows."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


def largest_scaled(dtype: torch.dtype) -> float:
    """Return the value to which the last step's largest magnitude may be scaled: ``LARGEST`` divided by the headroom."""
    return LARGEST[dtype] / 2 ** HEADROOM_BITS[dtype]


def capability_reasons(device: torch.device) -> list[str]:
    """Return the reasons why a GPU cannot compute in FP8; empty if it can, on a CPU, and for fake tensors without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return []
    capability = torch.cuda.get_device_capability(device)
    return [] if capability >= (8, 9) else [f"compute capability {capability[0]}.{capability[1]}, FP8 needs 8.9"]


def cast_fp8(x_RC: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x * scale`` in ``dtype``, E4M3 or E5M2: [R, C].

    Infinities and values beyond the largest finite value become that value; NaN stays NaN. ``amax`` becomes
    ``max(amax, max |x|)`` in place. An infinity or a NaN in x makes it infinite or NaN, so that a bad step can be detected.
    """
    x_RC = _full(x_RC)
    # Tensor.amax fails for an empty tensor.
    largest = x_RC.abs().amax() if x_RC.numel() else x_RC.new_zeros(())
    torch.maximum(amax, largest, out=amax)  # propagates NaN, which fmax does not
    # PyTorch's own cast to E5M2 makes infinities of larger values.
    return (x_RC * scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def cast_transpose_fp8(x_RC: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``cast_fp8`` [R, C] and its transpose [C, padded(R)]. C is a multiple of 16."""
    q_RC = cast_fp8(x_RC, scale, amax, dtype)
    rows = len(q_RC)
    # Scaled products need contiguous operands.
    return q_RC, F.pad(q_RC.t(), (0, padded(rows) - rows)).contiguous()


def cast_transpose_into_fp8(x_RC: Tensor, scale: Tensor, amax: Tensor, q_RC: Tensor, q_CR: Tensor) -> None:
    """Write ``cast_transpose_fp8`` to contiguous tensors, in their type."""
    for kept, cast in zip((q_RC, q_CR), cast_transpose_fp8(x_RC, scale, amax, q_RC.dtype), strict=True):
        kept.copy_(cast)


def cast_transpose_sum_fp8(
    x_RC: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``cast_transpose_fp8`` and the sums of x's columns, fp32 [C], which are a bias gradient."""
    return *cast_transpose_fp8(x_RC, scale, amax, dtype), _full(x_RC).sum(0)


def bias_gelu_cast_fp8(product_TF: Tensor, bias_F: Tensor, scale: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``gelu(product + bias)`` in the tanh form, in E4M3 [T, F], and its transpose [F, padded(T)]."""
    y_TF = _full(product_TF) + _full(bias_F)
    return cast_transpose_fp8(F.gelu(y_TF, approximate="tanh"), scale, amax, E4M3)


def bias_gelu_backward_cast_fp8(
    output_gradient_TF: Tensor, product_TF: Tensor, bias_F: Tensor, scale: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of ``product`` in ``gelu(product + bias)`` in E5M2, its transpose, and the bias gradient.

    Shapes [T, F], [F, padded(T)] and fp32 [F]. The bias gradient sums values that have not been rounded to E5M2.
    """
    y_TF = _full(product_TF) + _full(bias_F)
    gradient_TF = torch.ops.aten.gelu_backward(_full(output_gradient_TF), y_TF, approximate="tanh")
    return cast_transpose_sum_fp8(gradient_TF, scale, amax, E5M2)


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

    The result is written to ``out_MN`` if it is given; it has that type and is contiguous.

    a and b are E4M3 or E5M2, not both E5M2, and the inverses are 1 / scale. N and K are multiples of 16. The bias may have
    any floating-point type and is rounded to ``out_dtype``. With ``use_fast_accum`` an implementation may leave the sum to
    tensor cores that keep about 14 bits of it.
    """
    del use_fast_accum
    # Autocast would convert the fp32 operands back to 16 bits.
    with torch.autocast(a_MK.device.type, enabled=False):
        product_MN = (a_MK.float() * inverse_a) @ (b_NK.float() * inverse_b).t()
        if bias_N is not None:
            product_MN = product_MN + bias_N.detach().to(out_dtype)
        return product_MN.to(out_dtype) if out_MN is None else out_MN.copy_(product_MN)


def new_scales(amax_N: Tensor, scale_N: Tensor, largest_N: Tensor) -> Tensor:
    """Return the next step's scales, fp32 [N]: the largest powers of two with ``scale * amax <= largest``.

    If ``amax`` is 0 or not finite, the old scale stays. Scale and inverse stay normal numbers, from 2^-126 to 2^126. All
    arguments are fp32 [N]; ``largest_N`` is each tensor's ``largest_scaled``. Integer arithmetic makes the result exact.
    """
    amax_fraction_N, amax_exponent_N = torch.frexp(amax_N)
    largest_fraction_N, largest_exponent_N = torch.frexp(largest_N)
    # Fractions lie between 0.5 and 1. If amax has the larger fraction, the exponent is one less.
    exponent_N = largest_exponent_N - amax_exponent_N - (amax_fraction_N > largest_fraction_N).int()
    exponent_N = exponent_N.clamp(1 - _EXPONENT_BIAS, _EXPONENT_BIAS - 1)
    power_N = ((exponent_N + _EXPONENT_BIAS) << _MANTISSA_BITS).view(torch.float32)  # 2^exponent by its bits
    return torch.where(amax_N.isfinite() & (amax_N > 0), power_N, scale_N)


def _full(x: Tensor) -> Tensor:
    """Return ``x`` detached and in at least fp32."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))
