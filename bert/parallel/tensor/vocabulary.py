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
    """Return the sum of cross-entropies [] and the number of correct predictions [] over all columns, on all ranks.

    This rank's columns are the words from ``start`` on. Rows with the label -1 are ignored. A prediction is correct if the
    label has the largest logit. Of equal logits, the first one counts as the largest. A row with a NaN is never correct.
    """
    loss, label_logits_M = _ShardLoss.apply(logits_MV, labels_M, start, exchange)
    if not count_correct:
        return loss, None
    label_logits_M1, words_V = label_logits_M[:, None], torch.arange(logits_MV.shape[1], device=labels_M.device)
    level_MV = (logits_MV == label_logits_M1) & (words_V >= (labels_M - start)[:, None])
    # A NaN compares as false with anything, so negating the comparison makes its row incorrect.
    beaten_M = (~((logits_MV < label_logits_M1) | level_MV)).any(1).int()
    exchange.all_reduce_(beaten_M)
    return loss, ((beaten_M == 0) & (labels_M >= 0)).sum()


class _ShardLoss(torch.autograd.Function):
    """Loss and the label's logit of each row. The logits are kept to compute their gradient."""

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, labels_M: Tensor, start: int, exchange: Exchange) -> tuple[Tensor, Tensor]:
        wide_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
        # Use the maximum over all ranks' columns, so that no exponential overflows and all sums have the same scale.
        largest_M = wide_MV.amax(1)
        exchange.all_reduce_(largest_M, dist.ReduceOp.MAX)
        here_M, columns_M1 = _places(labels_M, start, logits_MV.shape[1])
        label_logits_M = torch.where(here_M, wide_MV.gather(1, columns_M1).squeeze(1), 0.0)
        # Both sums share one message. The rank with the label's column adds its logit, and the other ranks add zeros.
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
        gradient_MV = (logits_MV - log_sum_M[:, None]).exp_()  # promoted to the wider dtype
        here_M, columns_M1 = _places(labels_M, ctx.start, logits_MV.shape[1])
        gradient_MV.scatter_add_(1, columns_M1, -here_M[:, None].to(gradient_MV.dtype))
        gradient_MV *= (loss_gradient * (labels_M >= 0))[:, None]
        return gradient_MV.to(logits_MV.dtype), None, None, None


def _places(labels_M: Tensor, start: int, words: int) -> tuple[Tensor, Tensor]:
    """Return whether each label is in this rank's columns, and the label's column [M, 1], clamped to these columns."""
    columns_M = labels_M - start
    return (columns_M >= 0) & (columns_M < words), columns_M.clamp(0, words - 1)[:, None]
