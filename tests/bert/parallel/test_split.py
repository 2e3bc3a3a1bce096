"""Shards of a parameter in a tensor group, and the whole parameter that they form."""

import numpy as np
import pytest
import torch

from bert.parallel.tensor.shards import Split


@pytest.mark.parametrize(
    ("split", "shard_shape"),
    [
        (Split((7,), 2, 0), (4,)),
        (Split((12, 5), 4, 0, blocks=3), (3, 5)),
        (Split((30, 5), 4, 0, blocks=3), (9, 5)),
        (Split((3, 10), 4, 1), (3, 3)),
        (Split((50, 3), 4, 0, multiple=8), (16, 3)),
    ],
)
def test_shards_are_consecutive_parts_of_every_block_and_go_together_again(
    split: Split, shard_shape: tuple[int, ...]
) -> None:
    whole = torch.arange(1, 1 + int(np.prod(split.shape))).view(split.shape)
    shards = [split.shard(whole, rank) for rank in range(split.ranks)]
    assert {tuple(shard.shape) for shard in shards} == {shard_shape} == {split.shard_shape}
    for rank, shard in enumerate(shards):
        parts = (tensor.chunk(split.blocks, split.dimension) for tensor in (whole, shard))
        for block, part in zip(*parts, strict=True):
            own = list(block.split(split.length, split.dimension))[rank : rank + 1]
            expected = torch.zeros_like(part)
            if own:
                expected.narrow(split.dimension, 0, own[0].shape[split.dimension]).copy_(own[0])
            assert torch.equal(part, expected), (rank, part, expected)
    assert torch.equal(split.whole(torch.stack([shard.flatten() for shard in shards])), whole)
