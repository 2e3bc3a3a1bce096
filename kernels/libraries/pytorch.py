# pyright: reportPrivateImportUsage=false
"""Ops by PyTorch's own fused functions, the usual implementations on a CPU.

The functions have the same contracts as in ``kernels.reference.ops`` and ``kernels.reference.fp8``, except that PyTorch's
generator draws the dropout mask, with the same probability. Shape legend in ``kernels/__init__.py``.
"""

from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference.fp8 import ALIGNMENT, E4M3, E5M2, capability_reasons
from kernels.reference.ops import adding_gradient, summed_embeddings
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
    """Return softmax attention inside each sequence, [Q, H, E], by PyTorch's fused attention.

    Adjacent sequences of equal length share one call of the fused attention, on views of the token stream. The inputs
    therefore need no padding, masks or copies. The loader sorts batches by length, which makes sequences of equal
    length adjacent. The host reads the lengths.
    """
    del max_seqlen
    lengths = zip(_lengths(cu_seqlens_q), _lengths(cu_seqlens_k), strict=True)
    groups = [(*pair, len(list(equal))) for pair, equal in groupby(lengths)]
    # Split instead of slicing: the backward pass of a split is one concatenation, but the backward pass of each slice
    # would allocate a gradient for the whole stream, filled with zeros.
    *queries, unowned = _split(query_QHE, [length_q * count for length_q, _, count in groups])
    *keys, _ = _split(key_THE, [length_k * count for _, length_k, count in groups])
    *values, _ = _split(value_THE, [length_k * count for _, length_k, count in groups])
    outputs = [
        _padless_attention(query, key, value, count, dropout)
        for query, key, value, (length_q, _, count) in zip(queries, keys, values, groups, strict=True)
        if length_q
    ]
    return torch.cat([*outputs, torch.zeros_like(unowned)])


def varlen_self_attention(
    qkv_T3HE: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: Dropout | None = None
) -> Tensor:
    query_THE, key_THE, value_THE = qkv_T3HE.unbind(1)
    return varlen_attention(query_THE, key_THE, value_THE, cu_seqlens, cu_seqlens, max_seqlen, dropout)


def dropout_add_layer_norm(
    x_TD: Tensor,
    bias_D: Tensor,
    residual_TD: Tensor,
    weight_D: Tensor,
    norm_bias_D: Tensor,
    eps: float,
    dropout: Dropout | None = None,
) -> Tensor:
    biased_TD = x_TD + bias_D
    if dropout is None or x_TD.is_cuda:
        summed_TD = residual_TD + drop(biased_TD, dropout)
    else:
        summed_TD = torch.addcmul(residual_TD, biased_TD, _kept(biased_TD, dropout))  # addcmul saves a pass over memory
    return F.layer_norm(summed_TD, weight_D.shape, weight_D, norm_bias_D, eps)


def embedding_layer_norm(
    input_ids_T: Tensor,
    position_ids_T: Tensor,
    segment_ids_T: Tensor,
    word_VD: Tensor,
    position_LD: Tensor,
    segment_2D: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    dropout: Dropout | None = None,
    word_gradient_VD: Tensor | None = None,
) -> Tensor:
    word_VD = adding_gradient(word_VD, word_gradient_VD)
    summed_TD = summed_embeddings(input_ids_T, position_ids_T, segment_ids_T, word_VD, position_LD, segment_2D)
    return drop(F.layer_norm(summed_TD, weight_D.shape, weight_D, bias_D, eps), dropout)


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


def scaled_matmul_reasons(
    a_MK: Tensor, b_NK: Tensor, _inverse_a: Tensor, _inverse_b: Tensor, out_dtype: torch.dtype, *_: Any, **__: Any
) -> list[str]:
    reasons = capability_reasons(a_MK.device)
    if {a_MK.dtype, b_NK.dtype} not in ({E4M3}, {E4M3, E5M2}):
        reasons.append(f"operands in {a_MK.dtype} and {b_NK.dtype}: expected both in E4M3, or one of them in E5M2")
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        reasons.append(f"a product in {out_dtype}, expected bfloat16, float16 or float32")
    # M, the number of tokens in a micro-batch, need not be a multiple of ALIGNMENT.
    if any(size % ALIGNMENT for size in (*b_NK.shape, a_MK.shape[1])):
        reasons.append(f"sizes {list(a_MK.shape)} by {list(b_NK.shape)}: N and K are not multiples of {ALIGNMENT}")
    return reasons


