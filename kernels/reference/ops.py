"""Definitions of the ops in plain PyTorch, which are the expected results in tests.

A call of a function with the decorator ``op`` runs one of the implementations in the table of ``kernels/ops.py``. On a CPU,
PyTorch's fused functions (``kernels/libraries/pytorch.py``) compute attention and norms, and these definitions compute all
other ops. The attribute ``definition`` is the plain function. Shape legend in ``kernels/__init__.py``.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import op
from kernels.reference.random import Dropout

IGNORED = -1
"""Label of rows that count in no loss: empty slots, and tokens that an evaluation leaves out."""


def dropout_rows(x_ND: Tensor, dropout: Dropout | None, rows_N: Tensor | None = None) -> Tensor:
    """Apply dropout to a matrix with ``Dropout.mask``. ``rows_N`` are the mask's row numbers, by default 0 to N - 1."""
    if dropout is None:
        return x_ND
    rows_N = torch.arange(len(x_ND), device=x_ND.device) if rows_N is None else rows_N
    # Multiplying by the mask would keep a NaN in a dropped element, so select with ``where``.
    return torch.where(dropout.mask(rows_N, x_ND.shape[1]), x_ND * dropout.scale, 0.0)


@op
def varlen_attention(
    query_QHE: Tensor,
    key_THE: Tensor,
    value_THE: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,
    dropout: Dropout | None = None,
) -> Tensor:
    """Return softmax attention inside each sequence, [Q, H, E].

    Sequence s owns query rows ``cu_seqlens_q[s]:cu_seqlens_q[s + 1]`` and key rows ``cu_seqlens_k[s]:cu_seqlens_k[s + 1]``
    (both int32 [S + 1]), at most ``max_seqlen`` of each. Scores are scaled by 1 / sqrt(E). Dropout applies to the
    probabilities: query row q and head h use row q * H + h of the mask, whose columns are the keys of the sequence. Rows
    after the last sequence are zeros, and their gradients are zero.
    """
    heads = query_QHE.shape[1]
    outputs = []
    # A CUDA graph cannot capture this, because the bounds are copied to the host.
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for start_q, stop_q, start_k, stop_k in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False):
        assert max(stop_q - start_q, stop_k - start_k) <= max_seqlen
        query, key, value = query_QHE[start_q:stop_q], key_THE[start_k:stop_k], value_THE[start_k:stop_k]
        scores = torch.einsum("qhe,khe->qhk", query, key) * query.shape[-1] ** -0.5
        rows = torch.arange(start_q * heads, stop_q * heads, device=query.device)
        probabilities = dropout_rows(scores.softmax(dim=-1).flatten(0, 1), dropout, rows).view_as(scores)
        outputs.append(torch.einsum("qhk,khe->qhe", probabilities, value))
    outputs.append(torch.zeros_like(query_QHE[bounds_q[-1] :]))
    return torch.cat(outputs)


@op
def varlen_self_attention(
    qkv_T3HE: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: Dropout | None = None
) -> Tensor:
    """Return ``varlen_attention`` of the query, key and value in one fused tensor, [T, H, E]."""
    query, key, value = qkv_T3HE.unbind(1)
    return varlen_attention.definition(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, dropout)


@op
def dropout_add_layer_norm(
    x_TD: Tensor,
    bias_D: Tensor,
    residual_TD: Tensor,
    weight_D: Tensor,
    norm_bias_D: Tensor,
    eps: float,
    dropout: Dropout | None = None,
) -> Tensor:
    """Return ``layer_norm(residual + dropout(x + bias))``, [T, D], which ends each half of a post-LN layer."""
    summed_TD = residual_TD + dropout_rows(x_TD + bias_D, dropout)
    return F.layer_norm(summed_TD, weight_D.shape, weight_D, norm_bias_D, eps)


