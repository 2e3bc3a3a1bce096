"""BERT with its two pretraining heads, computed on the flat token stream of a ``Batch``.

Shape legend: T tokens, Q rows of the last layer, S sequences, M masked tokens, D hidden, F intermediate, V vocabulary,
H heads, E head size.

The encoder is post-LN, with learned positions and tanh-form GELU. The masked-LM decoder is tied to the word embeddings, and
the next-sentence head reads the pooled [CLS] token (Devlin et al., arXiv 1810.04805). Every weight is [out, in].

``Placement`` decides how weights and hidden states are divided among ranks, and ``MatrixProducts`` decides how products with
weights are computed. The base classes here do what PyTorch does on one rank.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert.configuration.sections import ModelConfig, Recompute
from bert.recomputation import recomputed
from kernels import (
    IGNORED,
    Dropout,
    compute_dtype,
    cross_entropy_sum,
    dense_gelu,
    dropout_add_layer_norm,
    embedding_layer_norm,
    masked_lm_logits,
    masked_lm_loss,
    varlen_attention,
    varlen_self_attention,
)

if TYPE_CHECKING:
    from dataloading.batches.loader import Batch


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

    def words(self, input_ids_T: Tensor, word_VD: Tensor) -> tuple[Tensor, Tensor]:
        """Return an index for each token, and the table of word embeddings that the indices refer to."""
        return input_ids_T, word_VD

    def masked_lm_loss(
        self,
        products: "MatrixProducts",
        hidden_MD: Tensor,
        word_VD: Tensor,
        bias_V: Tensor,
        labels_M: Tensor,
        count_correct: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return ``kernels.masked_lm_loss`` over all rows; ``hidden_MD`` has this rank's rows."""
        return products.masked_lm_loss(hidden_MD, word_VD, bias_V, labels_M, count_correct)

    def total(self, loss: Tensor) -> Tensor:
        """Sum a loss over the ranks."""
        return loss


