"""Start a timed run as a user does, on random samples with Wikipedia's lengths.

Reports the run's rate, the drift of its step time, and the verdict on its log. The log, the metrics and the program's output
stay beside the report.
"""

import importlib.metadata
import math
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu_parts.report import Figure, NotUsableError, PartReport
from benchmarks.gpu_parts.scale import Context, clipped_lengths
from benchmarks.gpu_parts.step import micro_batch_size, rate, rate_name
from benchmarks.gpu_parts.timing import Ceilings

if TYPE_CHECKING:
    from bert.configuration.config import Config
    from compliance.log.metrics import Metrics

_REPOSITORY = Path(__file__).resolve().parents[2]
_SECONDS = 300
_START_S, _STOP_S = 120, 40
"""Seconds reserved for the work before training (data, start-up, captures) and after it (evaluation, check of the log)."""


def end_to_end(context: Context) -> None:
    """Train the one-GPU recipe for about five minutes. Evaluate once, at the end, with a target that any model reaches.

    The run ends earlier or later if the caller's settings have ``evaluation.interval-samples``.
    """
    # Look for missing packages and wrong settings before making the data, because the run would fail only afterwards.
    if missing := missing_packages():
        raise NotUsableError(f"training needs packages that are not installed: {', '.join(missing)}")
    from bert.train import parse

    output = context.report.path.with_name("train.txt")
    log, metrics = output.with_name("result_0.txt"), output.with_name("metrics_0.jsonl")
    for path in (output, log, metrics):
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = parse(_arguments(context, folder, samples=None))
        samples = config.evaluation.interval_samples or (480 if context.tiny else _samples(context, config))
        # The evaluation set has the benchmark's size, because evaluation time is part of the result. A model may also
        # predict no token of a small set correctly, and would then miss even the lowest target. The training set may be
        # small, because training repeats it.
        evaluated = 500 if context.tiny else 10_000
        _write_data(context, folder, {"train": min(samples, 200_000), "evaluation": evaluated})
        complaint = _train(context, folder, _arguments(context, folder, samples), output)
    if log.exists():
        context.report.attempt("log", lambda: _verdict(log.resolve()))
    if complaint:
        raise RuntimeError(complaint)


def missing_packages() -> list[str]:
    """Return the packages that training requires, directly or indirectly, and that are not installed."""
    project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required, missing, seen = [*project["dependencies"], *project["optional-dependencies"]["train"]], [], set()
    for line in required:  # the loop appends the requirements of each package to this list
        name = re.split(r"[^\w.-]", line)[0].lower()
        if name not in seen and ";" not in line:  # skip conditional requirements, which may not apply here
            seen.add(name)
            try:
                required += importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                missing.append(name)
    return missing


def _samples(context: Context, config: "Config") -> int:
    """Return how many samples training processes, at the measured rate, in the part's time, at most in five minutes."""
    micro = micro_batch_size(context, config)
    name, report = rate_name(config, micro), context.report
    before = PartReport.load(report.path.with_name("step.json"))
    # If the part `step` has measured the rate under the same conditions, use it. Otherwise, measure the rate here.
    alike = all(before.about.get(fact) == report.about.get(fact) for fact in ("device", "without"))
    row = before.row(name) if alike else None
    if row is None or not row.figure:
        row = report.attempt(name, partial(rate, context, name, config, micro, Ceilings(None, None, None)))
    if row is None or not row.figure:
        raise RuntimeError("the rate of the step could not be measured; add -- --evaluation.interval-samples N")
    seconds = min(_SECONDS, max(10.0, context.end - time.monotonic() - _START_S - _STOP_S))
    return min(config.training.max_samples, int(row.figure * seconds))


