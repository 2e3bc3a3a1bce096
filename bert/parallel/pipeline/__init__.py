"""Pipeline parallelism: each copy of the model is divided into stages of layers, and micro-batches pass through them.

    division.py     assigns layers to stages by their cost
    stages.py       a rank's stages of the model, the word table that two of them share, and evaluation
    schedule.py     runs a step's micro-batches in PyTorch's schedules

``torch.distributed.pipelining`` decides the order of forward and backward passes and sends the tensors. The schedule is
1F1B, or interleaved 1F1B if ranks have several stages. This package adds what PyTorch's pipelining lacks:

- It sends tensors of one fixed shape, but micro-batches differ in their number of tokens. Every stage computes on the
  actual rows. Only the tensors that are sent are padded, to the largest micro-batch so far (``schedule.py``). PyTorch
  keeps a buffer for each micro-batch of a step, not only for the micro-batches in flight.
- It passes only hidden states to a stage. Each rank loads the rest of a micro-batch itself, such as the sequence
  boundaries: all ranks of a copy load the same micro-batches.
- It does not support weights that two stages share. The first stage owns the word table, and the last stage has a copy.
  The copy's gradient is sent to the first stage before gradients are summed over the copies of the model, and the updated
  table is sent back. So the clipping norm, the moments and checkpoints include one table, and both tables are equal bit
  for bit.
- Its schedules need at least as many micro-batches as stages, and always the same number. An evaluation has any number of
  batches and no backward pass, so its batches pass through the stages without a schedule.

Reductions begin after all micro-batches, weights are gathered right after the update, and no step is captured.
"""