@op
def dense_gelu(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor) -> Tensor:
    """Return ``gelu(x @ weight.T + bias)`` in BERT's tanh form, [T, F]."""
    return F.gelu(F.linear(x_TD, weight_FD, bias_F), approximate="tanh")


@op
def bias_gelu(product_TF: Tensor, bias_F: Tensor) -> Tensor:
    """Return ``gelu(product + bias)`` in the tanh form, [T, F], in the product's type.

    This is the part of ``dense_gelu`` that follows the matrix product.
    """
    # Without the cast, the fp32 bias would promote the sum to fp32.
    return F.gelu(product_TF + bias_F.to(product_TF.dtype), approximate="tanh")


@op
def accumulate_weight_gradient(
    gradient_NK: Tensor, output_gradient_TN: Tensor, input_TK: Tensor, overwrite: bool = False
) -> Tensor:
    """Add ``output_gradient.T @ input`` to a weight's gradient in place, or overwrite the gradient, and return it.

    The operands may have any type. The gradient is at least fp32, and the product is accumulated in the gradient's type. A
    gradient that is overwritten may contain NaN. T is the number of tokens in the micro-batch.
    """
    # Turn autocast off, because it would convert fp32 operands to 16 bits.
    with torch.autocast(gradient_NK.device.type, enabled=False):
        transposed_NT, input_TK = output_gradient_TN.t().to(gradient_NK.dtype), input_TK.to(gradient_NK.dtype)
        # Use mm, because it does not read the old gradient, which may be NaN.
        if overwrite:
            return torch.mm(transposed_NT, input_TK, out=gradient_NK)
        return gradient_NK.addmm_(transposed_NT, input_TK)


@op
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
    """Return ``dropout(layer_norm(sum of the three embeddings))``, [T, D]. Ids are integers [T].

    If ``word_gradient_VD`` (at least fp32) is given, the backward pass adds the word table's gradient to it and returns no
    gradient for the table to autograd.
    """
    word_VD = adding_gradient(word_VD, word_gradient_VD)
    summed_TD = summed_embeddings(input_ids_T, position_ids_T, segment_ids_T, word_VD, position_LD, segment_2D)
    return dropout_rows(F.layer_norm(summed_TD, weight_D.shape, weight_D, bias_D, eps), dropout)


def summed_embeddings(
    input_ids_T: Tensor,
    position_ids_T: Tensor,
    segment_ids_T: Tensor,
    word_VD: Tensor,
    position_LD: Tensor,
    segment_2D: Tensor,
) -> Tensor:
    """Return the sum of the three embeddings of each token, [T, D]."""
    return (
        F.embedding(input_ids_T, word_VD)
        + F.embedding(position_ids_T, position_LD)
        + F.embedding(segment_ids_T, segment_2D)
    )


