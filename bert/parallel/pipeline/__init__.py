"""Pipeline parallelism: each copy of the model is divided into stages of layers, and micro-batches pass through them.

    stages.py       assigns layers to stages by cost, and computes a rank's stages
    schedule.py     runs a step's micro-batches in PyTorch's schedules

``torch.distributed.pipelining`` decides the order of forward and backward passes and sends the tensors. The schedule is
1F1B, or interleaved 1F1B if ranks have several stages. This package adds what PyTorch's pipelining lacks:

- Micro-batches differ in their number of tokens, so tensors are padded before they are sent to the next stage.
- Stages also need the boundaries of sequences, which are not sent, so all ranks of a copy load the same micro-batches.
- Two stages share the word table. The first stage owns it, and the last stage has a copy, whose gradient is sent to the
  first stage before gradients are summed over the copies of the model. The updated table is sent back.
- An evaluation has any number of batches, so its batches pass through the stages without a schedule.
"""
