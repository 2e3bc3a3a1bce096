"""Attention through the package flash-attn (Dao 2023, arXiv 2307.08691), when it is installed; and what others like it need.

Same contract as in ``kernels.reference.ops``, apart from dropout, which the package draws by its own generator. It has not
run on a GPU as part of this project; the arguments are those of its version 2.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.reference.random import Dropout

VarlenAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, Dropout | None], Tensor]


def owned_rows(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``x`` with zeros in the rows after the last sequence, and so in its gradient.

    A batch that is filled up to a shape bucket has rows that no sequence owns. Libraries leave them as they find them in new
    memory, in the output and in the gradients, where the products before and after would take them for numbers.
    """
    # Compared on the device: reading the last bound would make the host wait, and break a captured step.
    owned = torch.arange(len(x), device=x.device) < cu_seqlens[-1]
    # where, not a product: what is in unowned rows may be NaN, and NaN times zero is NaN.
    return torch.where(owned.view(-1, *(1,) * (x.dim() - 1)), x, 0.0)


def on_owned_rows(attention: VarlenAttention) -> Callable[..., Tensor]:
    """Make the op ``varlen_attention`` of a library's attention, which gets its arguments in order."""

    def varlen_attention(
        query_QHE: Tensor,
        key_THE: Tensor,
        value_THE: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen: int,
        dropout: Dropout | None = None,
    ) -> Tensor:
        # Of the inputs too: where's backward pass puts zeros into their gradients' rows that the library leaves alone.
        query_QHE = owned_rows(query_QHE, cu_seqlens_q)
        key_THE, value_THE = owned_rows(key_THE, cu_seqlens_k), owned_rows(value_THE, cu_seqlens_k)
        output = attention(query_QHE, key_THE, value_THE, cu_seqlens_q, cu_seqlens_k, max_seqlen, dropout)
        return owned_rows(output, cu_seqlens_q)

    return varlen_attention


# Libraries without a packed call take three views, whose gradients autograd puts together.
def of_one_tensor(varlen_attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make ``varlen_self_attention`` of ``varlen_attention``: the three parts of one tensor [T, 3, H, E] to [T, H, E]."""

    def varlen_self_attention(
        qkv_T3HE: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: Dropout | None = None
    ) -> Tensor:
        return varlen_attention(*qkv_T3HE.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, dropout)

    return varlen_self_attention


@on_owned_rows
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds_q: Tensor, bounds_k: Tensor, longest: int, dropout: Dropout | None
) -> Tensor:
    """Softmax attention inside each sequence. Returns [Q, H, E]."""
    # Imported when called: the package is optional.
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    dropout_p = 0.0 if dropout is None else dropout.p
    return flash_attn_varlen_func(query, key, value, bounds_q, bounds_k, longest, longest, dropout_p=dropout_p)


def varlen_self_attention(
    qkv_T3HE: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: Dropout | None = None
) -> Tensor:
    """Softmax attention inside each sequence, with one gradient for the packed tensor. Returns [T, H, E]."""
    from flash_attn import flash_attn_varlen_qkvpacked_func  # pyright: ignore[reportMissingImports]

    # Packed: the kernel writes one gradient, where three would be copied together.
    output_THE = flash_attn_varlen_qkvpacked_func(
        owned_rows(qkv_T3HE, cu_seqlens), cu_seqlens, max_seqlen, dropout_p=0.0 if dropout is None else dropout.p
    )
    return owned_rows(output_THE, cu_seqlens)


def unsupported_reasons(query_QHE: Tensor, *_: Any, **__: Any) -> list[str]:
    """Say why these inputs, or a packed [T, 3, H, E] in place of the query, cannot be computed."""
    # Only what is the same for all calls of a signature may be looked at: the registry asks once for each.
    reasons = [] if query_QHE.is_cuda else [f"the tensors are on {query_QHE.device.type}, expected a GPU"]
    if query_QHE.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"{query_QHE.dtype}, expected float16 or bfloat16")
    if query_QHE.shape[-1] % 8 or query_QHE.shape[-1] > 256:
        reasons.append(f"a head size of {query_QHE.shape[-1]}, expected a multiple of 8 up to 256")
    capability = capability_of(query_QHE)
    if capability is not None and capability < (8, 0):
        reasons.append("compute capability {}.{}, expected 8.0 at least".format(*capability))
    return reasons


def capability_of(x: Tensor) -> tuple[int, int] | None:
    """Compute capability of the GPU that a tensor is on; None on a CPU, and where a GPU is only pretended."""
    return torch.cuda.get_device_capability(x.device) if x.is_cuda and torch.cuda.is_available() else None
