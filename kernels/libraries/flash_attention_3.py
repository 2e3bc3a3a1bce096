"""Attention through FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608), as module flash_attn_interface, when installed.

Same contract as in ``kernels.reference.ops``; it has no dropout. It has not run on a GPU as part of this project.
"""

import importlib
from typing import Any

from torch import Tensor

from kernels.libraries import flash_attention
from kernels.libraries.flash_attention import capability_of, of_one_tensor, on_owned_rows
from kernels.reference.random import Dropout


@on_owned_rows
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds_q: Tensor, bounds_k: Tensor, longest: int, dropout: object
) -> Tensor:
    """Softmax attention inside each sequence. Returns [Q, H, E]."""
    # The registry has refused dropout before (see `unsupported_reasons`).
    assert dropout is None
    bounds = {"cu_seqlens_q": bounds_q, "cu_seqlens_k": bounds_k, "max_seqlen_q": longest, "max_seqlen_k": longest}
    returned = importlib.import_module("flash_attn_interface").flash_attn_varlen_func(query, key, value, **bounds)
    return returned[0] if isinstance(returned, tuple) else returned  # the first releases add the log-sums


varlen_self_attention = of_one_tensor(varlen_attention)


def unsupported_reasons(query_QHE: Tensor, *args: Any, **kwargs: Any) -> list[str]:
    """Return the reasons why these inputs cannot be computed; empty if they can."""
    reasons = flash_attention.unsupported_reasons(query_QHE)
    if any(isinstance(value, Dropout) for value in (*args, *kwargs.values())):
        reasons.append("it has no dropout")
    capability = capability_of(query_QHE)
    # FlashAttention-3 is written for Hopper alone.
    if capability is not None and capability[0] != 9:
        reasons.append("compute capability {}.{}, expected 9.0 (Hopper)".format(*capability))
    return reasons
