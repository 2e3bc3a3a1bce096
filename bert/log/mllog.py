"""The only writer of MLLOG lines. It checks each record against the rules before writing it.

`MLLog` knows which records may come next in a log (`compliance.log.order`). A wrong key, value, order or number of
records raises `RuleViolation` at the call that caused it, and nothing is written. Each line is flushed at once, so that
the log of a killed run contains only whole lines. Digest lines (`compliance.log.digest`) show whether the file was
changed later.

The order of a run:

    cache_clear  init_start  submission  seed  hyperparameters  weights_initialization  init_stop
    run_start  { block_start, train, block_stop, eval_start, eval_accuracy, eval_stop } ...  run_stop
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from compliance.log import digest, rules
from compliance.log.logged_run import LoggedRun, samples_of
from compliance.log.order import left_open, own_settings, unearned_success, violations
from compliance.log.record import Record
from console.text import visible
from console.version import REPOSITORY

TOKEN = ":::MLLOG"


class LineFile:
    """Writer of the lines of a new result file. The file must not exist yet."""

    def __init__(self, path: Path) -> None:
        # Mode "x" is atomic: if several runs start at the same time, only one of them gets the number.
        self._file = path.open("xb")
        self._chain = digest.Chain()

    @property
    def next_line(self) -> int:
        """Number of the next line, from 1. Line 1 opens the digest chain."""
        return (self._chain.lines or 1) + 1

    def write(self, text: str) -> None:
        """Write one line, and a digest line if one is due."""
        # Escape what UTF-8 cannot encode, such as bytes of a file name. Otherwise an odd file name would end the run.
        line = text.encode("utf-8", "backslashreplace")
        lines = [line] if self._chain.lines else [digest.OPENING.encode(), line]
        for each in lines:
            self._chain.add(each)
        self._write(b"".join(each + b"\n" for each in lines))
        if self._chain.pending >= digest.LINES_A_DIGEST:
            self.write_digest()

    def write_digest(self, *, at_end: bool = False) -> None:
        """Write a digest line, which covers all lines before it."""
        self._write(self._chain.close_stretch(at_end) + b"\n")

    def close(self) -> None:
        """Write the final digest, sync the file to disk and close it. Does nothing if it is closed already."""
        if self._file.closed:
            return
        try:
            if self._chain.lines:
                self.write_digest(at_end=True)
            # Sync only at the end. Otherwise each line of the timed run would wait for the disk.
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _write(self, content: bytes) -> None:
        try:
            # Flush each line, so that the log of a running or killed run contains only whole lines.
            self._file.write(content)
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from None


class RuleViolation(ValueError):  # noqa: N818 - the name states what happened
    """The rules of the log forbid a record. It was not written."""


class MLLog:
    """Writer of one run's result file, which refuses to write records that the rules forbid.

    If ``path`` is None, as on every rank except rank 0, all methods return at once. Use the log from one thread; only
    ``line``, ``abort`` and ``close`` may be called from other threads. When used as a context manager, it closes the
    file, and completes the log as aborted if the block raises an exception. ``clock_ms`` returns milliseconds since the
    Unix epoch.

    Raises ``FileExistsError`` if the file exists.
    """

    def __init__(self, path: Path | None, *, clock_ms: Callable[[], int] | None = None) -> None:
        self._file = None if path is None else LineFile(path)
        self._clock_ms = clock_ms or _steady_clock()
        self._run = LoggedRun()
        self._is_aborting = False  # if True, rules that only a complete run must follow are not enforced
        self._lock = threading.RLock()  # reentrant, because `abort` logs records while it holds the lock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        for step in (self.abort, self.close):
            with suppress(OSError):  # an OSError here (a full disk) must not hide the error that ended the run
                step()

    # Methods for plain lines.

    def header(self, fields: Mapping[str, object]) -> None:
        """Write "# key: value" lines: the resolved configuration, the commit, versions, hardware."""
        for key, value in fields.items():
            self.line(f"# {key}: {visible(value)}")

    def line(self, text: str) -> None:
        """Write one plain line. Raises ``RuleViolation`` if ``text`` contains a line end or a record's token."""
        if self._file is None:
            return
        # A parser would read a plain line with the token as a record, and a plain line with a line end as two lines.
        if TOKEN in text or "\n" in text or "\r" in text:
            raise RuleViolation(f"plain line {text!r}: expected one line without {TOKEN}")
        with self._lock:
            self._file.write(text)

    def resumed(self, checkpoint: str, samples: int) -> None:
        """Log that the run resumes from a checkpoint after ``samples`` sequences. Its log is not a timed result."""
        self.line(f"# resumed from: {checkpoint}")
        self._run.resumed_samples = self._run.counted_samples = samples

    # Methods for particular records. `samples` is the number of sequences trained since run_start.

    def weights_initialization(self, num_hidden_layers: int) -> None:
        """Log the names of all weight tensors, as the reference implementation names them."""
        for tensor in rules.weight_tensors(num_hidden_layers):
            self.event("weights_initialization", tensor=tensor)

    def block_start(self, samples: int) -> None:
        """Log the start of training between two evaluations."""
        self.event("block_start", first_epoch_num=1, epoch_count=1, samples_count=samples)

    def block_stop(self, samples: int) -> None:
        self.event("block_stop", first_epoch_num=1, samples_count=samples)

    def eval_start(self, samples: int) -> None:
        """Log the start of an evaluation. ``samples`` must be on the evaluation schedule (TR 24.4)."""
        self.event("eval_start", epoch_num=samples, samples_count=samples)

    def eval_accuracy(self, accuracy: float, samples: int) -> None:
        """Log the open evaluation's masked-LM accuracy as a fraction. BERT's epoch number counts samples (TR 24.6)."""
        self.event("eval_accuracy", accuracy, epoch_num=samples, samples_count=samples)

    def eval_stop(self, samples: int) -> None:
        self.event("eval_stop", epoch_num=samples, samples_count=samples)

    def run_stop(self, status: Literal["success", "aborted"], *, samples: int, eval_samples: int) -> None:
        """Log the number of sequences trained, the number of sequences in one evaluation, and the end of the clock.

        Raises ``RuleViolation`` if a block or an evaluation is still open, or if the status is success but the last
        accuracy does not reach the target. In that case nothing is written, and ``abort`` can still complete the log.
        """
        if self._file is None:
            return
        broken = [*left_open(self._run), *(unearned_success(self._run, samples) if status == "success" else ())]
        if broken:
            raise RuleViolation(f"run_stop: status {status}, but {broken[0]}")
        self.event("train_samples", samples)
        self.event("eval_samples", eval_samples)
        self.event("run_stop", status=status)

    def abort(self) -> None:
        """Complete the log of a run that ends early: close open intervals and log run_stop with status aborted.

        Does nothing before ``init_start`` and after ``run_stop``.
        """
        with self._lock:
            run = self._run
            if self._file is None or run.phase in ("before", "done"):
                return
            self._is_aborting = True
            if run.phase == "init":
                self.event("init_stop")
            if run.phase == "ready":
                self.event("run_start")
            if "eval_start" in run.open:
                self.eval_stop(samples_of(run.open["eval_start"].metadata) or 0)
            if "block_start" in run.open:
                self.block_stop(run.counted_samples)
            # Every log needs these two records, even if the run never trained.
            for key, value in (("train_samples", run.counted_samples), ("eval_samples", 0)):
                if key not in run.first:
                    self.event(key, value)
            self.event("run_stop", status="aborted")

    def close(self) -> None:
        """Sync the file to the disk and close it. Does nothing if the file is closed already."""
        if self._file is not None:
            with self._lock:
                self._file.close()

    def event(self, key: str, value: object = None, **metadata: object) -> None:
        """Log a record of any key: the beginning or the end of an interval, or a point in time.

        At ``init_stop``, raises ``RuleViolation`` if a required record is missing, if a closed run differs from the
        benchmark in its target or evaluation interval, or if the initialization took too long.
        """
        if self._file is None:
            return
        rule = rules.KEYS.get(key)
        event_type = rule.event_type if rule else "POINT_IN_TIME"
        # One lock covers the check, the write and the update of the state, because the watchdog's thread may call `abort`.
        with self._lock:
            # Times in a log must not decrease, even if the clock goes backwards.
            time_ms = max(self._clock_ms(), self._run.last_ms)
            record = Record(self._file.next_line, time_ms, event_type, key, value, _caller() | metadata)
            self._check(record)
            self._file.write(_line_of(record))
            self._run.add(record)
            if key == "run_stop":
                # Write a digest here: it proves that the run was complete, even if the file is truncated after this line.
                self._file.write_digest()

    def _check(self, record: Record) -> None:
        """Raise ``RuleViolation`` if the record is not allowed at this point of the log."""
        for violation in violations(self._run, record):
            # The log of an aborted run must be completed, even inside an evaluation or after an initialization that
            # took too long.
            if not (self._is_aborting and violation.kind in ("evaluation", "init time")):
                raise RuleViolation(str(violation))
        if record.key == "init_stop" and not self._is_aborting:
            _check_initialized(self._run)


