"""The runs of one results folder: each log with its verdict, the metrics beside it, and the score over all.

results/<system>/bert/result_<n>.txt      the log (compliance.log)
results/<system>/bert/metrics_<n>.jsonl   one JSON object a line, by "event": run, step, eval, end; may be missing
results/systems/<system>.json             the system description; may be missing
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from compliance import rules
from compliance.artefact import read_bounded
from compliance.checker import Verdict, check_log
from compliance.log import Log, read_log

MIN_RUNS_FOR_SCORE = 3
"""Fewest runs of which something is left when the fastest and the slowest are dropped."""


@dataclass(frozen=True)
class Run:
    """One run of a folder.

    Attributes:
        number: n of result_<n>.txt.
        metrics: the objects of the metrics file, by event, in file order.
    """

    number: int
    log: Log
    verdict: Verdict
    metrics: dict[str, list[dict[str, Any]]]

    @cached_property
    def seconds(self) -> float | None:
        """Time to train: run_start to run_stop."""
        start, stop = self.log.first("run_start"), self.log.last("run_stop")
        return (stop.time_ms - start.time_ms) / 1000 if start and stop else None

    @cached_property
    def accuracies(self) -> list[tuple[int, float]]:
        """(sequences trained, masked-LM accuracy) of each evaluation."""
        return [
            (record.metadata["epoch_num"], record.value)
            for record in self.log.all("eval_accuracy")
            if rules.COUNT.accepts(record.metadata.get("epoch_num")) and rules.FRACTION.accepts(record.value)
        ]

    @property
    def accuracy(self) -> float | None:
        """Masked-LM accuracy of the last evaluation."""
        return self.accuracies[-1][1] if self.accuracies else None

    @property
    def target(self) -> float | None:
        """Accuracy that ends the run: as logged, or the benchmark's in a closed log."""
        logged = self.log.first("quality_target")
        if logged and rules.is_number(logged.value):
            return float(logged.value)
        return rules.QUALITY_TARGET if self.verdict.division == "closed" else None

    @property
    def samples(self) -> int | None:
        """Sequences trained."""
        record = self.log.last("train_samples")
        return record.value if record and rules.is_integer(record.value) else None

    @property
    def sequences_per_s(self) -> float | None:
        """Sequences trained over the whole time to train, evaluations included."""
        return self.samples / self.seconds if self.samples and self.seconds else None

    @property
    def outcome(self) -> str:
        """The verdict in a word: valid, aborted or invalid."""
        if self.verdict.passed:
            return "valid"
        return "aborted" if self.verdict.status == "aborted" else "invalid"


@dataclass(frozen=True)
class Results:
    """A results folder.

    Attributes:
        runs: by number.
        system: name of the system, from the path.
        description: the system description, empty when there is none.
    """

    folder: Path
    runs: tuple[Run, ...]
    system: str
    description: dict[str, str]

    @property
    def score_seconds(self) -> float | None:
        """Mean time to train without the fastest and the slowest run (TR 12).

        None with fewer than three runs, or when more than one is no valid result: one invalid run counts as the
        slowest.
        """
        valid = sorted(run.seconds for run in self.runs if run.verdict.passed and run.seconds is not None)
        if len(self.runs) < MIN_RUNS_FOR_SCORE or len(self.runs) - len(valid) > 1:
            return None
        kept = valid[1:] if len(valid) < len(self.runs) else valid[1:-1]
        return sum(kept) / len(kept)


def load_results(folder: Path, ruleset: str = rules.NEWEST_RULESET) -> Results:
    """Read and check every run of results/<system>/bert.

    Raises:
        ValueError: the folder is missing or holds no result file.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder, expected results/<system>/bert")
    logs = {int(match[1]): path for path in folder.iterdir() if (match := rules.RESULT_FILE.fullmatch(path.name))}
    if not logs:
        raise ValueError(f"{folder}: no result_<n>.txt in it, expected results/<system>/bert after a run")
    runs: list[Run] = []
    for number, path in sorted(logs.items()):
        log = read_log(path)
        runs.append(Run(number, log, check_log(log, ruleset), read_metrics(folder / f"metrics_{number}.jsonl")))
    system = folder.resolve().parent
    description = _read_description(system.parent / "systems" / f"{system.name}.json")
    return Results(folder, tuple(runs), system.name, description)


def read_metrics(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The objects of a metrics file by their event; a missing file and broken lines (a killed run) are left out."""
    events: dict[str, list[dict[str, Any]]] = {"run": [], "step": [], "eval": [], "end": []}
    if not path.is_file():
        return events
    for line in read_bounded(path).decode("utf-8", "replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        event = entry.get("event") if isinstance(entry, dict) else None
        if isinstance(event, str) and event in events:
            events[event].append(entry)
    return events


def numbers(entries: list[dict[str, Any]], key: str) -> list[float]:
    """The finite numbers under `key`; entries without one are left out."""
    return [float(entry[key]) for entry in entries if rules.is_number(entry.get(key))]


def _read_description(path: Path) -> dict[str, str]:
    try:
        fields = json.loads(read_bounded(path)) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: not a system description in JSON; write it again with `compliance system`"
        ) from error
    return {str(name): str(value) for name, value in fields.items()} if isinstance(fields, dict) else {}
