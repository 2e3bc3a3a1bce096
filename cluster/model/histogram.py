"""Lengths of Wikipedia sequences at maximum length 512, from the shipped histogram.

The GPU measurements read them where only PyTorch, Triton and NumPy are installed.
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
