"""Attention through PyTorch's own kernel for sequences of different lengths, which knows no dropout.

Same contract as in ``kernels.reference.ops``.
"""

from typing import cast

from torch import Tensor

from kernels.libraries.flash_attention import of_one_tensor, on_owned_rows
from kernels.libraries.flash_attention import (
    reasons_without_dropout as unsupported_reasons,
)  # the same kernel underneath

__all__ = ["unsupported_reasons", "varlen_attention", "varlen_self_attention"]


@on_owned_rows
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds_q: Tensor, bounds_k: Tensor, longest: int, dropout: object
) -> Tensor:
    """Softmax attention inside each sequence. Returns [Q, H, E]."""
    from torch.nn.attention.varlen import varlen_attn

    # The registry has refused dropout before (see `unsupported_reasons`).
    assert dropout is None
    return cast("Tensor", varlen_attn(query, key, value, bounds_q, bounds_k, longest, longest))


varlen_self_attention = of_one_tensor(varlen_attention)
