"""Shards of the model's parameters on the ranks of a tensor group.

Shape legend: R ranks of the group.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert.model import BertForPreTraining
from bert.optimizer import FlatParameters
from bert.parallel.mesh import Mesh, process_group, require_order
from bert.parallel.tensor.exchange import Exchange, Waiting
from bert.parallel.tensor.placement import SharedPlacement, place

_WORDS_MULTIPLE = 8
"""Shards of the vocabulary are rounded up to this many words, as rows of 16 bytes of logits are multiplied faster."""


@dataclass(frozen=True)
class Split:
    """Division of a parameter along one dimension, each of ``blocks`` parts of it by itself, into equal shards.

    Where the length does not divide, shards are filled up with zeros past its end.
    """

    shape: tuple[int, ...]
    """Of the whole."""
    ranks: int
    dimension: int
    blocks: int = 1
    multiple: int = 1
    """Of a shard's length."""

    @property
    def length(self) -> int:
        """Length of a shard of one block."""
        whole = self.shape[self.dimension] // self.blocks
        return -(-whole // (self.ranks * self.multiple)) * self.multiple

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of a shard."""
        return (*self.shape[: self.dimension], self.blocks * self.length, *self.shape[self.dimension + 1 :])

    def shard(self, whole: Tensor, rank: int) -> Tensor:
        """Return the shard of ``rank``, a copy."""
        blocks = whole.unflatten(self.dimension, (self.blocks, -1)).movedim(self.dimension + 1, 0)
        kept = blocks[rank * self.length : (rank + 1) * self.length]
        shard = whole.new_zeros((self.length, *blocks.shape[1:]))
        shard[: len(kept)] = kept
        return shard.movedim(0, self.dimension + 1).reshape(self.shard_shape)

    def whole(self, shards_R: Tensor) -> Tensor:
        """Return the whole of the shards of all ranks, flat in [R, n]."""
        shards = shards_R.unflatten(1, self.shard_shape).unflatten(self.dimension + 1, (self.blocks, self.length))
        joined = shards.movedim(0, self.dimension + 1).flatten(self.dimension + 1, self.dimension + 2)
        kept = joined.narrow(self.dimension + 1, 0, self.shape[self.dimension] // self.blocks)
        return kept.reshape(self.shape)


def split_of(name: str, shape: tuple[int, ...], ranks: int) -> Split | None:
    """Return how a parameter is divided; None for what every rank has: norms, biases of sums, small tables, heads."""
    if name in ("embeddings.word", "decoder_bias"):
        return Split(shape, ranks, 0, multiple=_WORDS_MULTIPLE)
    match name.split("."):
        case ["layers", _, "query_key_value", _]:  # whole heads of each of the three
            return Split(shape, ranks, 0, blocks=3)
        case ["layers", _, "intermediate", _]:  # columns of the product: its bias goes with them
            return Split(shape, ranks, 0)
        # Rows of the product. Its bias is added once, after the sum over ranks, and so is whole on each.
        case ["layers", _, "attention_output" | "output", "weight"]:
            return Split(shape, ranks, 1)
    return None


class TensorParallel:
    """A model divided among the ranks of a tensor group: each parameter is a rank's shard, or what all have."""

    def __init__(self, model: BertForPreTraining, group: dist.ProcessGroup, waiting: Waiting = nullcontext) -> None:
        """Divide the whole model that each rank has, in place."""
        self.group = group
        self.rank = group.rank()
        self.splits: dict[str, Split | None] = {}
        """Of each parameter, by name."""
        self._model = model
        # A list, since parameters are replaced on the way.
        for name, parameter in list(model.named_parameters()):
            self.splits[name] = split = split_of(name, tuple(parameter.shape), group.size())
            if split is not None:
                module, _, own = name.rpartition(".")
                # A copy, or a view would keep the whole parameter in memory.
                shard = nn.Parameter(split.shard(parameter.detach(), self.rank))
                setattr(model.get_submodule(module), own, shard)
        place(model, SharedPlacement(Exchange(group, waiting), model.config.vocab_size))

    def all_reduce_max_(self, values: Tensor) -> None:
        """Leave the largest of the ranks' values on each."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)

    def on_all_ranks(self, flat: FlatParameters) -> list[bool]:
        """Tell of each segment whether every rank has it."""
        named = self._model.named_parameters()
        starts = {flat.places[parameter].start for name, parameter in named if self.splits[name] is None}
        ends = torch.tensor(flat.segments.sizes).cumsum(0).tolist()
        return [start in starts for start in [0, *ends[:-1]]]  # of parameters that are divided, no segment begins there


def tensor_parallel(model: BertForPreTraining, mesh: Mesh, waiting: Waiting = nullcontext) -> TensorParallel | None:
    """Divide the model among the tensor group of this rank; None where that has no other. Every rank must call it."""
    if mesh.tensor == 1:
        return None
    # Shards are numbered by local rank, which the group must keep to.
    require_order(mesh)
    group = process_group(mesh.tensor_ranks)
    assert group is not None
    return TensorParallel(model, group, waiting)
