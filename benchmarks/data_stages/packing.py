"""Pack Wikipedia's sequence lengths with ``dataloading.batches.packing`` and print the packing efficiency.

    python benchmarks/data_stages/packing.py [--out FILE]

For comparison: Krell et al. (arXiv 2107.02027) publish 99.75 % real tokens with at most three sequences per row of 512.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import tyro

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
    capacity = len(by_length) - 1
    pack_histogram(by_length, capacity, 3)  # loads SciPy before timing starts
    print(f"{int(counts.sum()):,} sequences, {int(lengths @ counts) / int(counts.sum()):.1f} tokens on average")
    figures = []
    for limit in LIMITS:
        started = time.perf_counter()
        strategy = pack_histogram(by_length, capacity, limit)
        seconds = time.perf_counter() - started
        shares = {"efficiency": strategy.efficiency, "efficiency_bound": strategy.efficiency_bound}
        figures.append({"max_sequences": limit, "packs": strategy.packs, **shares, "seconds": seconds})
        print(
            f"at most {limit or 'any number of'} sequences a row: {strategy.packs:,} rows, "
            f"{strategy.efficiency:.4%} real tokens (at most {strategy.efficiency_bound:.4%}), {seconds:.2f} s"
        )
    if out:
        write_figures(out, {"algorithms": figures})


if __name__ == "__main__":
    tyro.cli(main)
