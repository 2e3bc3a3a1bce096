"""Series of runs that converge at chosen evaluations, for tests of several logs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.compliance.run_logs import CLOSED, OPEN, START_MS, log_of

EVALUATIONS = 17
"""Evaluations of a run that takes more sequences than the reference's mean: 2,550,016 at batch size 448."""


def write_log(
    path: Path,
    number: int,
    *,
    evaluations: int = EVALUATIONS,
    failed: bool = False,
    division: Any = "closed",
    settings: Mapping[str, Any] | None = None,
    global_batch_size: int | None = None,
    header: Mapping[str, object] | None = None,
    step_ms: int = 1000,
    **submission: str,
) -> Path:
    """Write the log of run `number`, which has its own seed and starts three hours after the previous run.

    A run that failed is aborted below the target. An evaluation takes 5 times `step_ms`.
    """
    changes = tuple((settings or {}).items())
    target = float(((CLOSED if division == "closed" else OPEN) | dict(changes))["quality_target"])
    log = log_of(
        (*[0.9 * target] * (evaluations - 1), 0.9 * target if failed else target + 0.0005),
        division,
        global_batch_size=global_batch_size,
        seed=1000 + 17 * number,
        status="aborted" if failed else "success",
        header=tuple((header or {}).items()),
        changes=changes,
        submission=tuple(submission.items()),
        step_ms=step_ms,
        start_ms=START_MS + number * 10_800_000,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(log)
    return path


def write_series(
    folder: Path, evaluations: Sequence[int], *, failed: Collection[int] = (), **options: Any
) -> list[Path]:
    """Write one log per entry of `evaluations`; runs in `failed` are aborted."""
    return [
        write_log(folder / f"result_{number}.txt", number, evaluations=count, failed=number in failed, **options)
        for number, count in enumerate(evaluations)
    ]
