"""Attention over a flat stream of sequences of different lengths.

Shape legend in ``kernels/__init__.py``; the definition is ``kernels.reference.varlen_attention``.
"""

from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference import dropout


def varlen_attention(
    query_QHE: Tensor,
    key_THE: Tensor,
    value_THE: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_p: float = 0.0,
) -> Tensor:
    """Softmax attention inside each sequence, through PyTorch's fused attention.

    Same contract as ``kernels.reference.varlen_attention``; int ``cu_seqlens`` [S + 1]. Returns [Q, H, E].

    Neighbours of equal length make one call, on views of the stream: nothing is padded, masked or copied on the way in. The
    loader's batches are sorted by length, so equal lengths are neighbours.
    """
    lengths = zip(_lengths(cu_seqlens_q), _lengths(cu_seqlens_k), strict=True)
    groups = [(*pair, len(list(equal))) for pair, equal in groupby(lengths)]
    # split, not slices: its backward is one concatenation, where each slice's would fill a whole stream with zeros
    queries = query_QHE.split([length_q * count for length_q, _, count in groups])
    keys, values = (x_THE.split([length_k * count for _, length_k, count in groups]) for x_THE in (key_THE, value_THE))
    outputs = [
        _padless_attention(query, key, value, count, dropout_p)
        for query, key, value, (_, _, count) in zip(queries, keys, values, groups, strict=True)
    ]
    return torch.cat(outputs)


def _lengths(cu_seqlens: Tensor) -> list[int]:
    return [stop - start for start, stop in pairwise(cu_seqlens.tolist())]


def _padless_attention(query: Tensor, key: Tensor, value: Tensor, count: int, dropout_p: float) -> Tensor:
    """Attention of ``count`` sequences of one length; rows [count * length, H, E]."""
    query, key, value = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (query, key, value))
    if dropout_p and not query.is_cuda:  # PyTorch's fused attention has no dropout on a CPU
        probabilities = (query * query.shape[-1] ** -0.5 @ key.transpose(2, 3)).softmax(dim=-1)
        output = dropout(probabilities, dropout_p) @ value
    else:
        output = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p)
    return output.transpose(1, 2).flatten(0, 1)