def _check_initialized(run: LoggedRun) -> None:
    """Raise ``RuleViolation`` if a record required before the clock starts is missing or violates the division's rules."""
    # Skip keys that may also be logged later, because they are not due yet.
    due = (rule.key for rule in rules.KEYS.values() if rule.written and {*rule.phases} <= {"before", "init"})
    missing = [key for key in due if key not in run.first and key != "init_stop"]
    if missing:
        raise RuleViolation(f"init_stop: not logged yet: {', '.join(missing)}")
    for violation in own_settings(run):
        raise RuleViolation(str(violation))


def _line_of(record: Record) -> str:
    """Return the line that mlperf-logging's ``MLLogger`` writes for ``record``."""
    fields = {"namespace": "", "time_ms": record.time_ms, "event_type": record.event_type, "key": record.key}
    return f"{TOKEN} {json.dumps(fields | {'value': record.value, 'metadata': record.metadata})}"


def _steady_clock() -> Callable[[], int]:
    """Return a clock in milliseconds since the Unix epoch that ignores later corrections of the wall clock."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda: (time.monotonic_ns() + offset_ns) // 1_000_000


def _caller() -> dict[str, object]:
    """Return file and line of the first frame outside this file, which is the code that logs the record."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return {"file": frame.f_code.co_filename.removeprefix(f"{REPOSITORY}/"), "lineno": frame.f_lineno}
