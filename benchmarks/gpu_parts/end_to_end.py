"""Start a timed run as a user does, on random samples with Wikipedia's lengths.

Reports the run's rate, the drift of its step time, and the verdict on its log.
"""

import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu_parts.report import Figure, NotUsableError, PartReport
from benchmarks.gpu_parts.scale import Context, clipped_lengths

if TYPE_CHECKING:
    from compliance.log.records import Metrics

NEEDS = ("h5py", "mlperf_logging", "msgspec", "rich", "safetensors", "tokenizers", "tyro")
"""Packages besides PyTorch and NumPy that training, data sets and the log check import."""

_REPOSITORY = Path(__file__).resolve().parents[2]
_SECONDS = 300
_LIKELY_RATE = 600.0
"""Sequences/s to assume if the part ``step`` has not measured a rate."""


def end_to_end(context: Context) -> None:
    """Train the one-GPU recipe for about five minutes. Every model reaches the target of its only evaluation, at the end."""
    # Check for missing packages before making the data, because the training program would fail only afterwards.
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        raise NotUsableError(f"not installed, which training needs: {', '.join(missing)}")
    # The evaluation set has the benchmark's size, because evaluation time is part of the result.
    training, evaluation = (480, 50) if context.tiny else (_samples(context), 10_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_data(context, folder, {"train": training, "evaluation": evaluation})
        _train(context, folder, training)
        (log,) = folder.glob("results/*/bert/result_*.txt")
        context.report.attempt("log", lambda: _verdict(log))


def _samples(context: Context) -> int:
    """Return the number of samples for five minutes of training at the rate that the part ``step`` has measured."""
    rows = PartReport.load(context.report.path.with_name("step.json")).rows
    rate = next((row.figure for row in rows if row.figure and row.unit == "sequences/s"), _LIKELY_RATE)
    return int(rate * _SECONDS)


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
        rate = statistics.median(record.sequences_per_s for record in steps)
        rows += [
            Figure("training", statistics.median(milliseconds), rate, "sequences/s", note=note, page=True),
            Figure("last quarter of the steps against the first", figure=drift, unit="x", note="step time", page=True),
            Figure("host waiting for data", share=waiting, note="of the time of all steps", page=True),
        ]
    if evaluations:
        note = f"{evaluations[0].count} masked tokens"
        rows.append(
            Figure("evaluation", 1e3 * statistics.median(record.eval_s for record in evaluations), note=note, page=True)
        )
    if end is not None and end.time_s:
        rate = end.samples / end.time_s
        rows.append(Figure("inside the clock", figure=rate, unit="sequences/s", note="evaluation too", page=True))
    return rows


def _write_data(context: Context, folder: Path, counts: dict[str, int]) -> None:
    """Write a synthetic vocabulary, and data sets of ``counts`` samples with random tokens and Wikipedia's lengths."""
    from benchmarks.inputs import synthetic_vocabulary, write_synthetic_set  # imported here: needs packages in NEEDS

    model = context.scale.model
    size, longest = (1024, 128) if context.tiny else (model.vocab_size, model.max_position_embeddings)
    vocabulary = synthetic_vocabulary(folder / "vocab.txt", size)
    for seed, (split, count) in enumerate(counts.items(), 1):
        lengths = clipped_lengths(count, longest, seed)
        write_synthetic_set(folder / split, lengths, longest, vocabulary, shards=4, seed=seed)


def _train(context: Context, folder: Path, samples: int) -> None:
    """Start the run, and update the rows from its metrics until it ends. Raises ``RuntimeError`` if the run fails."""
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
        "log.results": folder / "results",
    }
    recipe = "tiny_cpu" if context.tiny else "h100_1x1"
    from benchmarks.inputs import flags

    command = [sys.executable, "-m", "bert.train", recipe, *flags(settings)]
    complaints = folder / "stderr.txt"
    # Errors go to a file, because a pipe that nobody reads would fill up and block the run.
    with complaints.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, cwd=_REPOSITORY, stdout=subprocess.DEVNULL, stderr=errors)
        while (status := process.poll()) is None:
            time.sleep(0.2 if context.tiny else 5)
            _add_rows(context, folder, quiet=True)
    _add_rows(context, folder)
    if status:
        said = complaints.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
        raise RuntimeError(f"bert.train ended with {status} and said: {said[-1]}")


def _add_rows(context: Context, folder: Path, *, quiet: bool = False) -> None:
    from compliance.log.records import read_metrics  # imported here: needs packages in NEEDS

    for path in folder.glob("results/*/bert/metrics_*.jsonl"):
        context.report.add(*rows_of(read_metrics(path)), quiet=quiet)


def _verdict(log: Path) -> Figure:
    checker = [sys.executable, "-m", "compliance", "check", str(log)]
    done = subprocess.run(checker, cwd=_REPOSITORY, check=False, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).replace(str(log), log.name).strip().splitlines() or ["no verdict"]
    return Figure("log", note=lines[0] if done.returncode == 0 else f"WRONG: {' '.join(lines)[:300]}", page=True)