@op
def masked_lm_loss(
    hidden_MD: Tensor,
    decoder_VD: Tensor,
    bias_V: Tensor,
    labels_M: Tensor,
    count_correct: bool = True,
    decoder_gradient_VD: Tensor | None = None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of the masked tokens' cross-entropies, and the number of correct predictions.

    A prediction is correct if the label has the largest logit. Rows with the label ``IGNORED`` count in neither result.
    Returns (loss [] in at least fp32, correct [] int64). Without ``count_correct``, ``correct`` is None, because the search
    for the largest logit costs another pass. The caller divides the loss by the number of masked tokens in the whole global
    batch.

    With ``count_correct``, as in an evaluation, ``masked_lm_logits`` computes the logits without rounding to 16 bits, which
    would make different logits equal. Otherwise, as in training, the logits have the type of the product.

    If ``decoder_gradient_VD`` (at least fp32) is given, the backward pass adds the decoder's gradient to it, or overwrites
    it, and returns no gradient for the decoder to autograd. The decoder may then be a copy that does not require a gradient.
    """
    decoder_VD = adding_gradient(decoder_VD, decoder_gradient_VD, overwrite)
    if not count_correct:
        return cross_entropy_sum(F.linear(hidden_MD, decoder_VD, bias_V), labels_M), None
    logits_MV = masked_lm_logits(hidden_MD, decoder_VD, bias_V)
    return cross_entropy_sum(logits_MV, labels_M), correct_predictions(logits_MV, labels_M)


def adding_gradient(table: Tensor, gradient: Tensor | None, overwrite: bool = False) -> Tensor:
    """Return a view of ``table`` whose gradient is added to ``gradient``, or overwrites it.

    Returns ``table`` itself if ``gradient`` is None.
    """
    if gradient is None:
        return table
    # Make the table require a gradient, or autograd would not run the backward pass below.
    found = _Adding.apply(table if table.requires_grad else table.detach().requires_grad_(), gradient, overwrite)
    assert isinstance(found, Tensor)
    return found


class _Adding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, gradient: Tensor, overwrite: bool) -> Tensor:
        ctx.gradient, ctx.overwrite = gradient, overwrite
        return table.view_as(table)

    @staticmethod
    def backward(ctx: Any, found: Tensor) -> tuple[None, None, None]:
        ctx.gradient.copy_(found) if ctx.overwrite else ctx.gradient.add_(found)
        return None, None, None


def masked_lm_logits(hidden_MD: Tensor, decoder_VD: Tensor, bias_V: Tensor) -> Tensor:
    """Return ``hidden @ decoder.T + bias`` in at least fp32, [M, V].

    The operands are cast to ``compute_dtype``. The product is accumulated in fp32. Neither the product nor the bias is
    rounded to 16 bits.
    """
    dtype = compute_dtype(hidden_MD)
    hidden_MD, decoder_VD = hidden_MD.to(dtype), decoder_VD.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    # PyTorch cannot differentiate a product with out_dtype. If gradients are needed, cast the operands to fp32, which
    # gives the same result but makes autograd store fp32 copies of both operands.
    differentiable = torch.is_grad_enabled() and (hidden_MD.requires_grad or decoder_VD.requires_grad)
    with torch.autocast(hidden_MD.device.type, enabled=False):
        if dtype != wide and not differentiable:
            return fp32_product(hidden_MD, decoder_VD) + bias_V.to(wide)
        return F.linear(hidden_MD.to(wide), decoder_VD.to(wide), bias_V.to(wide))


def fp32_product(a_MK: Tensor, b_NK: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``a @ b.T`` of 16-bit operands, [M, N], accumulated and stored in fp32. The function has no gradient.

    PyTorch does not support this product on a CPU. There, the operands are cast to fp32, in which the product of two
    16-bit numbers is exact.
    """
    if a_MK.is_cuda:
        return torch.mm(a_MK, b_NK.t(), out_dtype=torch.float32, out=out)
    return torch.mm(a_MK.float(), b_NK.float().t(), out=out)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the type of matrix products with ``x``: autocast's type if autocast applies, otherwise the type of ``x``.

    Autocast does not apply to fp64.
    """
    device = x.device.type
    casts = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if casts else x.dtype


def correct_predictions(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """Count the rows whose label has the largest logit, [] int64.

    If several logits are equally large, the prediction is the lowest index. A row that contains NaN is never correct.
    """
    largest_M, predicted_M = logits_MV.detach().max(dim=-1)  # max returns the first of equal logits
    # max treats NaN as the largest value, so a row with NaN could be correct by chance.
    return ((predicted_M == labels_M) & ~largest_M.isnan()).sum()


def cross_entropy_sum(logits_NC: Tensor, labels_N: Tensor) -> Tensor:
    """Return the cross-entropy of C classes summed over N rows, [] in fp32, or in fp64 for fp64 logits."""
    logits_NC = logits_NC.to(torch.promote_types(logits_NC.dtype, torch.float32))
    return F.cross_entropy(logits_NC, labels_N, ignore_index=IGNORED, reduction="sum")
