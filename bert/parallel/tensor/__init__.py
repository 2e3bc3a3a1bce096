"""Tensor parallelism: the ranks of a tensor group share one copy of the model and compute the same micro-batches together.

    shards.py       which parameter is divided how
    placement.py    hidden states by rows: what ``bert.layers.Placement`` leaves alone is gathered and summed here
    vocabulary.py   the masked-LM loss of logits that no rank has all of

Every rank has some heads, some columns of fc1 with the rows of fc2 that read them, and some words, after Megatron-LM
(Shoeybi et al., arXiv 1909.08053); between products it has some rows of the token stream, with norms, dropout, residual of
these alone (Korthikanti et al., arXiv 2205.05198). So an all-gather goes before a product by columns and a reduce-scatter
behind one by rows, and the other way round in the backward pass.

What follows for the optimizer (``bert.parallel.reduction.sharded_lamb``): a parameter that is divided has all of its
gradient on the rank that has the shard, while one that all ranks have was used for a rank's own rows, so that its
gradient is summed over the group. Norms of whole tensors are sums over shards, to which what all ranks have contributes
once.

PyTorch's DTensor would divide parameters as well; but the flat vectors that ``Lamb``, reductions and checkpoints work on are
made of plain tensors, and so are the arguments of the kernels.
"""
