"""Estimated time and disk space for preparing the benchmark's data, and progress reports."""

import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from console.program import say
from console.text import clock
from dataloading.preparation.mlcommons import CHECKPOINT, EVALUATION, TRAIN, VOCABULARY, Inputs

# Seconds for each input byte of a stage, on one core of a virtual server. These constants determine the reported
# percentage. After the first file, the remaining time is corrected for this machine's speed.
_CHECKING = 2e-9
_PREPARING = 1.7e-7
_SHUFFLING = 1.2e-7
_VERIFYING = 3.1e-8
_STARTING_SECONDS = 5
"""Seconds that the checkpoint conversion takes to import PyTorch."""

_SAMPLE_BYTES = 11
"""Bytes of samples made from each byte of text, in ten passes over the text."""

_PRIOR = 0.1
"""Share of the expected total time that is counted as already measured, which steadies the first estimates."""


def estimate(inputs: Inputs, existing: Collection[str], jobs: int) -> tuple[dict[str, float], float, float]:
    """Estimate the time and disk space for all results that ``inputs`` allow and that do not exist yet.

    Returns the seconds for each stage, in order; the bytes of the results; and the highest disk usage in bytes while the
    results are made. There are no stages if all results exist.
    """
    missing = {name for name, files in inputs.by_result.items() if files and name not in existing}
    if missing <= {VOCABULARY}:
        return {}, 0, 0
    workers = max(1, min(jobs, os.cpu_count() or 1))
    text, held_out, checkpoint = map(total_bytes, (inputs.text, inputs.evaluation, inputs.checkpoint))
    seconds = {"check": _CHECKING * total_bytes(inputs.files) / workers}
    result, most = 0.0, 0.0
    if CHECKPOINT in missing:
        seconds[CHECKPOINT] = _STARTING_SECONDS + _CHECKING * checkpoint
        result += checkpoint / 3  # a TF1 checkpoint also contains two moments for each weight
    if EVALUATION in missing:
        seconds[EVALUATION] = _PREPARING * held_out
        most += _SAMPLE_BYTES * held_out
    if TRAIN in missing:
        seconds["samples"] = _PREPARING * text / workers
        seconds[TRAIN] = _SHUFFLING * text
        result += _SAMPLE_BYTES * text
        most += 2 * _SAMPLE_BYTES * text  # the unshuffled samples and the buckets of the shuffle
    seconds["verify"] = _VERIFYING * text
    return seconds, result, result + most


class Progress:
    """Progress over all stages. Prints a line for each percent of the expected time."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds = seconds
        self._shares = dict.fromkeys(seconds, 0.0)
        self._kept = 0.0
        """Estimated seconds for the results that earlier attempts made."""
        self._started = time.perf_counter()
        self._percent = -1

    def set(self, stage: str, share: float, *, kept: bool = False) -> None:
        """Set the completed share of a stage. ``kept`` means that an earlier attempt completed it."""
        if stage not in self._seconds:
            return
        self._kept += kept * (share - self._shares[stage]) * self._seconds[stage]
        self._shares[stage] = min(1.0, share)
        total = sum(self._seconds.values())
        done = sum(self._shares[name] * self._seconds[name] for name in self._seconds)
        if int(100 * done / total) > self._percent:
            self._percent = int(100 * done / total)
            slowness = (time.perf_counter() - self._started + _PRIOR * total) / (done - self._kept + _PRIOR * total)
            say(f"[{self._percent:3} %] {stage}, about {clock(slowness * (total - done))} left")

    def add(self, stage: str, share: float) -> None:
        self.set(stage, self._shares.get(stage, 0.0) + share)


def total_bytes(paths: Collection[Path]) -> int:
    """Return the total size of files. Files that another process has deleted count as empty."""
    size = 0
    for path in paths:
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size
