"""The whole configuration of a run, as frozen dataclasses that check their values when they are created.

Recipes (``recipes.py``) are functions that return a ``Config``.
"""

import math
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path

from bert.configuration.sections import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
    refuse,
)
from console.version import REPOSITORY


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    recipe: str
    """The recipe that the configuration started from."""
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    training: TrainingConfig
    evaluation: EvaluationConfig
    log: LogConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    plan: Path | None = None
    """Take settings from this file, which `python -m cluster plan` wrote, and compare the measured step time with the
    plan's prediction. The run must have the number of processes that the plan is for. A setting that contradicts the plan is
    refused."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    resume: Path | None = None
    """Continue from the newest complete checkpoint in this folder, on any number of ranks. The new log is not a timed
    result."""
    save_checkpoint: Path | None = None
    """Write the trained weights to this safetensors file after the run. If evaluation.target is None, write them instead
    after each evaluation that is the best so far."""
    dry_run: bool = False
    """Check everything that can be checked before the run, then exit."""

    def __post_init__(self) -> None:
        training = self.training
        # Refuse NaN and infinity here. The sections check values by comparisons, and NaN passes most of them.
        for name, value in flattened("config", self):
            is_finite = not isinstance(value, float) or math.isfinite(value)
            refuse(not is_finite, f"{name.removeprefix('config.')} is {value}: expected a finite number")
        if self.log.division == "closed":
            self._check_closed()
        refuse(
            training.max_samples < training.global_batch_size,
            f"training.max_samples is {training.max_samples}, less than one global batch of {training.global_batch_size}: "
            "raise it or lower training.global_batch_size",
        )
        self._check_tensor()
        if self.parallel.pipeline > 1:
            self._check_pipeline()
        if training.precision == "fp8":
            self._check_fp8()
        # On a CPU with bf16 instructions, bf16 is faster than fp32 only for hidden sizes above about 256 (docs/training.md).
        refuse(
            training.precision == "bf16" and training.device == "cpu" and self.model.hidden_size < 256,
            "training.precision bf16 is slower than fp32 for so small a model on a CPU: set training.precision to fp32",
        )

    def _check_closed(self) -> None:
        # Check these settings now. Otherwise the log would refuse them only later, during the initialization.
        division = "in the closed division: leave it out, or set log.division to open"
        for name, is_set in (
            ("evaluation.interval_samples", self.evaluation.interval_samples is not None),
            ("resume", self.resume is not None),
            ("training.site_steps", self.training.site_steps > 1),
        ):
            refuse(is_set, f"{name} is set {division}")
        refuse(not self.evaluation.unknown_tokens, f"evaluation.unknown_tokens is off {division}")
        refuse(
            self.evaluation.target != 0.720,
            f"evaluation.target is {self.evaluation.target}, expected 0.720 {division}",
        )
        # The closed division requires BERT-Large, which the defaults of ``ModelConfig`` describe.
        for each in fields(self.model):
            value = getattr(self.model, each.name)
            refuse(value != each.default, f"model.{each.name} is {value}, expected {each.default} {division}")

    def _check_tensor(self) -> None:
        tensor, model = self.parallel.tensor, self.model
        names = ("num_attention_heads", "intermediate_size")
        most = math.gcd(*(getattr(model, name) for name in names))
        divided = " and ".join(f"model.{name} {getattr(model, name)}" for name in names)
        refuse(
            most % tensor > 0,
            f"parallel.tensor is {tensor}, which does not divide {divided}: set it to a divisor of {most}",
        )

    def _check_pipeline(self) -> None:
        # PyTorch's pipeline schedules need at least as many micro-batches as pipeline ranks. With several stages per rank,
        # they also need to divide the micro-batches into equal rounds.
        ranks, virtual = self.parallel.pipeline, self.parallel.virtual_stages
        layers, steps = self.model.num_hidden_layers, self.training.gradient_accumulation_steps
        pipeline = f"parallel.pipeline is {ranks}"
        refuse(
            ranks * virtual > layers,
            f"{pipeline}, but {ranks * virtual} stages are more than model.num_hidden_layers {layers}: set "
            f"parallel.pipeline to {max(1, layers // virtual)} or less",
        )
        refuse(
            steps < ranks,
            f"{pipeline}, but training.gradient_accumulation_steps is {steps}: set it to {ranks} or more",
        )
        refuse(
            virtual > 1 and steps % (steps // ranks) > 0,
            f"{pipeline} with parallel.virtual_stages {virtual}, which needs rounds with equally many micro-batches: set "
            f"training.gradient_accumulation_steps, now {steps}, to a multiple of {ranks}",
        )
        training = self.training
        for is_on, setting in (
            (training.shard_gradients, "training.shard_gradients is on"),
            (training.precision == "fp8", "training.precision is fp8"),
            (training.device == "cuda" and training.cuda_graphs, "training.cuda_graphs is on"),
        ):
            refuse(
                is_on,
                f"{pipeline}, but {setting}. Stages do not support that: change this setting, or set parallel.pipeline to 1",
            )

    def _check_fp8(self) -> None:
        # FP8 matrix products need inner dimensions that are multiples of 16. This applies to the part that a rank has.
        multiple = 16 * self.parallel.tensor
        for name in ("hidden_size", "intermediate_size"):
            size = getattr(self.model, name)
            refuse(
                size % multiple > 0,
                f"model.{name} is {size}, but training.precision fp8 with parallel.tensor {self.parallel.tensor} needs "
                f"multiples of {multiple}: change one of the three",
            )
        refuse(
            self.model.num_hidden_layers == 1,
            "model.num_hidden_layers is 1, but training.precision fp8 leaves the last layer in bf16: set it to 2 or more",
        )


def flattened(prefix: str, section: object) -> list[tuple[str, object]]:
    """Return (name, value) of every setting in a section and its subsections. Each name begins with ``prefix``.

    Paths inside the repository are returned relative to its root.
    """
    assert is_dataclass(section)
    rows: list[tuple[str, object]] = []
    for each in fields(section):
        value = getattr(section, each.name)
        name = f"{prefix}.{each.name}"
        # Shorten these paths, because a result file must not depend on where the repository is stored.
        if isinstance(value, Path) and value.is_relative_to(REPOSITORY):
            value = value.relative_to(REPOSITORY)
        rows += flattened(name, value) if is_dataclass(value) else [(name, value)]
    return rows
