"""Tensor parallelism: the ranks of a tensor group share one copy of the model and compute each micro-batch together.

    shards.py       how each parameter is divided
    placement.py    hidden states divided by rows: the gathers and sums that ``bert.model.Placement`` omits on one rank,
                    and the masked-LM loss of logits that are divided among ranks

Following Megatron-LM (Shoeybi et al., arXiv 1909.08053), every rank has some heads, some columns of fc1 with the matching
rows of fc2, and some words. Between products, a rank has some rows of the token stream, and computes norms, dropout and
residual for these rows only (Korthikanti et al., arXiv 2205.05198). So an all-gather precedes a product that is divided by
columns, and a reduce-scatter follows a product that is divided by rows. The backward pass does the opposite.

A rank has the complete gradient of its shard of a divided parameter. A replicated parameter was used only for the rank's
own rows, so the optimizer (``bert.parallel.reduction.sharded_lamb``) sums its gradient over the group.
"""
