"""The only writer of MLLOG lines: a log that is right by construction.

`MLLog` knows `compliance.log.rules`. A wrong key, value, order or number of records raises `RuleViolation` in the run, at
the call that made it, and nothing is written. Each line is one write to the result file, flushed at once, so that
records and plain lines never interleave and a killed run leaves whole lines behind. Plain lines with a chain of digests
(`compliance.log.digest`) among them tell whether the file is still as the run left it.

The order of a run:

    cache_clear  init_start  submission  seed  hyperparameters  weights_initialization  init_stop
    run_start  { block_start, train, block_stop, eval_start, eval_accuracy, eval_stop } ...  run_stop

The next block may start before the result of an evaluation is known.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Self

from mlperf_logging.mllog.mllog import MLLogger

from compliance.log import digest, rules
from compliance.log.rules import QUALITY_TARGET, evaluation_interval, evaluation_samples
from console.text import visible

__all__ = ["QUALITY_TARGET", "MLLog", "ResultExists", "RuleViolation", "evaluation_interval", "evaluation_samples"]

TOKEN = ":::MLLOG"
REPOSITORY_ROOT = Path(__file__).resolve().parent.parent


class RuleViolation(ValueError):  # noqa: N818 - it names what happened to the rules
    """A record that the rules of the log forbid; it was not written."""


class ResultExists(ValueError):  # noqa: N818 - it names what was found
    """The result file is there already, and was not touched."""


class MLLog:
    """Writes the result file of one run, and refuses to write a wrong one.

    Only the process with a path writes; elsewhere (`path=None`) every method returns at once. Use it from one thread, and
    not from a signal handler; only `line`, `abort` and `close` may come from another one, for which the first may be stuck.
    As a context manager it closes the file, and completes the log as aborted when the block is left with an exception.

    Args:
        path: the result file, results/<system>/bert/result_<n>.txt; its folder is created. None: write nothing.
        clock_ms: the present time in milliseconds since the Unix epoch; default a clock that never goes back.

    Raises:
        ResultExists: the file is there already.
        ValueError: it cannot be created.
    """

    def __init__(self, path: Path | None, *, clock_ms: Callable[[], int] | None = None) -> None:
        self._file = None if path is None else _LineFile(path)
        self._logger = None if self._file is None else _logger_into(self._file)
        self._clock_ms = clock_ms or _steady_clock()
        self._state = _LogState()
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        for step in (self.abort, self.close):
            with suppress(OSError):  # a full disk must not hide the error that ended the run
                step()

    # Plain lines

    def header(self, fields: Mapping[str, object]) -> None:
        """Write "# key: value" lines: the resolved configuration, the commit, versions, hardware."""
        for key, value in fields.items():
            self.line(f"# {key}: {visible(value)}")

    def line(self, text: str) -> None:
        """Write one plain line.

        Raises:
            RuleViolation: `text` holds a line end or the token of a record.
        """
        if self._file is None:
            return
        if TOKEN in text or "\n" in text or "\r" in text:
            raise RuleViolation(f"plain line {text!r}: expected one line without {TOKEN}")
        with self._lock:
            self._file.write(text)

    # Before the clock

    def cache_clear(self, cleared: bool) -> None:
        """Log whether the system's caches were dropped before this run (TR 6.1). Say the truth."""
        self.event("cache_clear", cleared)

    def init_start(self) -> None:
        """Log the start of the untimed initialisation: before the model is constructed (TR 11)."""
        self.start("init_start")

    def submission(
        self,
        *,
        division: rules.Division,
        org: str,
        platform: str,
        status: Literal["research", "onprem", "cloud", "preview"] = "research",
    ) -> None:
        """Log what is submitted, by whom, on what."""
        self.event("submission_benchmark", "bert")
        self.event("submission_division", division)
        self.event("submission_org", org)
        self.event("submission_platform", platform)
        self.event("submission_status", status)

    def seed(self, seed: int) -> None:
        """Log the seed of the run, once for all ranks (TR 5.1)."""
        self.event("seed", seed)

    def hyperparameters(self, values: Mapping[str, int | float | str]) -> None:
        """Log the settings of the run by their MLPerf keys.

        `opt_lamb_epsilon` is written under its older name `opt_epsilon` too: ruleset 2.0.0 asks for that one. A
        missing key raises at `init_stop`.
        """
        for key, value in values.items():
            self.event(key, value)
            if key == "opt_lamb_epsilon":
                self.event("opt_epsilon", value)

    def weights_initialization(self, num_hidden_layers: int) -> None:
        """Log the name of every weight tensor, in the reference's naming."""
        for tensor in rules.weight_tensors(num_hidden_layers):
            self.event("weights_initialization", tensor=tensor)

    def init_stop(self) -> None:
        """Log the end of the initialisation.

        Raises:
            RuleViolation: something that must be logged by now is not; a closed run has another target, evaluation
                interval or model than the benchmark's; the initialisation took too long.
        """
        self.end("init_stop")

    def resumed(self, checkpoint: str, samples: int) -> None:
        """Note that the run goes on from a checkpoint after `samples` sequences, so that its evaluations go on from there.

        Such a log is no timed result. The check objects to it.
        """
        self.line(f"# resumed from: {checkpoint}")
        self._state.resumed_samples = self._state.samples = samples

    # The timed run; `samples` counts sequences trained since run_start

    def run_start(self) -> None:
        """Log the start of the clock: before any process touches the data set (TR 11)."""
        self.start("run_start")

    def block_start(self, samples: int) -> None:
        """Log the start of training between two evaluations."""
        self.start("block_start", first_epoch_num=1, epoch_count=1, samples_count=samples)

    def block_stop(self, samples: int) -> None:
        """Log the end of the training that `block_start` opened."""
        self.end("block_stop", first_epoch_num=1, samples_count=samples)

    def eval_start(self, samples: int) -> None:
        """Log the start of an evaluation, which must stand on the schedule (TR 24.4)."""
        self.start("eval_start", epoch_num=samples, samples_count=samples)

    def eval_accuracy(self, accuracy: float, samples: int) -> None:
        """Log the masked-LM accuracy of the open evaluation, a fraction. BERT counts epochs in samples (TR 24.6)."""
        self.event("eval_accuracy", accuracy, epoch_num=samples, samples_count=samples)

    def eval_stop(self, samples: int) -> None:
        """Log the end of the evaluation that `eval_start` opened."""
        self.end("eval_stop", epoch_num=samples, samples_count=samples)

    def run_stop(self, status: Literal["success", "aborted"], *, samples: int, eval_samples: int) -> None:
        """Log the sequences trained, those of one evaluation, and the end of the clock.

        Raises:
            RuleViolation: a block or an evaluation is open, or the status says success and the last accuracy does not
                reach the target. Nothing is written then, and `abort` can still complete the log.
        """
        if self._logger is None:
            return
        self._state.check_end(status, samples)
        self.event("train_samples", samples)
        self.event("eval_samples", eval_samples)
        self.end("run_stop", status=status)

    def abort(self, samples: int | None = None) -> None:
        """Complete the log of a run that ends early: close what is open and log run_stop with status aborted.

        Works from every state; before `init_start` and after `run_stop` there is nothing to complete. A run that ends
        during its initialisation gets the remaining records at once.

        Args:
            samples: sequences trained; default the last count that was logged.
        """
        with self._lock:
            self._abort(samples)

    def _abort(self, samples: int | None) -> None:
        state = self._state
        if self._logger is None or state.phase in ("before", "done"):
            return
        state.aborting = True
        samples = max(state.samples, samples or 0)
        if state.phase == "init":
            self.init_stop()
        if state.phase == "ready":
            self.run_start()
        if "eval_start" in state.open_at:
            self.eval_stop(state.open_at["eval_start"])
        if "block_start" in state.open_at:
            self.block_stop(samples)
        if "epoch_start" in state.open_at:
            self.end("epoch_stop", epoch_num=samples)
        for key, value in (("train_samples", samples), ("eval_samples", 0)):
            if not state.counts[key]:
                self.event(key, value)
        self.end("run_stop", status="aborted")

    def close(self) -> None:
        """Bring the file to the disk and close it; again does nothing."""
        if self._file is not None:
            with self._lock:
                self._file.close()

    # Any record

    def start(self, key: str, value: object = None, **metadata: object) -> None:
        """Log the opening record of an interval."""
        self._log(MLLogger.start, "INTERVAL_START", key, value, metadata)

    def end(self, key: str, value: object = None, **metadata: object) -> None:
        """Log the closing record of an interval."""
        self._log(MLLogger.end, "INTERVAL_END", key, value, metadata)

    def event(self, key: str, value: object = None, **metadata: object) -> None:
        """Log a record without duration."""
        self._log(MLLogger.event, "POINT_IN_TIME", key, value, metadata)

    def _log(
        self, write: Callable[..., None], event_type: str, key: str, value: object, metadata: dict[str, object]
    ) -> None:
        if self._logger is None:
            return
        with self._lock:
            time_ms = max(self._clock_ms(), self._state.time_ms)
            self._state.check(event_type, key, value, metadata, time_ms)
            write(self._logger, key, value, metadata=metadata, time_ms=time_ms, stack_offset=_frames_to_caller())
            self._state.advance(key, value, metadata, time_ms)
            if key == "run_stop" and self._file is not None:
                self._file.close_stretch()


