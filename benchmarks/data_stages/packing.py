"""Pack Wikipedia's sequence lengths with ``dataloading.batches.packing`` and print the packing efficiency.

    python benchmarks/data_stages/packing.py [--out FILE]

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
from cluster.model.histogram import length_counts
from dataloading.batches.packing import pack_histogram

LIMITS = (3, 12, None)


def main(out: Path | None = None) -> None:
    """Print a line for each limit on the number of sequences per row.

    Args:
        out: Write the figures here as JSON.
    """
    lengths, counts = length_counts()
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
    """Pack a histogram [capacity + 1], and return the figures."""
    started = time.perf_counter()
    strategy = pack_histogram(by_length, len(by_length) - 1, limit)
    seconds = time.perf_counter() - started
    return {
        "max_sequences": limit,
        "packs": strategy.packs,
        "efficiency": strategy.efficiency,
        "efficiency_bound": strategy.efficiency_bound,
        "seconds": seconds,
    }


if __name__ == "__main__":
    tyro.cli(main)
