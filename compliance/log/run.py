"""State of a run by its log: its phase, settings, evaluations, times and end, as far as its records go.

The writer, the check, the watch and the reports all read a run from its records here, one by one in the order of the log.
`compliance.log.order` says what is against the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from compliance.log import rules
from compliance.log.record import Record
from compliance.log.schedule import EvaluationSchedule, evaluation_interval

OPENED_BY = {closing: opening for opening, closing in rules.INTERVALS.items()}
"""Closing record to opening record."""


class LoggedRun:
    """A run as its log tells it. Times in milliseconds since the Unix epoch, None before they are logged.

    Of a record that is logged again, the first one counts for what is set, and the last run_stop for the end.

    Args:
        header: the plain lines "# key: value" of the log.
        settings: the first record of each key of the whole log, where that is known: others' settings may stand anywhere.

    Attributes:
        counts: records of each known key.
        first, last: the first and the last record of each known key.
        open: the opening record of each interval that is open.
        accuracies: the eval_accuracy records of the timed run.
        resumed_samples: sequences that had been trained when the run went on from a checkpoint, where that is known.
        counted_samples: the most sequences that a record of the timed run counts.
        is_evaluated: the evaluation that was opened last has its accuracy.
        start_ms: the earliest record.
        last_ms: the latest one.
        init_start_ms: the earliest init_start; every process may log one.
    """

    def __init__(self, header: Mapping[str, str] | None = None, settings: Mapping[str, Record] | None = None) -> None:
        self.header: Mapping[str, str] = {} if header is None else header
        self._known: Mapping[str, Record] = {} if settings is None else settings
        self.phase: rules.Phase = "before"
        self.counts: Counter[str] = Counter()
        self.first: dict[str, Record] = {}
        self.last: dict[str, Record] = {}
        self.open: dict[str, Record] = {}
        self.accuracies: list[Record] = []
        self.resumed_samples = 0
        self.counted_samples = 0
        self.is_evaluated = False
        self.start_ms: int | None = None
        self.last_ms = 0
        self.init_start_ms: int | None = None
        self._at_end: Record | None = None  # the last accuracy before the run ended

    def add(self, record: Record) -> None:
        """Take in the next record of the log."""
        key, time_ms = record.key, record.time_ms
        # Records of several processes need not stand in the order of their times.
        self.last_ms = max(self.last_ms, time_ms)
        if self.start_ms is None or time_ms < self.start_ms:
            self.start_ms = time_ms
        if key not in rules.KEYS:
            return
        self.counts[key] += 1
        self.last[key] = record
        # A phase begins with its first record: one that is logged again is a violation, and no new phase.
        is_first = self.first.setdefault(key, record) is record
        if is_first and key in rules.NEXT_PHASE:
            self.phase = rules.NEXT_PHASE[key]
        if key in rules.INTERVALS:
            self.open[key] = record
        elif key in OPENED_BY:
            self.open.pop(OPENED_BY[key], None)  # without an opening it is a violation, and nothing to close
        if key == "init_start":
            # The earliest counts, as for the official checker.
            self.init_start_ms = time_ms if self.init_start_ms is None else min(self.init_start_ms, time_ms)
        elif key == "run_stop":
            # The RCP checker reads the last accuracy above run_stop, and none below it.
            self._at_end = self.last.get("eval_accuracy")
        elif self.phase == "run":
            self._train(record)

    def _train(self, record: Record) -> None:
        self.counted_samples = max(self.counted_samples, samples_of(record.metadata) or 0)
        if record.key == "eval_start":
            self.is_evaluated = False
        elif record.key == "eval_accuracy":
            self.is_evaluated = True
            self.accuracies.append(record)

    # What was set

    def value(self, key: str) -> Any:
        """The value of a setting, None where there is none."""
        record = self.first.get(key) or self._known.get(key)
        return record.value if record else None

    def count_of(self, key: str) -> int | None:
        """The value of a setting that is an integer > 0; None where there is none such."""
        value = self.value(key)
        return value if rules.POSITIVE_INTEGER.accepts(value) else None

    @property
    def division(self) -> rules.Division:
        """Division as logged, in whatever case; until then as the head says, or closed, whose rules are stricter."""
        text = self.value("submission_division") or self.header.get("config.log.division")
        return "open" if str(text).lower() == "open" else "closed"

    @property
    def target(self) -> float | None:
        """Masked-LM accuracy that ends the run: the benchmark's, or what an open run sets itself."""
        if self.division == "closed":
            return rules.QUALITY_TARGET
        logged = self.value("quality_target")
        return float(logged) if rules.is_number(logged) else None

    @property
    def global_batch_size(self) -> int | None:
        """Sequences of an optimizer step, over all ranks."""
        return self.count_of("global_batch_size")

    @property
    def seed(self) -> int | None:
        """The seed of the run."""
        seed = self.value("seed")
        return seed if rules.is_integer(seed) else None

    @property
    def schedule(self) -> EvaluationSchedule | None:
        """Schedule of the run's evaluations; None while its batch size, or an open run's interval, is not known."""
        batch = self.global_batch_size
        if not batch:
            return None
        interval = evaluation_interval(batch) if self.division == "closed" else self.count_of("eval_interval_samples")
        return EvaluationSchedule(interval, batch) if interval else None

    @property
    def resumed_from(self) -> str | None:
        """The checkpoint from which the run went on, so that its log is not that of a whole run."""
        return self.header.get("resumed from")

    # What came of it

    @property
    def number_of_evaluations(self) -> int:
        """Evaluations on the schedule so far: one of the untrained model is none."""
        untrained = bool(self.accuracies) and self.accuracies[0].metadata.get("epoch_num") == 0
        return len(self.accuracies) - untrained

    @property
    def curve(self) -> list[tuple[int, float]]:
        """(sequences trained, masked-LM accuracy) of each evaluation that says both."""
        return [
            (record.metadata["epoch_num"], record.value)
            # What is no count or no fraction is for the check to judge; a curve leaves it out.
            for record in self.accuracies
            if rules.COUNT.accepts(record.metadata.get("epoch_num")) and rules.FRACTION.accepts(record.value)
        ]

    @property
    def accuracy(self) -> float | None:
        """Masked-LM accuracy of the last evaluation."""
        return self.curve[-1][1] if self.curve else None

    @property
    def train_samples(self) -> int | None:
        """Sequences trained, as the run itself sums them up."""
        samples = self.value("train_samples")
        return samples if rules.COUNT.accepts(samples) else None

    @property
    def is_ended(self) -> bool:
        """Tell whether the log has its run_stop: without one the run goes on, or was cut off."""
        return "run_stop" in self.first

    @property
    def status(self) -> Any:
        """Status at the end by the run's own words, "success" or "aborted"; None without an end."""
        stop = self.last.get("run_stop")
        return stop.metadata.get("status") if stop else None

    @property
    def run_start_ms(self) -> int | None:
        """Time at which the clock was started."""
        start = self.first.get("run_start")
        return start.time_ms if start else None

    @property
    def run_stop_ms(self) -> int | None:
        """Time at which the clock was stopped."""
        stop = self.last.get("run_stop")
        return stop.time_ms if stop else None

    @property
    def seconds(self) -> float | None:
        """Time to train: run_start to run_stop."""
        return _seconds(self.run_start_ms, self.run_stop_ms)

    @property
    def init_seconds(self) -> float | None:
        """Untimed initialisation: init_start to init_stop."""
        stop = self.last.get("init_stop")
        return _seconds(self.init_start_ms, stop.time_ms if stop else None)

    @property
    def sequences_per_s(self) -> float | None:
        """Sequences trained over the whole time to train, evaluations included."""
        return self.train_samples / self.seconds if self.train_samples and self.seconds else None

    def converged_samples(self) -> int | None:
        """Return the sequences to the target as the RCP checker reads them: `epoch_num` of the last eval_accuracy (TR 24.6).

        None if the run did not end with status success, or does not say how far it came.
        """
        if self.status != "success" or self._at_end is None:
            return None
        count = self._at_end.metadata.get("epoch_num")
        # A float counts, as it does for the RCP checker.
        samples = round(count) if rules.is_number(count) else 0
        return samples if samples > 0 and rules.is_integer(samples) else None


def samples_of(metadata: Mapping[str, object]) -> int | None:
    """Sequences trained at a record: samples_count, or epoch_num, which for BERT counts the same."""
    samples = metadata.get("samples_count", metadata.get("epoch_num"))
    return samples if rules.is_integer(samples) and samples >= 0 else None


def _seconds(start_ms: int | None, stop_ms: int | None) -> float | None:
    if start_ms is None or stop_ms is None or stop_ms < start_ms:  # a clock that was set back gives no time
        return None
    return (stop_ms - start_ms) / 1000
