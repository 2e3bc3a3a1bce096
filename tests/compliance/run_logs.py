"""Logs of simulated runs, written by the real log writer with a simulated clock."""

import itertools
import json
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from bert.log.mllog import MLLog
from compliance.log.schedule import EvaluationSchedule, evaluation_interval

START_MS = 1_700_000_000_000

CLOSED: dict[str, int | float | str] = {
    "global_batch_size": 448,
    "gradient_accumulation_steps": 1,
    "opt_base_learning_rate": 4.25e-4,
    "opt_lamb_epsilon": 1e-6,
    "opt_epsilon": 1e-6,
    "opt_lamb_beta_1": 0.9,
    "opt_lamb_beta_2": 0.999,
    "opt_lamb_weight_decay_rate": 0.01,
    "opt_learning_rate_training_steps": 6700,
    "opt_learning_rate_warmup_steps": 0,
    "num_warmup_steps": 0,
    "start_warmup_step": 0,
    "quality_target": 0.720,
    "eval_interval_samples": evaluation_interval(448),
}
OPEN = CLOSED | {"global_batch_size": 32, "quality_target": 0.3, "eval_interval_samples": 1000}


def counting_clock(step_ms: int = 1000, start_ms: int = START_MS) -> Callable[[], int]:
    """Return a clock that advances by `step_ms` per call."""
    ticks = itertools.count(start_ms, step_ms)
    return lambda: next(ticks)


def initialise(
    log: MLLog,
    division: Any = "closed",
    settings: dict[str, Any] | None = None,
    seed: int = 1234,
    org: str = "Example",
    platform: str = "one machine",
    status: str = "research",
    layers: int | None = None,
) -> None:
    """Log the records up to run_start."""
    log.event("cache_clear", True)
    log.event("init_start")
    stated = {"benchmark": "bert", "division": division, "org": org, "platform": platform, "status": status}
    for key, value in stated.items():
        log.event(f"submission_{key}", value)
    log.event("seed", seed)
    for key, value in (settings or (CLOSED if division == "closed" else OPEN)).items():
        log.event(key, value)
    log.weights_initialization(layers or (24 if division == "closed" else 2))
    log.event("init_stop")
    log.event("run_start")


def train(log: MLLog, settings: dict[str, Any], accuracies: list[float], samples: int = 0) -> int:
    """Log blocks and evaluations, beginning after `samples` sequences. Return the number of sequences trained."""
    schedule = EvaluationSchedule(settings["eval_interval_samples"], settings["global_batch_size"])
    for index, accuracy in enumerate(accuracies, start=schedule.index_after(samples)):
        log.block_start(samples)
        samples = schedule.samples(index)
        log.block_stop(samples)
        log.eval_start(samples)
        log.eval_accuracy(accuracy, samples)
        log.eval_stop(samples)
    return samples


@cache  # saves the 50 ms that it takes to write the 398 tensors of a closed log
def log_of(
    accuracies: tuple[float, ...],
    division: Any = "closed",
    *,
    global_batch_size: int | None = None,
    seed: int = 1234,
    status: Literal["success", "aborted", "running"] = "success",
    header: tuple[tuple[str, object], ...] = (),
    submission: tuple[tuple[str, Any], ...] = (),
    step_ms: int = 10,
    start_ms: int = START_MS,
    resumed: int = 0,
) -> bytes:
    """Return a log with one evaluation per accuracy. The log of a "running" run ends with its last evaluation.

    A run continues after `resumed` sequences. It has no target if `header` has evaluation.target None.
    """
    settings = CLOSED if division == "closed" else OPEN
    if batch := global_batch_size:
        settings = settings | {"global_batch_size": batch, "eval_interval_samples": evaluation_interval(batch)}
    if dict(header).get("config.evaluation.target", "") is None:
        settings = {key: value for key, value in settings.items() if key != "quality_target"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result_0.txt"
        with MLLog(path, clock_ms=counting_clock(step_ms, start_ms)) as log:
            log.header(dict(header))
            if resumed:
                log.resumed("a checkpoint", resumed)
            initialise(log, division, settings, seed, **dict(submission))
            samples = train(log, settings, list(accuracies), resumed)
            if status != "running":
                log.run_stop(status, samples=samples, eval_samples=10_000 if division == "closed" else 500)
        return path.read_bytes()


def write_run(
    path: Path, division: Any = "closed", *, header: Mapping[str, object] | None = None, step_ms: int = 10
) -> Path:
    """Write a complete, successful log with three evaluations, the last at 1.05 times the target."""
    target = float((CLOSED if division == "closed" else OPEN)["quality_target"])
    accuracies = (0.5 * target, 0.9 * target, 1.05 * target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(log_of(accuracies, division, header=tuple((header or {}).items()), step_ms=step_ms))
    return path


def without_chain(text: str) -> str:
    """Remove the digest chain from a log, as if other software had written it, so that edits break no digest."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(("# chain: ", "# digest")))


def write_metrics(path: Path, steps: int = 60, *, every: int = 10, batch: int = 32, scale: float = 1.0) -> Path:
    """Write a metrics file with a step record every `every` steps and an evaluation every 20 steps.

    A step takes 27 ms times `scale`. The four recorded parts of a step take all but 1 ms times `scale`.
    """
    parts = {"step_ms": 27.0, "data_wait_ms": 1.0, "forward_backward_ms": 20.0, "reduce_ms": 3.0, "update_ms": 2.0}
    scaled = {name: scale * ms for name, ms in parts.items()}
    entries: list[dict[str, Any]] = [
        {"event": "run", "recipe": "test", "world_size": 8, "started": "2024-01-02T03:04:05"}
    ]
    for step in range(every, steps + 1, every):
        at, rate = {"step": step, "samples": batch * step}, 1000 * batch / scaled["step_ms"]
        entries.append({"event": "step", **at, **scaled, "loss": 9.0 / step, "sequences_per_s": rate})
        if step % 20 == 0:
            entries.append({"event": "eval", **at, "eval_s": 0.05})
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path
