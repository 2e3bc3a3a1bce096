"""Parts of BERT: embeddings, encoder layers, and how layers are divided among ranks, multiplied and recomputed.

Shape legend in ``bert/model.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert.configuration.sections import ModelConfig
from kernels import (
    Dropout,
    dense_gelu,
    dropout_add_layer_norm,
    embedding_layer_norm,
    masked_lm_loss,
    varlen_attention,
    varlen_self_attention,
)

if TYPE_CHECKING:
    from dataloading.batches.loader import Batch


@dataclass(frozen=True)
class DropoutSites:
    """Dropout at each call site of one forward pass. Each site has its own random stream."""

    config: ModelConfig
    state: Tensor | None
    """int64 [2] seed and step, or None outside training."""

    def embeddings(self) -> Dropout | None:
        """Return the dropout after the norm of the embeddings."""
        return self._at(self.config.hidden_dropout, 0)

    def attention(self, layer: int) -> Dropout | None:
        """Return the dropout on a layer's attention probabilities."""
        return self._at(self.config.attention_dropout, 3 * layer + 1)

    def after_attention(self, layer: int) -> Dropout | None:
        return self._at(self.config.hidden_dropout, 3 * layer + 2)

    def after_feed_forward(self, layer: int) -> Dropout | None:
        return self._at(self.config.hidden_dropout, 3 * layer + 3)

    # Streams are numbered by layer, not by call, so that pipeline stages draw the same numbers as a single rank.
    def _at(self, p: float, stream: int) -> Dropout | None:
        return None if self.state is None or p == 0 else Dropout(p, self.state, stream)


