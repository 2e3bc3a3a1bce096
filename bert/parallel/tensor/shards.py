"""Shards of the model's parameters on the ranks of a tensor group.

Shape legend: R ranks of the group.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bert.configuration.sections import ModelConfig
from bert.execution.stopwatch import Stopwatch
from bert.model import Placement, parameter_shapes
from bert.optimizer import FlatParameters
from bert.parallel.tensor.placement import WORDS_MULTIPLE, Exchange, SharedPlacement


@dataclass(frozen=True)
class Split:
    """Division of a parameter into equal shards along one dimension.

    The parameter consists of ``blocks`` equal blocks along this dimension, and each block is divided separately. If a
    block's length is not divisible, its last shards are padded with zeros.
    """

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    ranks: int
    dimension: int
    blocks: int = 1
    multiple: int = 1
    """A shard's length is rounded up to a multiple of this."""

    @property
    def length(self) -> int:
        whole = self.shape[self.dimension] // self.blocks
        return -(-whole // (self.ranks * self.multiple)) * self.multiple

    @property
    def shard_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dimension], self.blocks * self.length, *self.shape[self.dimension + 1 :])

    def shard(self, whole: Tensor, rank: int) -> Tensor:
        """Return a copy of the shard of ``rank``."""
        blocks = whole.unflatten(self.dimension, (self.blocks, -1)).movedim(self.dimension + 1, 0)
        kept = blocks[rank * self.length : (rank + 1) * self.length]
        shard = whole.new_zeros((self.length, *blocks.shape[1:]))
        shard[: len(kept)] = kept
        return shard.movedim(0, self.dimension + 1).reshape(self.shard_shape)

    def whole(self, shards_R: Tensor) -> Tensor:
        """Return the whole parameter, given the flat shards of all ranks, [R, n]."""
        shards = shards_R.unflatten(1, self.shard_shape).unflatten(self.dimension + 1, (self.blocks, self.length))
        joined = shards.movedim(0, self.dimension + 1).flatten(self.dimension + 1, self.dimension + 2)
        kept = joined.narrow(self.dimension + 1, 0, self.shape[self.dimension] // self.blocks)
        return kept.reshape(self.shape)


def split_of(name: str, shape: tuple[int, ...], ranks: int) -> Split | None:
    """Return the division of a parameter, or None if every rank has all of it.

    The norms, the biases that are added after a reduce-scatter, and the small tables and heads are not divided.
    """
    if name in ("embeddings.word", "decoder_bias"):
        return Split(shape, ranks, 0, multiple=WORDS_MULTIPLE)
    match name.split("."):
        case ["layers", _, "query_key_value", _]:  # whole heads of queries, keys and values
            return Split(shape, ranks, 0, blocks=3)
        case ["layers", _, "intermediate", _]:  # columns of the product, and the same part of the bias
            return Split(shape, ranks, 0)
        # Each rank multiplies some columns of the input. The bias is added after the sum over ranks, so it is replicated.
        case ["layers", _, "attention_output" | "output", "weight"]:
            return Split(shape, ranks, 1)
    return None


class TensorParallel:
    """Division of a model among the ranks of a tensor group: a parameter is either sharded or replicated."""

    def __init__(self, config: ModelConfig, group: dist.ProcessGroup | None, stopwatch: Stopwatch) -> None:
        """If ``group`` is None, this rank is alone and has all parameters whole."""
        self.group = group
        self.rank = 0
        self.placement = Placement()
        if group is not None:
            self.rank = group.rank()
            self.placement = SharedPlacement(Exchange(group, stopwatch), config.vocab_size)
            shapes = parameter_shapes(config)
            self._splits = {name: split_of(name, shape, group.size()) for name, shape in shapes.items()}

    def split(self, name: str) -> Split | None:
        """Return the division of a parameter, or None if it is not divided."""
        return None if self.group is None else self._splits[name]

    def own(self, name: str, whole: Tensor) -> Tensor:
        split = self.split(name)
        return whole if split is None else split.shard(whole, self.rank)

    def on_all_ranks(self, flat: FlatParameters) -> list[bool]:
        """Tell for each segment whether every rank of a group has all of it, because its parameter is replicated."""
        if self.group is None:
            return [False] * len(flat.segments.sizes)
        named = zip(flat.names, flat.places.values(), strict=True)
        starts = {place.start for name, place in named if self.split(name) is None}
        ends = torch.tensor(flat.segments.sizes).cumsum(0).tolist()
        return [start in starts for start in [0, *ends[:-1]]]  # ``starts`` has only parameters that are not divided
