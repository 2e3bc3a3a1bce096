"""BERT with its two pretraining heads, computed on the flat token stream of a ``Batch``.

Shape legend: T tokens, Q rows of the last layer, S sequences, M masked tokens, D hidden, F intermediate, V vocabulary,
H heads, E head size.

Post-LN encoder with learned positions, tanh-form GELU, masked-LM decoder tied to the word embeddings, and next-sentence
head on the pooled [CLS] token (Devlin et al., arXiv 1810.04805). Every weight is [out, in].
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert.configuration.sections import ModelConfig
from bert.layers import Dense, DropoutSites, Embeddings, EncoderLayer, LayerNorm, Placement, WordTable
from kernels import compute_dtype, cross_entropy_sum, dense_gelu, masked_lm_logits

if TYPE_CHECKING:
    from dataloading.batches.loader import Batch


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
        # The counts are on the device, because a captured step is replayed with other batches.
        sequences, masked = batch.global_counts.unbind()
        # Without any masked token in the global batch, the masked-LM loss is 0 instead of NaN.
        return self.masked_lm_loss / masked.clamp(min=1), self.next_sentence_loss / sequences


MakeLayer = Callable[[ModelConfig, int, Placement], EncoderLayer]
"""Function that builds the encoder layer with the given index."""


class BertForPreTraining(nn.Module):
    """BERT with its two pretraining heads, or this rank's part of it."""

    dropout_state: Tensor

    def __init__(
        self,
        config: ModelConfig,
        placement: Placement | None = None,
        make_layer: MakeLayer = EncoderLayer,
        owns: Callable[[str], bool] = lambda _: True,
        word_copy: Tensor | None = None,
    ) -> None:
        """``placement`` and ``make_layer`` decide how parts are built; ``owns`` decides by name which parts are built.

        ``word_copy`` is the word table for the heads if this rank has no embeddings.
        """
        super().__init__()
        self.config = config
        self.placement = placement = placement or Placement()
        hidden = config.hidden_size
        # Parts of the model on other ranks are replaced by ``Identity``, so that parameters keep their names.
        self.embeddings: Any = nn.Identity() if word_copy is None else WordTable(word_copy)
        if owns("embeddings"):
            self.embeddings = Embeddings(config, placement)
        self.layers = nn.ModuleList(
            make_layer(config, index, placement) if owns(f"layers.{index}") else nn.Identity()
            for index in range(config.num_hidden_layers)
        )
        if owns("heads"):
            self.pooler = Dense(hidden, hidden)
            self.next_sentence = Dense(hidden, 2)
            self.transform = Dense(hidden, hidden)
            self.transform_norm = LayerNorm(hidden)
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
        # Counting correct predictions takes another pass over the logits, which training does not need.
        loss, correct = self.placement.masked_lm_loss(
            self._transformed(masked_MD),
            self.embeddings.word,
            self.decoder_bias,
            batch.masked_lm_ids,
            count_correct=not self.training,
        )
        logits_S2 = self.next_sentence_logits(cls_SD)
        # Rows past the end get the label -1, which no loss counts.
        labels_S = self.placement.own_rows(batch.next_sentence_labels, empty=-1)
        next_sentence_loss = self.placement.total(cross_entropy_sum(logits_S2, labels_S))
        return PretrainingOutput(loss, next_sentence_loss, correct)

    def head_inputs(self, batch: "Batch") -> tuple[Tensor, Tensor]:
        """Return the encoder's output at the [CLS] tokens [S, D] and at the masked tokens [M, D].

        Only these rows of the last layer are computed.
        """
        sites = self.next_sites()
        hidden_TD = self.embedded(batch, sites)
        for layer in self.layers[:-1]:
            hidden_TD = layer(hidden_TD, batch.cu_seqlens, batch.max_seqlen, sites)
        return self.last_layer(hidden_TD, batch, sites)

    def embedded(self, batch: "Batch", sites: DropoutSites) -> Tensor:
        """Return the input of the first layer, [T, D]."""
        embedded_TD = self.embeddings(batch, sites)
        # The embeddings and their norm are fp32; the residual stream has autocast's dtype.
        return embedded_TD.to(compute_dtype(embedded_TD))

    def last_layer(self, hidden_TD: Tensor, batch: "Batch", sites: DropoutSites) -> tuple[Tensor, Tensor]:
        """Return the result of ``head_inputs``, given the input of the last layer."""
        # [CLS] is the first token of every sequence.
        cls_S = batch.cu_seqlens[:-1].long()
        # Attention needs the queries of a sequence to be adjacent, so rows are sorted. Unused slots contain the index of the
        # first row after all sequences, so they come last, past the end of ``cu_seqlens_q``.
        rows_Q, order_Q = torch.cat([cls_S, batch.masked_lm_positions]).sort()
        # The number of chosen rows before each sequence boundary, computed on the device.
        cu_seqlens_q = torch.searchsorted(rows_Q, batch.cu_seqlens.long()).int()
        last = self.layers[-1]
        assert isinstance(last, EncoderLayer)
        output_QD = last.forward_rows(hidden_TD, batch.cu_seqlens, batch.max_seqlen, sites, rows_Q, cu_seqlens_q)
        # Restore the order of the heads: [CLS] tokens, then masked tokens.
        heads_QD = self.placement.all_rows(output_QD).index_select(0, order_Q.argsort())
        cls_SD, masked_MD = heads_QD[: len(cls_S)], heads_QD[len(cls_S) :]
        return self.placement.own_rows(cls_SD), self.placement.own_rows(masked_MD)

    def next_sites(self) -> DropoutSites:
        """Return the dropout of the next forward pass. In training, each pass has its own step of the random streams."""
        if not self.training:
            return DropoutSites(self.config, None)
        self.dropout_state[1] += 1
        # Copy the state, because the backward pass must use the step of its forward pass.
        return DropoutSites(self.config, self.dropout_state.clone())

    def masked_lm_logits(self, masked_MD: Tensor) -> Tensor:
        """Return an evaluation's logits [M, V], in at least fp32, given the encoder's output at the masked tokens."""
        return masked_lm_logits(self._transformed(masked_MD), self.embeddings.word, self.decoder_bias)

    def next_sentence_logits(self, cls_SD: Tensor) -> Tensor:
        """Return the logits [S, 2], given the encoder's output at the [CLS] tokens; column 1 is a random next sentence."""
        return self.next_sentence(torch.tanh(self.pooler(cls_SD)))

    def _transformed(self, masked_MD: Tensor) -> Tensor:
        wide_MD = dense_gelu(masked_MD, self.transform.weight, self.transform.bias)
        # The norms of ``kernels`` are fused with dropout and residual, which are not needed here.
        norm = self.transform_norm
        return F.layer_norm(wide_MD, norm.weight.shape, norm.weight, norm.bias, self.config.layer_norm_eps)


@functools.cache  # making the modules takes a fifth of a plan's time
def parameter_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of each parameter of the whole model by name, without allocating the model."""
    with torch.device("meta"):
        return {name: tuple(each.shape) for name, each in BertForPreTraining(config).named_parameters()}


@torch.no_grad()
def initialize_(model: BertForPreTraining, generator: torch.Generator) -> None:
    """Draw BERT's initial weights: normals truncated at two standard deviations, biases 0, gains 1."""
    deviation = model.config.initializer_range
    for parameter in model.parameters():
        # Vectors (biases and gains) already have their values, while matrices are uninitialised.
        if parameter.ndim > 1:
            nn.init.trunc_normal_(parameter, 0.0, deviation, -2 * deviation, 2 * deviation, generator=generator)
