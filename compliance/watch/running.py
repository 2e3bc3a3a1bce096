"""A run as its log tells it while it goes on: where it stands, and which rules it is about to break.

`RunningLog` takes lines one by one, of the log itself or of any output that holds the log's lines, and of the metrics file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from compliance.log import rules
from compliance.log.forecast import Schedule
from compliance.log.records import Record, parse_line

TOKEN = b":::MLLOG"

INIT_WARNING_FRACTION = 25 / 30
"""Share of the time for initialisation after which there is a warning."""

_LABEL = re.compile(rb"^ *\d+: ")
"""What a launcher puts before each line of a rank."""
_STEP_LINE = re.compile(rb"^step +\d+ +samples +(\d{1,18}) +[\d.]+ ms +(\d{1,15}(?:\.\d{1,15})?) seq/s")
_PROCESSES = re.compile(r"(\d{1,9}) x ")

MAX_EVALUATIONS = 10_000
MAX_QUOTED = 1_000
"""Most warnings and broken records that are passed on."""
MAX_COMPLAINTS = 3_000
MAX_VALUE = 300
"""Most characters of a text that are kept."""
MAX_HEADER_LINES = 1_000
MAX_HEADER_BYTES = 4_096
"""Longest line of the head that is kept."""

Phase = Literal["before", "init", "ready", "run", "done"]


@dataclass(frozen=True)
class Evaluation:
    """One evaluation: sequences trained, accuracy, and when its result was logged."""

    samples: int
    accuracy: float
    time_ms: int


@dataclass
class RunningLog:
    """What is known so far.

    Attributes:
        header: the plain lines "# key: value" of the log.
        settings: value by key of the records that are logged once; of a repeated key the first.
        step_samples: sequences trained by the latest line of metrics.
        step_rate: sequences a second by the same.
        complaints: broken rules, and what the run itself warns of, in the order in which they were noticed; each is
            said once. A log may hold any number of different warnings: of those the first `MAX_QUOTED` are kept.
    """

    header: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    phase: Phase = "before"
    init_start_ms: int | None = None
    run_start_ms: int | None = None
    run_stop_ms: int | None = None
    status: str | None = None
    last_ms: int = 0
    step_samples: int = 0
    step_rate: float | None = None
    processes: int | None = None
    evaluating_at: int | None = None
    complaints: dict[str, None] = field(default_factory=dict)
    _line: int = 0
    _evaluations_started: int = 0
    _said: set[str] = field(default_factory=set)
    _quoted: int = 0

    def take(self, line: bytes) -> None:
        """Take in one line of the log."""
        self._line += 1
        line = _LABEL.sub(b"", line, count=1)
        if TOKEN in line:
            record, problems = parse_line(line, self._line) if TOKEN + b" " in line else (None, [])
            for problem in problems:
                self._quote(f"a record is broken: {problem.found}; expected {problem.expected}")
            if record is not None:
                self._take_record(record)
        elif match := _STEP_LINE.match(line):
            self._take_step(int(match[1]), float(match[2]))
        elif line.startswith(b"# ") and b": " in line:
            key, _, value = line[2:MAX_HEADER_BYTES].decode("utf-8", "replace").partition(": ")
            if len(self.header) < MAX_HEADER_LINES:
                self.header.setdefault(key.strip(), value.strip())
        elif line.startswith(b"warning at step "):
            self._quote(line[: 4 * MAX_VALUE].decode("utf-8", "replace"))

    def take_metrics(self, line: bytes) -> None:
        """Take in one line of the metrics file."""
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(entry, dict):
            return
        if entry.get("event") == "run" and rules.POSITIVE_INTEGER.accepts(entry.get("world_size")):
            self.processes = entry["world_size"]
        samples, rate = entry.get("samples"), entry.get("sequences_per_s")
        if entry.get("event") == "step" and rules.is_integer(samples) and samples >= 0 and rules.is_number(rate):
            self._take_step(samples, float(rate))
        if entry.get("event") == "warning":
            self._quote(f"warning at step {_brief(entry.get('step'))}: {_brief(entry.get('text'))}")

    # What follows from it

    @property
    def division(self) -> rules.Division:
        """As logged; until then closed, whose rules are stricter."""
        named = str(self.settings.get("submission_division", self.header.get("config.log.division", "closed")))
        return "open" if named.lower() == "open" else "closed"

    @property
    def target(self) -> float | None:
        """Accuracy that ends the run."""
        if self.division == "closed":
            return rules.QUALITY_TARGET
        logged = self.settings.get("quality_target")
        return float(logged) if rules.is_number(logged) else None

    @property
    def global_batch_size(self) -> int | None:
        """Sequences a step, over all ranks."""
        return self._positive("global_batch_size")

    @property
    def schedule(self) -> Schedule | None:
        """When the run has to evaluate."""
        batch, interval = self.global_batch_size, self._positive("eval_interval_samples")
        if self.division == "closed":
            interval = rules.evaluation_interval(batch) if batch else None
        return Schedule(interval, batch) if batch and interval else None

    @property
    def samples(self) -> int:
        """Sequences trained by the latest news."""
        evaluated = self.evaluations[-1].samples if self.evaluations else 0
        return max(self.step_samples, evaluated, self.evaluating_at or 0)

    @property
    def max_samples(self) -> int | None:
        """Sequences after which a run of this repository ends as aborted."""
        limits = [self._setting("max_samples")]
        steps = self._setting("max_steps")
        if steps is not None and self.global_batch_size:
            limits.append(steps * self.global_batch_size)
        return min((limit for limit in limits if limit is not None), default=None)

    def _setting(self, name: str) -> int | None:
        text = self.header.get(f"config.training.{name}", "")
        return int(text) if text.isdecimal() and text.isascii() and len(text) < 19 else None

    @property
    def rate(self) -> float | None:
        """Sequences a second, evaluations included, over the last evaluations; before the second, since run_start."""
        recent = self.evaluations[-4:]
        if len(recent) >= 2 and recent[-1].time_ms > recent[0].time_ms:
            return 1000 * (recent[-1].samples - recent[0].samples) / (recent[-1].time_ms - recent[0].time_ms)
        if recent and self.run_start_ms is not None and recent[0].time_ms > self.run_start_ms:
            return 1000 * recent[0].samples / (recent[0].time_ms - self.run_start_ms)
        return self.step_rate

    def seconds_until(self, samples: int, now_ms: float) -> float | None:
        """Time until so many sequences are trained and evaluated; 0 when they are overdue, None when it is not known."""
        if not self.rate or self.run_start_ms is None:
            return None
        then = self.evaluations[-1] if self.evaluations else Evaluation(0, 0.0, self.run_start_ms)
        left = (samples - then.samples) / self.rate - (now_ms - then.time_ms) / 1000
        return max(0.0, left)

    def watch_the_time(self, now_ms: float) -> None:
        """Notice what only the clock shows: a long initialisation, an evaluation that does not come."""
        if self.phase == "init" and self.init_start_ms is not None:
            limit = rules.INIT_LIMIT_MINUTES[self.division]
            minutes = (now_ms - self.init_start_ms) / 60_000
            if minutes >= limit:
                self._complain(f"initialisation has passed its {limit} min: the run is no valid result (TR 11)")
            elif minutes >= limit * INIT_WARNING_FRACTION:
                self._complain(
                    f"initialisation has taken {minutes:.0f} min of {limit} (TR 11)", "a long initialisation"
                )
        if self.phase != "run" or len(self.evaluations) < 2 or self.evaluating_at is not None:
            return
        spacing = max(second.time_ms - first.time_ms for first, second in self._neighbours())
        late_s = (now_ms - self.evaluations[-1].time_ms - spacing) / 1000
        if late_s > max(60.0, spacing / 2000):
            number = len(self.evaluations) + 1
            minutes = (late_s + spacing / 1000) / 60
            self._complain(f"evaluation {number} is late: none for {minutes:.0f} min", f"late evaluation {number}")

    def _neighbours(self) -> Iterator[tuple[Evaluation, Evaluation]]:
        return zip(self.evaluations, self.evaluations[1:], strict=False)

    def _positive(self, key: str) -> int | None:
        value = self.settings.get(key)
        return value if rules.is_integer(value) and value > 0 else None

    def _complain(self, text: str, about: str = "") -> bool:
        """Take in a complaint; returns whether it is a new one.

        Args:
            about: what tells it from others, where numbers in it change from look to look.
        """
        if (about or text) in self._said or len(self.complaints) > MAX_COMPLAINTS:
            return False
        if len(self.complaints) == MAX_COMPLAINTS:
            text = f"there are more than {MAX_COMPLAINTS} complaints: `python -m compliance check` lists them"
        self._said.add(about or text)
        self.complaints[text] = None
        return True

    def _quote(self, text: str) -> None:
        """Take in a complaint in words of the log, of which there may be any number."""
        text = text[:MAX_VALUE]
        if self._quoted < MAX_QUOTED:
            self._quoted += self._complain(text)
        elif text not in self._said:
            self._complain(f"there are more than {MAX_QUOTED} different warnings: the others stand in the log")

    # Records

    def _take_record(self, record: Record) -> None:
        key = record.key
        self.last_ms = max(self.last_ms, record.time_ms)
        if key == "init_start":
            self.init_start_ms = self.init_start_ms or record.time_ms
            self.phase = "init" if self.phase == "before" else self.phase
        elif key == "init_stop":
            self.phase = "ready"
        elif key == "run_start":
            self._start(record)
        elif key == "run_stop":
            self.run_stop_ms, self.phase = record.time_ms, "done"
            self.status = str(_brief(record.metadata.get("status")))
        elif key == "eval_start":
            self._start_evaluation(record)
        elif key == "eval_accuracy":
            self._take_accuracy(record)
        elif key == "block_start":
            self.step_samples = max(self.step_samples, _samples_of(record) or 0)
        elif key == "cache_clear":  # one that was dropped is enough, as for the check
            self.settings[key] = record.value is not False or self.settings.get(key, False)
        elif key in rules.KEYS and rules.KEYS[key].event_type == "POINT_IN_TIME":
            self.settings.setdefault(key, _brief(record.value))

    def _start(self, record: Record) -> None:
        if self.run_start_ms is not None:
            self._complain("a second run_start: the measured time is no longer the run's (common.yaml)")
            return
        self.run_start_ms, self.phase = record.time_ms, "run"
        self._check_settings()

    def _check_settings(self) -> None:
        """What must have been logged when the clock starts."""
        settings, closed = self.settings, self.division == "closed"
        if "cache_clear" not in settings:
            self._complain("no cache_clear before run_start: caches must be dropped, and that logged (TR 6.1)")
        elif closed and settings["cache_clear"] is False:
            self._complain("caches were not dropped before this closed run (TR 6.1)")
        if closed and "seed" not in settings:
            self._complain("no seed is logged; the package checker asks for one (TR 5.1)")
        batch, each = self.global_batch_size, self._positive("d_batch_size")
        steps = self._positive("gradient_accumulation_steps")
        shown = _PROCESSES.match(self.header.get("processes", ""))
        processes = self.processes or (int(shown[1]) if shown else None)
        if batch and each and steps and processes and batch != each * steps * processes:
            self._complain(
                f"global_batch_size is {batch}, but {processes} processes x {each} sequences x {steps} steps are "
                f"{processes * each * steps}"
            )
        logged, schedule = settings.get("eval_interval_samples"), self.schedule
        if closed and schedule and rules.is_integer(logged) and logged != schedule.interval:
            self._complain(f"evaluation every {logged} samples, but the rules want {schedule.interval} (TR 24.4)")

    def _start_evaluation(self, record: Record) -> None:
        samples = _samples_of(record)
        self._evaluations_started += 1
        if samples is None:
            return
        self.evaluating_at = samples
        self._check_place(self._evaluations_started, samples)

    def _take_accuracy(self, record: Record) -> None:
        samples = _samples_of(record)
        self.evaluating_at = None
        if not rules.is_number(record.value):
            self._complain(f"eval_accuracy is {str(_brief(record.value))[:40]}, no number")
            return
        if not 0 <= record.value <= 1:
            self._complain(f"eval_accuracy is {record.value:g}, expected a fraction from 0 to 1")
            return
        index = len(self.evaluations) + 1
        if index > MAX_EVALUATIONS:
            self._complain(f"there are more than {MAX_EVALUATIONS} evaluations: the others are not looked at")
            return
        schedule = self.schedule
        before = self.evaluations[-1].samples if self.evaluations else 0
        if schedule and (samples is None or samples <= max(before, schedule.interval // 100)):
            self._complain("epoch_num of eval_accuracy does not count samples (TR 24.6)")
            samples = schedule.samples(index)
        samples = samples or before
        if self._evaluations_started == 0:
            self._check_place(index, samples)
        self.evaluations.append(Evaluation(samples, float(record.value), record.time_ms))

    def _check_place(self, index: int, samples: int) -> None:
        schedule = self.schedule
        previous = self.evaluations[-1].samples if self.evaluations else 0
        if schedule is None or self.header.get("resumed from"):
            return
        if not rules.is_on_schedule(index, samples, previous, schedule.interval, schedule.global_batch_size):
            due = schedule.samples(index)
            what = "was missed" if samples > due else "is early"
            self._complain(f"evaluation {index} {what}: due at {due:,} samples, taken at {samples:,} (TR 24.4)")

    def _take_step(self, samples: int, rate: float) -> None:
        self.step_samples, self.step_rate = max(self.step_samples, samples), rate
        schedule = self.schedule
        index = max(self._evaluations_started, len(self.evaluations)) + 1
        if schedule is None or self.header.get("resumed from"):
            return
        due = schedule.samples(index)
        if samples >= due + schedule.global_batch_size + schedule.interval // 10:
            text = f"evaluation {index} was missed: due at {due:,} samples, now {samples:,} (TR 24.4)"
            self._complain(text, f"missed evaluation {index}")


def _samples_of(record: Record) -> int | None:
    """Sequences trained at a record: samples_count, or epoch_num, which for BERT counts the same."""
    samples = record.metadata.get("samples_count", record.metadata.get("epoch_num"))
    return samples if rules.COUNT.accepts(samples) else None


def _brief(value: Any) -> Any:
    """A value of a log as it may be kept and shown: not without end, in length or in depth."""
    if isinstance(value, str):
        return value[:MAX_VALUE]
    return f"a JSON {type(value).__name__}" if isinstance(value, (list, dict)) else value
