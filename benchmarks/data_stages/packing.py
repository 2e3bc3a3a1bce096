"""Pack a length histogram with ``dataloading.batches.packing`` and print the packing efficiency.

    python benchmarks/data_stages/packing.py [--histogram FILE] [--out FILE]

For comparison: Krell et al. (arXiv 2107.02027) publish 99.75 % real tokens with at most three sequences per row of 512.
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import tyro
from numpy.typing import NDArray

from benchmarks.conditions import write_figures
from cluster.model.histogram import HISTOGRAM, length_counts
from dataloading.batches.packing import pack_histogram

LIMITS = (3, 12, None)


def main(histogram: Path = HISTOGRAM, out: Path | None = None) -> None:
    """Print a line for each limit on the number of sequences per row.

    Args:
        histogram: CSV file with columns ``length`` and ``count``; the longest length is the capacity.
        out: Write the figures here as JSON.
    """
    lengths, counts = length_counts(histogram)
    by_length = np.zeros(lengths.max() + 1, np.int64)
    by_length[lengths] = counts
    pack_histogram(by_length, len(by_length) - 1, 3)  # loads SciPy before timing starts
    figures = [packed(by_length, limit) for limit in LIMITS]
    print(f"{int(counts.sum()):,} sequences, {int(lengths @ counts) / int(counts.sum()):.1f} tokens on average")
    for figure in figures:
        print(
            f"at most {figure['max_sequences'] or 'any number of'} sequences a row: {figure['packs']:,} rows, "
            f"{figure['efficiency']:.4%} real tokens (at most {figure['efficiency_bound']:.4%}), {figure['seconds']:.2f} s"
        )
    if out:
        write_figures(out, {"algorithms": figures})


def packed(by_length: NDArray[np.int64], limit: int | None) -> dict[str, Any]:
    """Pack a histogram [capacity + 1] and return the figures. Exit if a pack is too long or a sequence is missing."""
    capacity, started = len(by_length) - 1, time.perf_counter()
    strategy = pack_histogram(by_length, capacity, limit)
    seconds = time.perf_counter() - started
    slots = np.zeros_like(by_length)
    for combination, number in zip(strategy.combinations, strategy.counts, strict=True):
        if sum(combination) > capacity:
            sys.exit(f"error: {combination} is over the capacity")
        for length in combination:
            slots[length] += number
    if (slots < by_length).any():
        sys.exit("error: sequences were left out")
    packs = int(sum(strategy.counts))
    return {
        "max_sequences": limit,
        "packs": packs,
        "efficiency": strategy.tokens / (packs * capacity),
        "efficiency_bound": strategy.efficiency_bound,
        "seconds": seconds,
    }


if __name__ == "__main__":
    tyro.cli(main)
