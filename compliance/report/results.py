"""Runs of a results folder: each log with its verdict and its metrics, and the score of all runs.

results/<system>/bert/result_<n>.txt      the log (compliance.log.reader)
results/<system>/bert/metrics_<n>.jsonl   the records of the run (compliance.log.metrics); may be missing
results/systems/<system>.json             the system description, in a submission <org>/systems/; may be missing
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

from compliance.convergence.outlook import Outlook, outlook_of
from compliance.convergence.selection import FAILED, counted_seconds, olympic_mean, submitted
from compliance.folders import find, numbered_logs
from compliance.log import rules
from compliance.log.findings import Finding, Verdict
from compliance.log.logged_run import LoggedRun
from compliance.log.metrics import EvaluationRecord, Metrics, read_metrics
from compliance.log.reader import Log, read_log
from compliance.submission.check import check_paths, is_for_submission
from compliance.submission.comparison import differing_settings
from compliance.submission.derived import metrics_fault
from compliance.submission.description import count_accelerators, read_description

MIN_RUNS_FOR_SCORE = 3
"""Minimum number of runs for a score, because the score drops the fastest and the slowest run."""

STEP_PARTS = {
    "forward and backward": "forward_backward_ms",
    "exposed communication": "reduce_ms",
    "update": "update_ms",
    "waiting for data": "data_wait_ms",
}

SITE_PART = "waiting for other sites"
"""Name of the part of a run in which a site waits for others. Only a run whose sites take steps by themselves has it."""

Outcome = Literal["valid", "aborted", "invalid", "finished", "resumed", "interrupted", "failed", "unfinished"]
Value = TypeVar("Value")


@dataclass(frozen=True)
class ReportedRun:
    """A run of a folder: result_<number>.txt, and the records of its metrics file."""

    number: int
    log: Log
    verdict: Verdict
    metrics: Metrics

    @cached_property
    def logged(self) -> LoggedRun:
        """What the log says about the run. It is empty if the log holds several attempts or several processes."""
        return self.log.run if self.verdict.is_one_run else LoggedRun(self.log.header)

    @property
    def outcome(self) -> Outcome:
        """The verdict if the run has a target. Otherwise how it ended; "resumed" if it had resumed and then finished."""
        if self.logged.trains_to_end:
            if self.logged.status == "success":
                return "resumed" if "resumed from" in self.log.header else "finished"
            is_fault = "ended by a fault" in self.log.header
            return "failed" if is_fault else "interrupted" if self.logged.is_ended else "unfinished"
        if self.verdict.passed:
            return "valid"
        return "aborted" if self.verdict.status == "aborted" else "invalid"

    @property
    def first_step(self) -> int:
        """Number of steps trained before the run resumed from a checkpoint."""
        return self.logged.resumed_samples // (self.logged.global_batch_size or 1)

    @cached_property
    def best(self) -> tuple[int, float] | tuple[None, None]:
        """(sequences trained, accuracy) of the first evaluation with the highest accuracy; two None without evaluations."""
        return max(self.logged.curve, key=lambda point: point[1], default=(None, None))

    @property
    def best_record(self) -> EvaluationRecord | None:
        """Metrics record of the evaluation with the best accuracy; None if there is no such record."""
        return next((record for record in self.metrics.evaluations if record.samples == self.best[0]), None)

    @property
    def best_error(self) -> float | None:
        """Half of the best accuracy's 95 % confidence interval; None if the number of masked tokens is unknown."""
        error = self.best_record.error if self.best_record else math.nan
        return error if math.isfinite(error) else None

    @property
    def counted_seconds(self) -> float:
        """Time to train that enters the score; infinite if the run is not a valid result."""
        return counted_seconds(self.logged, passed=self.verdict.passed)


