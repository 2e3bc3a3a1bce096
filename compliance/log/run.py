"""State of a run according to the log records so far: phase, settings, evaluations, times and end.

The writer, the check, the watch and the reports all feed the records of a run to `LoggedRun` in the order of the log.
`compliance.log.order` finds the rules that the next record breaks.
"""

from collections.abc import Mapping
from typing import Any

from compliance.log import rules
from compliance.log.record import Record
from compliance.log.schedule import EvaluationSchedule, evaluation_interval

OPENED_BY = {closing: opening for opening, closing in rules.INTERVALS.items()}
"""Opening record of each interval, by its closing record."""


class LoggedRun:
    """A run according to its log. Times are in milliseconds since the Unix epoch, None before they are logged.

    If a record is repeated, the first one defines a setting, and the last run_stop defines the end. `header` has the
    plain lines "# key: value" of the log. `settings` has the first record of each key in the whole log, if known,
    because other software may log settings anywhere.

    Attributes:
        first, last: first and last record of each known key.
        open: opening record of each interval that is still open.
        accuracies: eval_accuracy records of the timed run.
        resumed_samples: sequences trained before the checkpoint that the run resumed from, if known.
        counted_samples: largest count of sequences in a record of the timed run.
        is_evaluated: whether the accuracy of the last evaluation is logged.
        start_ms, last_ms: times of the earliest and of the latest record.
        init_start_ms: time of the earliest init_start, because every process may log one.
    """

    def __init__(self, header: Mapping[str, str] | None = None, settings: Mapping[str, Record] | None = None) -> None:
        self.header: Mapping[str, str] = {} if header is None else header
        self._known: Mapping[str, Record] = {} if settings is None else settings
        self.phase: rules.Phase = "before"
        self.first: dict[str, Record] = {}
        self.last: dict[str, Record] = {}
        self.open: dict[str, Record] = {}
        self.accuracies: list[Record] = []
        self.resumed_samples = self.counted_samples = 0
        self.is_evaluated = False
        self.start_ms: int | None = None
        self.last_ms = 0
        self.init_start_ms: int | None = None
        self._at_end: Record | None = None  # the last eval_accuracy record before the run ended

    def add(self, record: Record) -> None:
        key, time_ms = record.key, record.time_ms
        # Records of several processes may be out of order.
        self.last_ms = max(self.last_ms, time_ms)
        self.start_ms = time_ms if self.start_ms is None else min(self.start_ms, time_ms)
        if key not in rules.KEYS:
            return
        self.last[key] = record
        # A repeated record is a violation and does not begin a phase.
        is_first = self.first.setdefault(key, record) is record
        if is_first and key in rules.NEXT_PHASE:
            self.phase = rules.NEXT_PHASE[key]
        if key in rules.INTERVALS:
            self.open[key] = record
        elif key in OPENED_BY:
            self.open.pop(OPENED_BY[key], None)
        if key == "init_start":
            # The official checker also takes the earliest time.
            self.init_start_ms = time_ms if self.init_start_ms is None else min(self.init_start_ms, time_ms)
        elif key == "run_stop":
            # The RCP checker reads the last accuracy above run_stop.
            self._at_end = self.last.get("eval_accuracy")
        elif self.phase == "run":
            self.counted_samples = max(self.counted_samples, samples_of(record.metadata) or 0)
            if key == "eval_start":
                self.is_evaluated = False
            elif key == "eval_accuracy":
                self.is_evaluated = True
                self.accuracies.append(record)

    # Settings

    def value(self, key: str) -> Any:
        """Return the value of a setting; None if it is not logged."""
        record = self.first.get(key) or self._known.get(key)
        return record.value if record else None

    def count_of(self, key: str) -> int | None:
        """Return the value of a setting if it is a positive integer, else None."""
        value = self.value(key)
        return value if rules.POSITIVE_INTEGER.accepts(value) else None

    @property
    def division(self) -> rules.Division:
        """Division in the log (in any letter case), else in the header, else closed, which has stricter rules."""
        text = self.value("submission_division") or self.header.get("config.log.division")
        return "open" if str(text).lower() == "open" else "closed"

    @property
    def target(self) -> float | None:
        """Masked-LM accuracy that ends the run: the benchmark's target, or an open run's own target."""
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
        seed = self.value("seed")
        return seed if rules.is_integer(seed) else None

    @property
    def schedule(self) -> EvaluationSchedule | None:
        """Evaluation schedule; None while the batch size or an open run's interval is unknown."""
        batch = self.global_batch_size
        if not batch:
            return None
        interval = evaluation_interval(batch) if self.division == "closed" else self.count_of("eval_interval_samples")
        return EvaluationSchedule(interval, batch) if interval else None

    # Results

    @property
    def number_of_evaluations(self) -> int:
        """Number of scheduled evaluations so far. An evaluation of the untrained model does not count."""
        untrained = bool(self.accuracies) and self.accuracies[0].metadata.get("epoch_num") == 0
        return len(self.accuracies) - untrained

    @property
    def curve(self) -> list[tuple[int, float]]:
        """(sequences trained, masked-LM accuracy) of each evaluation with a valid count and fraction."""
        return [
            (record.metadata["epoch_num"], record.value)
            for record in self.accuracies
            if rules.COUNT.accepts(record.metadata.get("epoch_num")) and rules.FRACTION.accepts(record.value)
        ]

    @property
    def accuracy(self) -> float | None:
        """Masked-LM accuracy of the last evaluation."""
        return self.curve[-1][1] if self.curve else None

    @property
    def train_samples(self) -> int | None:
        samples = self.value("train_samples")
        return samples if rules.COUNT.accepts(samples) else None

    @property
    def is_ended(self) -> bool:
        """Tell whether the log has a run_stop. Otherwise the run is in progress or was cut off."""
        return "run_stop" in self.first

    @property
    def status(self) -> Any:
        """Final status as logged, "success" or "aborted"; None before the end."""
        stop = self.last.get("run_stop")
        return stop.metadata.get("status") if stop else None

    @property
    def run_start_ms(self) -> int | None:
        start = self.first.get("run_start")
        return start.time_ms if start else None

    @property
    def seconds(self) -> float | None:
        """Time to train, from run_start to run_stop."""
        return _seconds(self.run_start_ms, self.last.get("run_stop"))

    @property
    def init_seconds(self) -> float | None:
        """Untimed initialisation, from init_start to init_stop."""
        return _seconds(self.init_start_ms, self.last.get("init_stop"))

    @property
    def sequences_per_s(self) -> float | None:
        """Sequences trained per second of the time to train, which includes evaluations."""
        return self.train_samples / self.seconds if self.train_samples and self.seconds else None

    def converged_samples(self) -> int | None:
        """Return the sequences to the target as the RCP checker reads them: `epoch_num` of the last eval_accuracy (TR 24.6).

        The result is None if the run did not end with status success, or did not log the number.
        """
        if self.status != "success" or self._at_end is None:
            return None
        count = self._at_end.metadata.get("epoch_num")
        # Accept a float, as the RCP checker does.
        samples = round(count) if rules.is_number(count) else 0
        return samples if samples > 0 and rules.is_integer(samples) else None


def samples_of(metadata: Mapping[str, object]) -> int | None:
    """Return the sequences trained at a record: samples_count, or epoch_num, which counts sequences in BERT logs."""
    samples = metadata.get("samples_count", metadata.get("epoch_num"))
    return samples if rules.is_integer(samples) and samples >= 0 else None


def _seconds(start_ms: int | None, stop: Record | None) -> float | None:
    if start_ms is None or stop is None or stop.time_ms < start_ms:  # the clock was set back
        return None
    return (stop.time_ms - start_ms) / 1000
