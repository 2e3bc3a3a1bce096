"""A run's whole configuration: frozen dataclasses, checked once, before any work.

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
)

REPOSITORY = Path(__file__).resolve().parents[2]


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
    """Take the settings of this file of `python -m cluster plan`, on as many processes as it is for, and compare the
    measured step with its prediction. A setting that contradicts it is refused."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    resume: Path | None = None
    """Go on from the newest whole checkpoint in this folder, on any number of ranks. The log is a new one, and no timed
    result."""
    save_checkpoint: Path | None = None
    """Write the trained weights here (safetensors) after the run."""
    dry_run: bool = False
    """Check everything that can be checked before the run, and stop."""

    def __post_init__(self) -> None:
        # NaN gets past the comparisons that sections check themselves by.
        for section in (self.model, self.optimizer, self.training, self.evaluation):
            _finite(section)
        if self.log.division == "closed":
            self._check_closed()
        if self.training.max_samples < self.training.global_batch_size:
            raise ValueError(
                f"training.max_samples {self.training.max_samples} is less than one global batch of "
                f"{self.training.global_batch_size}: raise it or lower training.global_batch_size"
            )
        self._check_tensor()
        if self.parallel.pipeline > 1:
            self._check_pipeline()
        if self.training.precision == "fp8":
            self._check_fp8()
        # From about this width on it pays, where the processor multiplies bf16 (docs/training.md).
        if self.training.precision == "bf16" and self.training.device == "cpu" and self.model.hidden_size < 256:
            raise ValueError(
                "training.precision bf16 is slower than fp32 for so small a model on a CPU: set training.precision to fp32"
            )

    def _check_closed(self) -> None:
        # The writer of the log refuses some of these too, but when the run has been initialised.
        if self.evaluation.interval_samples is not None:
            raise ValueError(
                "evaluation.interval_samples is set in the closed division, where the formula of the rules decides: "
                "leave it unset, or set log.division to open"
            )
        if self.evaluation.to_the_end:
            raise ValueError(
                "evaluation.to_the_end is set in the closed division, whose runs end when they reach the target: leave it "
                "unset, or set log.division to open"
            )
        if self.evaluation.target != 0.720:
            raise ValueError(
                f"evaluation.target is {self.evaluation.target}, but the closed division's is 0.720: "
                "set log.division to open, or the target to 0.720"
            )
        if self.resume is not None:
            raise ValueError(
                "resume is set in the closed division, whose results are timed from the start in one piece: "
                "leave it out, or set log.division to open"
            )
        # The defaults of ``ModelConfig`` are BERT-Large, of which nothing may differ.
        for each in fields(self.model):
            if (value := getattr(self.model, each.name)) != each.default:
                raise ValueError(
                    f"model.{each.name} is {value}, but the closed division trains BERT-Large as it is: set log.division "
                    "to open"
                )

    def _check_tensor(self) -> None:
        """Refuse shares with half a head; what is left of the vocabulary past the last whole share is filled up."""
        tensor, model = self.parallel.tensor, self.model
        names = ("num_attention_heads", "intermediate_size")
        # What divides all of them divides their greatest common divisor.
        most = math.gcd(*(getattr(model, name) for name in names))
        if most % tensor:
            near = sorted(
                (size for size in range(1, most + 1) if most % size == 0), key=lambda size: abs(size - tensor)
            )
            sizes = " and ".join(f"model.{name} {getattr(model, name)}" for name in names)
            raise ValueError(
                f"parallel.tensor is {tensor}, which does not divide {sizes}: set it to {' or '.join(map(str, near[:2]))}"
            )

    def _check_pipeline(self) -> None:
        """Refuse impossible pipelines.

        A stage needs a layer; torch's schedules need a micro-batch for each rank, interleaved in whole rounds.
        """
        parallel, training = self.parallel, self.training
        ranks, stages, steps = (
            parallel.pipeline,
            parallel.pipeline * parallel.virtual_stages,
            training.gradient_accumulation_steps,
        )
        pipeline = f"parallel.pipeline is {ranks}"
        if stages > self.model.num_hidden_layers:
            virtual = f" with parallel.virtual_stages {parallel.virtual_stages}" if parallel.virtual_stages > 1 else ""
            raise ValueError(
                f"{pipeline}{virtual}, but {stages} stages are more than model.num_hidden_layers "
                f"{self.model.num_hidden_layers}: set it to "
                f"{max(1, self.model.num_hidden_layers // parallel.virtual_stages)} or less"
            )
        if steps < ranks:
            raise ValueError(
                f"{pipeline}, but training.gradient_accumulation_steps is {steps}: a step needs at least as many "
                f"micro-batches as stages, set it to {ranks} or more"
            )
        # The rounds of torch's ``ScheduleInterleaved1F1B`` are micro-batches // ranks.
        if parallel.virtual_stages > 1 and steps % (steps // ranks):
            raise ValueError(
                f"{pipeline} with parallel.virtual_stages {parallel.virtual_stages}, whose schedule takes micro-batches in "
                f"rounds of equal size: set training.gradient_accumulation_steps {steps} to a multiple of {ranks}"
            )
        if training.precision == "fp8":
            raise ValueError(
                f"{pipeline}, but training.precision is fp8, whose scales are of the whole model: set it to bf16, or "
                "parallel.pipeline to 1"
            )
        if training.device == "cuda" and training.cuda_graphs:
            raise ValueError(
                f"{pipeline}, but training.cuda_graphs is on, and what stages send one another is not captured: set "
                "--training.no-cuda-graphs, or parallel.pipeline to 1"
            )

    def _check_fp8(self) -> None:
        for name in ("hidden_size", "intermediate_size"):
            # FP8 products contract over multiples of 16, and each rank has its share of the width.
            multiple = 16 * self.parallel.tensor
            if getattr(self.model, name) % multiple:
                shared = f" with parallel.tensor {self.parallel.tensor}" if self.parallel.tensor > 1 else ""
                raise ValueError(
                    f"model.{name} is {getattr(self.model, name)}, but training.precision fp8{shared} needs a multiple of "
                    f"{multiple}"
                )
        if self.model.num_hidden_layers == 1:
            raise ValueError(
                "model.num_hidden_layers is 1, but training.precision fp8 leaves the last layer in bf16: expected at least 2"
            )


def flattened(prefix: str, section: object) -> list[tuple[str, object]]:
    """Names and values of a section and of those in it; paths in the repository start at its root."""
    assert is_dataclass(section)
    rows: list[tuple[str, object]] = []
    for each in fields(section):
        value = getattr(section, each.name)
        name = f"{prefix}.{each.name}"
        # So a result file says the same wherever the repository lies.
        if isinstance(value, Path) and value.is_relative_to(REPOSITORY):
            value = value.relative_to(REPOSITORY)
        rows += flattened(name, value) if is_dataclass(value) else [(name, value)]
    return rows


def _finite(section: ModelConfig | OptimizerConfig | TrainingConfig | EvaluationConfig) -> None:
    for each in fields(section):
        value = getattr(section, each.name)
        if isinstance(value, float) and not math.isfinite(value):
            name = f"{type(section).__name__.removesuffix('Config').lower()}.{each.name}"
            raise ValueError(f"{name} is {value}: expected a finite number")
