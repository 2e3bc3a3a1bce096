"""Lengths of Wikipedia sequences at maximum length 512, from the shipped histogram.

The histogram counts 16,279,552 sequences with a mean of 255.8 tokens. Graphcore published it with Krell, Kosec, Perez and
Fitzgibbon, *Efficient Sequence Packing without Cross-contamination*, arXiv 2107.02027.

This module imports only NumPy, because the GPU measurements run where little else is installed.
"""

import functools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@functools.cache
def length_counts() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the lengths that occur, ascending, and the number of sequences of each length."""
    path = Path(__file__).with_name("wikipedia_length_histogram.csv")
    lengths, counts = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.int64, unpack=True)
    return lengths, counts


def drawn_lengths(generator: np.random.Generator, count: int) -> NDArray[np.int64]:
    lengths, counts = length_counts()
    return generator.choice(lengths, count, p=counts / counts.sum())
