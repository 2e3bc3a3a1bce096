"""Strategy of a run: how ranks divide the work and sum gradients. It affects time and memory, not results."""

from dataclasses import dataclass

from bert.configuration.config import Config
from bert.configuration.sections import (
    SHARDED,
    ParallelConfig,
    Precision,
    Recompute,
    ReduceDtype,
    ReductionStrategy,
    TrainingConfig,
)

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
        """Number of ranks that share a copy of the model."""
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