class LayerNorm(nn.Module):
    """Gain and bias of a layer norm. The kernels compute the norm, fused with the preceding operation."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))


class Dense(nn.Module):
    """Weight [out, in] and bias [out] of a dense layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        # A checkpoint or ``initialize_`` sets the values.
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Placement:
    """Division of weights and hidden states among ranks. This base class is for one rank, which has all of them.

    With the subclass in ``bert.parallel.tensor``, a matrix product multiplies all rows by this rank's shard of a weight,
    and every operation between products computes only this rank's rows.
    """

    def share(self, length: int) -> int:
        """Return the length of a rank's shard of a dimension of size ``length``."""
        return length

    def share_of_words(self, vocab_size: int) -> int:
        """Return the number of rows of the word table that a rank has."""
        return vocab_size

    def all_rows(self, own: Tensor) -> Tensor:
        """Gather the rows of all ranks."""
        return own

    def own_rows(self, rows: Tensor, empty: int = 0) -> Tensor:  # noqa: ARG002
        """Return this rank's part of ``rows``; padding rows past the end are filled with ``empty``."""
        return rows

    def summed(self, product: Tensor) -> Tensor:
        """Sum the partial products of all ranks, and return this rank's rows of the sum."""
        return product

    def words(self, input_ids_T: Tensor, word_VD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return word indices, the table that they index, and the table's gradient to add to, or None to use autograd."""
        return input_ids_T, word_VD, None

    def masked_lm_loss(
        self, hidden_MD: Tensor, word_VD: Tensor, bias_V: Tensor, labels_M: Tensor, count_correct: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return ``kernels.masked_lm_loss`` over all rows; ``hidden_MD`` has this rank's rows."""
        return masked_lm_loss(hidden_MD, word_VD, bias_V, labels_M, count_correct=count_correct)

    def total(self, loss: Tensor) -> Tensor:
        """Sum a loss over the ranks."""
        return loss


class Embeddings(nn.Module):
    """Word, position and segment embeddings, and the layer norm of their sum."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        self.config = config
        self.placement = placement
        # Do not use nn.Embedding, because one op reads all three tables.
        self.word = nn.Parameter(torch.empty(placement.share_of_words(config.vocab_size), config.hidden_size))
        self.position = nn.Parameter(torch.empty(config.max_position_embeddings, config.hidden_size))
        self.segment = nn.Parameter(torch.empty(config.type_vocab_size, config.hidden_size))
        self.norm = LayerNorm(config.hidden_size)

    def forward(self, batch: "Batch", sites: DropoutSites) -> Tensor:
        """Embed a batch; return [T, D]."""
        word_ids_T, word_VD, word_gradient_VD = self.placement.words(batch.input_ids, self.word)
        return embedding_layer_norm(
            word_ids_T,
            self.placement.own_rows(batch.position_ids),
            self.placement.own_rows(batch.segment_ids),
            word_VD,
            self.position,
            self.segment,
            self.norm.weight,
            self.norm.bias,
            self.config.layer_norm_eps,
            sites.embeddings(),
            word_gradient_VD,
        )


class MatrixProducts:
    """Matrix products of an encoder layer, in the precision of the input or of autocast."""

    def product(self, x: Tensor, dense: Dense, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``. If ``bias`` is None, a later operation adds the bias."""
        return F.linear(x, dense.weight, bias)

    def feed_forward(self, x_TD: Tensor, wide: Dense, narrow: Dense) -> Tensor:
        """Return ``gelu(x @ wide.T + bias) @ narrow.T``, [T, D], without the second bias."""
        return F.linear(dense_gelu(x_TD, wide.weight, wide.bias), narrow.weight)


Recomputation = Callable[..., Any]
"""Wrapper that calls a function with the given arguments, and may call it again in the backward pass."""


def compute_once(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call a function that is not recomputed in the backward pass."""
    return function(*inputs)


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each followed by dropout, residual and norm."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        placement: Placement,
        products: MatrixProducts | None = None,
        recomputation: Recomputation = compute_once,
    ) -> None:
        super().__init__()
        self.config = config
        self.index = index
        self.placement = placement
        self.products = products or MatrixProducts()
        self.recomputation = recomputation
        hidden = config.hidden_size
        # With tensor parallelism, a rank has whole heads and some columns of the intermediate layer.
        heads, intermediate = placement.share(hidden), placement.share(config.intermediate_size)
        # One weight for queries, keys and values. LAMB treats it as three tensors, like the reference (``lamb_segments``).
        self.query_key_value = Dense(hidden, 3 * heads)
        self.attention_output = Dense(heads, hidden)
        self.attention_norm = LayerNorm(hidden)
        self.intermediate = Dense(hidden, intermediate)
        self.output = Dense(intermediate, hidden)
        self.output_norm = LayerNorm(hidden)

    def forward(self, hidden_TD: Tensor, cu_seqlens: Tensor, max_seqlen: int, sites: DropoutSites) -> Tensor:
        """Return the layer's output for all tokens, [T, D]."""
        return self.recomputation(self.compute, hidden_TD, cu_seqlens, max_seqlen, sites)

    def compute(self, hidden_TD: Tensor, cu_seqlens: Tensor, max_seqlen: int, sites: DropoutSites) -> Tensor:
        """Compute the result of ``forward``. With recomputation, this is called a second time in the backward pass."""
        all_TD = self.placement.all_rows(hidden_TD)
        # One product computes queries, keys and values in the layout that attention reads.
        dense = self.query_key_value
        qkv_T3HE = self.products.product(all_TD, dense, dense.bias).unflatten(-1, (3, -1, self._head_size))
        context_THE = varlen_self_attention(qkv_T3HE, cu_seqlens, max_seqlen, sites.attention(self.index))
        return self._after_attention(context_THE.flatten(1), hidden_TD, sites)

    def forward_rows(
        self,
        hidden_TD: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        sites: DropoutSites,
        rows_Q: Tensor,
        cu_seqlens_q: Tensor,
    ) -> Tensor:
        """Return the output for ``rows_Q`` only, [Q, D]. It is exact: attention still reads all tokens' keys and values."""
        hidden_TD = self.placement.all_rows(hidden_TD)
        weight, bias = self.query_key_value.weight, self.query_key_value.bias
        # Rows of the fused weight are queries, keys and values of this rank's heads.
        queries = len(weight) // 3
        # Do not use ``products``, which would multiply by the whole fused weight. The last layer does not use FP8 anyway.
        keys_values = F.linear(hidden_TD, weight[queries:], bias[queries:])
        key, value = keys_values.unflatten(-1, (2, -1, self._head_size)).unbind(1)
        chosen_QD = hidden_TD.index_select(0, rows_Q)
        query = F.linear(chosen_QD, weight[:queries], bias[:queries]).unflatten(-1, (-1, self._head_size))
        dropout = sites.attention(self.index)
        context_QHE = varlen_attention(query, key, value, cu_seqlens_q, cu_seqlens, max_seqlen, dropout)
        return self._after_attention(context_QHE.flatten(1), self.placement.own_rows(chosen_QD), sites)

    @property
    def _head_size(self) -> int:
        return self.config.hidden_size // self.config.num_attention_heads

    def _after_attention(self, context_TD: Tensor, residual_TD: Tensor, sites: DropoutSites) -> Tensor:
        # ``_added`` adds the bias of this product.
        projected_TD = self.products.product(context_TD, self.attention_output, None)
        attended_TD = self._added(
            # The bias is added after the sum over ranks, because it must be added only once.
            self.placement.summed(projected_TD),
            self.attention_output.bias,
            residual_TD,
            self.attention_norm,
            sites.after_attention(self.index),
        )
        all_TD = self.placement.all_rows(attended_TD)
        narrow_TD = self.placement.summed(self.products.feed_forward(all_TD, self.intermediate, self.output))
        dropout = sites.after_feed_forward(self.index)
        return self._added(narrow_TD, self.output.bias, attended_TD, self.output_norm, dropout)

    def _added(
        self, product_TD: Tensor, bias_D: Tensor, residual_TD: Tensor, norm: LayerNorm, dropout: Dropout | None
    ) -> Tensor:
        return dropout_add_layer_norm(
            product_TD, bias_D, residual_TD, norm.weight, norm.bias, self.config.layer_norm_eps, dropout
        )


class WordTable(nn.Module):
    """Copy of the word table on the last pipeline stage. It is a buffer, because the first stage has the parameter."""

    def __init__(self, word_VD: Tensor) -> None:
        super().__init__()
        self.word: Tensor
        self.register_buffer("word", word_VD, persistent=False)
