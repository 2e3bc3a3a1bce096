"""A timed run as a user starts it, on made-up samples of Wikipedia's lengths: rate, drift, waiting, the log's verdict."""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_scale import HISTOGRAM, Context
from benchmarks.gpu_timing import Row
from dataloading.dataset import write_dataset
from dataloading.shard import DatasetInfo
from dataloading.synthetic import synthetic_samples
from dataloading.tokenization import Vocabulary

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_REPOSITORY = Path(__file__).resolve().parents[1]


def end_to_end(context: Context) -> None:
    """The recipe of one GPU to its only evaluation, whose target any model reaches: about five minutes on an H100."""
    training, evaluation = (2_000, 100) if context.tiny else (280_000, 10_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vocabulary = _write_vocabulary(folder / "vocab.txt", 1024 if context.tiny else context.scale.model.vocab_size)
        longest = 128 if context.tiny else context.scale.model.max_position_embeddings
        for split, count, seed in (("train", training, 1), ("evaluation", evaluation, 2)):
            _write_samples(folder / split, count, longest, vocabulary, seed)
        _train(context, folder, training)
        (metrics,) = folder.glob("results/*/bert/metrics_*.jsonl")
        records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        for row in rows_of(records):
            context.report.add(row)
        (log,) = folder.glob("results/*/bert/result_*.txt")
        context.report.attempt("log", lambda: _verdict(log))


def rows_of(records: list[dict[str, Any]]) -> list[Row]:
    """What the lines of a metrics file say."""
    steps, evaluations, ends = (
        [record for record in records if record["event"] == event] for event in ("step", "eval", "end")
    )
    milliseconds = [record["step_ms"] for record in steps]
    quarter = max(1, len(steps) // 4)
    drift = statistics.median(milliseconds[-quarter:]) / statistics.median(milliseconds[:quarter])
    waiting = sum(record["data_wait_ms"] for record in steps) / sum(milliseconds)
    return [
        Row(
            "inside the clock", figure=ends[0]["samples"] / ends[0]["time_s"], unit="sequences/s", note="evaluation too"
        ),
        Row(
            "training", statistics.median(milliseconds), _median(steps, "sequences_per_s"), "sequences/s", note="a step"
        ),
        Row("last quarter of the steps against the first", figure=drift, unit="x", note="step time; 1 is no drift"),
        Row("host waiting for data", share=waiting, note="of the time of all steps"),
        Row("evaluation", 1e3 * _median(evaluations, "eval_s"), note=f"{evaluations[0]['count']} masked tokens"),
    ]


def _median(records: list[dict[str, Any]], name: str) -> float:
    return statistics.median(record[name] for record in records)


def _write_vocabulary(path: Path, size: int) -> Vocabulary:
    """Made-up word pieces after the special tokens."""
    words = [f"word{index}" for index in range(size - len(_SPECIAL))]
    path.write_text("\n".join([*_SPECIAL, *words]) + "\n", encoding="utf-8")
    return Vocabulary.from_file(path)


def _write_samples(folder: Path, count: int, longest: int, vocabulary: Vocabulary, seed: int) -> None:
    """Lengths drawn from Wikipedia's histogram, tokens at random."""
    length, weight = np.loadtxt(HISTOGRAM, delimiter=",", skiprows=1, dtype=np.int64, unpack=True)
    drawn = np.random.default_rng(seed).choice(length, count, p=weight / weight.sum())
    samples = synthetic_samples(np.clip(drawn, 3, longest), vocabulary.size, seed)
    info = DatasetInfo(
        vocab_size=vocabulary.size,
        max_seq_length=longest,
        max_predictions_per_seq=int(samples.masked_counts.max()),
        vocabulary_md5=vocabulary.md5,
        vocabulary_sha256=vocabulary.sha256,
        options={"seed": seed},
        sources={},
    )
    write_dataset(folder, samples, shards=4, info=info)


def _train(context: Context, folder: Path, samples: int) -> None:
    settings = {
        "data.train": folder / "train",
        "data.evaluation": folder / "evaluation",
        "data.vocab": folder / "vocab.txt",
        "data.initial-checkpoint": None,
        "evaluation.target": 1e-12,
        "evaluation.interval-samples": samples,
        "log.division": "open",
        "log.system": "benchmark",
        "log.results": folder / "results",
    }
    recipe = "tiny_cpu" if context.tiny else "h100_1x1"
    arguments = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "bert.train", recipe, *arguments],
        cwd=_REPOSITORY,
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"bert.train ended with {done.returncode}: {done.stderr.strip()[-500:]}")


def _verdict(log: Path) -> Row:
    checker = [sys.executable, "-m", "compliance", "check", str(log)]
    done = subprocess.run(checker, cwd=_REPOSITORY, check=False, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).replace(str(log), log.name).strip().splitlines() or ["no verdict"]
    return Row("log", note=lines[0] if done.returncode == 0 else f"WRONG: {' '.join(lines)[:300]}")
