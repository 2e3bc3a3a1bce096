"""Attention through NVIDIA's Transformer Engine, by its public ``DotProductAttention``, when it is installed.

Same contract as in ``kernels.reference.ops``, apart from dropout, which the library draws by its own generator. It chooses
between cuDNN and flash-attn itself. It has not run on a GPU as part of this project; the arguments are those of 2.20.
"""

import importlib
from functools import lru_cache
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
    heads, size = query_QHE.shape[1:]
    kind = "self" if cu_seqlens_q is cu_seqlens_k else "cross"
    attention = _attention(heads, size, 0.0 if dropout is None else dropout.p, kind)
    output = attention(
        owned_rows(query_QHE, cu_seqlens_q),
        owned_rows(key_THE, cu_seqlens_k),
        owned_rows(value_THE, cu_seqlens_k),
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_k,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        attn_mask_type="padding",
    )
    return owned_rows(output.view(len(query_QHE), heads, size), cu_seqlens_q)


def varlen_self_attention(
    qkv_T3HE: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: Dropout | None = None
) -> Tensor:
    """``varlen_attention`` of the three parts of one tensor [T, 3, H, E]. Returns [T, H, E]."""
    query_THE, key_THE, value_THE = qkv_T3HE.unbind(1)
    return varlen_attention(query_THE, key_THE, value_THE, cu_seqlens, cu_seqlens, max_seqlen, dropout)


@lru_cache(maxsize=16)
def _attention(heads: int, size: int, dropout: float, kind: str) -> Any:
    """The library's module; it has no parameters. As a new module is, in training: outside, the dropout is 0."""
    library = importlib.import_module("transformer_engine.pytorch")
    return library.DotProductAttention(
        heads,
        size,
        attention_dropout=dropout,
        qkv_format="thd",
        attn_mask_type="padding",
        attention_type=kind,
    )


def unsupported_reasons(query_QHE: Tensor, *_: Any, **__: Any) -> list[str]:
    """Say why these inputs cannot be computed: the limits of flash-attn, which with cuDNN is what the library calls."""
    return flash_attention.unsupported_reasons(query_QHE)
