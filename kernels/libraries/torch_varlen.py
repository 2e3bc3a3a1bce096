"""Attention through PyTorch's own kernel for sequences of different lengths, which knows no dropout.

Same contract as in ``kernels.reference.ops``.
"""

from typing import Any

from torch import Tensor

from kernels.libraries import flash_attention
from kernels.libraries.flash_attention import owned_rows
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
    from torch.nn.attention.varlen import varlen_attn

    assert dropout is None
    query_QHE = owned_rows(query_QHE, cu_seqlens_q)
    key_THE, value_THE = owned_rows(key_THE, cu_seqlens_k), owned_rows(value_THE, cu_seqlens_k)
    output = varlen_attn(query_QHE, key_THE, value_THE, cu_seqlens_q, cu_seqlens_k, max_seqlen, max_seqlen)
    assert isinstance(output, Tensor)
    return owned_rows(output, cu_seqlens_q)


def varlen_self_attention(
    qkv_T3HE: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: Dropout | None = None
) -> Tensor:
    """``varlen_attention`` of the three parts of one tensor [T, 3, H, E]. Returns [T, H, E]."""
    query_THE, key_THE, value_THE = qkv_T3HE.unbind(1)
    return varlen_attention(query_THE, key_THE, value_THE, cu_seqlens, cu_seqlens, max_seqlen, dropout)


def unsupported_reasons(query_QHE: Tensor, *args: Any, **kwargs: Any) -> list[str]:
    """Say why these inputs cannot be computed."""
    reasons = flash_attention.unsupported_reasons(query_QHE)  # the same kernel underneath
    if any(isinstance(value, Dropout) for value in (*args, *kwargs.values())):
        reasons.append("it has no dropout")
    return reasons
