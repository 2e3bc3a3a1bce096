"""Hidden states on the ranks of a tensor group: all rows where products need them, a rank's own between products.

Rows are divided evenly, with inert ones past the end: zeros, which no sequence owns and no loss reads.

Shape legend in ``bert/model.py``; besides R ranks of the group, W = N / R own rows of N, rounded up.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bert.layers import Placement
from bert.parallel.tensor.exchange import Exchange
from bert.parallel.tensor.vocabulary import shard_loss
from kernels import masked_lm_logits

WORDS_MULTIPLE = 8
"""Shards of the vocabulary are rounded up to this many words, as rows of 16 bytes of logits are multiplied faster."""


class SharedPlacement(Placement):
    """``Placement`` where each rank of a group has a shard of the weights and its own rows of hidden states.

    Dropout falls on own rows and own heads only, so that it is as random as on one rank where every rank has a seed of its
    own.
    """

    def __init__(self, exchange: Exchange, vocab_size: int) -> None:
        self._exchange = exchange
        self._vocab_size = vocab_size

    def share(self, length: int) -> int:
        """Return the length of each rank's shard of a dimension."""
        return -(-length // self._exchange.size)

    def share_of_words(self, vocab_size: int) -> int:
        """Return how many rows of the word table each rank has, some of them past its end."""
        return -(-vocab_size // (self._exchange.size * WORDS_MULTIPLE)) * WORDS_MULTIPLE

    def all_rows(self, own: Tensor) -> Tensor:
        """[R W, ...] from each rank's [W, ...]; gradients are summed, and scattered back."""
        rows = _AllRows.apply(own, self._exchange)
        assert isinstance(rows, Tensor)
        return rows

    def own_rows(self, rows: Tensor, empty: int = 0) -> Tensor:
        """[W, ...] of [N, ...]."""
        own = self.share(len(rows))
        # Equal slices of the padded length, as collectives need; past the end of the rows one may be empty.
        start = own * self._exchange.rank
        return _lengthened(rows[start : start + own], own, empty)

    def summed(self, product: Tensor) -> Tensor:
        """[W, D] of the sum over ranks of [N, D]; gradients are gathered."""
        rows = _SummedRows.apply(_lengthened(product, self.share(len(product)) * self._exchange.size), self._exchange)
        assert isinstance(rows, Tensor)
        return rows

    def words(self, input_ids_T: Tensor, word_VD: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return a table of the own rows' words in their order, brought together from the shards that have them."""
        # One shard alone has a word, and the others add zeros. Places outside of this one are clamped only to be read
        # safely.
        places_T = input_ids_T - len(word_VD) * self._exchange.rank
        here_T = (places_T >= 0) & (places_T < len(word_VD))
        found_TD = torch.where(here_T[:, None], F.embedding(places_T.clamp(0, len(word_VD) - 1), word_VD), 0.0)
        table_WD = self.summed(found_TD)
        return torch.arange(len(table_WD), device=table_WD.device), table_WD, None

    def masked_lm_loss(
        self, hidden_MD: Tensor, word_VD: Tensor, bias_V: Tensor, labels_M: Tensor, count_correct: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return ``kernels.masked_lm_loss`` of logits of which each rank has those of its words; the same on all ranks."""
        hidden_MD = self.all_rows(hidden_MD)[: len(labels_M)]  # without the inert rows
        start = len(word_VD) * self._exchange.rank
        known = min(max(0, self._vocab_size - start), len(word_VD))
        if known < len(word_VD):  # rows past the vocabulary must not win
            bias_V = torch.cat([bias_V[:known], bias_V.new_full((len(bias_V) - known,), -torch.inf)])
        product = masked_lm_logits if count_correct else F.linear
        return shard_loss(product(hidden_MD, word_VD, bias_V), labels_M, start, self._exchange, count_correct)

    def total(self, loss: Tensor) -> Tensor:
        """[] the sum over ranks, on all of them."""
        total = _Total.apply(loss, self._exchange)
        assert isinstance(total, Tensor)
        return total


def _lengthened(rows: Tensor, length: int, empty: int = 0) -> Tensor:
    if len(rows) == length:
        return rows
    # F.pad counts dimensions from the last, and rows are the first.
    return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, length - len(rows)), value=empty)


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.gathered(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.scattered(gradient), None


class _SummedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.scattered(product)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.gathered(gradient), None


class _Total(torch.autograd.Function):
    """Sum whose gradient each rank has already: the loss is the same on all of them."""

    @staticmethod
    def forward(_: Any, own: Tensor, exchange: Exchange) -> Tensor:
        total = own.clone()
        exchange.all_reduce_(total)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
