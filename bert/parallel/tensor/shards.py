"""Shards of the model's parameters on the ranks of a tensor group, and whole vectors from them and back.

Shape legend: R ranks of the group, P elements of a flat vector of ``FlatParameters``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert.model import BertForPreTraining
from bert.optimizer import FlatParameters
from bert.parallel.mesh import Mesh, process_group, require_order
from bert.parallel.single import all_gather_single
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
        case ["layers", _, "intermediate", _]:
            return Split(shape, ranks, 0)
        case ["layers", _, "attention_output" | "output", "weight"]:
            return Split(shape, ranks, 1)
    return None


class TensorParallel:
    """A model divided among the ranks of a tensor group: each parameter is a rank's shard, or what all have."""

    def __init__(self, model: BertForPreTraining, group: dist.ProcessGroup) -> None:
        """Divide the whole model that each rank has, in place."""
        self.group = group
        self.rank = group.rank()
        self.splits: dict[nn.Parameter, Split | None] = {}
        for name, parameter in list(model.named_parameters()):
            split = split_of(name, tuple(parameter.shape), group.size())
            if split is not None:
                module, _, own = name.rpartition(".")
                parameter = nn.Parameter(split.shard(parameter.detach(), self.rank))
                setattr(model.get_submodule(module), own, parameter)
            self.splits[parameter] = split
        place(model, SharedPlacement(group, model.config.vocab_size))

    def all_reduce_max_(self, values: Tensor) -> None:
        """Leave the largest of the ranks' values on each."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)

    def on_all_ranks(self, flat: FlatParameters) -> list[bool]:
        """Tell of each segment whether every rank has it."""
        starts = {place.start for parameter, place in flat.places.items() if self.splits[parameter] is None}
        ends = torch.tensor(flat.segments.sizes).cumsum(0).tolist()
        return [start in starts for start in [0, *ends[:-1]]]  # of parameters that are divided, no segment begins there


def tensor_parallel(model: BertForPreTraining, mesh: Mesh) -> TensorParallel | None:
    """Divide the model among the tensor group of this rank; None where that has no other. Every rank must call it."""
    if mesh.tensor == 1:
        return None
    require_order(mesh)
    group = process_group(mesh.tensor_ranks)
    assert group is not None
    return TensorParallel(model, group)


class WholeVectors:
    """Flat vectors of the whole model: those of ``FlatParameters``, or what a tensor group has of them together."""

    def __init__(self, model: BertForPreTraining, flat: FlatParameters, tensor: TensorParallel | None) -> None:
        self._tensor = tensor
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, slice] = {}
        self._own: dict[str, tuple[slice, Split | None]] = {}
        self.size = 0
        """Elements of a whole vector."""
        for name, parameter in model.named_parameters():
            split = None if tensor is None else tensor.splits[parameter]
            self._own[name] = flat.places[parameter], split
            self._shapes[name] = shape = tuple(parameter.shape) if split is None else split.shape
            start = flat.places[parameter].start if tensor is None else self.size
            self._places[name] = slice(start, start + math.prod(shape))
            self.size = start + math.prod(shape)
        if tensor is None:
            self.size = len(flat.weights_P)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(map(math.prod, self._shapes.values()))

    def parts(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's part of a whole vector, in the parameter's shape, as a view."""
        for name, part in self._places.items():
            yield name, whole[part].view(self._shapes[name])

    def gather(self, vector_P: Tensor) -> Tensor:
        """Bring a vector's shards together. Every rank must call it at the same time."""
        if self._tensor is None:
            return vector_P
        group = self._tensor.group
        gathered = vector_P.new_empty(group.size() * len(vector_P))
        all_gather_single(gathered, vector_P, group=group)
        shards_RP = gathered.view(group.size(), -1)
        whole = vector_P.new_empty(self.size)
        for name, part in self.parts(whole):
            place, split = self._own[name]
            part.copy_(shards_RP[0, place].view_as(part) if split is None else split.whole(shards_RP[:, place]))
        return whole

    def shard_(self, vector_P: Tensor, whole: Tensor) -> None:
        """Overwrite a vector by this rank's shards of a whole one."""
        if self._tensor is None:
            vector_P.copy_(whole)
            return
        for name, part in self.parts(whole):
            place, split = self._own[name]
            vector_P[place] = (part if split is None else split.shard(part, self._tensor.rank)).flatten()