@dataclass(frozen=True)
class Results:
    """A results folder: its runs by number, the system's name and description (empty if missing), and the ruleset.

    `beside` contains the verdicts on the folder as a whole and on the description.
    """

    folder: Path
    runs: tuple[ReportedRun, ...]
    system: str
    description: dict[str, str]
    ruleset: str
    beside: tuple[Verdict, ...] = ()

    @cached_property
    def is_experiment(self) -> bool:
        """Tell whether no run has a target. MLPerf's rules do not apply to such runs."""
        # Ignore files without records, which have no header and say nothing about their runs.
        known = [run for run in self.runs if run.log.header]
        return bool(known) and all(run.logged.trains_to_end for run in known)

    @cached_property
    def differing(self) -> dict[str, list[str]]:
        """Settings that differ between the runs, with the value of each run. Such runs have no common mean."""
        # Ignore closed runs. A closed run with other settings is invalid, so no mean includes it anyway.
        is_closed = [str(run.verdict.division).lower() == "closed" for run in self.runs]
        return differing_settings(
            [LoggedRun() if closed else run.logged for closed, run in zip(is_closed, self.runs, strict=True)]
        )

    @cached_property
    def ranked(self) -> list[ReportedRun]:
        """All runs, the one with the best accuracy first."""
        return sorted(self.runs, key=lambda run: run.best[1] or 0.0, reverse=True)

    @cached_property
    def submitted(self) -> tuple[ReportedRun, ...]:
        """Runs to submit: all runs, or if there are more than ten, the ten that `select` chooses."""
        starts, times = [run.logged.start_ms or 0 for run in self.runs], [run.counted_seconds for run in self.runs]
        return tuple(self.runs[index] for index in submitted(starts, times))

    @cached_property
    def valid(self) -> tuple[ReportedRun, ...]:
        """Submitted runs that are valid results and have a time."""
        return tuple(run for run in self.submitted if run.counted_seconds < FAILED)

    @property
    def invalid_count(self) -> int:
        """Number of submitted runs that are invalid. If it is more than one, there is no score (TR 12)."""
        return len(self.submitted) - len(self.valid)

    @cached_property
    def dropped(self) -> dict[int, str]:
        """Why a run is not in the score, by run number: "fastest", "slowest" or "not submitted". Empty without a score."""
        if self.score_seconds is None:
            return {}
        fastest, *_, slowest = sorted(self.submitted, key=lambda run: run.counted_seconds)
        others = {run.number: "not submitted" for run in self.runs if run not in self.submitted}
        return others | {fastest.number: "fastest", slowest.number: "slowest"}

    @property
    def score_seconds(self) -> float | None:
        """Mean time to train without the fastest and the slowest run (TR 12), before scaling.

        It is None if there are fewer than three runs, if more than one is invalid, or if the runs' settings differ.
        """
        if len(self.submitted) < MIN_RUNS_FOR_SCORE or self.differing:
            return None
        score = olympic_mean([run.counted_seconds for run in self.submitted])
        return score if score < FAILED else None

    @property
    def scaled_seconds(self) -> float | None:
        """Score after scaling. Scaling applies if the runs converge in fewer samples than the reference (TR 13)."""
        if self.score_seconds is None:
            return None
        return self.score_seconds * (self.convergence.applied_scaling if self.convergence else 1.0)

    @property
    def notice(self) -> str:
        """Disclaimer about MLPerf; "" for an experiment, which has nothing to do with MLPerf.

        Runs of this repository are not MLPerf results. Other runs may be MLPerf results, but this report is unofficial.
        """
        if self.is_experiment:
            return ""
        own = any(run.log.chain.opened for run in self.runs)
        return rules.NOT_A_RESULT if own else rules.UNOFFICIAL

    @property
    def for_submission(self) -> bool:
        """Tell whether any run is meant for a submission."""
        return any(is_for_submission(run.logged) for run in self.runs)

    @property
    def division(self) -> str | None:
        """Division, if all logs that state a division agree; else None."""
        return _only({run.verdict.division for run in self.runs})

    @property
    def global_batch_size(self) -> int | None:
        """Sequences per optimizer step, if all logs that state it agree; else None."""
        return _only({run.logged.global_batch_size for run in self.runs})

    @cached_property
    def convergence(self) -> Outlook | None:
        """Comparison of the runs' convergence with the reference; None outside of the closed division."""
        batch = self.global_batch_size
        if self.division != "closed" or not batch:
            return None
        return outlook_of([run.logged for run in self.submitted], batch, self.ruleset)

    @cached_property
    def findings(self) -> list[tuple[str, Finding]]:
        """Pairs of subject and finding, errors first. A subject is "run 3", or the name of the folder or description.

        The findings of an experiment are only about logs that cannot be read.
        """
        found = [(f"run {run.number}", finding) for run in self.runs for finding in run.verdict.findings]
        found += [(verdict.path.resolve().name, finding) for verdict in self.beside for finding in verdict.findings]
        kept = [pair for pair in found if not self.is_experiment or pair[1].rule.startswith("log format")]
        # Within errors and within warnings, sorted() keeps the order.
        return sorted(kept, key=lambda pair: pair[1].severity == "warning")

    @property
    def accelerator(self) -> str:
        """Name of the accelerator, from the system description or else from a log; "" if there is none."""
        names = (self.description.get("accelerator_model_name", ""), self.shown.log.header.get("accelerator", ""))
        return next((name for name in names if name and name not in ("N/A", "none")), "")

    @property
    def accelerators(self) -> int | None:
        """Number of accelerators from the system description, or else the number of processes of a run; None if unknown."""
        described, run = count_accelerators(self.description), self.shown.metrics.run
        # A run on CPUs has processes too, so its processes are not accelerators.
        if described is not None or not self.accelerator or run is None:
            return described
        return run.world_size or None

    @cached_property
    def shown(self) -> ReportedRun:
        """Run whose settings are shown: the best run of an experiment, otherwise the last valid run, or the last run."""
        return self.ranked[0] if self.is_experiment else (self.valid or self.runs)[-1]


