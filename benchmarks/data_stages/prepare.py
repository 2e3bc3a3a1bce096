"""Text to samples on one core: ``dataloading`` against the plain-Python reference algorithm.

    python benchmarks/data_stages/prepare.py [--vocab FILE] [--text FILE ...] [--rounds N] [--dupe_factor N] [--out FILE]

Both sides read the text, load the vocabulary, tokenize and draw the samples, and then write an HDF5 data set of one shard,
by the same code; nothing is kept from one run to the next. Runs alternate in one process, and their outputs must be equal.
Compiling is not part of the runs; its time is printed. Without --text the input is the standard library's prose
(``dataloading.text.documents``), and without --vocab the vocabulary that ships with the built-in default.
"""

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tyro

from benchmarks.conditions import write_figures
from benchmarks.data_stages import reference_prepare
from benchmarks.inputs import write_demo_text
from bert.configuration.recipes import ARTIFACTS
from dataloading.dataset.folder import open_dataset, write_dataset
from dataloading.options import PretrainingOptions
from dataloading.shards.samples import Samples
from dataloading.shards.shard import DatasetInfo
from dataloading.text.pretraining_data import create_samples, read_documents, tokenize_documents
from dataloading.text.tokenization import Tokenizer, Vocabulary

ROOT = Path(__file__).resolve().parents[2]
SHIPPED_VOCAB = ARTIFACTS / "tiny_cpu" / "vocab.txt"

_COMPILE = """
import pathlib, sys, time
from dataloading.options import PretrainingOptions
from dataloading.text.pretraining_data import create_samples, tokenize_documents
from dataloading.text.tokenization import Tokenizer
tokenizer = Tokenizer.from_vocab(pathlib.Path(sys.argv[1]))
documents = tokenize_documents([["one", "two"], ["three"]], tokenizer)
started = time.perf_counter()
create_samples(documents, PretrainingOptions(), tokenizer.vocabulary)
print(time.perf_counter() - started)
"""


def main(
    vocab: Path = SHIPPED_VOCAB,
    text: tuple[Path, ...] = (),
    rounds: int = 3,
    dupe_factor: int = PretrainingOptions.dupe_factor,
    out: Path | None = None,
) -> None:
    """Print the medians of both sides, and the ratio last.

    Args:
        vocab: Vocabulary file, one token a line.
        text: Files with one sentence a line and an empty line between documents.
        rounds: Runs of each side.
        dupe_factor: Passes over the text, as in the reference script.
        out: Write the figures here as JSON.
    """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    options = PretrainingOptions(dupe_factor=dupe_factor)
    with tempfile.TemporaryDirectory() as folder:
        paths = text or (write_demo_text(Path(folder) / "text.txt"),)
        # Twice in new processes with one empty cache: the first compiles, the second loads.
        cold, warm = (_first_call_seconds(vocab, Path(folder)) for _ in range(2))
        print(f"text: {sum(path.stat().st_size for path in paths) / 1e6:.2f} MB in {len(paths)} file(s)")
        print(f"not in the runs: first call {cold:.2f} s to compile, {warm:.2f} s to load the compiled code from cache")
        sides: dict[str, Callable[[], Samples]] = {
            "plain Python": lambda: reference_prepare.prepare(paths, reference_prepare.read_vocab(vocab), options),
            "dataloading": lambda: _prepare(paths, vocab, options),
        }
        sizes = options.max_seq_length, options.max_predictions_per_seq
        info = DatasetInfo.of(Vocabulary.from_file(vocab), *sizes, asdict(options))
        sides["dataloading"]()  # loads what is compiled
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        with_writing: dict[str, list[float]] = {name: [] for name in sides}
        # Digests of the shards: equal files are the proof that both sides do the same.
        digests: set[str] = set()
        count = 0
        for turn in range(rounds):
            for name, prepare in sides.items():
                shards = Path(folder) / f"{name}-{turn}"
                # Garbage of the other side must not be collected on this one's time.
                gc.collect()
                started = time.perf_counter()
                samples = prepare()
                seconds[name].append(time.perf_counter() - started)
                # By the same code on both sides, and timed apart.
                write_dataset(shards, samples, shards=1, info=info)
                with_writing[name].append(time.perf_counter() - started)
                dataset = open_dataset(shards)
                digests.add(dataset.shards[0].digest)
                count = len(dataset)
        if len(digests) != 1:
            sys.exit("error: the outputs differ; the times mean nothing")
    for name, runs in seconds.items():
        spread = f"{min(runs):.3f} to {max(runs):.3f}"
        median = statistics.median(runs)
        print(f"{name}: median {median:.3f} s of {rounds} ({spread}), {count / median:,.0f} samples/s")
    ratio, written_ratio = (
        statistics.median(times["plain Python"]) / statistics.median(times["dataloading"])
        for times in (seconds, with_writing)
    )
    if out:
        figures = {
            "samples": count,
            "dupe_factor": dupe_factor,
            "seconds": seconds,
            "seconds_with_writing": with_writing,
        }
        write_figures(out, figures | {"ratio": ratio, "ratio_with_writing": written_ratio})
    print(f"with writing and checking the shard: ratio {written_ratio:.1f}x")
    print(f"{count:,} samples, equal bit for bit; ratio {ratio:.1f}x")


def _prepare(paths: tuple[Path, ...], vocab: Path, options: PretrainingOptions) -> Samples:
    tokenizer = Tokenizer.from_vocab(vocab)
    return create_samples(tokenize_documents(read_documents(paths), tokenizer), options, tokenizer.vocabulary)


def _first_call_seconds(vocab: Path, cache: Path) -> float:
    """Seconds of the first call in a new process; the first process compiles, the next one finds the cache."""
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, str(vocab.resolve())],
        cwd=ROOT,
        # A cache of its own, which is empty: the user's may hold the compiled code already.
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


if __name__ == "__main__":
    tyro.cli(main)