class _LogState:
    """What has been logged so far, and whether a further record may follow."""

    def __init__(self) -> None:
        self.phase: rules.Phase = "before"
        self.aborting = False  # an aborted run need not be complete
        self.time_ms = 0
        self.counts: Counter[str] = Counter()
        self.open_at: dict[str, int] = {}  # key of an open interval -> samples at its start
        self.samples = 0  # the largest count logged
        self.resumed_samples = 0  # trained before the run went on from a checkpoint
        self._values: dict[str, object] = {}
        self._tensors: list[object] = []
        self._init_start_ms = 0
        self._evaluations = 0
        self._evaluated_samples = 0
        self._accuracy: float | None = None  # of the evaluation that is open, or of the last one

    def check(self, event_type: str, key: str, value: object, metadata: Mapping[str, object], time_ms: int) -> None:
        """Raise RuleViolation if the record may not follow."""
        rule = rules.KEYS.get(key)
        if rule is None:
            close = difflib.get_close_matches(key, rules.KEYS, 1)
            raise RuleViolation(f"{key}: not a key of the log" + (f"; did you mean {close[0]}?" if close else ""))
        if event_type != rule.event_type:
            raise RuleViolation(f"{key}: logged as {event_type}, expected {rule.event_type}")
        if self.phase not in rule.phases:
            expected = " or ".join(rules.PHASE_NAMES[phase] for phase in rule.phases)
            raise RuleViolation(f"{key}: logged {rules.PHASE_NAMES[self.phase]}, expected {expected} ({rule.source})")
        if rule.once and self.counts[key]:
            raise RuleViolation(f"{key}: logged a second time, expected exactly once ({rule.source})")
        _check_value(rule, value)
        _check_metadata(rule, metadata)
        self._check_interval(key, metadata)
        if key == "init_stop" and not self.aborting:
            self._check_initialized(time_ms)
        elif key == "eval_start":
            self._check_schedule(_samples_of(metadata))
        elif key == "eval_accuracy":
            self._check_accuracy(_samples_of(metadata))
        elif key == "run_stop":
            self.check_end(metadata["status"], self._values.get("train_samples"))

    def advance(self, key: str, value: object, metadata: Mapping[str, object], time_ms: int) -> None:
        """Take in a record that has been written."""
        self.time_ms = time_ms
        self.counts[key] += 1
        self._values[key] = value
        samples = _samples_of(metadata)
        self.samples = max(self.samples, samples)
        self.phase = rules.NEXT_PHASE.get(key, self.phase)
        if key in rules.INTERVALS:
            self.open_at[key] = samples
        elif key in _OPENING:
            del self.open_at[_OPENING[key]]
        if key == "init_start":
            self._init_start_ms = time_ms
        elif key == "weights_initialization":
            self._tensors.append(metadata["tensor"])
        elif key == "eval_start":
            self._evaluations += 1
            self._evaluated_samples = samples
            self._accuracy = None
        elif key == "eval_accuracy" and rules.is_number(value):
            self._accuracy = float(value)

    def check_end(self, status: object, train_samples: object) -> None:
        """Raise RuleViolation if the run may not end with this status and number of sequences."""
        still_open = [key for key in ("block_start", "eval_start", "epoch_start") if key in self.open_at]
        if still_open:
            raise RuleViolation(
                f"run_stop: {still_open[0]} is still open, expected {rules.INTERVALS[still_open[0]]} first"
            )
        if status != "success":
            return
        target = self._values.get("quality_target")
        if self._accuracy is None or not rules.is_number(target) or self._accuracy < target:
            raise RuleViolation(
                f"run_stop: status success with accuracy {self._accuracy}, expected at least quality_target {target}; "
                "a run that misses its target ends with status aborted"
            )
        if train_samples != self._evaluated_samples:
            raise RuleViolation(
                f"run_stop: train_samples {train_samples}, expected {self._evaluated_samples}, the sequences trained "
                "at the evaluation that reached the target"
            )

    def _check_interval(self, key: str, metadata: Mapping[str, object]) -> None:
        if key in self.open_at:
            raise RuleViolation(f"{key}: the one before is still open, expected {rules.INTERVALS[key]} first")
        opening = _OPENING.get(key)
        if opening is None:
            return
        if opening not in self.open_at:
            raise RuleViolation(f"{key}: nothing to close, expected {opening} first")
        if _samples_of(metadata) < self.open_at[opening]:
            raise RuleViolation(f"{key}: {_samples_of(metadata)} samples, expected at least {self.open_at[opening]}")
        if key == "eval_stop" and self._accuracy is None and not self.aborting:
            raise RuleViolation("eval_stop: the evaluation has no result, expected eval_accuracy first")

    def _check_initialized(self, time_ms: int) -> None:
        due = (rule.key for rule in rules.KEYS.values() if rule.written and {*rule.phases} <= {"before", "init"})
        missing = [key for key in due if not self.counts[key] and key != "init_stop"]
        if missing:
            raise RuleViolation(f"init_stop: not logged yet: {', '.join(missing)}")
        division: rules.Division = "closed" if self._values["submission_division"] == "closed" else "open"
        limit = rules.INIT_LIMIT_MINUTES[division]
        minutes = (time_ms - self._init_start_ms) / 60_000
        if minutes >= limit:
            raise RuleViolation(f"init_stop: initialisation took {minutes:.1f} min, expected less than {limit} (TR 11)")
        interval, batch = self._integer("eval_interval_samples"), self._integer("global_batch_size")
        if interval < batch:
            raise RuleViolation(
                f"eval_interval_samples: {interval}, expected at least global_batch_size {batch}: "
                "evaluate at most once a step"
            )
        if division == "closed":
            self._check_closed()
        while evaluation_samples(self._evaluations + 1, interval, batch) < self.resumed_samples:
            self._evaluations += 1

    def _check_closed(self) -> None:
        interval = rules.evaluation_interval(self._integer("global_batch_size"))
        fixed = {"quality_target": QUALITY_TARGET, "eval_interval_samples": interval}
        for key, expected in fixed.items():
            if self._values[key] != expected:
                raise RuleViolation(
                    f"{key}: {self._values[key]} in a closed run, expected {expected} ({rules.KEYS[key].source}); "
                    "change it, or set the division to open"
                )
        expected_tensors = rules.weight_tensors(rules.BERT_LARGE_LAYERS)
        if sorted(map(str, self._tensors)) != sorted(expected_tensors):
            raise RuleViolation(
                f"weights_initialization: {len(self._tensors)} tensors in a closed run, expected the "
                f"{len(expected_tensors)} of BERT-Large, once each; train BERT-Large, or set the division to open"
            )

    def _check_schedule(self, samples: int) -> None:
        index = self._evaluations + 1
        interval, batch = self._integer("eval_interval_samples"), self._integer("global_batch_size")
        expected = evaluation_samples(index, interval, batch)
        if samples != expected:
            raise RuleViolation(
                f"eval_start: evaluation {index} at {samples} samples, expected at {expected}: "
                f"every {interval} samples, rounded up to a whole batch (TR 24.4)"
            )

    def _check_accuracy(self, samples: int) -> None:
        at = self.open_at.get("eval_start")
        if at is None:
            raise RuleViolation("eval_accuracy: no evaluation is open, expected eval_start first")
        if samples != at:
            raise RuleViolation(f"eval_accuracy: epoch_num {samples}, expected {at}, the samples of its eval_start")
        if self._accuracy is not None:
            raise RuleViolation("eval_accuracy: logged a second time for one evaluation, expected eval_stop")

    def _integer(self, key: str) -> int:
        value = self._values[key]
        assert rules.is_integer(value), key
        return value


