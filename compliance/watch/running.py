"""State of a run in progress according to its log and metrics: its progress, and the rules that it breaks."""

import re

from compliance.log import rules
from compliance.log.logged_run import LoggedRun
from compliance.log.metrics import StepRecord, WarningRecord, parse_record
from compliance.log.order import Violation, own_settings, violations
from compliance.log.reader import take_header
from compliance.log.record import TOKEN_BYTES, Record, parse_line

INIT_WARNING_FRACTION = 25 / 30
"""Share of the initialisation limit after which to warn, so that some minutes are left to act."""

_LABEL = re.compile(rb"^ *\d+: ")
"""Prefix with the rank's number, which a launcher adds to each line that a rank prints."""

MAX_EVALUATIONS = 1_000
MAX_COMPLAINTS = 1_000
MAX_COMPLAINT = 300
"""Maximum number of characters of a complaint, which may quote the log."""


class RunningLog(LoggedRun):
    """Progress of a run and the complaints about it. The lines come from the log, or from program output that contains it.

    Attributes:
        step_samples, step_rate: samples trained and sequences per second according to the latest line of metrics.
        site_bytes, site_wait_ms: bytes sent between sites so far, and the latest mean time per step spent waiting for them.
        complaints: broken rules and the run's own warnings, without repetition, in order of detection.
    """

    def __init__(self) -> None:
        self._head: dict[str, str] = {}
        super().__init__(self._head)
        self.step_samples = 0
        self.step_rate: float | None = None
        self.site_bytes, self.site_wait_ms = 0, 0.0
        self.complaints: dict[str, None] = {}
        self._line = 0
        self._said: set[str] = set()
        self._cleared = False

    def take(self, line: bytes) -> None:
        self._line += 1
        line = _LABEL.sub(b"", line)
        if TOKEN_BYTES in line:
            record, problems = parse_line(line, self._line)
            for problem in problems:
                self._quote(f"a record is broken: {problem.found}; expected {problem.expected}")
            if record is not None and record.key in rules.KEYS:
                self._take_record(record)
        elif line.startswith(b"warning at step "):
            self._quote(line.decode("utf-8", "replace"))
        else:
            take_header(line, self._head)

    def take_metrics(self, line: bytes) -> None:
        record = parse_record(line)
        if isinstance(record, StepRecord):
            self.step_samples, self.step_rate = max(self.step_samples, record.samples), record.sequences_per_s
            self.site_bytes, self.site_wait_ms = self.site_bytes + record.site_bytes, record.site_wait_ms
        elif isinstance(record, WarningRecord):
            self._quote(f"warning at step {record.step}: {record.text}")

    @property
    def samples(self) -> int:
        """Samples trained according to the log or the metrics, whichever states more."""
        counted = max((samples for samples, _ in self.curve), default=0) if self.other_unit else self.counted_samples
        return max(self.step_samples, counted)

    @property
    def _marks(self) -> list[tuple[int, int]]:
        """(samples trained, time in milliseconds) of the last four evaluations, or of run_start and the first evaluation."""
        found = [(samples, record.time_ms) for samples, record in self.counted_accuracies[-4:]]
        begin = self.resumed_samples
        start = [(begin, self.run_start_ms)] if self.run_start_ms is not None and len(found) < 2 else []
        return [*start, *found]

    @property
    def rate(self) -> float | None:
        """Sequences per second, including evaluations, over the last four evaluations; None if unknown.

        After a single evaluation it is the rate since run_start. Before the first evaluation it is the rate of the latest
        steps.
        """
        # The rate of the whole run would hide that the run became slower, so use recent evaluations.
        # A resumed run may evaluate before its first step. Without progress, use the rate of its steps.
        if (marks := self._marks) and marks[-1][1] > marks[0][1] and marks[-1][0] > marks[0][0]:
            return 1000 * (marks[-1][0] - marks[0][0]) / (marks[-1][1] - marks[0][1])
        return self.step_rate

    @property
    def sample_limit(self) -> int | None:
        """Sequences after which the run ends, according to the configuration in its header; None if unknown."""
        sizes = {"max_samples": 1, "max_steps": self.global_batch_size or 0}
        logged = {name: self.header.get(f"config.training.{name}", "") for name in sizes}
        limits = [size * int(logged[name]) for name, size in sizes.items() if re.fullmatch("[0-9]{1,15}", logged[name])]
        return min(filter(None, limits), default=None)

    def check_initialisation(self, now_ms: float) -> None:
        """Add a complaint if the initialisation nears or exceeds its time limit. A run without a target has no limit."""
        if self.phase == "init" and self.init_start_ms is not None and not self.trains_to_end:
            limit = rules.INIT_LIMIT_MINUTES[self.division]
            minutes = (now_ms - self.init_start_ms) / 60_000
            if minutes >= limit:
                self.complain(f"initialisation takes {limit} min or more: the run is not a valid result (TR 11)")
            elif minutes >= limit * INIT_WARNING_FRACTION:
                self.complain(f"initialisation has taken {minutes:.0f} min of {limit} (TR 11)", "a long initialisation")

    def trained_by(self, now_ms: float) -> int | None:
        """Estimate the samples trained until now from the last evaluation and the rate; None if either is unknown."""
        if not self._marks or not self.rate:
            return None
        samples, time_ms = self._marks[-1]
        return round(samples + self.rate * max(0.0, now_ms - time_ms) / 1000)

    def complain(self, text: str, about: str = "") -> None:
        """Add a complaint if it is new. `about` identifies a complaint whose text contains changing numbers."""
        text = text[:MAX_COMPLAINT]
        if (about or text) in self._said or len(self.complaints) > MAX_COMPLAINTS:
            return
        if len(self.complaints) == MAX_COMPLAINTS:
            text = f"there are more than {MAX_COMPLAINTS} complaints: `python -m compliance check` lists them"
        self._said.add(about or text)
        self.complaints[text] = None

    def _quote(self, text: str) -> None:
        """Add a complaint that quotes the log. The number of these complaints is limited."""
        # Reserve half of the complaints for broken rules, because a log may contain any number of warnings.
        is_full = len(self.complaints) >= MAX_COMPLAINTS // 2
        self.complain("there are more warnings in the log" if is_full else text)

    def _take_record(self, record: Record) -> None:
        key = record.key
        # All evaluations are stored, so limit their number.
        if key == "eval_accuracy" and len(self.accuracies) >= MAX_EVALUATIONS:
            self.complain(f"there are more than {MAX_EVALUATIONS} evaluations: the later ones are ignored")
            return
        for violation in violations(self, record, rules.NEWEST_RULESET):
            if _is_fatal(violation):
                is_count = violation.kind == "count"  # complain of wrong counts only once
                self.complain(violation.sentence, "count" if is_count else violation.found + violation.expected)
        if key == "run_start" and key not in self.first:
            self._check_settings()
        if key == "init_start" and self.phase not in ("before", "init"):
            self.complain("a second attempt logs to this file: the log of two attempts is not a valid result", key)
        # It is enough if one process cleared its caches. The check of a log applies the same rule.
        self._cleared |= key == "cache_clear" and record.value is not False
        self.add(record)

    def _check_settings(self) -> None:
        """Check the records that must be logged before the clock starts. Complain of each that is missing or wrong."""
        is_closed = self.division == "closed"
        if "cache_clear" not in self.first:
            self.complain("no cache_clear before run_start: drop the caches before a run, and log it (TR 6.1)")
        elif is_closed and not self._cleared:
            self.complain("caches were not dropped before this closed run (TR 6.1)")
        if is_closed and "seed" not in self.first:
            self.complain("no seed is logged; the package checker asks for one (TR 5.1)")
        for violation in own_settings(self):
            self.complain(violation.sentence)


def _is_fatal(violation: Violation) -> bool:
    """Tell whether a violation makes the run invalid. Other violations may only be the logging style of other software."""
    if violation.kind in ("repeat", "value"):
        return violation.key in ("run_start", "run_stop", "eval_accuracy")
    return violation.kind in ("init time", "schedule", "count")
