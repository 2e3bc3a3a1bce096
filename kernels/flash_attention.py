"""Attention through the package flash-attn (Dao 2023, arXiv 2307.08691), when it is installed.

Same contract as in ``kernels.reference``, apart from dropout, which the package draws by its own generator.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.random import Dropout


def varlen_attention(
    query_QHE: Tensor,
    key_THE: Tensor,
    value_THE: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,
    dropout: Dropout | None = None,
) -> Tensor:
    """Softmax attention inside each sequence. Returns [Q, H, E]."""
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    return flash_attn_varlen_func(
        query_QHE,
        key_THE,
        value_THE,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen,
        max_seqlen,
        dropout_p=0.0 if dropout is None else dropout.p,
    )


def unsupported_reasons(query_QHE: Tensor, *_: Any, **__: Any) -> list[str]:
    """Why these inputs cannot be computed."""
    reasons = [] if query_QHE.is_cuda else [f"the tensors are on {query_QHE.device.type}, expected a GPU"]
    if query_QHE.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"{query_QHE.dtype}, expected float16 or bfloat16")
    return reasons