_OPENING = {closing: opening for opening, closing in rules.INTERVALS.items()}


def _check_value(rule: rules.KeyRule, value: object) -> None:
    if rule.value is None and value is not None:
        raise RuleViolation(f"{rule.key}: value {value!r}, expected none")
    if rule.value is not None and not rule.value.accepts(value):
        raise RuleViolation(f"{rule.key}: value {value!r}, expected {rule.value.wording} ({rule.source})")


def _check_metadata(rule: rules.KeyRule, metadata: Mapping[str, object]) -> None:
    for name, expected in rule.metadata:
        if name not in metadata or not expected.accepts(metadata[name]):
            raise RuleViolation(
                f"{rule.key}: {name} is {metadata.get(name)!r}, expected {expected.wording} ({rule.source})"
            )
    for name, value in metadata.items():
        if name in ("file", "lineno"):
            raise RuleViolation(f"{rule.key}: {name} is filled in by the log itself, leave it out")
        if not isinstance(value, str) and not rules.is_number(value):
            raise RuleViolation(f"{rule.key}: {name} is {value!r}, expected text or a finite number")


def _samples_of(metadata: Mapping[str, object]) -> int:
    """Sequences trained at a record: samples_count, or epoch_num, which for BERT counts the same."""
    samples = metadata.get("samples_count", metadata.get("epoch_num"))
    return samples if rules.is_integer(samples) else 0


