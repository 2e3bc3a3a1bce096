"""Pipeline parallelism: a copy of the model is divided into stages of layers, which micro-batches go through in turn.

    division.py     which layers are in which stage, by their cost
    stages.py       a rank's stages of the model, the word table that two of them have, and evaluation
    schedule.py     a step's micro-batches in PyTorch's schedules

The order of forward and backward passes, and what is sent when, are PyTorch's: ``torch.distributed.pipelining``, 1F1B, or
interleaved where ranks have several stages. What that cannot do, and is here:

- It sends tensors of one shape, known beforehand; micro-batches have as many tokens as they happen to have. Every stage
  computes with the rows that there are, and only what is sent is lengthened, to the largest micro-batch so far
  (``schedule.py``). It keeps a buffer for each micro-batch of a step, not only for those under way.
- It gives a stage hidden states alone. What else one needs of a micro-batch, such as where sequences begin, each rank has
  loaded itself: the ranks of a copy get the same micro-batches.
- It has no weights that two stages share. The word table is the first stage's; the last one has a copy, whose gradient goes
  to the first before gradients are summed over the copies of the model, and which comes back after the update. So clip norm,
  moments and checkpoints know one table, and both are equal to the last bit.
- Its schedules want as many micro-batches as there are stages, always the same number. An evaluation has any number, and no
  backward pass: its batches follow one another through the stages by themselves.

Reductions begin when all micro-batches are through, weights are gathered right after the update, and no step is captured.
"""
