"""Ops through PyTorch's own kernels, where the definition is not already that: the path on a CPU.

Same contracts as in ``kernels.reference.ops``, apart from dropout: what is dropped is drawn by PyTorch's generator, with the
same probability. Shape legend in ``kernels/__init__.py``.
"""

from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.libraries.flash_attention import of_one_tensor
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
    """Softmax attention inside each sequence, through PyTorch's fused attention. Returns [Q, H, E].

    Neighbours of equal length make one call, on views of the stream: nothing is padded, masked or copied on the way in. The
    loader's batches are sorted by length, so equal lengths are neighbours. Lengths are read by the host.
    """
    del max_seqlen  # what others size their launches by
    lengths = zip(_lengths(cu_seqlens_q), _lengths(cu_seqlens_k), strict=True)
    # groupby joins neighbours alone; equal lengths that are apart would be two calls, and right all the same.
    groups = [(*pair, len(list(equal))) for pair, equal in groupby(lengths)]
    # split, not slices: its backward is one concatenation, where each slice's would fill a whole stream with zeros
    *queries, unowned = _split(query_QHE, [length_q * count for length_q, _, count in groups])
    *keys, _ = _split(key_THE, [length_k * count for _, length_k, count in groups])
    *values, _ = _split(value_THE, [length_k * count for _, length_k, count in groups])
    # A length of 0 makes no call.
    outputs = [
        _padless_attention(query, key, value, count, dropout)
        for query, key, value, (length_q, _, count) in zip(queries, keys, values, groups, strict=True)
        if length_q
    ]
    # Rows after the last sequence are zeros, and hand no gradient on.
    return torch.cat([*outputs, torch.zeros_like(unowned)])


varlen_self_attention = of_one_tensor(varlen_attention)


def dropout_add_layer_norm(
    x_TD: Tensor,
    bias_D: Tensor,
    residual_TD: Tensor,
    weight_D: Tensor,
    norm_bias_D: Tensor,
    eps: float,
    dropout: Dropout | None = None,
) -> Tensor:
    """``layer_norm(residual + dropout(x + bias))``. Returns [T, D]."""
    biased_TD = x_TD + bias_D
    # On a CPU drawing is most of the work (see `_kept`).
    if dropout is None or x_TD.is_cuda:
        summed_TD = residual_TD + drop(biased_TD, dropout)
    else:
        summed_TD = torch.addcmul(residual_TD, biased_TD, _kept(biased_TD, dropout))  # a pass less than product and sum
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
    """Sum of the three embeddings, layer norm, dropout. Returns [T, D]."""
    word_VD = adding_gradient(word_VD, word_gradient_VD)
    summed_TD = summed_embeddings(input_ids_T, position_ids_T, segment_ids_T, word_VD, position_LD, segment_2D)
    return drop(F.layer_norm(summed_TD, weight_D.shape, weight_D, bias_D, eps), dropout)


def drop(x: Tensor, dropout: Dropout | None) -> Tensor:
    """Each element 0 with the probability of ``dropout``, otherwise scaled; any shape, same dtype."""
    if dropout is None:
        return x
    return F.dropout(x, dropout.p) if x.is_cuda else x * _kept(x, dropout)


def _kept(x: Tensor, dropout: Dropout) -> Tensor:
    """Draw what dropout multiplies ``x`` by on a CPU: 0, or the scale of what is kept.

    The random numbers are most of the work there, so one 64-bit draw serves four elements; 16 bits each hit the probability
    to within 1 / 131072.
    """
    # From -2**63 to the largest: all 64 bits are random, the sign among them.
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    kept = words.view(torch.int16)[: x.numel()].view(x.shape) >= dropout.threshold - 2**15  # signed
    return kept.to(x.dtype).mul_(dropout.scale)


def _split(x_NHE: Tensor, rows: list[int]) -> tuple[Tensor, ...]:
    """The leading rows in parts of so many, and the rest."""
    return x_NHE.split([*rows, len(x_NHE) - sum(rows)])


def _lengths(cu_seqlens: Tensor) -> list[int]:
    return [stop - start for start, stop in pairwise(cu_seqlens.tolist())]


def _padless_attention(query: Tensor, key: Tensor, value: Tensor, count: int, dropout: Dropout | None) -> Tensor:
    """Attention of ``count`` sequences of one length; rows [count * length, H, E]."""
    # [S, H, length, E] as views, which the fused attention takes by their strides.
    query, key, value = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (query, key, value))
    if dropout is not None and not query.is_cuda:  # PyTorch's fused attention has no dropout on a CPU
        probabilities = (query * query.shape[-1] ** -0.5 @ key.transpose(2, 3)).softmax(dim=-1)
        output = drop(probabilities, dropout) @ value
    else:
        output = F.scaled_dot_product_attention(query, key, value, dropout_p=0.0 if dropout is None else dropout.p)
    return output.transpose(1, 2).flatten(0, 1)