class _LineFile:
    """The result file: whole lines, and among them the chain of digests over all of them."""

    def __init__(self, path: Path) -> None:
        self._file = _create(path)
        self._chain = digest.Chain()

    def write(self, text: str) -> None:
        """Write one line, and a digest when one is due."""
        line = text.encode("utf-8", "backslashreplace")
        lines = [line] if self._chain.lines else [digest.OPENING.encode(), line]
        for each in lines:
            self._chain.add(each)
        self._write(b"".join(each + b"\n" for each in lines))
        if self._chain.pending >= digest.LINES_A_DIGEST:
            self.close_stretch()

    def close_stretch(self, *, at_end: bool = False) -> None:
        """Write the digest over all lines so far."""
        self._write(self._chain.close_stretch(at_end) + b"\n")

    def close(self) -> None:
        """Write the digest at the end, bring the file to the disk and close it; again does nothing."""
        if self._file.closed:
            return
        try:
            if self._chain.lines:
                self.close_stretch(at_end=True)
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _write(self, content: bytes) -> None:
        try:
            self._file.write(content)
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from None


class _LineHandler(logging.Handler):
    """Takes the lines of the MLLogger to the result file, and lets no failure pass."""

    def __init__(self, file: _LineFile) -> None:
        super().__init__(logging.INFO)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno > logging.INFO:
            # MLLogger catches an error of the write and logs a complaint in its place; the error itself is wanted.
            raise sys.exception() or RuntimeError(record.getMessage())
        self._file.write(record.getMessage())


def _logger_into(file: _LineFile) -> MLLogger:
    logger = logging.Logger("mllog", logging.INFO)  # not registered by name: one for each log, no shared handlers
    logger.addHandler(_LineHandler(file))
    return MLLogger(logger, root_dir=re.escape(str(REPOSITORY_ROOT)))


def _create(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("xb")
    except OSError as error:
        if isinstance(error, FileExistsError) and path.parent.is_dir():
            raise ResultExists(
                f"{path} is already there and a result is never overwritten: choose another run number, or move it away"
            ) from None
        raise ValueError(f"{path} cannot be created: {error.strerror}; choose another results folder") from error


def _steady_clock() -> Callable[[], int]:
    """The wall clock as of now, carried on by the monotonic clock: a correction of the time moves no record."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda: (time.monotonic_ns() + offset_ns) // 1_000_000


def _frames_to_caller() -> int:
    """Stack offset, as MLLogger counts it, from its caller to the first frame outside this file."""
    offset, frame = 0, sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        offset, frame = offset + 1, frame.f_back
    return offset + 1
