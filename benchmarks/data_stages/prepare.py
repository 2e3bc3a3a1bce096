"""Compare the speed of text preparation on one core: ``dataloading`` and the reference algorithm in plain Python.

    python benchmarks/data_stages/prepare.py [--vocab FILE] [--text FILE ...] [--rounds N] [--dupe_factor N] [--out FILE]

Both implementations read the text, load the vocabulary, tokenize and draw samples. Their runs alternate in one process, and
their outputs must be equal. Compilation is not timed. By default, the input is the standard library's prose
(``dataloading.preparation.demo``) with the vocabulary that ships with the built-in recipe.
"""

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import tyro

from benchmarks.conditions import write_figures
from benchmarks.data_stages import reference_prepare
from benchmarks.inputs import write_demo_text
from bert.configuration.recipes import ARTIFACTS
from console.text import counted
from dataloading.options import PretrainingOptions
from dataloading.preparation.pretraining_data import create_samples
from dataloading.shards.samples import Samples
from dataloading.text.documents import read_documents
from dataloading.text.tokenization import Tokenizer, tokenize_documents
from dataloading.text.vocabulary import Vocabulary

SHIPPED_VOCAB = ARTIFACTS / "tiny_cpu" / "vocab.txt"


def main(
    vocab: Path = SHIPPED_VOCAB,
    text: tuple[Path, ...] = (),
    rounds: int = 3,
    dupe_factor: int = PretrainingOptions.dupe_factor,
    out: Path | None = None,
) -> None:
    """Print the median time of each implementation, and the ratio of the medians.

    Args:
        vocab: Vocabulary file, one token a line.
        text: Files with one sentence a line and an empty line between documents.
        rounds: Number of runs of each implementation.
        dupe_factor: Passes over the text, as in the reference script.
        out: Write the figures here as JSON.
    """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    options = PretrainingOptions(dupe_factor=dupe_factor)
    with tempfile.TemporaryDirectory() as folder:
        paths = text or (write_demo_text(Path(folder, "text.txt")),)
        print(f"text: {sum(path.stat().st_size for path in paths) / 1e6:.2f} MB in {counted(len(paths), 'file')}")

        def compiled() -> Samples:
            tokenizer = Tokenizer(Vocabulary.from_file(vocab), options.normalization)
            return create_samples(tokenize_documents(read_documents(paths), tokenizer), options, tokenizer.vocabulary)

        sides: dict[str, Callable[[], Samples]] = {
            "plain Python": lambda: reference_prepare.prepare(paths, reference_prepare.read_vocab(vocab), options),
            "dataloading": compiled,
        }
        sides["dataloading"]()  # the first call compiles Numba functions or loads them from their cache
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        first: Samples | None = None
        for _ in range(rounds):
            for name, prepare in sides.items():
                gc.collect()  # otherwise the next implementation might collect the garbage of the previous one
                started = time.perf_counter()
                samples = prepare()
                seconds[name].append(time.perf_counter() - started)
                first = first or samples
                if not equal(first, samples):
                    sys.exit("error: the outputs differ, so their times cannot be compared")
    count = len(samples)
    for name, runs in seconds.items():
        spread = f"{min(runs):.3f} to {max(runs):.3f}"
        median = statistics.median(runs)
        print(f"{name}: median {median:.3f} s of {rounds} ({spread}), {count / median:,.0f} samples/s")
    ratio = statistics.median(seconds["plain Python"]) / statistics.median(seconds["dataloading"])
    if out:
        write_figures(out, {"samples": count, "dupe_factor": dupe_factor, "seconds": seconds, "ratio": ratio})
    print(f"{count:,} samples, equal bit for bit; ratio {ratio:.1f}x")


def equal(one: Samples, other: Samples) -> bool:
    return all(np.array_equal(value, getattr(other, name)) for name, value in vars(one).items())


if __name__ == "__main__":
    tyro.cli(main)
