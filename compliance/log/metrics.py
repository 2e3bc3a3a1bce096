"""Metrics records that a run writes, one JSON object per line, in metrics_<n>.jsonl beside result_<n>.txt.

The training loop writes the records. The benchmarks and the commands report, watch and whatif read them. A file is
untrusted, so its size, the length of its lines and the range of its numbers are limited. Lines without a valid record are
skipped, such as the truncated last line of a killed run.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from compliance.log.follower import Follower

MAX_BYTES = 512 * 2**20
NAN = math.nan
"""Placeholder for a number that is not finite. JSON stores it as null."""

Count = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class _Event(msgspec.Struct, frozen=True, tag_field="event"):
    """A line of a metrics file. Its field "event" tells the kind of record."""


class RunRecord(_Event, frozen=True, tag="run"):
    """Facts about the run: the first record of a file."""

    recipe: str = ""
    system: str = ""
    target: float = NAN
    global_batch_size: Count = 0
    world_size: Count = 0
    parameters: Count = 0
    commit: str = ""
    started: str = ""


class StepRecord(_Event, frozen=True, tag="step"):
    """Means over the steps since the previous record. Times are in milliseconds, and rates are for all ranks together."""

    step: Count
    samples: Count
    time_s: Time = 0.0
    """Seconds since ``run_start``."""
    step_ms: Time = 0.0
    data_wait_ms: Time = 0.0
    forward_backward_ms: Time = 0.0
    reduce_ms: Time = 0.0
    update_ms: Time = 0.0
    loss: float = NAN
    """The three losses are not finite if a step was skipped because of a non-finite loss."""
    masked_lm_loss: float = NAN
    next_sentence_loss: float = NAN
    learning_rate: float = NAN
    """Learning rate of the last step that was not skipped."""
    gradient_norm: float = NAN
    tokens_per_s: Time = 0.0
    sequences_per_s: Time = 0.0
    skipped_steps: Count = 0
    """Number of steps that were skipped because a gradient was not finite."""
    site_wait_ms: Time = 0.0
    """Mean time that rank 0 waited for the other sites, if each site takes steps by itself."""
    site_bytes: Count = 0
    """Bytes that all ranks together have sent between sites since the previous record."""


class EvaluationRecord(_Event, frozen=True, tag="eval"):
    step: Count
    samples: Count
    time_s: Time = 0.0
    eval_s: Time = 0.0
    masked_lm_accuracy: float = NAN
    correct: Count = 0
    count: Count = 0
    perplexity: float = NAN
    """Exponential of the mean masked-LM loss on the evaluation set."""

    @property
    def error(self) -> float:
        """Half the width of the accuracy's 95 % confidence interval; NaN if the number of masked tokens is unknown."""
        share = self.masked_lm_accuracy
        return 1.96 * math.sqrt(share * (1 - share) / self.count) if self.count and 0 <= share <= 1 else NAN


@dataclass(frozen=True)
class Straggler:
    """A rank that became slow or recovered. It is judged by `own_ms`, the time of its own work in a step."""

    rank: Count
    host: str
    is_slow: bool
    own_ms: Time
    median_ms: Time
    """Median of `own_ms` over the ranks with the same work."""


class WarningRecord(_Event, frozen=True, tag="warning"):
    step: Count
    time_s: Time = 0.0
    text: str = ""
    straggler: Straggler | None = None
    """The straggler that the warning is about, if any."""


class PlanRecord(_Event, frozen=True, tag="plan"):
    """Milliseconds of a step and of each of its parts: the median of the measured times, and the prediction of the plan."""

    step_ms: Time
    data_wait_ms: Time
    forward_backward_ms: Time
    reduce_ms: Time
    update_ms: Time
    other_ms: Time
    """Time of the step that belongs to none of the four parts above."""
    planned_step_ms: Time
    planned_data_wait_ms: Time
    planned_forward_backward_ms: Time
    planned_reduce_ms: Time
    planned_update_ms: Time
    planned_other_ms: Time


class EndRecord(_Event, frozen=True, tag="end"):
    status: str
    time_s: Time = 0.0
    samples: Count = 0
    masked_lm_accuracy: float = NAN


Record = StepRecord | EvaluationRecord | WarningRecord | PlanRecord | EndRecord


@dataclass
class Metrics:
    """The records of one run by kind, in file order."""

    run: RunRecord | None = None
    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    warnings: list[WarningRecord] = field(default_factory=list)
    plan: PlanRecord | None = None
    end: EndRecord | None = None

    def add(self, record: RunRecord | Record) -> None:
        match record:
            case StepRecord():
                self.steps.append(record)
            case EvaluationRecord():
                self.evaluations.append(record)
            case WarningRecord():
                self.warnings.append(record)
            case RunRecord():
                self.run = record
            case PlanRecord():
                self.plan = record
            case EndRecord():
                self.end = record


class MetricsWriter:
    """Writer of the metrics file of ``run``. The file must not exist yet.

    Raises ``OSError`` with the file's name if a line cannot be written, as on a full disk.
    """

    def __init__(self, path: Path, run: RunRecord) -> None:
        # Flush every line, so that programs that follow the file, or read it after a kill, find complete records.
        self._file = path.open("x", encoding="utf-8", buffering=1)
        self.write(run)

    def write(self, record: RunRecord | Record) -> None:
        """Append a record as one line of JSON. A number that is not finite becomes null."""
        values = msgspec.to_builtins(record)
        # Write null for NaN, which JSON lacks. Nine digits are enough to tell any two fp32 numbers apart.
        line = {
            name: (float(f"{value:.9g}") if math.isfinite(value) else None) if isinstance(value, float) else value
            for name, value in values.items()
        }
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from None

    def close(self) -> None:
        self._file.close()


def parse_record(line: bytes) -> RunRecord | Record | None:
    """Parse one line of a metrics file; return None if it holds no record."""
    try:
        values = msgspec.json.decode(line, type=dict[str, object])
        # Leave out the fields that are null, so that they get their defaults.
        given = {name: value for name, value in values.items() if value is not None}
        return msgspec.convert(given, RunRecord | Record)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # RecursionError: deeply nested JSON
        return None


def read_metrics(path: Path) -> Metrics:
    """Read a metrics file. The result has no records if the file is missing or cannot be read."""
    metrics = Metrics()
    for line in Follower(path, MAX_BYTES).lines():
        if (record := parse_record(line)) is not None:
            metrics.add(record)
    return metrics
