"""Reporter, which passes each record to all sinks: the metrics file, lines of text, and TensorBoard."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import TracebackType

from bert.configuration.run_plan import RunPlan
from bert.execution.phases import PHASES
from compliance.convergence.forecast import forecast, time_left
from compliance.log.metrics import (
    EndRecord,
    EvaluationRecord,
    Metrics,
    MetricsWriter,
    PlanRecord,
    Record,
    StepRecord,
    Straggler,
    WarningRecord,
)
from compliance.log.schedule import EvaluationSchedule
from console.text import clock, visible


@dataclass
class StepLines:
    """Sink that describes each record in one line and passes the line to ``put``.

    The run ends when it reaches ``target`` or after ``max_samples`` samples. ``resumed_samples`` is the number of samples
    trained before the run was resumed; the run's time does not include them.
    """

    put: Callable[[str], None]
    target: float | None
    max_samples: int
    schedule: EvaluationSchedule
    resumed_samples: int = 0
    width: int | None = None
    """Width of the terminal in characters, or None if lines are not for a terminal."""
    records: Metrics = field(default_factory=Metrics)

    @property
    def eta(self) -> str:
        """Time left, as text. With a target, it is a range, or an upper bound while no range can be predicted."""
        steps = self.records.steps
        # The rate is unknown before this run has trained samples.
        if not steps or steps[-1].samples == self.resumed_samples:
            return "-"
        samples = steps[-1].samples
        rate = (samples - self.resumed_samples) / steps[-1].time_s
        if self.target is None:
            return clock(max(0, self.max_samples - samples) / rate)
        curve = [(evaluation.samples, evaluation.masked_lm_accuracy) for evaluation in self.records.evaluations]
        found = forecast(curve, self.target, self.schedule, None)
        return time_left(found, self.schedule, samples, rate, self.max_samples)

    def write(self, record: Record) -> None:
        self.records.add(record)  # first, because `_text` uses the records
        self.put(self._text(record))

    def close(self) -> None:
        """Do nothing, because every line has been written already."""

    def _text(self, record: Record) -> str:
        if isinstance(record, StepRecord):
            skipped = f"  WARNING: {record.skipped_steps} skipped, gradients not finite" if record.skipped_steps else ""
            return self._fitted(self._step_columns(record), ("tok/s", "wait", "lr", "samples", "ms")) + skipped
        if isinstance(record, EvaluationRecord):
            return self._fitted(self._evaluation_columns(record), ("samples", "s", "counts"))
        if isinstance(record, WarningRecord):
            # The text may contain names of hosts and files, which may contain control characters.
            return f"warning at step {record.step}: {visible(record.text)}"
        if isinstance(record, PlanRecord):
            return f"plan: a step took {record.step_ms:.1f} ms, planned {record.planned_step_ms:.1f} ms"
        return f"end: {record.status} after {record.samples} samples and {record.time_s:.1f} s"

    def _step_columns(self, record: StepRecord) -> dict[str, str]:
        return {
            "step": f"step {record.step:>6}",
            "samples": f"samples {record.samples:>9}",
            "ms": f"{record.step_ms:7.1f} ms",
            "seq/s": f"{record.sequences_per_s:8.1f} seq/s",
            "tok/s": f"{record.tokens_per_s:9.0f} tok/s",
            "wait": f"wait {100 * record.data_wait_ms / record.step_ms:4.1f} %",
            "loss": f"loss {record.loss:.4f}",
            "lr": f"lr {record.learning_rate:.2e}",
            "eta": f"eta {self.eta}",
        }

    def _evaluation_columns(self, record: EvaluationRecord) -> dict[str, str]:
        accuracy = f"accuracy {record.masked_lm_accuracy:.4f}"
        best = max(evaluation.masked_lm_accuracy for evaluation in self.records.evaluations)
        aims = (
            {"target": f"target {self.target:.4f}"}
            if self.target is not None
            else {"perplexity": f"perplexity {record.perplexity:.1f}", "best": f"best {best:.4f}"}
        )
        counts = f"({record.correct}/{record.count})"
        columns = {"eval": f"eval {record.step:>6}", "samples": f"samples {record.samples:>9}", "accuracy": accuracy}
        return columns | {"counts": counts} | aims | {"s": f"{record.eval_s:.2f} s"}

    def _fitted(self, columns: dict[str, str], dropped: Sequence[str]) -> str:
        """Join columns. While the line is too long for the terminal, leave out the next column named in ``dropped``."""
        for name in dropped:
            if self.width is None or len("  ".join(columns.values())) <= self.width:
                break
            del columns[name]
        return "  ".join(columns.values())


_GROUPS = {
    "loss": ("loss", "masked_lm_loss", "next_sentence_loss"),
    "optimizer": ("learning_rate", "gradient_norm", "skipped_steps"),
    "rate": ("sequences_per_s", "tokens_per_s"),
    "step": ("step_ms", "data_wait_ms", "forward_backward_ms", "reduce_ms", "update_ms"),
    "evaluation": ("masked_lm_accuracy", "eval_s"),
}
"""Fields of the records, grouped by the heading under which TensorBoard shows them."""


def require_tensorboard() -> None:
    if find_spec("tensorboard") is None:
        raise ValueError(
            "log.tensorboard is set, but tensorboard is not installed: pip install '.[tensorboard]', or leave the "
            "setting out"
        )


class TensorBoard:
    """Sink that writes the numbers of each record as scalars. TensorBoard's steps are numbers of training samples."""

    def __init__(self, folder: Path) -> None:
        # Import it here, because the package is optional.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=10)

    def write(self, record: Record) -> None:
        # Skip other kinds of records, which have no values to plot over samples.
        if isinstance(record, StepRecord | EvaluationRecord):
            for group, names in _GROUPS.items():
                for name in names:
                    if hasattr(record, name):
                        self._writer.add_scalar(f"{group}/{name}", getattr(record, name), record.samples)

    def close(self) -> None:
        """Write pending records and close the file."""
        self._writer.close()


