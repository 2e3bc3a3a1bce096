# pyright: reportPrivateImportUsage=false
"""Scaled FP8 matrix products by PyTorch (cuBLASLt on a GPU), with the same contract as in ``kernels.reference.fp8``."""

from typing import Any

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
    """Return ``(a * inverse_a) @ (b * inverse_b).T + bias``, [M, N] in ``out_dtype``.

    Hopper's tensor cores keep only about 14 bits of a sum. Without ``use_fast_accum``, cuBLASLt adds their partial sums
    in fp32 outside of the tensor cores.
    """
    return torch._scaled_mm(
        a_MK,
        b_NK.t(),  # cuBLASLt requires a column-major right operand in FP8
        scale_a=inverse_a,
        scale_b=inverse_b,
        bias=None if bias_N is None else bias_N.detach().to(out_dtype),
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
        out=out_MN,
    )


def unsupported_reasons(
    a_MK: Tensor, b_NK: Tensor, _inverse_a: Tensor, _inverse_b: Tensor, out_dtype: torch.dtype, *_: Any, **__: Any
) -> list[str]:
    reasons = capability_reasons(a_MK.device)
    if {a_MK.dtype, b_NK.dtype} not in ({E4M3}, {E4M3, E5M2}):
        reasons.append(f"operands in {a_MK.dtype} and {b_NK.dtype}: expected E4M3, or one of E4M3 and one of E5M2")
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        reasons.append(f"a product in {out_dtype}, expected bfloat16, float16 or float32")
    # M, the number of tokens in a micro-batch, need not be a multiple of ALIGNMENT.
    if any(size % ALIGNMENT for size in (*b_NK.shape, a_MK.shape[1])):
        reasons.append(f"sizes {list(a_MK.shape)} by {list(b_NK.shape)}: N and K are not multiples of {ALIGNMENT}")
    return reasons