def accumulate_weight_gradient(
    gradient_NK: Tensor, output_gradient_TN: Tensor, input_TK: Tensor, overwrite: bool = False
) -> Tensor:
    """Add ``output_gradient.T @ input`` to an fp32 gradient in place, or overwrite the gradient, and return it.

    PyTorch supports adding a product of 16-bit operands to an fp32 tensor from version 2.10 on, on CUDA only.
    """
    transposed_NT = output_gradient_TN.t()
    # Unlike addmm, mm does not read the old gradient, which may contain NaN.
    if overwrite:
        return torch.mm(transposed_NT, input_TK, out_dtype=torch.float32, out=gradient_NK)
    # If ``out`` is the gradient, cuBLAS adds the product while it writes the result, which saves a pass over memory.
    return torch.addmm(gradient_NK, transposed_NT, input_TK, out_dtype=torch.float32, out=gradient_NK)


def gradient_reasons(
    gradient_NK: Tensor, output_gradient_TN: Tensor, input_TK: Tensor, *_: Any, **__: Any
) -> list[str]:
    reasons = []
    if not gradient_NK.is_cuda:
        reasons.append(f"tensors on {gradient_NK.device.type}: PyTorch supports this product on CUDA only")
    dtypes = output_gradient_TN.dtype, input_TK.dtype
    if dtypes not in ((torch.bfloat16,) * 2, (torch.float16,) * 2):
        reasons.append(f"operands in {dtypes[0]} and {dtypes[1]}: expected both in bfloat16 or both in float16")
    if gradient_NK.dtype != torch.float32:
        reasons.append(f"a gradient in {gradient_NK.dtype}, expected float32")
    return reasons


def drop(x: Tensor, dropout: Dropout | None) -> Tensor:
    """Apply dropout to ``x``, of any shape: set random elements to 0 and scale the remaining elements."""
    if dropout is None:
        return x
    return F.dropout(x, dropout.p) if x.is_cuda else x * _kept(x, dropout)


def _kept(x: Tensor, dropout: Dropout) -> Tensor:
    """Draw the factors by which dropout multiplies ``x`` on a CPU: 0 for a dropped element, otherwise dropout's scale.

    Drawing random numbers is most of the work on a CPU, so each 64-bit number serves four elements. With 16 bits per
    element, the probability is exact to within 1 / 131072.
    """
    # The range starts at -2**63, so that all 64 bits are random, including the sign.
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    kept = words.view(torch.int16)[: x.numel()].view(x.shape) >= dropout.threshold - 2**15  # because int16 is signed
    return kept.to(x.dtype).mul_(dropout.scale)


def _split(x_NHE: Tensor, rows: list[int]) -> tuple[Tensor, ...]:
    return x_NHE.split([*rows, len(x_NHE) - sum(rows)])


def _lengths(cu_seqlens: Tensor) -> list[int]:
    return [stop - start for start, stop in pairwise(cu_seqlens.tolist())]


def _padless_attention(query: Tensor, key: Tensor, value: Tensor, count: int, dropout: Dropout | None) -> Tensor:
    """Return the attention of ``count`` sequences of equal length, [count * length, H, E]."""
    # Views [S, H, length, E], whose strides the fused attention accepts.
    query, key, value = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (query, key, value))
    if dropout is not None and not query.is_cuda:  # PyTorch's fused attention has no dropout on a CPU
        probabilities = (query * query.shape[-1] ** -0.5 @ key.transpose(2, 3)).softmax(dim=-1)
        output = drop(probabilities, dropout) @ value
    else:
        output = F.scaled_dot_product_attention(query, key, value, dropout_p=0.0 if dropout is None else dropout.p)
    return output.transpose(1, 2).flatten(0, 1)
