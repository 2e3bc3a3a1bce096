"""Series of closed runs that converge at chosen evaluations, for the tests of what is computed over several logs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from bert.mllog import MLLog, evaluation_interval
from tests.compliance.run_logs import CLOSED, START_MS, train

BETWEEN_STARTS_MS = 10_000_000


def write_series(
    folder: Path,
    evaluations: Sequence[int],
    *,
    failed: Collection[int] = (),
    global_batch_size: int = 448,
    header: Mapping[str, object] | None = None,
) -> list[Path]:
    """A log for each number of evaluations; runs in `failed` end as aborted. A run takes 5 s an evaluation, about."""
    settings = CLOSED | {
        "global_batch_size": global_batch_size,
        "eval_interval_samples": evaluation_interval(global_batch_size),
    }
    paths: list[Path] = []
    for number, count in enumerate(evaluations):
        ticks = itertools.count(START_MS + number * BETWEEN_STARTS_MS, 1000)
        paths.append(folder / f"result_{number}.txt")
        with MLLog(paths[-1], clock_ms=lambda ticks=ticks: next(ticks)) as log:
            log.header(header or {})
            log.cache_clear(True)
            log.init_start()
            log.submission(division="closed", org="Example", platform="one machine")
            log.seed(1000 + number)
            log.hyperparameters(settings)
            log.weights_initialization(24)
            log.init_stop()
            log.run_start()
            last = 0.5 if number in failed else 0.7205
            samples = train(log, settings, [*[0.5] * (count - 1), last])
            log.run_stop("aborted" if number in failed else "success", samples=samples, eval_samples=10_000)
    return paths
