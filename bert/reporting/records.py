"""Records of a run while it runs: rates, losses, accuracy, warnings, its end. One record feeds every sink."""

from dataclasses import dataclass
from typing import Protocol

# In the order of a step, by which the watchdog tells who is behind.
PHASES: tuple[str, ...] = ("data_wait", "forward_backward", "reduce", "update")
"""Parts of a step."""
EXCHANGE = "exchange in "
"""What a phase's name begins with while a rank waits, in the midst of it, for those that share its stage of the model."""


@dataclass(frozen=True)
class Position:
    """Position of a run: how far it has trained."""

    steps: int = 0
    """Global batches."""
    samples: int = 0

    def after(self, global_batch_size: int) -> "Position":
        """The position one step further on."""
        return Position(self.steps + 1, self.samples + global_batch_size)


@dataclass(frozen=True)
class StepRecord:
    """Means over the steps since the last record; times in milliseconds, rates over all ranks."""

    step: int
    samples: int
    time_s: float
    """Since ``run_start``."""
    step_ms: float
    data_wait_ms: float
    forward_backward_ms: float
    reduce_ms: float
    update_ms: float
    loss: float
    """Not finite, as the two below, where such a loss is why a step was skipped."""
    masked_lm_loss: float
    next_sentence_loss: float
    learning_rate: float
    """Of the last step that was not skipped."""
    gradient_norm: float
    tokens_per_s: float
    sequences_per_s: float
    skipped_steps: int = 0
    """Of these steps, those that changed nothing because a gradient was not finite."""


@dataclass(frozen=True)
class EvaluationRecord:
    """Result of an evaluation of the whole evaluation set."""

    step: int
    samples: int
    time_s: float
    eval_s: float
    masked_lm_accuracy: float
    correct: int
    count: int


@dataclass(frozen=True)
class WarningRecord:
    """Message that a person should look at while the run goes on."""

    step: int
    time_s: float
    text: str


@dataclass(frozen=True)
class PlanRecord:
    """A step of the run, the median of its intervals, beside the one that its plan expects; milliseconds."""

    step_ms: float
    data_wait_ms: float
    forward_backward_ms: float
    reduce_ms: float
    update_ms: float
    other_ms: float
    """In none of the phases."""
    planned_step_ms: float
    planned_data_wait_ms: float
    planned_forward_backward_ms: float
    planned_reduce_ms: float
    planned_update_ms: float
    planned_other_ms: float


@dataclass(frozen=True)
class EndRecord:
    """End of the run."""

    status: str
    time_s: float
    samples: int
    masked_lm_accuracy: float | None


Record = StepRecord | EvaluationRecord | WarningRecord | PlanRecord | EndRecord


class Sink(Protocol):
    """Destination of records."""

    def write(self, record: Record) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Finish."""
        ...
