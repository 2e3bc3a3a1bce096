"""State of a run according to the log records so far: phase, settings, evaluations, times and end.

The writer, the check, the watch and the reports all feed the records of a run to `LoggedRun` in the order of the log.
`compliance.log.order` finds the rules that the next record breaks.
"""

from collections.abc import Mapping
from statistics import median
from typing import Any

from compliance.log import rules
from compliance.log.record import Record
from compliance.log.schedule import EvaluationSchedule, evaluation_interval
from console.text import counted

OPENED_BY = {closing: opening for opening, closing in rules.INTERVALS.items()}
"""Maps the key of the closing record of each interval to the key of its opening record."""


class LoggedRun:
    """A run according to its log. Times are in milliseconds since the Unix epoch; None if not logged yet.

    If a setting is repeated, its first record counts. If run_stop is repeated, the last one counts. `header` has the
    plain lines "# key: value" of the log. The check of a log passes the first records of all keys as `settings`, because
    other software may log a setting after the records that need it.

    Attributes:
        first, last: first and last record of each known key.
        open: opening record of each interval that is still open.
        accuracies: eval_accuracy records of the timed run.
        resumed_samples: sequences trained before the run resumed from a checkpoint; their time is not in `seconds`.
        counted_samples: largest number of trained sequences that a record of the timed run names.
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
        self._block_samples: list[int] = []  # samples_count of each block_stop of the timed run

    def add(self, record: Record) -> None:
        key, time_ms = record.key, record.time_ms
        # Records of several processes may be out of order, so compare each time with the earliest and the latest so far.
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
            # Take the earliest time, as the official checker does.
            self.init_start_ms = time_ms if self.init_start_ms is None else min(self.init_start_ms, time_ms)
        elif self.phase == "run":
            self.counted_samples = max(self.counted_samples, samples_of(record.metadata) or 0)
            if key == "block_stop" and rules.is_integer(samples := record.metadata.get("samples_count")):
                self._block_samples.append(samples)
            elif key == "block_start" and is_first and "resumed from" in self.header:
                self.resumed_samples = self.counted_samples
            elif key == "eval_start":
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
    def trains_to_end(self) -> bool:
        """Tell whether the run has no target according to its header, and so trains to its end."""
        return self.target is None and self.header.get("config.evaluation.target") == "None"

    @property
    def global_batch_size(self) -> int | None:
        """Number of sequences in an optimizer step, over all ranks."""
        return self.count_of("global_batch_size")

    @property
    def seed(self) -> int | None:
        seed = self.value("seed")
        return seed if rules.SEED.accepts(seed) else None

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
    def counted_accuracies(self) -> list[tuple[int, Record]]:
        """Pairs (sequences trained, record) of the evaluations with a valid count and a valid accuracy.

        If epoch_num does not count sequences, the counts come from the schedule.
        """
        schedule = self.schedule if self.other_unit else None
        return [
            (schedule.samples(index) if schedule else record.metadata["epoch_num"], record)
            for index, record in enumerate(self.accuracies, start=1)
            if rules.COUNT.accepts(record.metadata.get("epoch_num")) and rules.FRACTION.accepts(record.value)
        ]

    @property
    def curve(self) -> list[tuple[int, float]]:
        """Pairs (sequences trained, masked-LM accuracy) of the evaluations in `counted_accuracies`."""
        return [(samples, record.value) for samples, record in self.counted_accuracies]

    @property
    def accuracy(self) -> float | None:
        """Masked-LM accuracy of the last evaluation."""
        return self.curve[-1][1] if self.curve else None

    @property
    def train_samples(self) -> int | None:
        samples = self.value("train_samples")
        return int(samples) if rules.STEPS.accepts(samples) else None

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
        """Time to train in seconds, from run_start to run_stop."""
        return _seconds(self.run_start_ms, self.last.get("run_stop"))

    @property
    def init_seconds(self) -> float | None:
        """Duration of the untimed initialisation in seconds, from init_start to init_stop."""
        return _seconds(self.init_start_ms, self.last.get("init_stop"))

    @property
    def sequences_per_s(self) -> float | None:
        """Sequences trained per second of the time to train. This time includes the evaluations."""
        return (self.trained - self.resumed_samples) / self.seconds if self.trained and self.seconds else None

    # The members below find the number of sequences that the run needed to reach its target. The RCP checker takes
    # epoch_num of the last eval_accuracy for it (TR 24.6) or, with an option, train_samples.

    @property
    def epoch_nums(self) -> list[int]:
        """epoch_num of every evaluation; empty if any evaluation lacks it."""
        counts = [record.metadata.get("epoch_num") for record in self.accuracies]
        samples = [round(count) for count in counts if rules.is_number(count)]
        return samples if len(samples) == len(counts) else []

    @property
    def other_unit(self) -> str:
        """Text that says what epoch_num of the evaluations is if it cannot count sequences; "" if it may count them."""
        samples, schedule = self.epoch_nums, self.schedule
        if not samples:
            return ""
        found = f"epoch_num {samples[0]}" + (f" to {samples[-1]}" if samples[-1] != samples[0] else "")
        found += f" at {counted(len(samples), 'evaluation')}"
        in_turn = list(range(samples[0], samples[0] + len(samples)))
        is_placeholder = len(samples) > 1 and samples in ([samples[0]] * len(samples), in_turn)
        if is_placeholder or max(samples) < (self.global_batch_size or 1):
            return found
        if schedule is None:
            return ""
        step = median(after - before for before, after in zip([0, *samples], samples, strict=False))
        length = rules.FIXED_SETTINGS["max_sequence_length"]
        for unit, size in (("optimizer steps", 1 / schedule.global_batch_size), ("tokens", length)):
            if abs(step - size * schedule.interval) <= 0.2 * size * schedule.interval:
                return f"{found}, which counts {unit}"
        is_data_set = self.division == "closed" and samples[-1] > rules.MAX_TRAINED
        return f"{found}, the size of a data set" if is_data_set else ""

    @property
    def doubt(self) -> str:
        """Text that says why the evaluations' epoch_num cannot be the number of sequences trained so far; "" if it can."""
        if self.other_unit or not self.accuracies:
            return self.other_unit
        samples, schedule, blocks = self.epoch_nums, self.schedule, self._block_samples
        if not samples:
            return "an evaluation has no epoch_num"
        # Ignore samples_count if it starts anew in each block. It may exceed epoch_num if evaluation follows training.
        counted = blocks[-1] if blocks and (len(blocks) == 1 or blocks[-1] > blocks[0]) else None
        if schedule and counted and samples[-1] > counted + schedule.interval + schedule.global_batch_size:
            return f"epoch_num {samples[-1]} at the last evaluation, and samples_count {counted} at the last block_stop"
        return ""

    @property
    def trained(self) -> int | None:
        """Sequences trained in the run: train_samples if it agrees with the evaluations; None if no count can be trusted."""
        logged, schedule, doubt = self.train_samples, self.schedule, self.doubt
        evaluated = self.epoch_nums[-1] if self.accuracies and not doubt else None
        if evaluated is not None:
            # Training ends at the last evaluation or before the next one, so train_samples must lie between them.
            interval = schedule.interval if schedule else evaluated // len(self.accuracies)
            low, high = evaluated, evaluated + interval
        elif schedule:
            # Some logs round the interval differently, or use the interval of another batch size, so allow a tolerance.
            due = self.resumed_samples + self.number_of_evaluations * schedule.interval
            low, high = due - max(schedule.interval, due // 5), due + max(schedule.interval, due // 10)
        else:
            low, high = 0, rules.MAX_TRAINED
        return logged if logged is not None and low <= logged <= high else evaluated

    @property
    def reached(self) -> int | None:
        """Index, from 0, of the first evaluation that reached the target; None if none did, or if no target is logged."""
        target = self.target
        values = [record.value if rules.FRACTION.accepts(record.value) else 0.0 for record in self.accuracies]
        return next((index for index, value in enumerate(values) if target and value >= target), None)

    @property
    def went_on(self) -> bool:
        """Tell whether a successful closed run went on after an evaluation that reached the target."""
        is_success = self.division == "closed" and self.status == "success"
        return is_success and self.reached is not None and self.reached < len(self.accuracies) - 1

    def converged_samples(self) -> int | None:
        """Return the sequences to the target: epoch_num of the first evaluation that reached it, else `trained`.

        The result is None if the run did not converge, or if no count can be trusted.
        """
        if not self._is_converged:
            return None
        last = len(self.accuracies) - 1
        first = last if self.reached is None else self.reached
        if not self.doubt:
            return self.epoch_nums[first] or None
        # train_samples counts to the end of the run. If the run went on after its target, no count tells when it reached it.
        return (self.trained or None) if first == last else None

    @property
    def is_unknown(self) -> bool:
        """Tell whether the run converged, but logs no count of sequences to the target that can be trusted."""
        return self._is_converged and self.converged_samples() is None

    @property
    def _is_converged(self) -> bool:
        is_claimed = self.status == "success" and bool(self.accuracies)
        return is_claimed and (self.target is None or self.reached is not None)


def samples_of(metadata: Mapping[str, object]) -> int | None:
    """Return the sequences trained at a record: samples_count, or epoch_num, which counts sequences in BERT logs."""
    samples = metadata.get("samples_count", metadata.get("epoch_num"))
    return samples if rules.is_integer(samples) and samples >= 0 else None


def _seconds(start_ms: int | None, stop: Record | None) -> float | None:
    # Return no duration if the clock was set back or the times have another unit.
    if start_ms is None or stop is None or not rules.FIRST_MS <= start_ms <= stop.time_ms < rules.LAST_MS:
        return None
    return (stop.time_ms - start_ms) / 1000
