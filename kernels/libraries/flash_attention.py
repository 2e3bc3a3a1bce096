"""Attention by the package flash-attn (Dao 2023, arXiv 2307.08691), if it is installed.

The functions have the same contracts as in ``kernels.reference.ops``, except that the package draws the dropout mask. The
calls follow version 2 of the package. They have not run on a GPU as part of this project.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.reference.random import Dropout


def varlen_attention(
    query_QHE: Tensor,
    key_THE: Tensor,
    value_THE: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,
    dropout: Dropout | None = None,
) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    output_QHE = flash_attn_varlen_func(
        _owned_rows(query_QHE, cu_seqlens_q),
        _owned_rows(key_THE, cu_seqlens_k),
        _owned_rows(value_THE, cu_seqlens_k),
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen,
        max_seqlen,
        dropout_p=0.0 if dropout is None else dropout.p,
    )
    return _owned_rows(output_QHE, cu_seqlens_q)


def varlen_self_attention(
    qkv_T3HE: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: Dropout | None = None
) -> Tensor:
    from flash_attn import flash_attn_varlen_qkvpacked_func  # pyright: ignore[reportMissingImports]

    output_THE = flash_attn_varlen_qkvpacked_func(
        _owned_rows(qkv_T3HE, cu_seqlens), cu_seqlens, max_seqlen, dropout_p=0.0 if dropout is None else dropout.p
    )
    return _owned_rows(output_THE, cu_seqlens)


def _owned_rows(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return ``x`` with zeros in the rows after the last sequence, and in the same rows of its gradient.

    The library leaves these rows uninitialized in the output and in the gradients.
    """
    # Compare on the device. If the host read the last bound, it would have to wait, and no CUDA graph could capture the
    # step.
    owned = torch.arange(len(x), device=x.device) < cu_seqlens[-1]
    # Multiplying by the mask would keep NaN, so select with ``where``.
    return torch.where(owned.view(-1, *(1,) * (x.dim() - 1)), x, 0.0)


def unsupported_reasons(query_QHE: Tensor, *_: Any, **__: Any) -> list[str]:
    """Check whether the package supports the query, or self-attention's fused tensor [T, 3, H, E]."""
    reasons = [] if query_QHE.is_cuda else [f"the tensors are on {query_QHE.device.type}, expected a GPU"]
    if query_QHE.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"{query_QHE.dtype}, expected float16 or bfloat16")
    if query_QHE.shape[-1] % 8 or query_QHE.shape[-1] > 256:
        reasons.append(f"a head size of {query_QHE.shape[-1]}, expected a multiple of 8 up to 256")
    if query_QHE.is_cuda and torch.cuda.is_available():  # without a GPU, fake tensors have no capability
        capability = torch.cuda.get_device_capability(query_QHE.device)
        if capability < (8, 0):
            reasons.append("compute capability {}.{}, expected 8.0 at least".format(*capability))
    return reasons
