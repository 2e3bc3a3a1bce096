"""A run as its log tells it while it goes on: where it stands, and which rules it is about to break.

`RunningLog` takes lines one by one, of the log itself or of any output that holds the log's lines, and of the metrics file.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from compliance.log import rules
from compliance.log.order import Violation, own_settings, violations
from compliance.log.record import TOKEN_BYTES, Record, parse_line
from compliance.log.records import RunRecord, StepRecord, WarningRecord, parse_record
from compliance.log.run import LoggedRun, samples_of

# The rules set no such mark; it leaves some minutes to act.
INIT_WARNING_FRACTION = 25 / 30
"""Share of the time for initialisation after which there is a warning."""

_LABEL = re.compile(rb"^ *\d+: ")
"""Prefix that a launcher puts before each line of a rank."""
_STEP_LINE = re.compile(rb"^step +\d+ +samples +(\d{1,18}) +[\d.]+ ms +(\d{1,15}(?:\.\d{1,15})?) seq/s")
_PROCESSES = re.compile(r"(\d{1,9}) x ")
_SHARED = re.compile(r"([1-9]\d{0,3})$")
"""Processes that share a copy of the model, and so compute the same sequences."""

MAX_EVALUATIONS = 10_000
MAX_QUOTED = 1_000
"""Maximum number of warnings and broken records that are passed on."""
MAX_COMPLAINTS = 3_000
MAX_VALUE = 300
"""Maximum characters of a text that are kept."""
MAX_METADATA = 100
"""Maximum fields of a record's metadata that are kept."""
MAX_HEADER_LINES = 1_000
MAX_HEADER_BYTES = 4_096
"""Longest line of the head that is kept."""


@dataclass(frozen=True)
class LoggedEvaluation:
    """An evaluation: sequences trained, accuracy, and when its result was logged."""

    samples: int
    accuracy: float
    time_ms: int


