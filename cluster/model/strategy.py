"""Strategy of a run: how ranks divide work and model, and sum gradients. It affects time and memory, not results."""

import functools
import math
from dataclasses import dataclass

from bert.configuration.config import Config
from bert.configuration.sections import (
    SHARDED,
    ModelConfig,
    ParallelConfig,
    Precision,
    Recompute,
    ReduceDtype,
    ReductionStrategy,
    TrainingConfig,
)
from bert.model import parameter_shapes
from bert.optimizer import padded
from bert.parallel.pipeline.stages import stages_of
from bert.parallel.reduction.gradients import bucket_slices
from bert.parallel.tensor.shards import split_of

# Use the training default, so that a plan without the field and a run without the option use the same size.
BUCKET_BYTES = TrainingConfig.bucket_bytes


@dataclass(frozen=True)
class Strategy:
    """The settings of a run that decide its time and memory, named as in `TrainingConfig` and `ParallelConfig`."""

    global_batch_size: int
    gradient_accumulation_steps: int = 1
    precision: Precision = "fp32"
    reduction: ReductionStrategy = "flat"
    reduce_dtype: ReduceDtype = "fp32"
    bucket_bytes: int = BUCKET_BYTES
    recompute: Recompute = "none"
    tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    shard_gradients: bool = False
    """Affects only the predicted memory. The predicted step time does not include the reduction after every micro-batch."""

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(self.tensor, self.pipeline, self.virtual_stages)

    @property
    def stages(self) -> str:
        """Number of pipeline ranks, followed by the virtual stages per rank if there are several, such as "4 x 2"."""
        return str(self.pipeline) + (f" x {self.virtual_stages}" if self.virtual_stages > 1 else "")

    @property
    def is_sharded(self) -> bool:
        """Whether each rank updates a shard of the weights and gathers the other shards."""
        return self.reduction in SHARDED

    @property
    def copy_ranks(self) -> int:
        return self.tensor * self.pipeline

    def shards(self, node_copies: int, copies: int) -> int:
        """Return the number of optimizer-state shards, given the number of copies per node and in total."""
        return {"sharded": node_copies, "sharded_world": copies}.get(self.reduction, 1)

    def sequences(self, ranks: int) -> int:
        """Return the sequences of a micro-batch. Raises ``ValueError`` if the ranks cannot share the global batch evenly."""
        micro_batches = ranks // self.copy_ranks * self.gradient_accumulation_steps
        if self.global_batch_size % micro_batches:
            copies = f"{ranks // self.copy_ranks} copies of the model ({ranks} ranks)"
            raise ValueError(
                f"global_batch_size is {self.global_batch_size}, which {copies} x {self.gradient_accumulation_steps} "
                f"micro-batches cannot share evenly. Use a multiple of {micro_batches}."
            )
        return self.global_batch_size // micro_batches


def strategy_of(config: Config) -> Strategy:
    """Return the strategy of a configuration. A setting "auto" stands for its first candidate."""
    training = config.training
    return Strategy(
        training.global_batch_size,
        training.gradient_accumulation_steps,
        training.precision,
        "flat" if training.reduction == "auto" else training.reduction,
        training.reduce_dtype,
        training.bucket_bytes,
        training.recompute,
        config.parallel.tensor,
        config.parallel.pipeline,
        config.parallel.virtual_stages,
        training.shard_gradients,
    )


WORD = "embeddings.word"
"""Name of the word table, which the first stage owns and the last stage copies."""


@dataclass(frozen=True)
class ModelShare:
    """Part of the model that a rank holds: its layers, and the flat vector of its parameters.

    Attributes:
        has_embeddings, has_last: Whether the rank holds the embeddings, and whether it holds the last layer with the heads.
        inner: Number of layers of the rank, excluding the model's last layer.
        neighbours: Number of adjacent stages, with which the rank exchanges hidden states and their gradients.
        elements: Elements of the vector, including the padding after each parameter.
        shared: Elements that are replicated on every rank of a tensor group.
        segments: Number of tensors whose norms LAMB computes.
        copied: Elements of the rank's copy of the word table, which is not part of the vector.
        ends: Offsets in the vector at which the embeddings and each layer end. The vector begins with the decoder's bias
            and ends with the other parameters of the heads.
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


# Cached, because a search asks for the same few divisions many times.
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