def load_results(folder: Path, ruleset: str = rules.NEWEST_RULESET) -> Results:
    """Read and check every run of results/<system>/bert.

    Raises:
        ValueError: the folder is missing, contains no result file, or contains a folder with results beside its logs.
    """
    logs = numbered_logs(folder)
    verdicts = {verdict.path: verdict for verdict in check_paths([folder], ruleset)}
    if folder not in verdicts:
        raise ValueError(f"{folder}: its logs lie beside a folder with results. Move them to results/<system>/bert")
    # The check has chosen a ruleset for the folder if `ruleset` is "auto".
    ruleset = verdicts[folder].ruleset
    runs: list[ReportedRun] = []
    for number, path in logs:  # result_1.txt and result_01.txt are two runs with the same number
        log, verdict = read_log(path), verdicts.pop(path)
        metrics = read_metrics(folder / f"metrics_{number}.jsonl")
        # If a metrics file belongs to another run, do not use it. The check of the folder warns of such a file.
        runs.append(ReportedRun(number, log, verdict, Metrics() if metrics_fault(metrics, log.run) else metrics))
    place = find(folder).benchmarks[0]
    fields = read_description(place.description).fields if place.description.is_file() else {}
    description = {str(name): str(value) for name, value in fields.items()}
    return Results(folder, tuple(runs), place.system, description, ruleset, tuple(verdicts.values()))


def breakdown(run: ReportedRun) -> dict[str, float]:
    """Return how many seconds of the run each of its parts took, in drawing order; empty without step metrics.

    A step record contains means over the steps since the previous record. Time outside of steps and evaluations is
    "other". It includes the start of the data pipeline, logging and checkpoints.
    """
    if not run.metrics.steps or not run.logged.seconds:
        return {}
    seconds, site_seconds = dict.fromkeys(STEP_PARTS, 0.0), 0.0
    done = run.first_step
    for record in run.metrics.steps:
        # After a restart, step numbers begin again at an earlier step. Count the repeated steps only once.
        taken = max(0, record.step - done)
        done += taken
        for name, key in STEP_PARTS.items():
            seconds[name] += getattr(record, key) / 1000 * taken
        site_seconds += record.site_wait_ms / 1000 * taken
    if any(record.site_bytes for record in run.metrics.steps):
        seconds[SITE_PART] = site_seconds
    seconds["evaluation"] = sum(record.eval_s for record in run.metrics.evaluations)
    whole = sum(seconds.values())
    return seconds | {"other": max(0.0, run.logged.seconds - whole)} if whole > 0 else {}


def _only(values: set[Value | None]) -> Value | None:
    known = values - {None}
    return next(iter(known)) if len(known) == 1 else None