@dataclass(frozen=True)
class Position:
    """Position of a run: the numbers of steps and samples trained so far."""

    steps: int = 0
    """Number of global batches trained."""
    samples: int = 0


Sink = MetricsWriter | StepLines | TensorBoard

_TOLERANCE = 0.2
"""A run warns if its step time differs from the planned step time by more than this share of the planned time."""


class Reporter:
    """Reporter that passes each record to every sink and measures the run's time. Only rank 0 has sinks."""

    def __init__(self, sinks: list[Sink], plan: tuple[RunPlan, Path] | None = None) -> None:
        """``plan`` holds the plan to compare the run with, and the path of its file."""
        self._sinks, self._plan = sinks, plan
        self._steps: list[StepRecord] = []
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Start to measure time. Call this when the clock of the run starts."""
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as closing:
            if error is not None:  # an error while closing a sink must not hide the error that ended the run
                closing.enter_context(suppress(OSError))
            for sink in self._sinks:
                # The exit stack closes all sinks, even if closing one of them raises an error.
                closing.callback(sink.close)

    def write(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self._steps.append(record)
        for sink in self._sinks:
            sink.write(record)

    def end(self, steps: int, record: EndRecord) -> None:
        """Report the comparison with the plan, if any, and the end of the run after ``steps`` steps."""
        if self._plan and self._steps:
            plan, file = self._plan
            compared = compare_with_plan(plan, self._steps)
            self.write(compared)
            if text := describe_difference(compared, file):
                self.warn(steps, text)
        self.write(record)

    def warn(self, steps: int, text: str, straggler: Straggler | None = None) -> None:
        self.write(WarningRecord(steps, self.seconds, text, straggler))


def compare_with_plan(plan: RunPlan, intervals: Sequence[StepRecord]) -> PlanRecord:
    """Return the measured times (medians over all log intervals, which outliers hardly affect) and the planned times."""
    planned_ms = {f"planned_{part}_ms": 1000 * seconds for part, seconds in plan.step_seconds.items()}
    # Compute ``other`` for each interval before its median, because medians of parts do not add up to the median of the sum.
    others = [each.step_ms - sum(getattr(each, f"{part}_ms") for part in PHASES) for each in intervals]
    return PlanRecord(
        step_ms=median(each.step_ms for each in intervals),
        **{f"{part}_ms": median(getattr(each, f"{part}_ms") for each in intervals) for part in PHASES},
        other_ms=median(others),
        planned_step_ms=sum(planned_ms.values()),
        **planned_ms,
    )


def describe_difference(found: PlanRecord, plan: Path) -> str:
    """Describe how the step time differs from the plan in the file ``plan``, and which phase differs most.

    Returns "" if the difference is at most 20 %.
    """
    planned = found.planned_step_ms
    if abs(found.step_ms - planned) <= _TOLERANCE * planned:
        return ""
    pairs = {part: (getattr(found, f"{part}_ms"), getattr(found, f"planned_{part}_ms")) for part in (*PHASES, "other")}
    sign, way = (1, "more") if found.step_ms > planned else (-1, "less")
    most = max(pairs, key=lambda part: sign * (pairs[part][0] - pairs[part][1]))
    return (
        f"a step took {found.step_ms:.1f} ms, {abs(found.step_ms / planned - 1):.0%} {way} "
        f"than the {planned:.1f} ms of {plan}: mostly in {most.replace('_', ' ')}, {pairs[most][0]:.1f} ms instead of "
        f"{pairs[most][1]:.1f}"
    )
