"""Attention through NVIDIA's Transformer Engine, by its public ``DotProductAttention``, when it is installed.

Same contract as in ``kernels.reference.ops``, apart from dropout, which the library draws by its own generator. It chooses
between cuDNN and flash-attn itself. It has not run on a GPU as part of this project; the arguments are those of 2.20.
"""

import importlib
from functools import lru_cache
from typing import Any

from torch import Tensor

from kernels.libraries.flash_attention import of_one_tensor, on_owned_rows, unsupported_reasons
from kernels.reference.random import Dropout

__all__ = ["unsupported_reasons", "varlen_attention", "varlen_self_attention"]
"""The limits are those of flash-attn, which with cuDNN is what the library calls."""


@on_owned_rows
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds_q: Tensor, bounds_k: Tensor, longest: int, dropout: Dropout | None
) -> Tensor:
    """Softmax attention inside each sequence. Returns [Q, H, E]."""
    heads, size = query.shape[1:]
    # The same bounds twice mean self-attention; the last layer has queries of its own.
    kind = "self" if bounds_q is bounds_k else "cross"
    output = _attention(heads, size, 0.0 if dropout is None else dropout.p, kind)(
        query,
        key,
        value,
        qkv_format="thd",
        cu_seqlens_q=bounds_q,
        cu_seqlens_kv=bounds_k,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        attn_mask_type="padding",
    )
    # The library returns heads side by side.
    return output.view(len(query), heads, size)


varlen_self_attention = of_one_tensor(varlen_attention)


# One module for each setting, made once.
@lru_cache(maxsize=16)
def _attention(heads: int, size: int, dropout: float, kind: str) -> Any:
    """The library's module; it has no parameters. As a new module is, in training: outside, the dropout is 0."""
    library = importlib.import_module("transformer_engine.pytorch")
    settings = {"qkv_format": "thd", "attn_mask_type": "padding", "attention_type": kind}
    return library.DotProductAttention(heads, size, attention_dropout=dropout, **settings)
