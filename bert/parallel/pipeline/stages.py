"""Division of a model into pipeline stages, and the module that computes the stages of a rank. The division makes the most
expensive stage as cheap as possible.

Shape legend in ``bert/model.py``. In addition, W is the number of rows of hidden states on this rank: T, or this rank's
share of T in a tensor group.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert.configuration.sections import ModelConfig, Recompute
from bert.model import (
    BertForPreTraining,
    MatrixProducts,
    Placement,
    PretrainingOutput,
    parameter_shapes,
)
from dataloading.batches.loader import Batch
from kernels import compute_dtype

_MASKED_SHARE = 0.15
"""Fraction of tokens that the heads read. BERT masks 15 % of the tokens; the [CLS] tokens are negligible."""


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of the model. The first stage also has the embeddings, and the last stage has the heads."""

    index: int
    count: int
    """Number of stages of the model."""
    layers: range

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def owns(self, name: str) -> bool:
        """Tell whether the stage updates the parameter ``name``."""
        match name.split("."):
            case ["embeddings", *_]:
                return self.is_first
            case ["layers", layer, *_]:
                return int(layer) in self.layers
        return self.is_last


def stages_of(config: ModelConfig, count: int) -> list[Stage]:
    return [Stage(index, count, layers) for index, layers in enumerate(divided(layer_costs(config), count))]


def layer_costs(config: ModelConfig) -> list[float]:
    """Return each layer's multiply-adds per token in products with weights; the last layer includes the heads.

    Attention adds the same cost to every layer and is omitted. The last layer computes keys and values for all tokens, and
    everything else only for the rows that the heads read. The embeddings have no products.
    """
    hidden, wide = config.hidden_size, config.intermediate_size
    rows = _MASKED_SHARE * hidden * (2 * hidden + 2 * wide)  # weights of query, attention output, fc1, fc2
    heads = _MASKED_SHARE * hidden * (hidden + config.vocab_size)  # weights of transform and decoder
    layer = hidden * (4 * hidden + 2 * wide)  # weights of query, key, value, attention output, fc1, fc2
    return [float(layer)] * (config.num_hidden_layers - 1) + [2 * hidden**2 + rows + heads]


def divided(costs: list[float], count: int) -> list[range]:
    """Divide costs into ``count`` ranges with the lowest possible highest sum. On a tie, minimise the sum of squares."""

    @cache
    def best(start: int, ranges: int) -> tuple[float, float, tuple[int, ...]]:
        if ranges == 1:
            cost = sum(costs[start:])
            return cost, cost**2, (len(costs),)
        choices = []
        for stop in range(start + 1, len(costs) - ranges + 2):
            cost = sum(costs[start:stop])
            highest, squares, stops = best(stop, ranges - 1)
            choices.append((max(cost, highest), squares + cost**2, (stop, *stops)))
        return min(choices)  # if both sums tie, take the earliest boundaries, so that all ranks divide alike

    stops = best(0, count)[2]
    return [range(start, stop) for start, stop in zip((0, *stops), stops, strict=False)]


class PipelineModel(BertForPreTraining):
    """Pipeline stages that this rank holds. A call of this module sends a batch through the stages of all ranks."""

    def __init__(
        self,
        config: ModelConfig,
        group: dist.ProcessGroup,
        virtual_stages: int,
        word_VD: Tensor,
        placement: Placement | None = None,
        products: MatrixProducts | None = None,
        recompute: Recompute = "none",
    ) -> None:
        """``word_VD`` is the word table, or this rank's shard of it. The last stage copies it."""
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        stages = stages_of(config, self.size * virtual_stages)
        self.stages = own = stages[self.rank :: self.size]
        """This rank's stages. Between two of them, a micro-batch passes through all other ranks."""
        self.owners = {
            name: next(stage.index for stage in stages if stage.owns(name)) % self.size
            for name in parameter_shapes(config)
        }
        """Rank in the pipeline group that updates each parameter, by the parameter's name."""
        table = self._gradient = None
        if own[-1].is_last:
            # The copy of the word table is a buffer, because only the first stage has the table as a parameter. Autograd
            # accumulates the copy's gradient here, and ``add_word_gradient_`` sends it to the first stage.
            word_VD = word_VD.detach().clone().requires_grad_()
            word_VD.grad = self._gradient = torch.zeros_like(word_VD)
            table = nn.Module()
            table.register_buffer("word", word_VD, persistent=False)
        super().__init__(
            config, placement, products, None, recompute, lambda name: any(stage.owns(name) for stage in own), table
        )

    def rows(self, batch: Batch) -> int:
        """Return W for a micro-batch: the number of rows of hidden states that this rank receives and sends."""
        return len(self.placement.own_rows(batch.position_ids))

    def hidden_dtype(self) -> torch.dtype:
        """Return the dtype of hidden states under the current autocast settings."""
        weight = next(self.parameters())
        return compute_dtype(weight) if weight.is_cuda else weight.dtype  # on a CPU, norms under autocast return fp32

    def through(
        self, stage: Stage, given_WD: Tensor | None, batch: Batch, dropout_state: Tensor | None
    ) -> Tensor | PretrainingOutput:
        """Compute a stage from the previous stage's hidden states [W, D], if any. The last stage returns losses."""
        hidden_WD = self.embedded(batch, dropout_state) if given_WD is None else given_WD
        for layer in stage.layers[:-1] if stage.is_last else stage.layers:
            hidden_WD = self.layers[layer](hidden_WD, batch.cu_seqlens, batch.max_seqlen, dropout_state)
        if not stage.is_last:
            # Convert to the dtype of the next stage's buffer, because the last norm may return another dtype.
            return hidden_WD.to(self.hidden_dtype())
        return self.losses(*self.last_layer(hidden_WD, batch, dropout_state), batch)

    def forward(self, batch: Batch) -> PretrainingOutput:
        """Return both losses of a batch on the rank of the last stage, and zeros on other ranks. Every rank must call it."""
        dropout_state = self.next_dropout_state()
        zero = torch.zeros((), device=batch.input_ids.device)
        output = PretrainingOutput(zero, zero, zero.long())
        for stage in self.stages:
            hidden_WD = None
            if not stage.is_first:
                shape = self.rows(batch), self.config.hidden_size
                hidden_WD = torch.empty(shape, dtype=self.hidden_dtype(), device=batch.input_ids.device)
                # The indices wrap around, because with several stages per rank, the last rank sends to the first one.
                dist.recv(hidden_WD, group=self.group, group_src=(self.rank - 1) % self.size)
            computed = self.through(stage, hidden_WD, batch, dropout_state)
            if isinstance(computed, Tensor):
                dist.send(computed.contiguous(), group=self.group, group_dst=(self.rank + 1) % self.size)
            else:
                output = computed
        return output

    @torch.no_grad()
    def add_word_gradient_(self) -> None:
        """Add the gradient of the word table's copy to the table's own gradient. Every rank must call this method."""
        if self._gradient is not None:
            dist.send(self._gradient, group=self.group, group_dst=0)
            self._gradient.zero_()
        elif self.rank == 0:
            word = self.embeddings.word
            received = torch.empty_like(word)
            dist.recv(received, group=self.group, group_src=self.size - 1)
            word.grad += received

    @torch.no_grad()
    def copy_word_(self) -> None:
        """Send the word table to the last stage. Every rank must call it."""
        if self._gradient is not None:
            dist.recv(self.embeddings.word.detach(), group=self.group, group_src=0)
        elif self.rank == 0:
            dist.send(self.embeddings.word.detach(), group=self.group, group_dst=self.size - 1)