class RunningLog(LoggedRun):
    """A run and what is known beside its records: its steps, and what there is to complain about.

    Attributes:
        evaluations: those with an accuracy, in the samples that were trained by then or, where the log does not
            count them, by the schedule.
        step_samples: sequences trained by the latest line of metrics.
        step_rate: sequences a second by the same.
        caches_cleared: whether one process at least dropped its caches; None when none says.
        complaints: broken rules, and what the run itself warns of, in the order in which they were noticed; each is
            said once. A log may hold any number of different warnings: of those the first `MAX_QUOTED` are kept.
    """

    def __init__(self) -> None:
        self._head: dict[str, str] = {}  # filled as lines come
        super().__init__(self._head)
        self.evaluations: list[LoggedEvaluation] = []
        self.step_samples = 0
        self.step_rate: float | None = None
        self.processes: int | None = None
        self.evaluating_at: int | None = None
        self.caches_cleared: bool | None = None
        self.complaints: dict[str, None] = {}
        self._line = 0
        self._said: set[str] = set()
        self._quoted = 0

    def take(self, line: bytes) -> None:
        """Take in one line of the log."""
        self._line += 1
        line = _LABEL.sub(b"", line, count=1)
        if TOKEN_BYTES in line:
            record, problems = parse_line(line, self._line)
            for problem in problems:
                self._quote(f"a record is broken: {problem.found}; expected {problem.expected}")
            if record is not None:
                self._take_record(record)
        elif match := _STEP_LINE.match(line):
            self._take_step(int(match[1]), float(match[2]))
        elif line.startswith(b"# ") and b": " in line:
            key, _, value = line[2:MAX_HEADER_BYTES].decode("utf-8", "replace").partition(": ")
            if len(self._head) < MAX_HEADER_LINES:
                self._head.setdefault(key.strip(), value.strip())
        elif line.startswith(b"warning at step "):
            self._quote(line[: 4 * MAX_VALUE].decode("utf-8", "replace"))

    def take_metrics(self, line: bytes) -> None:
        """Take in one line of the metrics file."""
        record = parse_record(line)
        if isinstance(record, RunRecord) and record.world_size:
            self.processes = record.world_size
        elif isinstance(record, StepRecord):
            self._take_step(record.samples, record.sequences_per_s)
        elif isinstance(record, WarningRecord):
            self._quote(f"warning at step {record.step}: {record.text}")

    # What follows from it

    @property
    def samples(self) -> int:
        """Sequences trained by the latest news."""
        evaluated = self.evaluations[-1].samples if self.evaluations else 0
        return max(self.step_samples, evaluated, self.counted_samples)

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
        # Over a few evaluations: the rate of the whole run would hide that it has become slower.
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
        # From the last evaluation on, whose time is known, and not from the last step.
        then = self.evaluations[-1] if self.evaluations else LoggedEvaluation(0, 0.0, self.run_start_ms)
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
                text = f"initialisation has taken {minutes:.0f} min of {limit} (TR 11)"
                self._complain(text, "a long initialisation")
        # Before two evaluations there is no spacing to compare with.
        if self.phase != "run" or len(self.evaluations) < 2 or self.evaluating_at is not None:
            return
        # The longest so far, so that uneven ones are not called late.
        spacing = max(second.time_ms - first.time_ms for first, second in pairwise(self.evaluations))
        late_s = (now_ms - self.evaluations[-1].time_ms - spacing) / 1000
        # By half the longest spacing so far, and a minute at least.
        if late_s > max(60.0, spacing / 2000):
            number = len(self.evaluations) + 1
            minutes = (late_s + spacing / 1000) / 60
            self._complain(f"evaluation {number} is late: none for {minutes:.0f} min", f"late evaluation {number}")

    def _complain(self, text: str, about: str = "") -> bool:
        """Take in a complaint; returns whether it is a new one.

        Args:
            about: what tells it from others, where numbers in it change from look to look.
        """
        # Said once each: a watch looks every second.
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
        if key not in rules.KEYS:
            return
        # Bounded, as each evaluation is kept.
        if key == "eval_accuracy" and len(self.accuracies) >= MAX_EVALUATIONS:
            self._complain(f"there are more than {MAX_EVALUATIONS} evaluations: the others are not looked at")
            return
        # Kept for the whole run, so without the length and depth that a hostile log may give it.
        record = _brief_record(record)
        for violation in violations(self, record, rules.NEWEST_RULESET):
            # The evaluations before the checkpoint are in another log.
            if _is_fatal(violation) and not (self.resumed_from and violation.kind == "schedule"):
                is_count = violation.kind == "count"  # once for all, whatever the numbers
                self._complain(violation.sentence, "count" if is_count else violation.found + violation.expected)
        # When the clock starts, all that had to be logged before is there.
        if key == "run_start" and key not in self.first:
            self._check_settings()
        if key == "cache_clear":  # one that was dropped is enough, as for the check
            self.caches_cleared = self.caches_cleared or record.value is not False
        elif key == "eval_start":
            self.evaluating_at = samples_of(record.metadata)
        elif key == "eval_accuracy":
            self._take_accuracy(record)
        self.add(record)

    def _check_settings(self) -> None:
        """Check what must have been logged when the clock starts."""
        is_closed = self.division == "closed"
        if self.caches_cleared is None:
            self._complain("no cache_clear before run_start: caches must be dropped, and that logged (TR 6.1)")
        elif is_closed and not self.caches_cleared:
            self._complain("caches were not dropped before this closed run (TR 6.1)")
        if is_closed and "seed" not in self.first:
            self._complain("no seed is logged; the package checker asks for one (TR 5.1)")
        batch, each = self.global_batch_size, self.count_of("d_batch_size")
        steps = self.count_of("gradient_accumulation_steps")
        named = _PROCESSES.match(self.header.get("processes", ""))
        processes = self.processes or (int(named[1]) if named else None)
        # Absent in logs of other software: each process then counts as a copy of the model.
        shared = [_SHARED.match(self.header.get(f"config.parallel.{name}", "")) for name in ("tensor", "pipeline")]
        copy = math.prod(int(each[1]) for each in shared if each)
        if batch and each and steps and processes and batch * copy != each * steps * processes:
            shape = f"{processes} processes / {copy} of a copy" if copy > 1 else f"{processes} processes"
            self._complain(
                f"global_batch_size is {batch}, but {shape} x {each} sequences x {steps} steps are "
                f"{processes * each * steps // copy}"
            )
        for violation in own_settings(self):
            self._complain(violation.sentence)

    def _take_accuracy(self, record: Record) -> None:
        self.evaluating_at = None
        if not rules.FRACTION.accepts(record.value):
            return
        schedule, samples = self.schedule, samples_of(record.metadata)
        before = self.evaluations[-1].samples if self.evaluations else 0
        # Numbers of epochs or of evaluations are far below those of sequences.
        if schedule and (samples is None or samples <= max(before, schedule.interval // 100)):
            samples = schedule.samples(self.number_of_evaluations + 1)
        self.evaluations.append(LoggedEvaluation(samples or before, float(record.value), record.time_ms))

    def _take_step(self, samples: int, rate: float) -> None:
        self.step_samples, self.step_rate = max(self.step_samples, samples), rate
        schedule = self.schedule
        # One that is under way has not been missed.
        index = self.number_of_evaluations + 1 + (self.evaluating_at is not None)
        if schedule is None or self.resumed_from is not None:
            return
        due = schedule.samples(index)
        # The next block may begin before an evaluation is logged, and metrics come at intervals.
        if samples >= due + schedule.global_batch_size + schedule.interval // 10:
            text = f"evaluation {index} was missed: due at {due:,} samples, now {samples:,} (TR 24.4)"
            self._complain(text, f"missed evaluation {index}")


def _is_fatal(violation: Violation) -> bool:
    """Tell whether it costs the run its result, and is not only how somebody else's program logs."""
    if violation.kind in ("repeat", "value"):
        return violation.key in ("run_start", "run_stop", "eval_accuracy")
    return violation.kind in ("init time", "schedule", "count")


def _brief_record(record: Record) -> Record:
    """A record as it may be kept."""
    metadata = {name: _brief(value) for name, value in islice(record.metadata.items(), MAX_METADATA)}
    return record._replace(value=_brief(record.value), metadata=metadata)


def _brief(value: Any) -> Any:
    """A value of a log as it may be kept and shown: not without end, in length or in depth."""
    if isinstance(value, str):
        return value[:MAX_VALUE]
    return f"a JSON {type(value).__name__}" if isinstance(value, (list, dict)) else value
