"""Compare the runs of a folder with the reference, from their logs alone, even while runs are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from compliance.convergence.outlook import Outlook, outlook
from compliance.convergence.selection import FAILED, select
from compliance.folders import numbered_logs
from compliance.log import rules
from compliance.log.reader import Log, read_log
from compliance.log.rules import SUBMISSION_RUNS


@dataclass(frozen=True)
class StandingRun:
    """One run of a folder.

    Attributes:
        samples: number of sequences to the target; None if the run did not reach it.
        status: "running" if the log has no run_stop.
        chosen: whether this run would be submitted.
    """

    path: Path
    samples: int | None
    evaluations: int
    status: Literal["converged", "not converged", "running"]
    chosen: bool


@dataclass(frozen=True)
class Standing:
    """The runs of a folder and their outlook."""

    folder: Path
    ruleset: str
    division: rules.Division
    global_batch_size: int
    runs: tuple[StandingRun, ...]
    outlook: Outlook

    @property
    def passed(self) -> bool:
        """Tell whether the runs pass, or can pass with the missing runs. Without a reference, only the open division can."""
        verdict = self.outlook.verdict
        return verdict != "fail" and (verdict != "no reference" or self.division == "open")

    def lines(self) -> list[str]:
        """Return the standing as lines of text and tables, for a terminal."""
        lines = [
            f"{self.folder}: {len(self.runs)} logs, {self.division} division, global batch size "
            f"{self.global_batch_size}, ruleset {self.ruleset}",
            "",
            f"{'log':<20} {'samples':>12} {'evaluations':>12}",
        ]
        for run in self.runs:
            reached = f"{run.samples:,}" if run.samples else run.status
            is_left_out = not run.chosen and run.status != "running"
            note = "  not among the runs that a submission takes" if is_left_out else ""
            lines.append(f"{run.path.name:<20} {reached:>12} {run.evaluations:>12}{note}")
        if found := self.outlook.reference:
            lines += ["", f"reference: mean {found.mean:,.0f}, minimum {found.minimum:,.0f} ({found.description})"]
        return [*lines, "", self.outlook.sentence]


def standing(folder: Path, ruleset: str) -> Standing:
    """Compare the logs of results/<system>/bert with the reference. Of more than ten runs, only the submitted ones count.

    Raises:
        ValueError: there are no logs, the logs differ in batch size or division, or the ruleset is unknown.
    """
    logs = result_logs(folder)
    division, batch = division_of(logs), batch_size_of(logs)
    samples = [log.run.converged_samples() for log in logs]
    # Exclude runs in progress, which may still fail.
    chosen: Sequence[int] = [index for index, log in enumerate(logs) if log.run.is_ended]
    if len(chosen) > SUBMISSION_RUNS:
        # The status in the log decides here. Only `package` checks whether a run is valid.
        times = [minutes_of(logs[index]) if samples[index] else FAILED for index in chosen]
        selection = select([logs[index].run.start_ms or 0 for index in chosen], times, SUBMISSION_RUNS)
        chosen = [chosen[run] for run in selection.chosen]
    found = tuple(
        StandingRun(
            log.path,
            samples[index],
            len(log.run.accuracies),
            "running" if not log.run.is_ended else "converged" if samples[index] else "not converged",
            index in chosen,
        )
        for index, log in enumerate(logs)
    )
    ahead = outlook([samples[index] for index in chosen], batch, ruleset, division=division)
    return Standing(folder, ruleset, division, batch, found, ahead)


def result_logs(folder: Path) -> list[Log]:
    """Return the logs of a folder in order of their numbers. Raises ValueError if there is none."""
    return [read_log(path) for _, path in numbered_logs(folder)]


def minutes_of(log: Log) -> float:
    """Return the time to train in minutes; infinite if it was not measured."""
    seconds = log.run.seconds
    return FAILED if seconds is None else seconds / 60


def batch_size_of(logs: list[Log]) -> int:
    """Return the global batch size of all runs. Raises ValueError if the logs differ, or an ended log lacks it."""
    return cast(int, _common(logs, "global_batch_size"))


def division_of(logs: list[Log]) -> rules.Division:
    """Return the division of all runs. Raises as `batch_size_of` does."""
    return cast(rules.Division, _common(logs, "submission_division"))


def _common(logs: list[Log], key: str) -> Any:
    rule = rules.KEYS[key].value
    assert rule is not None
    first: dict[Any, str] = {}  # each value and the first log that has it
    for log in logs:
        record = log.run.first.get(key)
        if record is None and not log.run.is_ended:
            continue  # the run has not logged it yet
        if record is None or not rule.accepts(record.value):
            found = f"{key} {record.value!r}" if record else f"no {key}"
            raise ValueError(f"{log.path}: {found}, expected {rule.wording}; see `python -m compliance check`")
        first.setdefault(record.value, log.path.name)
    if not first:
        raise ValueError(f"{logs[0].path.parent}: no log says {key} yet; wait for the first run to initialise")
    if len(first) > 1:
        said = ", ".join(f"{value!r} in {name}" for value, name in first.items())
        differs = f"{key} differs between logs ({said})"
        raise ValueError(f"{logs[0].path.parent}: {differs}: keep each set of runs in its own folder")
    return next(iter(first))