class Dense(nn.Module):
    """Weight [out, in] and bias [out] of a dense layer."""

    def __init__(self, inputs: int, outputs: int, copy_NK: Tensor | None = None) -> None:
        """``copy_NK`` is a 16-bit copy of the weight. The optimizer writes the copy, and matrix products read it."""
        super().__init__()
        # Leave the values undefined: a checkpoint or ``initialize_`` sets them.
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.copy_NK = copy_NK

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class MatrixProducts:
    """Matrix products with the weights of encoder layers and with the word table, in the precision of autocast."""

    def layer(self, config: ModelConfig, index: int, placement: Placement, recompute: Recompute) -> "EncoderLayer":
        """Build an encoder layer that uses these products."""
        return EncoderLayer(config, index, placement, self, recompute)

    def dense(self, layer: int, name: str, inputs: int, outputs: int) -> Dense:  # noqa: ARG002
        """Build the dense layer ``name`` of an encoder layer."""
        return Dense(inputs, outputs)

    def product(self, x: Tensor, dense: Dense, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``. If ``bias`` is None, a later operation adds the bias."""
        return F.linear(x, dense.weight, bias)

    def feed_forward(self, x_TD: Tensor, wide: Dense, narrow: Dense) -> Tensor:
        """Return ``gelu(x @ wide.T + bias) @ narrow.T``, [T, D], without the second bias."""
        return F.linear(dense_gelu(x_TD, wide.weight, wide.bias), narrow.weight)

    def masked_lm_loss(
        self, hidden_MD: Tensor, word_VD: Tensor, bias_V: Tensor, labels_M: Tensor, count_correct: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return ``kernels.masked_lm_loss``, which multiplies by the word table."""
        return masked_lm_loss(hidden_MD, word_VD, bias_V, labels_M, count_correct=count_correct)

    def table_gradient(self, word_VD: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return the tensor to which the embeddings add the word table's gradient, [V, D], or None to use autograd."""
        return None


class Embeddings(nn.Module):
    """Word, position and segment embeddings, and the layer norm of their sum."""

    def __init__(self, config: ModelConfig, placement: Placement, products: MatrixProducts) -> None:
        super().__init__()
        self.config, self.placement, self.products = config, placement, products
        # Do not use nn.Embedding, because one op reads all three tables.
        self.word = nn.Parameter(torch.empty(placement.share_of_words(config.vocab_size), config.hidden_size))
        self.position = nn.Parameter(torch.empty(config.max_position_embeddings, config.hidden_size))
        self.segment = nn.Parameter(torch.empty(config.type_vocab_size, config.hidden_size))
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, batch: "Batch", dropout_state: Tensor | None) -> Tensor:
        """Embed a batch; return [T, D]."""
        word_ids_T, word_VD = self.placement.words(batch.input_ids, self.word)
        return embedding_layer_norm(
            word_ids_T,
            self.placement.own_rows(batch.position_ids),
            self.placement.own_rows(batch.segment_ids),
            word_VD,
            self.position,
            self.segment,
            self.norm.weight,
            self.norm.bias,
            self.norm.eps,
            self.dropout(dropout_state),
            self.products.table_gradient(self.word),
        )

    def dropout(self, state: Tensor | None) -> Dropout | None:
        """Return the dropout to apply after the norm, or None for no dropout."""
        return _dropout(self.config.hidden_dropout, state, 0)


def _dropout(p: float, state: Tensor | None, stream: int) -> Dropout | None:
    return None if state is None or p == 0 else Dropout(p, state, stream)


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each followed by dropout, residual and norm."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        placement: Placement,
        products: MatrixProducts,
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.placement, self.products = placement, products
        self.recompute: Recompute = recompute
        hidden, eps = config.hidden_size, config.layer_norm_eps
        # With tensor parallelism, a rank has whole heads and some columns of the intermediate layer.
        heads, intermediate = placement.share(hidden), placement.share(config.intermediate_size)
        # Queries, keys and values share a weight. LAMB treats it as three tensors, like the reference (``lamb_segments``).
        self.query_key_value = products.dense(index, "query_key_value", hidden, 3 * heads)
        self.attention_output = products.dense(index, "attention_output", heads, hidden)
        self.attention_norm = nn.LayerNorm(hidden, eps)
        self.intermediate = products.dense(index, "intermediate", hidden, intermediate)
        self.output = products.dense(index, "output", intermediate, hidden)
        self.output_norm = nn.LayerNorm(hidden, eps)

    def forward(self, hidden_TD: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_state: Tensor | None) -> Tensor:
        """Return the layer's output for all tokens, [T, D]."""
        return recomputed(self.recompute, self.compute, hidden_TD, cu_seqlens, max_seqlen, dropout_state)

    def compute(self, hidden_TD: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_state: Tensor | None) -> Tensor:
        """Compute the result of ``forward``. With recomputation, this is called a second time in the backward pass."""
        all_TD = self.placement.all_rows(hidden_TD)
        # One product computes queries, keys and values in the layout that attention reads.
        dense = self.query_key_value
        qkv_T3HE = self.products.product(all_TD, dense, dense.bias).unflatten(-1, (3, -1, self._head_size))
        dropout, *others = self.dropouts(dropout_state)
        context_THE = varlen_self_attention(qkv_T3HE, cu_seqlens, max_seqlen, dropout)
        return self._after_attention(context_THE.flatten(1), hidden_TD, others)

    def forward_rows(
        self,
        hidden_TD: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_state: Tensor | None,
        rows_Q: Tensor,
        cu_seqlens_q: Tensor,
    ) -> Tensor:
        """Return the output for ``rows_Q`` only, [Q, D]. It is exact: attention still reads all tokens' keys and values."""
        hidden_TD = self.placement.all_rows(hidden_TD)
        weight, bias = self.query_key_value.weight, self.query_key_value.bias
        # The first third of the fused weight's rows computes this rank's queries. The rest computes its keys and values.
        queries = len(weight) // 3
        # Do not use ``products``, which would multiply by the whole fused weight. The last layer does not use FP8 anyway.
        keys_values = F.linear(hidden_TD, weight[queries:], bias[queries:])
        key, value = keys_values.unflatten(-1, (2, -1, self._head_size)).unbind(1)
        chosen_QD = hidden_TD.index_select(0, rows_Q)
        query = F.linear(chosen_QD, weight[:queries], bias[:queries]).unflatten(-1, (-1, self._head_size))
        dropout, *others = self.dropouts(dropout_state)
        context_QHE = varlen_attention(query, key, value, cu_seqlens_q, cu_seqlens, max_seqlen, dropout)
        return self._after_attention(context_QHE.flatten(1), self.placement.own_rows(chosen_QD), others)

    def dropouts(self, state: Tensor | None) -> list[Dropout | None]:
        """Return three dropouts: on attention probabilities, before the norm after attention, and before the last norm.

        Each has its own random stream, so that pipeline stages draw the same numbers as a single rank.
        """
        hidden = self.config.hidden_dropout
        rates = self.config.attention_dropout, hidden, hidden
        return [_dropout(p, state, 3 * self.index + place) for place, p in enumerate(rates, 1)]

    @property
    def _head_size(self) -> int:
        return self.config.hidden_size // self.config.num_attention_heads

    def _after_attention(self, context_TD: Tensor, residual_TD: Tensor, dropouts: list[Dropout | None]) -> Tensor:
        # The norm adds the bias of this product after the sum over ranks. Otherwise each rank would add the bias once.
        projected_TD = self.placement.summed(self.products.product(context_TD, self.attention_output, None))
        attended_dropout, output_dropout = dropouts
        attended_TD = _normed(
            projected_TD, self.attention_output.bias, residual_TD, self.attention_norm, attended_dropout
        )
        all_TD = self.placement.all_rows(attended_TD)
        narrow_TD = self.placement.summed(self.products.feed_forward(all_TD, self.intermediate, self.output))
        return _normed(narrow_TD, self.output.bias, attended_TD, self.output_norm, output_dropout)


def _normed(
    product_TD: Tensor, bias_D: Tensor, residual_TD: Tensor, norm: nn.LayerNorm, dropout: Dropout | None
) -> Tensor:
    return dropout_add_layer_norm(product_TD, bias_D, residual_TD, norm.weight, norm.bias, norm.eps, dropout)


@dataclass(frozen=True)
class PretrainingOutput:
    """Loss sums of one micro-batch, kept on the device."""

    masked_lm_loss: Tensor
    """[], sum of cross-entropies over the masked tokens."""
    next_sentence_loss: Tensor
    """[], sum of cross-entropies over the sequences."""
    masked_lm_correct: Tensor | None
    """int64 [], number of masked tokens whose largest logit is the label; None in training."""

    def mean_losses(self, batch: "Batch") -> tuple[Tensor, Tensor]:
        """Return this micro-batch's share of the global batch's mean masked-LM and next-sentence losses, both [].

        The divisors are the counts of the whole global batch, so that losses and gradients add up over ranks and
        accumulation steps. The model trains on the sum of both losses.
        """
        # The counts are on the device, because each replay of a captured step has another batch with other counts.
        sequences, masked = batch.global_counts.unbind()
        # Without any masked token in the global batch, the masked-LM loss is 0 instead of NaN.
        return self.masked_lm_loss / masked.clamp(min=1), self.next_sentence_loss / sequences


class BertForPreTraining(nn.Module):
    """BERT with its two pretraining heads, or this rank's part of it."""

    dropout_state: Tensor

    def __init__(
        self,
        config: ModelConfig,
        placement: Placement | None = None,
        products: MatrixProducts | None = None,
        inner_products: MatrixProducts | None = None,
        recompute: Recompute = "none",
        owns: Callable[[str], bool] = lambda _: True,
        absent_embeddings: nn.Module | None = None,
    ) -> None:
        """``inner_products`` and ``recompute`` apply to all encoder layers but the last. Other parts use ``products``.

        The last layer computes few rows, so faster products would gain little. Its backward pass comes first, so
        recomputation would save no memory. ``owns`` decides by name which parts this rank has. ``absent_embeddings`` takes
        the place of the embeddings on a rank that does not have them.
        """
        super().__init__()
        self.config = config
        self.placement = placement = placement or Placement()
        self.products = products = products or MatrixProducts()
        hidden, last = config.hidden_size, config.num_hidden_layers - 1
        # Parts of the model on other ranks are replaced by ``Identity``, so that parameters keep their names.
        self.embeddings: Any = (
            Embeddings(config, placement, products) if owns("embeddings") else absent_embeddings or nn.Identity()
        )
        self.layers = nn.ModuleList()
        for index in range(config.num_hidden_layers):
            if not owns(f"layers.{index}"):
                self.layers.append(nn.Identity())
            elif index == last:
                self.layers.append(products.layer(config, index, placement, "none"))
            else:
                self.layers.append((inner_products or products).layer(config, index, placement, recompute))
        if owns("heads"):
            self.pooler = Dense(hidden, hidden)
            self.next_sentence = Dense(hidden, 2)
            self.transform = Dense(hidden, hidden)
            self.transform_norm = nn.LayerNorm(hidden, config.layer_norm_eps)
            # There is no decoder weight: ``losses`` uses the word table, and autograd adds up the gradients of both uses.
            self.decoder_bias = nn.Parameter(torch.zeros(placement.share_of_words(config.vocab_size)))
        # Seed and step are on the device, so that each replay of a captured step draws different numbers.
        self.register_buffer("dropout_state", torch.zeros(2, dtype=torch.int64), persistent=False)

    @torch.no_grad()
    def seed_dropout(self, seed: int) -> None:
        """Restart dropout from ``seed``. This does not affect ops that draw from PyTorch's own random generator."""
        self.dropout_state.copy_(torch.tensor([seed, 0]))

    def forward(self, batch: "Batch") -> PretrainingOutput:
        return self.losses(*self.head_inputs(batch), batch)

    def losses(self, cls_SD: Tensor, masked_MD: Tensor, batch: "Batch") -> PretrainingOutput:
        """Return the loss sums, given the result of ``head_inputs``."""
        loss, correct = self.placement.masked_lm_loss(
            self.products,
            self._transformed(masked_MD),
            self.embeddings.word,
            self.decoder_bias,
            batch.masked_lm_ids,
            # Counting correct predictions takes another pass over the logits, which training does not need.
            count_correct=not self.training,
        )
        logits_S2 = self.next_sentence_logits(cls_SD)
        labels_S = self.placement.own_rows(batch.next_sentence_labels, empty=IGNORED)
        next_sentence_loss = self.placement.total(cross_entropy_sum(logits_S2, labels_S))
        return PretrainingOutput(loss, next_sentence_loss, correct)

    def head_inputs(self, batch: "Batch") -> tuple[Tensor, Tensor]:
        """Return the encoder's output at the [CLS] tokens [S, D] and at the masked tokens [M, D].

        Only these rows of the last layer are computed.
        """
        dropout_state = self.next_dropout_state()
        hidden_TD = self.embedded(batch, dropout_state)
        for layer in self.layers[:-1]:
            hidden_TD = layer(hidden_TD, batch.cu_seqlens, batch.max_seqlen, dropout_state)
        return self.last_layer(hidden_TD, batch, dropout_state)

    def embedded(self, batch: "Batch", dropout_state: Tensor | None) -> Tensor:
        """Return the input of the first layer, [T, D]."""
        embedded_TD = self.embeddings(batch, dropout_state)
        # The embeddings and their norm are fp32; the residual stream has autocast's dtype.
        return embedded_TD.to(compute_dtype(embedded_TD))

    def last_layer(self, hidden_TD: Tensor, batch: "Batch", dropout_state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the result of ``head_inputs``, given the input of the last layer."""
        # [CLS] is the first token of every sequence.
        cls_S = batch.cu_seqlens[:-1].long()
        # Attention needs the queries of a sequence to be adjacent, so rows are sorted. Unused slots contain the index of the
        # first row after all sequences, so they come last, past the end of ``cu_seqlens_q``.
        rows_Q, order_Q = torch.cat([cls_S, batch.masked_lm_positions]).sort()
        # Count the chosen rows before each sequence boundary on the device, so that the host need not wait.
        cu_seqlens_q = torch.searchsorted(rows_Q, batch.cu_seqlens.long()).int()
        last = self.layers[-1]
        assert isinstance(last, EncoderLayer)
        sequences = batch.cu_seqlens, batch.max_seqlen
        output_QD = last.forward_rows(hidden_TD, *sequences, dropout_state, rows_Q, cu_seqlens_q)
        # Restore the order that the pretraining heads expect: [CLS] tokens, then masked tokens.
        heads_QD = self.placement.all_rows(output_QD).index_select(0, order_Q.argsort())
        cls_SD, masked_MD = heads_QD[: len(cls_S)], heads_QD[len(cls_S) :]
        return self.placement.own_rows(cls_SD), self.placement.own_rows(masked_MD)

    def next_dropout_state(self) -> Tensor | None:
        """Return seed and step of the next forward pass's dropout, int64 [2], or None outside training.

        Each forward pass in training counts as a step. Its number makes its random numbers differ from other passes.
        """
        if not self.training:
            return None
        self.dropout_state[1] += 1
        # Return a copy: the backward pass needs this pass's step, but the next forward pass changes the original.
        return self.dropout_state.clone()

    def masked_lm_logits(self, masked_MD: Tensor) -> Tensor:
        """Return an evaluation's logits [M, V], in at least fp32, given the encoder's output at the masked tokens."""
        return masked_lm_logits(self._transformed(masked_MD), self.embeddings.word, self.decoder_bias)

    def next_sentence_logits(self, cls_SD: Tensor) -> Tensor:
        """Return the logits [S, 2], given the encoder's output at [CLS] tokens; column 1 is for a random next sentence."""
        return self.next_sentence(torch.tanh(self.pooler(cls_SD)))

    def _transformed(self, masked_MD: Tensor) -> Tensor:
        return self.transform_norm(dense_gelu(masked_MD, self.transform.weight, self.transform.bias))


# ``python -m cluster plan`` calls this so often that without the cache, a fifth of its time would be spent here.
@functools.cache
def parameter_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of each parameter of the whole model by name, without allocating the model."""
    with torch.device("meta"):
        return {name: tuple(each.shape) for name, each in BertForPreTraining(config).named_parameters()}
