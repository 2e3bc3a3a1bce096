"""Series of closed runs that converge at chosen evaluations, for tests of statistics over several logs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tests.compliance.run_logs import START_MS, log_of

BETWEEN_STARTS_MS = 10_000_000


def write_series(
    folder: Path,
    evaluations: Sequence[int],
    *,
    failed: Collection[int] = (),
    global_batch_size: int = 448,
    header: Mapping[str, object] | None = None,
    platform: str = "one machine",
    step_ms: int = 1000,
) -> list[Path]:
    """Write one log per entry of `evaluations`; runs in `failed` are aborted. An evaluation takes 5 times `step_ms`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"result_{number}.txt" for number in range(len(evaluations))]
    for number, (path, count) in enumerate(zip(paths, evaluations, strict=True)):
        log = log_of(
            (*(0.5 + 0.01 * index for index in range(1, count)), 0.5 if number in failed else 0.7205),
            global_batch_size=global_batch_size,
            seed=1000 + number,
            status="aborted" if number in failed else "success",
            header=tuple((header or {}).items()),
            submission=(("platform", platform),),
            step_ms=step_ms,
            start_ms=START_MS + number * BETWEEN_STARTS_MS,
        )
        path.write_bytes(log)
    return paths