def rows_of(metrics: "Metrics") -> list[Figure]:
    """Return rows from a run's metrics. The run may still be in progress."""
    steps, evaluations, end = metrics.steps, metrics.evaluations, metrics.end
    rows = []
    if steps:
        milliseconds = [record.step_ms for record in steps]
        quarter = max(1, len(steps) // 4)
        drift = statistics.median(milliseconds[-quarter:]) / statistics.median(milliseconds[:quarter])
        waiting = sum(record.data_wait_ms for record in steps) / sum(milliseconds)
        note = f"a step; {steps[-1].samples:,} samples in {steps[-1].time_s:.0f} s"
        speed = statistics.median(record.sequences_per_s for record in steps)
        loss, skipped = steps[-1].loss, sum(record.skipped_steps for record in steps)
        verdict = "" if math.isfinite(loss) else "WRONG, not finite: "
        rows += [
            Figure("loss", figure=loss, note=f"{verdict}from {steps[0].loss:.4f}, {skipped} steps skipped", page=True),
            Figure("training", statistics.median(milliseconds), speed, "sequences/s", note=note, page=True),
            Figure("last quarter of the steps against the first", figure=drift, unit="x", note="step time", page=True),
            Figure("host waiting for data", share=waiting, note="of the time of all steps", page=True),
        ]
    if evaluations:
        note = f"{evaluations[0].count} masked tokens"
        rows.append(
            Figure("evaluation", 1e3 * statistics.median(record.eval_s for record in evaluations), note=note, page=True)
        )
    if end is not None and end.time_s:
        speed = end.samples / end.time_s
        rows.append(Figure("inside the clock", figure=speed, unit="sequences/s", note="evaluation too", page=True))
    return rows


def _write_data(context: Context, folder: Path, counts: dict[str, int]) -> None:
    """Write a synthetic vocabulary, and data sets of ``counts`` samples with random tokens and Wikipedia's lengths."""
    # Import here, because packages that benchmarks.inputs needs may be missing.
    from benchmarks.inputs import synthetic_vocabulary, write_synthetic_set

    model = context.scale.model
    size, longest = (1024, 128) if context.tiny else (model.vocab_size, model.max_position_embeddings)
    vocabulary = synthetic_vocabulary(folder / "vocab.txt", size)
    for seed, (split, count) in enumerate(counts.items(), 1):
        lengths = clipped_lengths(count, longest, seed)
        write_synthetic_set(folder / split, lengths, longest, vocabulary, shards=4, seed=seed)


def _arguments(context: Context, folder: Path, samples: int | None) -> list[str]:
    """Return the arguments for ``bert.train``. The caller's settings override most of the part's own settings."""
    from benchmarks.inputs import flags

    settings = {
        "training.device": context.device.type,
        "data.train": folder / "train",
        "data.evaluation": folder / "evaluation",
        "data.vocab": folder / "vocab.txt",
        "data.initial-checkpoint": None,
        # Any model reaches this target, so the run ends successfully at its first evaluation.
        "evaluation.target": 1e-12,
        # Evaluate once, at the end.
        "evaluation.interval-samples": samples,
        # The closed division does not allow these settings.
        "log.division": "open",
        "log.system": "benchmark",
        # Keep the interval short, because a run that gets a signal stops at the end of an interval.
        "log.interval-steps": 10,
    }
    words = [word for pair in context.without.items() for word in pair]
    without = ["--training.implementations", *words] if words else []
    if context.on_gpu and not context.captures:
        without.append("--training.no-cuda-graphs")
    own = [*flags(settings), *without, *context.settings, *flags({"log.results": folder / "results", "log.run": 0})]
    return ["tiny_cpu" if context.tiny else "h100_1x1", *own]


def _train(context: Context, folder: Path, arguments: list[str], output: Path) -> str | None:
    """Train, and update the rows until the run ends or its time is up. Returns the reason if the run did not succeed."""
    stopped = False
    with output.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-m", "bert.train", *arguments]
        process = subprocess.Popen(command, cwd=_REPOSITORY, stdout=file, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(0.2 if context.tiny else 5)
            _keep(context, folder, quiet=True)
            left = context.end - time.monotonic()
            if left < _STOP_S and not stopped:
                # After SIGTERM, the run ends its log as aborted, so that the log can still be checked.
                process.terminate()
                stopped = True
            elif left < _STOP_S / 2:
                process.kill()
    _keep(context, folder)
    if stopped:
        early = f"bert.train was stopped {_STOP_S} s before the part's limit"
        return f"{early}: use more --seconds or a smaller --evaluation.interval-samples"
    said = output.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
    return f"bert.train ended with {process.returncode} and said: {said[-1]}" if process.returncode else None


def _keep(context: Context, folder: Path, *, quiet: bool = False) -> None:
    """Copy the run's log and metrics beside the report, and update the rows from the metrics."""
    from compliance.log.metrics import read_metrics  # imported here, because its packages may be missing

    for path in (folder / "results").glob("*/bert/*_0.*"):
        kept = Path(shutil.copy(path, context.report.path.parent))
        if path.suffix == ".jsonl":
            context.report.add(*rows_of(read_metrics(kept)), quiet=quiet)


def _verdict(log: Path) -> Figure:
    checker = [sys.executable, "-m", "compliance", "check", str(log)]
    done = subprocess.run(checker, cwd=_REPOSITORY, check=False, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).replace(str(log), log.name).strip().splitlines() or ["no verdict"]
    return Figure("log", note=lines[0] if done.returncode == 0 else f"WRONG: {' '.join(lines)[:300]}", page=True)
