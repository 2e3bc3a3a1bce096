"""Model state of a rank, counted before there are ranks: weights, gradients and LAMB's, in bytes."""

import math
from dataclasses import dataclass

from bert.configuration.config import Config
from bert.model import parameter_shapes
from bert.optimizer import padded
from bert.parallel.pipeline.division import stages_of
from bert.parallel.reduction.sharded_gradients import gradient_elements
from bert.parallel.tensor.shards import split_of

_WORD = "embeddings.word"


@dataclass(frozen=True)
class ModelState:
    """Parameters and bytes that ranks hold of a model that they share."""

    shape: str
    parameters: int
    """Of the whole model."""
    most: int
    """Of the rank that has the most."""
    state_bytes: int
    """Of that rank: weights, gradients or, where they are sharded, buffers of buckets, and LAMB's moments, update, gradients
    and weights of its shard."""

    def __str__(self) -> str:
        """Say it in one line."""
        return (
            f"{self.shape}: {self.parameters:,} parameters, at most {self.most:,} on a rank; weights, gradients and "
            f"optimizer take {self.state_bytes / 1e9:.2f} GB there, besides what micro-batches take"
        )


def model_state(config: Config, world_size: int, local_size: int = 0) -> ModelState:
    """Count what ranks will hold; ``local_size``: ranks of a node, 0 where that is not known and all count as one node."""
    parallel = config.parallel
    data = world_size // parallel.copy_ranks
    # Where a copy takes several hosts, each has one rank of a data group at most.
    a_node = max(1, (local_size or world_size) // parallel.copy_ranks)
    shards = {"sharded": a_node, "sharded_world": data}.get(config.training.reduction, 1)
    shapes = parameter_shapes(config.model)
    elements = {}
    for name, shape in shapes.items():
        split = split_of(name, shape, parallel.tensor) if parallel.tensor > 1 else None
        elements[name] = padded(math.prod(split.shard_shape if split else shape))
    stages = stages_of(config.model, parallel.pipeline * parallel.virtual_stages)
    held = []
    for rank in range(parallel.pipeline):
        # As ``PipelineModel`` deals them: with several stages a rank, every so many.
        own = stages[rank :: parallel.pipeline]
        count = sum(size for name, size in elements.items() if any(stage.owns(name) for stage in own))
        copied = elements[_WORD] if parallel.pipeline > 1 and own[-1].is_last else 0
        whole = padded(count, data)
        is_sharded, bucket_bytes = config.training.shard_gradients, config.training.bucket_bytes
        gradients = gradient_elements(whole, data, bucket_bytes) if is_sharded else whole
        # Bytes: fp32 weights and gradients; the word table's copy with its gradient; of a shard, the five vectors of
        # ShardedLamb.
        held.append((4 * (whole + gradients) + 8 * copied + 20 * whole // shards, count + copied))
    state_bytes, most = max(held)
    pipeline = f" x pipeline {parallel.pipeline}" if parallel.pipeline > 1 else ""
    shape = f"data {data}{pipeline} x tensor {parallel.tensor}"
    return ModelState(shape, sum(map(math.prod, shapes.values())), most, state_bytes)
