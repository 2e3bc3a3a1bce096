"""Hidden states in a tensor group. The input of a product has all rows, but between products a rank has only its own rows.
This module also has the loss of logits whose columns are divided among the ranks, and the collectives that both use.

Rows are divided evenly. Padding rows at the end are zeros, which belong to no sequence and which no loss reads.

Shape legend in ``bert/model.py``. In addition, R is the number of ranks in the group, and W = N / R, rounded up, is the
number of rows of N on each rank. In the loss, V is the number of words in this rank's shard.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bert.execution.stopwatch import Stopwatch
from bert.model import MatrixProducts, Placement
from bert.parallel.single import all_gather_single, reduce_scatter_single
from kernels import masked_lm_logits


class Exchange:
    """Collectives of a tensor group. The stopwatch counts their time as ``exchanging``."""

    def __init__(self, group: dist.ProcessGroup, stopwatch: Stopwatch) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group, self._stopwatch = group, stopwatch

    def gathered(self, own: Tensor) -> Tensor:
        """Gather all rows [R W, ...] from each rank's rows [W, ...]."""
        rows = own.new_empty((self.size * len(own), *own.shape[1:]))
        with self._stopwatch.exchanging():
            # Collectives on one tensor need contiguous memory, and gradients from autograd may not be contiguous.
            all_gather_single(rows, own.contiguous(), group=self._group)
        return rows

    def scattered(self, rows: Tensor) -> Tensor:
        """Sum ``rows`` [R W, ...] over the ranks, and return this rank's rows [W, ...] of the sum: a reduce-scatter."""
        # ``SharedPlacement`` has already padded the rows to a multiple of the ranks.
        own = rows.new_empty((len(rows) // self.size, *rows.shape[1:]))
        with self._stopwatch.exchanging():
            if rows.device.type == "cpu":
                # Gloo implements a reduce-scatter as an all-reduce, which waits several times for other ranks. All
                # ranks of the group are on one host, so each rank's part can be sent to it directly at no extra cost.
                received = torch.empty_like(rows, memory_format=torch.contiguous_format)
                dist.all_to_all_single(received, rows.contiguous(), group=self._group)
                torch.sum(received.view(self.size, *own.shape), 0, out=own)
            else:
                reduce_scatter_single(own, rows.contiguous(), group=self._group)
        return own

    def all_reduce_(self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        with self._stopwatch.exchanging():
            dist.all_reduce(values, operation, group=self._group)


_Exchanged = Callable[[Tensor], Tensor]
WORDS_MULTIPLE = 8
"""A shard has a multiple of this many words, because products are faster if a row of logits is a multiple of 16 bytes."""


class SharedPlacement(Placement):
    """``Placement`` in which each rank of a group has a shard of the weights and its own rows of hidden states.

    Dropout applies only to a rank's own rows and heads. Give every rank its own seed, so that masks are independent.
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
        return _Collective.apply(own, self._exchange.gathered, self._exchange.scattered)

    def own_rows(self, rows: Tensor, empty: int = 0) -> Tensor:
        """Return this rank's rows [W, ...] of ``rows`` [N, ...]."""
        own = self.share(len(rows))
        # Collectives need slices of equal length, so the length is padded. The slice may be empty past the end of the rows.
        start = own * self._exchange.rank
        return _lengthened(rows[start : start + own], own, empty)

    def summed(self, product: Tensor) -> Tensor:
        """Return this rank's rows [W, D] of the sum of the products [N, D]. The backward pass gathers the gradients."""
        product = _lengthened(product, self.share(len(product)) * self._exchange.size)
        return _Collective.apply(product, self._exchange.scattered, self._exchange.gathered)

    def words(self, input_ids_T: Tensor, word_VD: Tensor) -> tuple[Tensor, Tensor]:
        """Return indices 0, 1, ... into a table, and the table. Its rows are the embeddings of this rank's tokens."""
        # Each word is in one shard, and the other ranks add zeros. Indices outside this shard are clamped only to make the
        # lookup valid.
        places_T = input_ids_T - len(word_VD) * self._exchange.rank
        here_T = (places_T >= 0) & (places_T < len(word_VD))
        found_TD = torch.where(here_T[:, None], F.embedding(places_T.clamp(0, len(word_VD) - 1), word_VD), 0.0)
        table_WD = self.summed(found_TD)
        return torch.arange(len(table_WD), device=table_WD.device), table_WD

    def masked_lm_loss(
        self,
        products: MatrixProducts,  # noqa: ARG002
        hidden_MD: Tensor,
        word_VD: Tensor,
        bias_V: Tensor,
        labels_M: Tensor,
        count_correct: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the result of ``kernels.masked_lm_loss`` on all ranks. Each rank computes the logits of its own words.

        A prediction is correct if the label has the largest logit. Of equal logits, the first one counts as the largest. A
        row with a NaN is never correct.
        """
        hidden_MD = self.all_rows(hidden_MD)[: len(labels_M)]  # drop the padding rows
        start = len(word_VD) * self._exchange.rank
        known = min(max(0, self._vocab_size - start), len(word_VD))
        if known < len(word_VD):  # rows past the vocabulary must not have the largest logit
            bias_V = torch.cat([bias_V[:known], bias_V.new_full((len(bias_V) - known,), -torch.inf)])
        product = masked_lm_logits if count_correct else F.linear
        logits_MV = product(hidden_MD, word_VD, bias_V)
        loss, label_logits_M = _ShardLoss.apply(logits_MV, labels_M, start, self._exchange)
        if not count_correct:
            return loss, None
        label_logits_M1, words_V = label_logits_M[:, None], torch.arange(logits_MV.shape[1], device=labels_M.device)
        level_MV = (logits_MV == label_logits_M1) & (words_V >= (labels_M - start)[:, None])
        # A NaN compares as false with anything, so negating the comparison makes its row incorrect.
        beaten_M = (~((logits_MV < label_logits_M1) | level_MV)).any(1).int()
        self._exchange.all_reduce_(beaten_M)
        return loss, ((beaten_M == 0) & (labels_M >= 0)).sum()

    def total(self, loss: Tensor) -> Tensor:
        """Return the sum [] of a loss over the ranks, on all ranks."""

        def over_ranks(own: Tensor) -> Tensor:
            self._exchange.all_reduce_(own := own.clone())
            return own

        # The gradient needs no communication, because the loss is the same on all ranks.
        return _Collective.apply(loss, over_ranks, lambda gradient: gradient)


def _lengthened(rows: Tensor, length: int, empty: int = 0) -> Tensor:
    if len(rows) == length:
        return rows
    # F.pad takes dimensions from the last to the first, so the padding of the rows comes last.
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


class _ShardLoss(torch.autograd.Function):
    """Sum of the rows' cross-entropies over the columns of all ranks, and the logit of each row's label. Ignores label -1.

    This rank's columns are the words from ``start`` on. The logits are kept to compute their gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, labels_M: Tensor, start: int, exchange: Exchange) -> tuple[Tensor, Tensor]:
        wide_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
        # Use the maximum over all ranks' columns, so that no exponential overflows and all sums have the same scale.
        largest_M = wide_MV.amax(1)
        exchange.all_reduce_(largest_M, dist.ReduceOp.MAX)
        here_M, columns_M1 = _places(labels_M, start, logits_MV.shape[1])
        label_logits_M = torch.where(here_M, wide_MV.gather(1, columns_M1).squeeze(1), 0.0)
        # Both sums share one message. The rank with the label's column adds the label's logit, and others add zeros.
        sums_2M = torch.stack([(wide_MV - largest_M[:, None]).exp().sum(1), label_logits_M])
        exchange.all_reduce_(sums_2M)
        total_M, label_logits_M = sums_2M.unbind()
        log_sum_M = largest_M + total_M.log()
        ctx.save_for_backward(logits_MV, labels_M, log_sum_M)
        ctx.start = start
        ctx.mark_non_differentiable(label_logits_M)
        return torch.where(labels_M >= 0, log_sum_M - label_logits_M, 0.0).sum(), label_logits_M

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        logits_MV, labels_M, log_sum_M = ctx.saved_tensors
        # The gradient is the softmax, minus one at the label.
        gradient_MV = (logits_MV - log_sum_M[:, None]).exp_()  # at least fp32, as ``log_sum_M`` is
        here_M, columns_M1 = _places(labels_M, ctx.start, logits_MV.shape[1])
        gradient_MV.scatter_add_(1, columns_M1, -here_M[:, None].to(gradient_MV.dtype))
        gradient_MV *= (loss_gradient * (labels_M >= 0))[:, None]
        return gradient_MV.to(logits_MV.dtype), None, None, None


def _places(labels_M: Tensor, start: int, words: int) -> tuple[Tensor, Tensor]:
    """Return whether each label is in this rank's columns, and the label's column [M, 1], clamped to these columns."""
    columns_M = labels_M - start
    return (columns_M >= 0) & (columns_M < words), columns_M.clamp(0, words - 1)[:, None]
