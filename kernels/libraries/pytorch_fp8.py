# pyright: reportPrivateImportUsage=false
"""Scaled FP8 matrix products through PyTorch, that is cuBLASLt on a GPU.

Same contract as in ``kernels.reference.fp8``.
"""

import torch
from torch import Tensor

from kernels.reference.fp8 import ALIGNMENT, E4M3, E5M2, capability_reasons


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
    """``(a * inverse_a) @ (b * inverse_b).T + bias``: [M, N] in ``out_dtype``.

    Without ``use_fast_accum`` cuBLASLt adds up in fp32 outside of Hopper's tensor cores.
    """
    return torch._scaled_mm(
        a_MK,
        b_NK.t(),  # column-major, as cuBLASLt wants the right operand in FP8
        scale_a=inverse_a,
        scale_b=inverse_b,
        bias=None if bias_N is None else bias_N.detach().to(out_dtype),
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
        out=out_MN,
    )


def unsupported_reasons(
    a_MK: Tensor,
    b_NK: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    out_dtype: torch.dtype,
    bias_N: Tensor | None = None,
    use_fast_accum: bool = False,
    out_MN: Tensor | None = None,
) -> list[str]:
    """Say why these operands cannot be multiplied; empty when they can."""
    del use_fast_accum
    reasons = capability_reasons(a_MK.device)
    if out_MN is not None and not (out_MN.is_contiguous() and out_MN.dtype == out_dtype):
        reasons.append(f"{out_MN.dtype} to write {out_dtype} to, or not contiguous")
    # Both in E5M2 is what neither cuBLASLt nor the definition has.
    if {a_MK.dtype, b_NK.dtype} not in ({E4M3}, {E4M3, E5M2}):
        reasons.append(f"operands in {a_MK.dtype} and {b_NK.dtype}: expected E4M3, or one of E4M3 and one of E5M2")
    if (inverse_a.dtype, inverse_b.dtype) != (torch.float32, torch.float32):
        reasons.append(f"inverse scales in {inverse_a.dtype} and {inverse_b.dtype}, expected float32")
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        reasons.append(f"a product in {out_dtype}, expected bfloat16, float16 or float32")
    # PyTorch refuses a bias on an fp32 result.
    if bias_N is not None and out_dtype == torch.float32:
        reasons.append("a bias on a product in float32, expected bfloat16 or float16")
    # M may be anything: tokens of a micro-batch.
    if any(size % ALIGNMENT for size in (*b_NK.shape, a_MK.shape[1])):
        reasons.append(f"sizes {list(a_MK.shape)} by {list(b_NK.shape)}: N and K are not multiples of {ALIGNMENT}")
    if not (a_MK.is_contiguous() and b_NK.is_contiguous()):
        reasons.append("an operand that is not contiguous")
    return reasons
