"""Cross-entropy of logits whose columns are divided among the ranks of a group.

Shape legend: M masked tokens, V words of this rank's shard.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bert.parallel.tensor.exchange import Exchange


def shard_loss(
    logits_MV: Tensor, labels_M: Tensor, start: int, exchange: Exchange, count_correct: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum of cross-entropies [], and how many labels have the largest logit [], over all ranks' columns; on all ranks.

    This rank's columns are the words from ``start`` on. Rows whose label is -1 count for neither. As in the definition, the
    first of equal logits is the largest, and a row with a NaN is never right.
    """
    loss, label_logits_M = _ShardLoss.apply(logits_MV, labels_M, start, exchange)
    if not count_correct:
        return loss, None
    label_logits_M1, words_V = label_logits_M[:, None], torch.arange(logits_MV.shape[1], device=labels_M.device)
    level_MV = (logits_MV == label_logits_M1) & (words_V >= (labels_M - start)[:, None])
    # Negated, since a NaN compares as false with anything: so its row is beaten.
    beaten_M = (~((logits_MV < label_logits_M1) | level_MV)).any(1).int()
    exchange.all_reduce_(beaten_M)
    return loss, ((beaten_M == 0) & (labels_M >= 0)).sum()


class _ShardLoss(torch.autograd.Function):
    """Loss and the label's logit of each row; keeps the logits, of which the gradient is made."""

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, labels_M: Tensor, start: int, exchange: Exchange) -> tuple[Tensor, Tensor]:
        wide_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
        # The largest of all columns, so that no exponential overflows and the sums of all ranks are on one scale.
        largest_M = wide_MV.amax(1)
        exchange.all_reduce_(largest_M, dist.ReduceOp.MAX)
        here_M, columns_M1 = _places(labels_M, start, logits_MV.shape[1])
        label_logits_M = torch.where(here_M, wide_MV.gather(1, columns_M1).squeeze(1), 0.0)
        # Both in one message. The rank that has the label's column adds its logit, the others zeros.
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
        # Softmax, less one at the label.
        gradient_MV = (logits_MV - log_sum_M[:, None]).exp_()  # in the wider type, by promotion
        here_M, columns_M1 = _places(labels_M, ctx.start, logits_MV.shape[1])
        gradient_MV.scatter_add_(1, columns_M1, -here_M[:, None].to(gradient_MV.dtype))
        gradient_MV *= (loss_gradient * (labels_M >= 0))[:, None]
        return gradient_MV.to(logits_MV.dtype), None, None, None


def _places(labels_M: Tensor, start: int, words: int) -> tuple[Tensor, Tensor]:
    """Return whether a row's label is among the columns here, and in which [M, 1], or in any."""
    columns_M = labels_M - start
    return (columns_M >= 0) & (columns_M < words), columns_M.clamp(0, words - 1)[:, None]
