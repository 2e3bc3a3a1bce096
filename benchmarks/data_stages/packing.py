"""Packing of a length histogram: ``dataloading.batches.packing`` against the published algorithms, on one core.

    python benchmarks/data_stages/packing.py [--histogram FILE] [--rounds N] [--out FILE]

The published ones are shortest-pack-first and longest-pack-first histogram packing and non-negative least squares, written
anew from their description (``published_packing.py``). All pack the same histogram in the same process and are checked to
hold every sequence. Runs alternate; least squares, which takes long, runs once. Loading SciPy is not part of the runs.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import tyro
from numpy.typing import NDArray
from scipy import optimize, sparse  # noqa: F401  # loaded before the runs

from benchmarks.conditions import write_figures
from benchmarks.data_stages import published_packing
from cluster.model.histogram import HISTOGRAM, length_counts
from dataloading.batches.packing_strategy import PackingStrategy, pack_histogram

LIMITS = (3, 12, None)


def main(histogram: Path = HISTOGRAM, rounds: int = 5, out: Path | None = None) -> None:
    """Print a table of efficiencies and times, and last what the packs of the best published one cost over ours.

    Args:
        histogram: CSV file with columns ``length`` and ``count``; the longest length is the capacity.
        rounds: Runs of each algorithm.
        out: Write the figures here as JSON.
    """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    counts = read_histogram(histogram)
    strategies = {limit: pack_histogram(counts, len(counts) - 1, limit) for limit in LIMITS}
    runs = _algorithms(counts)
    seconds: dict[tuple[str, int | None], list[float]] = {key: [] for key in runs}
    packs: dict[tuple[str, int | None], int] = {}
    for turn in range(rounds):
        for key, algorithm in runs.items():
            if turn and key[0] == "least squares":
                continue
            started = time.perf_counter()
            packing = algorithm()
            seconds[key].append(time.perf_counter() - started)
            # Checked in each run: a faster algorithm that leaves sequences out is no algorithm.
            packs[key] = _checked_packs(packing, counts)
    figures = [_figure(key, packs[key], seconds[key], strategies[key[1]]) for key in runs]
    print(f"{int(counts.sum()):,} sequences, {strategies[None].tokens / counts.sum():.1f} tokens on average")
    print(f"{'algorithm':<20}{'k':>10}{'packs':>12}{'real tokens':>13}{'at most':>10}{'seconds':>10}  spread")
    for figure in figures:
        spread = f"{min(figure['seconds']):.3f} to {max(figure['seconds']):.3f} of {len(figure['seconds'])}"
        print(
            f"{figure['algorithm']:<20}{figure['max_sequences'] or 'unlimited':>10}{figure['packs']:>12,}"
            f"{figure['efficiency']:>13.4%}{figure['efficiency_bound']:>10.4%}{figure['median_seconds']:>10.3f}  {spread}"
        )
    ratios = {str(limit or "unlimited"): _padding_ratio(figures, limit) for limit in LIMITS}
    if out:
        write_figures(out, {"algorithms": figures, "padding_ratio": ratios}, ("numpy", "scipy"))
    shown = ", ".join(f"k={limit}: {ratio:.2f}x" for limit, ratio in ratios.items())
    print(f"padding of the best published algorithm over ours: {shown}")


def read_histogram(path: Path) -> NDArray[np.int64]:
    """[longest + 1] sequences of each length."""
    lengths, counts = length_counts(path)
    by_length = np.zeros(lengths.max() + 1, np.int64)
    by_length[lengths] = counts
    return by_length


def _algorithms(counts: NDArray[np.int64]) -> dict[tuple[str, int | None], Callable[[], published_packing.Packing]]:
    """Return the algorithms by name and limit."""

    def ours(limit: int | None) -> published_packing.Packing:
        strategy = pack_histogram(counts, len(counts) - 1, limit)
        return published_packing.Packing(dict(zip(strategy.combinations, strategy.counts, strict=True)))

    runs: dict[tuple[str, int | None], Callable[[], published_packing.Packing]] = {}
    for limit in LIMITS:
        runs["shortest pack first", limit] = partial(published_packing.shortest_pack_first, counts, limit)
        runs["longest pack first", limit] = partial(published_packing.longest_pack_first, counts, limit)
        # With a larger limit there are too many combinations for a matrix.
        if limit == 3:
            runs["least squares", limit] = partial(published_packing.least_squares, counts, 3)
        runs["ours", limit] = partial(ours, limit)
    return runs


def _checked_packs(packing: published_packing.Packing, counts: NDArray[np.int64]) -> int:
    """Number of packs; they must have a slot for every sequence and hold no more than fits."""
    slots = np.zeros_like(counts)
    for combination, number in packing.items():
        if sum(combination) >= len(counts):
            sys.exit(f"error: {combination} is over the capacity; the figures mean nothing")
        for length in combination:
            # Slots may be more than sequences: what least squares leaves empty is padding.
            slots[length] += number
    if (slots < counts).any():
        sys.exit("error: an algorithm left sequences out; the figures mean nothing")
    return packing.total()


def _figure(key: tuple[str, int | None], packs: int, seconds: list[float], ours: PackingStrategy) -> dict:
    return {
        "algorithm": key[0],
        "max_sequences": key[1],
        "packs": packs,
        # Real tokens over all slots of all packs.
        "efficiency": ours.tokens / (packs * ours.capacity),
        "efficiency_bound": ours.efficiency_bound,
        "median_seconds": statistics.median(seconds),
        "seconds": seconds,
    }


def _padding_ratio(figures: list[dict], limit: int | None) -> float:
    """Padding tokens of the best published algorithm over ours, at one limit."""
    padding = {
        figure["algorithm"]: 1 / figure["efficiency"] - 1 for figure in figures if figure["max_sequences"] == limit
    }
    ours = padding.pop("ours")
    return min(padding.values()) / ours


if __name__ == "__main__":
    tyro.cli(main)
