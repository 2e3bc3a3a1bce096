"""Strategy: how a run is spread over ranks, and how they sum their gradients. What a planner chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from bert.configuration.config import Config
from bert.configuration.sections import (
    ParallelConfig,
    Precision,
    Recompute,
    ReduceDtype,
    ReductionStrategy,
    TrainingConfig,
)

# From the training settings, so that a plan without the field and a run without the option mean the same size.
BUCKET_BYTES = TrainingConfig.bucket_bytes
"""Of the flat fp32 gradient, unless a run or a plan says otherwise."""


@dataclass(frozen=True)
class Strategy:
    """Settings of a run that decide where its time and memory go, and not what it computes.

    Attributes:
        reduce_dtype: in which gradients travel.
        bucket_bytes: of a bucket of the flat fp32 gradient.
        tensor: neighbours of a host that share a copy of the model, or a stage of one.
        pipeline: such groups that share a copy, layer by layer.
        virtual_stages: of each of them.

    Raises:
        ValueError: a number is not positive, a name is none that there is, or two settings do not go together.
    """

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

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "gradient_accumulation_steps", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        named = {"precision": Precision, "reduction": ReductionStrategy, "recompute": Recompute}
        for name, allowed in named.items():
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(get_args(allowed))}")
        ParallelConfig(self.tensor, self.pipeline, self.virtual_stages)  # refuses what there is not
        if self.reduce_dtype not in ("fp32", "bf16"):
            raise ValueError(f"reduce_dtype is {self.reduce_dtype!r}, expected fp32 or bf16")

    @property
    def parallel(self) -> ParallelConfig:
        """Sharing of a copy of the model by ranks, as the configuration has it."""
        return ParallelConfig(self.tensor, self.pipeline, self.virtual_stages)

    @property
    def stages(self) -> str:
        """Number of stages, in words: where ranks have several, how many each."""
        return str(self.pipeline) + (f" x {self.virtual_stages}" if self.virtual_stages > 1 else "")

    @property
    def summing(self) -> str:
        """The reduction, in words."""
        return self.reduction

    @property
    def copy_ranks(self) -> int:
        """Ranks that share a copy of the model."""
        return self.tensor * self.pipeline

    def sequences(self, ranks: int) -> int:
        """Sequences of a micro-batch of one copy. Raises ``ValueError`` where the global batch does not divide."""
        share = self.copy_ranks
        # Only copies see different sequences: ranks of one copy work on the same micro-batch.
        micro_batches = ranks // share * self.gradient_accumulation_steps
        if self.global_batch_size % micro_batches:
            copies = f"{ranks} ranks" if share == 1 else f"{ranks // share} copies of {share} ranks"
            raise ValueError(
                f"global_batch_size {self.global_batch_size} does not divide over {copies} x "
                f"{self.gradient_accumulation_steps} accumulation steps: make it a multiple of {micro_batches}"
            )
        return self.global_batch_size // micro_batches


def strategy_of(config: Config) -> Strategy:
    """Return the strategy of a configuration; of ``auto`` the first that it stands for."""
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
    )
