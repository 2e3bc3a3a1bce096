"""FP8 with one scale a tensor: the definitions of the casts, of the scaled matrix product and of delayed scaling.

Forward values take E4M3 and gradients E5M2 (Micikevicius et al. 2022, arXiv 2209.05433). A tensor x is stored as
``q = x * scale`` rounded to nearest even; what lies beyond the largest finite value becomes that value. Every cast also
raises ``amax`` in place to the largest magnitude it has seen, so that the next step's scale follows from it on the device
and nothing is read by the host. Scales are powers of two: they and their inverses add no rounding of their own.

Shape legend in ``kernels/__init__.py``; besides, R rows, C columns, and a product's M, N and K. ``scale``, ``amax`` and
``inverse_*`` are fp32 tensors of no dimension on the device of the others. Inputs are taken in fp32, or in fp64 where they
are fp64. A transposed result holds ``padded(R)`` columns, the ones after R being zeros: scaled matrix products contract over
multiples of 16. None of these functions has a gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
"""Largest finite value."""

HEADROOM_BITS = {E4M3: 2, E5M2: 4}
"""How much larger than in the step before a tensor may become until it saturates: fourfold, and sixteenfold for gradients.

A gradient's largest magnitude at times grows ninefold in one step, that of inputs and weights by less than a third. The
price is paid by what is too small, and is nothing as long as the largest magnitude is below some 2^10 (E4M3) or 2^20 (E5M2)
deviations.
"""

ALIGNMENT = 16
"""What the sizes of scaled matrix products are multiples of."""

_MANTISSA_BITS, _EXPONENT_BIAS = 23, 127
"""Of fp32."""


def padded(rows: int) -> int:
    """The next multiple of 16: the length of a transposed result's rows."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


def largest_scaled(dtype: torch.dtype) -> float:
    """Return what the largest magnitude of the step before may be scaled to: ``LARGEST`` less the headroom."""
    return LARGEST[dtype] / 2 ** HEADROOM_BITS[dtype]


def capability_reasons(device: torch.device) -> list[str]:
    """Say why a GPU cannot do FP8, or nothing; nothing too for fake tensors on a machine without a GPU to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return []
    capability = torch.cuda.get_device_capability(device)
    return [] if capability >= (8, 9) else [f"compute capability {capability[0]}.{capability[1]}, FP8 needs 8.9"]


def cast_fp8(x_RC: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * scale`` in ``dtype``, E4M3 or E5M2: [R, C].

    Infinities become the largest finite value, as everything beyond it does; NaN stays NaN. In place
    ``amax = max(amax, max |x|)``: an infinity or a NaN in x makes it so, and thus a bad step is seen.
    """
    x_RC = _full(x_RC)
    # amax has no value for an empty tensor; 0 leaves the old one.
    largest = x_RC.abs().amax() if x_RC.numel() else x_RC.new_zeros(())
    torch.maximum(amax, largest, out=amax)  # hands a NaN on, as fmax would not
    # Clamped, since PyTorch's cast makes infinity of what lies beyond E5M2.
    return (x_RC * scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def cast_transpose_fp8(x_RC: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``cast_fp8``, and the same transposed: [R, C] and [C, padded(R)]. C is a multiple of 16."""
    q_RC = cast_fp8(x_RC, scale, amax, dtype)
    rows = len(q_RC)
    # Contiguous, as scaled products ask for; zeros add nothing to them.
    return q_RC, F.pad(q_RC.t(), (0, padded(rows) - rows)).contiguous()


def cast_transpose_into_fp8(x_RC: Tensor, scale: Tensor, amax: Tensor, q_RC: Tensor, q_CR: Tensor) -> None:
    """``cast_transpose_fp8`` into tensors that are there, in whose type; both are contiguous."""
    for kept, cast in zip((q_RC, q_CR), cast_transpose_fp8(x_RC, scale, amax, q_RC.dtype), strict=True):
        kept.copy_(cast)


def cast_transpose_sum_fp8(
    x_RC: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """``cast_transpose_fp8``, and the sums of x's columns, fp32 [C]: a bias gradient."""
    return *cast_transpose_fp8(x_RC, scale, amax, dtype), _full(x_RC).sum(0)


def bias_gelu_cast_fp8(product_TF: Tensor, bias_F: Tensor, scale: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 of ``gelu(product + bias)`` in the tanh form, and the same transposed: [T, F] and [F, padded(T)]."""
    y_TF = _full(product_TF) + _full(bias_F)
    return cast_transpose_fp8(F.gelu(y_TF, approximate="tanh"), scale, amax, E4M3)


def bias_gelu_backward_cast_fp8(
    output_gradient_TF: Tensor, product_TF: Tensor, bias_F: Tensor, scale: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """E5M2 of the gradient of ``product`` in ``gelu(product + bias)``, the same transposed, and the bias gradient.

    Shapes [T, F], [F, padded(T)] and fp32 [F]; the bias gradient sums what has not been rounded to E5M2.
    """
    y_TF = _full(product_TF) + _full(bias_F)
    # PyTorch's own derivative, so that the definition has no formula of its own to be wrong.
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
    """``(a * inverse_a) @ (b * inverse_b).T``, accumulated in fp32, plus the bias: [M, N] in ``out_dtype``.

    It is written to ``out_MN`` where one is given, of that type and contiguous.

    a and b are E4M3 or E5M2, not both E5M2, and the inverses are 1 / scale. N and K are multiples of 16. The bias may have
    any floating-point type and counts as rounded to ``out_dtype``. With ``use_fast_accum`` an implementation may leave the
    sum to tensor cores that keep about 14 bits of it.
    """
    del use_fast_accum
    # Autocast would bring the operands, which are fp32 by now, back to 16 bits.
    with torch.autocast(a_MK.device.type, enabled=False):
        # FP8 values are exact in fp32, so that the sum alone rounds.
        product_MN = (a_MK.float() * inverse_a) @ (b_NK.float() * inverse_b).t()
        if bias_N is not None:
            product_MN = product_MN + bias_N.detach().to(out_dtype)
        return product_MN.to(out_dtype) if out_MN is None else out_MN.copy_(product_MN)


def new_scales(amax_N: Tensor, scale_N: Tensor, largest_N: Tensor) -> Tensor:
    """The next step's scales, fp32 [N]: the largest powers of two with ``scale * amax <= largest``.

    Where ``amax`` is 0 or not finite the old scale stays. Scale and inverse are kept normal numbers, from 2^-126 to 2^126.
    All are fp32 [N]; ``largest_N`` is each tensor's ``largest_scaled``. Integers alone decide, so that the result is exact.
    """
    amax_fraction_N, amax_exponent_N = torch.frexp(amax_N)
    largest_fraction_N, largest_exponent_N = torch.frexp(largest_N)
    # Fractions are from 0.5 to 1: where amax has the larger one, one power less is the last that keeps below the limit.
    exponent_N = largest_exponent_N - amax_exponent_N - (amax_fraction_N > largest_fraction_N).int()
    exponent_N = exponent_N.clamp(1 - _EXPONENT_BIAS, _EXPONENT_BIAS - 1)
    # Shifted into the exponent's bits: integers alone, and so exact.
    power_N = ((exponent_N + _EXPONENT_BIAS) << _MANTISSA_BITS).view(torch.float32)  # 2^exponent by its bits
    return torch.where(amax_N.isfinite() & (amax_N > 0), power_N, scale_N)


def _full(x: Tensor) -> Tensor:
    """Return ``x`` in at least fp32, without autograd."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))
