"""Attention through FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608), as module flash_attn_interface, when installed.

Same contract as in ``kernels.reference.ops``; it has no dropout. It has not run on a GPU as part of this project.
"""

import importlib
from typing import Any

from torch import Tensor

from kernels.libraries import flash_attention
from kernels.libraries.flash_attention import capability_of, owned_rows
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
    """Softmax attention inside each sequence. Returns [Q, H, E]."""
    assert dropout is None
    library = importlib.import_module("flash_attn_interface")
    returned = library.flash_attn_varlen_func(
        owned_rows(query_QHE, cu_seqlens_q),
        owned_rows(key_THE, cu_seqlens_k),
        owned_rows(value_THE, cu_seqlens_k),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
    )
    output_QHE = returned[0] if isinstance(returned, tuple) else returned  # the first releases add the log-sums
    return owned_rows(output_QHE, cu_seqlens_q)


def varlen_self_attention(
    qkv_T3HE: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: Dropout | None = None
) -> Tensor:
    """``varlen_attention`` of the three parts of one tensor [T, 3, H, E]. Returns [T, H, E]."""
    query_THE, key_THE, value_THE = qkv_T3HE.unbind(1)
    return varlen_attention(query_THE, key_THE, value_THE, cu_seqlens, cu_seqlens, max_seqlen, dropout)


def unsupported_reasons(query_QHE: Tensor, *args: Any, **kwargs: Any) -> list[str]:
    """Say why these inputs cannot be computed."""
    reasons = flash_attention.unsupported_reasons(query_QHE)
    capability = capability_of(query_QHE)
    if capability is not None and capability[0] != 9:
        reasons.append("compute capability {}.{}, expected 9.0 (Hopper)".format(*capability))
    if any(isinstance(value, Dropout) for value in (*args, *kwargs.values())):
        reasons.append("it has no dropout")
    return reasons
