"""Part of the model that each pipeline rank holds, and the number of micro-batches that it has in flight."""

import functools
import math
from dataclasses import dataclass

from bert.configuration.sections import ModelConfig, Precision
from bert.model import parameter_shapes
from bert.optimizer import padded
from bert.parallel.pipeline.stages import stages_of
from bert.parallel.reduction.gradients import bucket_slices
from bert.parallel.tensor.shards import split_of
from cluster.model.strategy import Strategy

WORD = "embeddings.word"
"""Name of the word table, which the first stage owns and the last stage copies."""


@dataclass(frozen=True)
class ModelShare:
    """Layers of a rank, and the flat vector of the rank's parameters.

    Attributes:
        has_embeddings, has_last: Whether the rank holds the embeddings, and whether it holds the last layer with the heads.
        inner: Number of layers of the rank, excluding the model's last layer.
        neighbours: Number of adjacent stages, with which the rank exchanges hidden states and their gradients.
        elements: Elements of the vector, including the padding after each parameter.
        shared: Elements that are replicated on every rank of a tensor group.
        segments: Number of tensors whose norms LAMB computes.
        copied: Elements of the rank's copy of the word table, which is not part of the vector.
        ends: Offsets at which the embeddings and each layer end. The decoder's bias comes first, the heads last.
    """

    has_embeddings: bool
    has_last: bool
    inner: int
    neighbours: int
    elements: int
    shared: int
    segments: int
    copied: int
    ends: tuple[int, ...]

    def padded(self, shards: int) -> int:
        """Return the elements of the vector, padded so that it divides into equal shards."""
        return padded(self.elements, shards)

    def buckets(self, shards: int, bucket_bytes: int) -> list[slice]:
        """Return the buckets of the vector in the order in which the backward pass fills them."""
        return bucket_slices(self.padded(shards), shards, bucket_bytes)


# Cached, because a search repeats the same few shapes.
@functools.cache
def model_shares(
    model: ModelConfig, tensor: int = 1, pipeline: int = 1, virtual_stages: int = 1
) -> tuple[ModelShare, ...]:
    """Return the share of each pipeline rank. With tensor parallelism, return the largest share in each tensor group."""
    stages = stages_of(model, pipeline * virtual_stages)
    shapes, shares = parameter_shapes(model), []
    for rank in range(pipeline):
        own = stages[rank::pipeline]  # as PyTorch's interleaved schedules assign stages
        first, last = any(stage.is_first for stage in own), any(stage.is_last for stage in own)
        ends = [0] * (model.num_hidden_layers + 1)
        stop = shared = segments = copied = 0
        for name, shape in shapes.items():
            split = split_of(name, shape, tensor)
            size = padded(math.prod(split.shard_shape if split else shape))
            if not any(stage.owns(name) for stage in own):
                copied += size if name == WORD and last else 0
                continue
            stop += size
            shared += 0 if split else size
            segments += 3 if name.endswith("query_key_value.weight") else 1
            if name.startswith("embeddings."):
                ends[0] = stop
            elif name.startswith("layers."):
                ends[1 + int(name.split(".")[1])] = stop
        layers = sum(len(stage.layers) for stage in own) - last
        shares.append(
            ModelShare(first, last, layers, 2 * len(own) - first - last, stop, shared, segments, copied, tuple(ends))
        )
    return tuple(shares)


def hidden_bytes(precision: Precision, on_gpu: bool) -> int:
    """Return the bytes per activation element sent between stages. On CPUs, autocast's norms return fp32."""
    return 2 if precision != "fp32" and on_gpu else 4


def under_way(strategy: Strategy, place: int) -> float:
    """Return the number of micro-batches whose activations a pipeline rank stores at once under PyTorch's schedules."""
    stages, virtual = strategy.pipeline, strategy.virtual_stages
    if virtual == 1:  # 1F1B
        return min(stages - place, strategy.gradient_accumulation_steps) if stages > 1 else 1
    # ScheduleInterleaved1F1B runs this many forward passes of single stages before the first backward pass.
    passes = (virtual - 1) * stages + 2 * (stages - 1 - place) + 1
    return min(passes / virtual, strategy.gradient_accumulation_steps)
