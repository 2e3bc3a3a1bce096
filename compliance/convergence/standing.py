"""Tell where a folder's runs stand against the reference, from the logs and nothing else, also while runs are missing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from compliance.convergence.outlook import Outlook, outlook
from compliance.convergence.reference_points import describe_origin
from compliance.convergence.selection import FAILED, select
from compliance.folders import numbered_logs
from compliance.log import rules
from compliance.log.reader import Log, read_log
from compliance.log.rules import SUBMISSION_RUNS

RunStatus = Literal["converged", "not converged", "running"]


@dataclass(frozen=True)
class StandingRun:
    """The facts that count of one log.

    Attributes:
        samples: sequences to the target; None when it was not reached.
        evaluations: how many there have been.
        status: "running" when the log has no run_stop: still running, or cut off.
        chosen: whether it is one of the runs that a submission takes.
    """

    path: Path
    samples: int | None
    evaluations: int
    status: RunStatus
    chosen: bool


@dataclass(frozen=True)
class Standing:
    """The runs of a folder and their outlook. `needed_runs` is the number of runs of a complete set."""

    folder: Path
    ruleset: str
    division: rules.Division
    global_batch_size: int
    needed_runs: int
    runs: tuple[StandingRun, ...]
    outlook: Outlook

    @property
    def passed(self) -> bool:
        """Tell whether nothing speaks against these runs, as far as they go."""
        verdict = self.outlook.verdict
        # Above the largest reference point a closed set cannot pass as it is; open ones are compared with nothing.
        return verdict != "fail" and (verdict != "no reference" or self.division == "open")

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return {
            "folder": str(self.folder),
            "ruleset": self.ruleset,
            "division": self.division,
            "global_batch_size": self.global_batch_size,
            "runs": [asdict(run) | {"path": str(run.path)} for run in self.runs],
            **asdict(self.outlook),
        }

    def lines(self) -> list[str]:
        """Describe the standing in words and tables, for a terminal."""
        lines = [
            f"{self.folder}: {len(self.runs)} logs, {self.division} division, global batch size "
            f"{self.global_batch_size}, ruleset {self.ruleset}",
            "",
            f"{'log':<20} {'samples':>12} {'evaluations':>12}",
        ]
        for run in self.runs:
            reached = f"{run.samples:,}" if run.samples else run.status
            is_left_out = not run.chosen and run.status != "running"  # a run in progress may still be one of those
            note = "  not among the runs that a submission takes" if is_left_out else ""
            lines.append(f"{run.path.name:<20} {reached:>12} {run.evaluations:>12}{note}")
        if self.outlook.reference:
            found = self.outlook.reference
            lines += ["", f"reference: mean {found.mean:,.0f}, minimum {found.minimum:,.0f} ({describe_origin(found)})"]
        if self.outlook.needed and self.outlook.needed.cases:
            lines += ["", f"if the {self.outlook.needed.remaining} missing converge at", ""]
            for case in self.outlook.needed.cases:
                place = f"evaluation {case.evaluation.index:>3} {case.evaluation.samples:>12,}"
                lines.append(f"    {place}   mean {case.mean:>12,.0f}   {case.verdict}, scaling {case.scaling:.6f}")
        return [*lines, "", self.outlook.sentence]


def standing(folder: Path, ruleset: str, runs: int = SUBMISSION_RUNS, *, from_train_samples: bool = False) -> Standing:
    """Tell where the logs of results/<system>/bert stand.

    Logs without run_stop are taken for runs in progress and not counted. Of more than `runs` runs those count that a
    submission takes (`compliance.convergence.selection`).

    Args:
        runs: runs of a complete set.
        from_train_samples: see `compliance.log.run.LoggedRun.converged_samples`.

    Raises:
        ValueError: no logs, or logs of different batch sizes or divisions, or no known ruleset.
    """
    # In the order of their numbers: `chosen` and `found` refer to the logs by their place in it.
    logs = result_logs(folder)
    division, batch = division_of(logs), batch_size_of(logs)
    samples = [log.run.converged_samples(from_train_samples=from_train_samples) for log in logs]
    ended = [index for index, log in enumerate(logs) if log.run.is_ended]
    # Only a run that has ended is evidence: one in progress may yet fail.
    chosen = ended
    if len(ended) > runs:
        # By the logs' own end, and not by a verdict: whether a run is valid is for `package` to ask.
        times = [minutes_of(logs[index]) if samples[index] else FAILED for index in ended]
        # A log that has ended has records, and so a start.
        selection = select([logs[index].run.start_ms or 0 for index in ended], times, runs)
        chosen = [ended[run] for run in selection.chosen]
    found = tuple(
        StandingRun(log.path, samples[index], len(log.run.accuracies), _status(log, samples[index]), index in chosen)
        for index, log in enumerate(logs)
    )
    ahead = outlook([samples[index] for index in chosen], batch, ruleset, runs, division)
    return Standing(folder, ruleset, division, batch, runs, found, ahead)


def _status(log: Log, samples: int | None) -> RunStatus:
    if not log.run.is_ended:
        return "running"
    return "converged" if samples else "not converged"


def result_logs(folder: Path) -> list[Log]:
    """The logs of a folder by their number.

    Raises:
        ValueError: the folder is missing or holds none.
    """
    return [read_log(path) for _, path in numbered_logs(folder)]


def minutes_of(log: Log) -> float:
    """Time to train; infinite where it was not measured."""
    seconds = log.run.seconds
    return FAILED if seconds is None else seconds / 60


def batch_size_of(logs: list[Log]) -> int:
    """The global batch size of all runs.

    Raises:
        ValueError: a log that has ended without one, or several in one folder.
    """
    return cast(int, _common(logs, "global_batch_size"))


def division_of(logs: list[Log]) -> rules.Division:
    """The division of all runs.

    Raises:
        ValueError: see `batch_size_of`.
    """
    return cast(rules.Division, _common(logs, "submission_division"))


def _common(logs: list[Log], key: str) -> Any:
    rule = rules.KEYS[key].value
    assert rule is not None
    first: dict[Any, str] = {}  # each value, with the first log that has it
    for log in logs:
        record = log.run.first.get(key)
        if record is None and not log.run.is_ended:
            continue  # it has not come so far
        if record is None or not rule.accepts(record.value):
            found = f"{key} {record.value!r}" if record else f"no {key}"
            raise ValueError(f"{log.path}: {found}, expected {rule.wording}; see `python -m compliance check`")
        # Values that a rule accepts are numbers or texts, and so can be keys.
        first.setdefault(record.value, log.path.name)
    if not first:
        raise ValueError(f"{logs[0].path.parent}: no log says {key} yet; wait for the first run to initialise")
    if len(first) > 1:
        said = ", ".join(f"{value!r} in {name}" for value, name in first.items())
        differs = f"{key} differs between logs ({said})"
        raise ValueError(f"{logs[0].path.parent}: {differs}: keep each set of runs in its own folder")
    return next(iter(first))
