"""Hidden states in a tensor group: all rows as the input of products, and a rank's own rows between products.

Rows are divided evenly. Padding rows at the end are zeros, which belong to no sequence and which no loss reads.

Shape legend in ``bert/model.py``. In addition, R is the number of ranks in the group, and W = N / R, rounded up, is the
number of rows of N on each rank.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bert.layers import Placement
from bert.parallel.tensor.exchange import Exchange
from bert.parallel.tensor.vocabulary import shard_loss
from kernels import masked_lm_logits

_Exchanged = Callable[[Tensor], Tensor]
WORDS_MULTIPLE = 8
"""A shard has a multiple of this many words, because products are faster if a row of logits is a multiple of 16 bytes."""


class SharedPlacement(Placement):
    """``Placement`` in which each rank of a group has a shard of the weights and its own rows of hidden states.

    Dropout applies only to a rank's own rows and heads. It is as random as on one rank if every rank has its own seed.
    """

    def __init__(self, exchange: Exchange, vocab_size: int) -> None:
        self._exchange = exchange
        self._vocab_size = vocab_size

    def share(self, length: int) -> int:
        return -(-length // self._exchange.size)

    def share_of_words(self, vocab_size: int) -> int:
        """Return the number of rows of the word table per rank; some of them may be past the table's end."""
        return -(-vocab_size // (self._exchange.size * WORDS_MULTIPLE)) * WORDS_MULTIPLE

    def all_rows(self, own: Tensor) -> Tensor:
        """Gather all rows [R W, ...] from each rank's rows [W, ...]. The backward pass sums and scatters the gradients."""
        rows = _Collective.apply(own, self._exchange.gathered, self._exchange.scattered)
        assert isinstance(rows, Tensor)
        return rows

    def own_rows(self, rows: Tensor, empty: int = 0) -> Tensor:
        """Return this rank's rows [W, ...] of ``rows`` [N, ...]."""
        own = self.share(len(rows))
        # Collectives need slices of equal length, so the length is padded. The slice may be empty past the end of the rows.
        start = own * self._exchange.rank
        return _lengthened(rows[start : start + own], own, empty)

    def summed(self, product: Tensor) -> Tensor:
        """Return this rank's rows [W, D] of the sum of the products [N, D]. The backward pass gathers the gradients."""
        product = _lengthened(product, self.share(len(product)) * self._exchange.size)
        rows = _Collective.apply(product, self._exchange.scattered, self._exchange.gathered)
        assert isinstance(rows, Tensor)
        return rows

    def words(self, input_ids_T: Tensor, word_VD: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return indices 0, 1, ... and a table with the embeddings of this rank's tokens, gathered from all shards."""
        # Each word is in one shard, and the other ranks add zeros. Indices outside this shard are clamped only to make the
        # lookup valid.
        places_T = input_ids_T - len(word_VD) * self._exchange.rank
        here_T = (places_T >= 0) & (places_T < len(word_VD))
        found_TD = torch.where(here_T[:, None], F.embedding(places_T.clamp(0, len(word_VD) - 1), word_VD), 0.0)
        table_WD = self.summed(found_TD)
        return torch.arange(len(table_WD), device=table_WD.device), table_WD, None

    def masked_lm_loss(
        self, hidden_MD: Tensor, word_VD: Tensor, bias_V: Tensor, labels_M: Tensor, count_correct: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return ``kernels.masked_lm_loss`` on all ranks; each rank computes the logits of its own words."""
        hidden_MD = self.all_rows(hidden_MD)[: len(labels_M)]  # without the padding rows
        start = len(word_VD) * self._exchange.rank
        known = min(max(0, self._vocab_size - start), len(word_VD))
        if known < len(word_VD):  # rows past the vocabulary must not have the largest logit
            bias_V = torch.cat([bias_V[:known], bias_V.new_full((len(bias_V) - known,), -torch.inf)])
        product = masked_lm_logits if count_correct else F.linear
        return shard_loss(product(hidden_MD, word_VD, bias_V), labels_M, start, self._exchange, count_correct)

    def total(self, loss: Tensor) -> Tensor:
        """Return the sum [] of a loss over the ranks, on all ranks."""

        def over_ranks(own: Tensor) -> Tensor:
            self._exchange.all_reduce_(own := own.clone())
            return own

        # The gradient needs no communication, because the loss is the same on all ranks.
        total = _Collective.apply(loss, over_ranks, lambda gradient: gradient)
        assert isinstance(total, Tensor)
        return total


def _lengthened(rows: Tensor, length: int, empty: int = 0) -> Tensor:
    if len(rows) == length:
        return rows
    # F.pad takes dimensions from the last to the first, and rows are the first.
    return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, length - len(rows)), value=empty)


class _Collective(torch.autograd.Function):
    """Autograd function that applies ``function`` to a tensor, and ``backward`` to the gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, function: _Exchanged, backward: _Exchanged) -> Tensor:
        ctx.function = backward
        return function(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.function(gradient), None, None
