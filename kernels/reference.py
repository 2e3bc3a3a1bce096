"""Every op in plain PyTorch: the definition, the oracle of the tests, and the path on a CPU.

Shape legend in ``kernels/__init__.py``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def dropout(x: Tensor, dropout_p: float) -> Tensor:
    """Each element 0 with probability ``dropout_p``, otherwise divided by ``1 - dropout_p``; any shape, same dtype.

    On a CPU the random numbers are most of the work, so one 64-bit draw serves four elements there; 16 bits each hit the
    probability to within 1 / 131072.
    """
    if dropout_p == 0 or x.is_cuda:
        return F.dropout(x, dropout_p)
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    kept = words.view(torch.int16)[: x.numel()].view(x.shape) >= round(dropout_p * 2**16) - 2**15
    return x * kept.to(x.dtype).mul_(1 / (1 - dropout_p))


def varlen_attention(
    query_QHE: Tensor,
    key_THE: Tensor,
    value_THE: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_p: float = 0.0,
) -> Tensor:
    """Softmax attention inside each sequence, one sequence at a time: the definition.

    Sequence s owns query rows ``cu_seqlens_q[s]:cu_seqlens_q[s + 1]`` and key rows ``cu_seqlens_k[s]:cu_seqlens_k[s + 1]``
    (both int [S + 1]); scores are scaled by 1 / sqrt(E). Returns [Q, H, E].
    """
    outputs = []
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for start_q, stop_q, start_k, stop_k in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False):
        query, key, value = query_QHE[start_q:stop_q], key_THE[start_k:stop_k], value_THE[start_k:stop_k]
        scores = torch.einsum("qhe,khe->hqk", query, key) * query.shape[-1] ** -0.5
        probabilities = dropout(scores.softmax(dim=-1), dropout_p)
        outputs.append(torch.einsum("hqk,khe->qhe", probabilities, value))
    return torch.cat(outputs)


def dropout_add_layer_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, dropout_p: float = 0.0
) -> Tensor:
    """``layer_norm(residual + dropout(x))``, the end of each half of a post-LN layer. Returns [T, D]."""
    return F.layer_norm(residual_TD + dropout(x_TD, dropout_p), weight_D.shape, weight_D, bias_D, eps)


def dense_gelu(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor) -> Tensor:
    """``gelu(x @ weight.T + bias)`` in the tanh form that BERT is defined with. Returns [T, F]."""
    return F.gelu(F.linear(x_TD, weight_FD, bias_F), approximate="tanh")


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
    dropout_p: float = 0.0,
) -> Tensor:
    """Sum of the three embeddings, layer norm, dropout. Ids are integers [T]. Returns [T, D]."""
    summed_TD = (
        F.embedding(input_ids_T, word_VD)
        + F.embedding(position_ids_T, position_LD)
        + F.embedding(segment_ids_T, segment_2D)
    )
    return dropout(F.layer_norm(summed_TD, weight_D.shape, weight_D, bias_D, eps), dropout_p)


def masked_lm_loss(
    hidden_MD: Tensor, decoder_VD: Tensor, bias_V: Tensor, labels_M: Tensor, ignore_index: int = -1
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies of the masked tokens, and how many have the label as their largest logit.

    Rows whose label is ``ignore_index`` count for neither. Returns (loss [] in at least fp32, correct [] int64); the caller
    divides, because the number of masked tokens of the whole global batch is known to the plan and not to this rank.
    """
    logits_MV = F.linear(hidden_MD, decoder_VD, bias_V)
    loss = cross_entropy_sum(logits_MV, labels_M, ignore_index)
    correct = (logits_MV.detach().argmax(dim=-1) == labels_M).sum()
    return loss, correct


def cross_entropy_sum(logits_NC: Tensor, labels_N: Tensor, ignore_index: int = -1) -> Tensor:
    """Sum over N rows of the cross-entropy of C classes, [] in fp32, or in fp64 for fp64 logits."""
    logits_NC = logits_NC.to(torch.promote_types(logits_NC.dtype, torch.float32))
    return F.cross_entropy(logits_NC, labels_N, ignore_index=ignore_index, reduction="sum")
