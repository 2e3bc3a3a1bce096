"""Measure how evenly global batches are dealt to 8 to 4,096 ranks, and what a plan costs over 156 million samples.

    python benchmarks/data_stages/plan.py [--quick] [--out FILE]

Global batches of sequences drawn from a length histogram are dealt four ways: in the order drawn; sorted by length and then
one after another; as the plan deals them; and with unequal numbers of sequences, the longest first and each to the rank with
the least work so far, which shows what equal numbers cost. An imbalance is the largest share over the mean one: a step takes
so many times as long as in perfect balance. Every deal is checked to hold each sequence once.

No dealing of equal numbers goes below the least imbalance of tokens that is printed for few sequences a rank: below it, even
the linear program over all combinations of that many lengths, fractions of combinations allowed, needs more ranks than there
are (`dataloading.batches.packing_strategy`, whose packs are shares here).

The plan's own cost is taken in processes of their own that open a made-up data set as training does: a length index of
156 million samples on disk, already in the system's cache, and no shards.
"""

import heapq
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import tyro
from numpy.typing import NDArray

from cluster.model.histogram import HISTOGRAM, drawn_lengths
from dataloading.batches.packing_strategy import pack_histogram
from dataloading.batches.sampler import BatchPlan, cost, deal
from dataloading.dataset.folder import open_dataset
from dataloading.dataset.manifest import write_metadata
from dataloading.shards.shard import DatasetInfo, ShardRecord

SAMPLES = 156_000_000
STEPS = 20

SHARES = (
    *((8, 56), (8, 96), (64, 48), (64, 72), (128, 24), (512, 6)),
    *((1024, 4), (3072, 4), (4096, 4), (1024, 3), (1024, 2)),
)
"""Ranks, and sequences a rank: those of published results, and fewer."""

BOUNDED = ((4096, 4), (1024, 3), (1024, 2))
"""Ranks, and sequences a rank, of which the bound is computed: some ten seconds each."""

BATCHES = ((3072, 64), (3072, 512), (12288, 3072), (16384, 4096))
"""Global batch sizes and ranks over which the plan is timed."""

Groups = list[NDArray[np.int64]]


def main(
    histogram: Path = HISTOGRAM,
    batches: int = 100,
    samples: int = SAMPLES,
    quick: bool = False,
    out: Path | None = None,
) -> None:
    """Print a table of imbalances, a table of times and memory, and last the imbalance at 64 ranks.

    Args:
        histogram: CSV file with columns ``length`` and ``count``.
        batches: Global batches dealt of each kind.
        samples: Samples of the data set over which the plan is timed.
        quick: Three batches of each kind, 100,000 samples, and fewer ranks: to see that it works.
        out: Write the figures here as JSON.
    """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if quick:
        batches, samples = 3, 100_000
    generator = np.random.default_rng(0)
    print(f"imbalance (largest share over the mean one) of tokens / of work; means over {batches} global batches")
    print(f"{'ranks':>6}{'each':>6}" + "".join(f"{name:>20}" for name in DEALS) + f"{'ours, worst':>20}{'ms':>8}")
    rows = []
    for ranks, sequences in SHARES:
        # Drawn once for all deals of a row.
        drawn = [drawn_lengths(generator, ranks * sequences, histogram) for _ in range(batches)]
        row: dict[str, Any] = {"ranks": ranks, "sequences": sequences} | {
            name: _imbalances(drawn, ranks, DEALS[name]) for name in DEALS
        }
        rows.append(row)
        means = "".join(f"{_pair(row[name], 'mean'):>20}" for name in DEALS)
        print(f"{ranks:6}{sequences:6}{means}{_pair(row['ours'], 'worst'):>20}{row['ours']['ms']:8.2f}", flush=True)
    bounds = []
    for ranks, sequences in BOUNDED[-1:] if quick else BOUNDED:
        least = least_imbalance(drawn_lengths(generator, ranks * sequences, histogram), ranks)
        bounds.append({"ranks": ranks, "sequences": sequences, "tokens": least})
        print(f"{ranks:6}{sequences:6}  no dealing has an imbalance of tokens below {least:.4f}", flush=True)
    # Drawn for a million at most, and repeated up to `samples`.
    lengths = drawn_lengths(generator, min(samples, 1 << 20), histogram)
    plans = _timed_plans(lengths, samples, BATCHES[::3] if quick else BATCHES)
    if out:
        # It brings in torch, which the processes that are measured do without.
        from benchmarks.conditions import write_figures

        figures = {"batches": batches, "imbalance": rows, "bounds": bounds, "samples": samples, "plans": plans}
        write_figures(out, figures, ("numpy",))
    at_64 = next(row for row in rows if (row["ranks"], row["sequences"]) == (64, 48))
    shown = ", ".join(f"{name} {at_64[name]['tokens']['mean']:.4f}" for name in DEALS)
    print(f"tokens at 64 ranks of 48 sequences: {shown}")


def measure(folder: str, global_batch_size: int, world_size: int) -> None:
    """Print as JSON what opening a data set and planning 20 steps for the last rank takes: run in a process of its own."""
    started = time.perf_counter()
    dataset = open_dataset(Path(folder))
    plan = BatchPlan(dataset.lengths, dataset.masked_counts, global_batch_size, world_size, 1, seed=1)
    opened = time.perf_counter()
    steps = []
    for step in range(STEPS):
        begun = time.perf_counter()
        # One rank's steps tell: every rank plans the whole global batch, and picks its own part.
        plan.rank_batches(step, world_size - 1)
        steps.append(time.perf_counter() - begun)
    figures = {
        "seconds_to_open": opened - started,
        "seconds": time.perf_counter() - started,
        "step_ms": [1000 * seconds for seconds in steps],
        "peak_mb": _peak_bytes() / 1e6,
    }
    print(json.dumps(figures))


def least_imbalance(lengths: NDArray[np.int64], ranks: int) -> float:
    """Return an imbalance of tokens that no dealing of equal numbers of sequences to ``ranks`` goes below."""
    sequences = len(lengths) // ranks
    mean = lengths.sum() / ranks

    # The bound packs lengths into shares of so many tokens: needing more shares than ranks excludes it.
    def is_excluded(tokens: int) -> bool:
        counts = np.zeros(tokens + 1, np.int64)
        found = np.bincount(lengths)
        counts[: len(found)] = found
        return pack_histogram(counts, tokens, sequences).bound > ranks

    # No share is smaller than the mean, nor than the longest sequence.
    low = max(math.ceil(mean), int(lengths.max()))
    if not is_excluded(low):
        return low / mean
    high = low + math.ceil(mean / 8)  # farther off than any deal here
    # Bisection: what is excluded for some tokens is excluded for fewer.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_excluded(middle) else (low, middle)
    return high / mean


def _unequal_numbers(lengths: NDArray[np.int64], ranks: int) -> Groups:
    cost_N = cost(lengths).tolist()
    shares: list[list[int]] = [[] for _ in range(ranks)]
    # A heap gives the rank with the least work in logarithmic time.
    least = [(0, rank) for rank in range(ranks)]
    for sequence in np.argsort(-lengths, kind="stable").tolist():
        so_far, rank = least[0]
        shares[rank].append(sequence)
        heapq.heapreplace(least, (so_far + cost_N[sequence], rank))
    return [np.array(share) for share in shares]


DEALS: dict[str, Callable[[NDArray[np.int64], int], Groups]] = {
    "random": lambda lengths, ranks: list(np.arange(len(lengths)).reshape(ranks, -1)),
    "sorted, strided": lambda lengths, ranks: list(np.argsort(-lengths, kind="stable").reshape(-1, ranks).T),
    "ours": lambda lengths, ranks: list(deal(lengths, ranks)),
    "unequal numbers": _unequal_numbers,
}


def _imbalances(
    drawn: list[NDArray[np.int64]], ranks: int, dealt_by: Callable[[NDArray[np.int64], int], Groups]
) -> dict[str, Any]:
    """Mean and worst imbalance of tokens and of work, and the median time of a deal in ms."""
    found: dict[str, list[float]] = {"tokens": [], "work": []}
    seconds = []
    for lengths in drawn:
        started = time.perf_counter()
        # Only the deal is timed, not the check.
        groups = dealt_by(lengths, ranks)
        seconds.append(time.perf_counter() - started)
        if not np.array_equal(np.sort(np.concatenate(groups)), np.arange(len(lengths))):
            sys.exit("error: a deal left sequences out; the figures mean nothing")
        for name, weight in (("tokens", lengths), ("work", cost(lengths))):
            shares = np.array([weight[group].sum() for group in groups])
            found[name].append(float(shares.max() / shares.mean()))
    figures: dict[str, Any] = {
        name: {"mean": statistics.mean(values), "worst": max(values)} for name, values in found.items()
    }
    return figures | {"ms": 1000 * statistics.median(seconds)}


def _pair(figures: dict[str, Any], statistic: str) -> str:
    return f"{figures['tokens'][statistic]:.4f} / {figures['work'][statistic]:.4f}"


def _timed_plans(
    lengths: NDArray[np.int64], samples: int, batches: tuple[tuple[int, int], ...]
) -> list[dict[str, Any]]:
    """The cost of the plan over a data set of ``samples`` whose lengths repeat the given ones."""
    print(f"\nplan over {samples:,} samples, {STEPS} steps of one rank")
    print(
        f"{'batch':>6}{'ranks':>6}{'to open':>10}{'in all':>10}{'a step, median':>16}{'longest':>10}{'peak memory':>14}"
    )
    plans = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _write_made_up_index(folder, lengths, samples)
        # Processes of their own: memory that this one has had would count for the plan.
        for global_batch_size, ranks in batches:
            code = f"from benchmarks.data_stages import plan; plan.measure({temporary!r}, {global_batch_size}, {ranks})"
            done = subprocess.run(
                [sys.executable, "-c", code],
                cwd=Path(__file__).resolve().parents[2],
                stdout=subprocess.PIPE,
                check=True,
            )
            plan = json.loads(done.stdout)
            plans.append({"global_batch_size": global_batch_size, "ranks": ranks} | plan)
            print(
                f"{global_batch_size:6}{ranks:6}{plan['seconds_to_open']:8.2f} s{plan['seconds']:8.2f} s"
                f"{statistics.median(plan['step_ms']):13.2f} ms{max(plan['step_ms']):7.2f} ms{plan['peak_mb']:11.0f} MB",
                flush=True,
            )
    return plans


def _write_made_up_index(folder: Path, lengths: NDArray[np.int64], samples: int) -> None:
    # The index alone, without shards: the plan reads nothing else.
    tokens = np.resize(lengths.astype(np.uint16), samples)
    masked = np.maximum(1, tokens * np.float32(0.15)).astype(np.uint16)
    record = ShardRecord("part_00000_of_00001.hdf5", samples, int(tokens.sum()), int(masked.sum()), "", 0)
    write_metadata(folder, [record], tokens, masked, DatasetInfo(30522, 512, 76, "", "", {}, {}))


def _peak_bytes() -> int:
    """The most memory this process has had, shared pages of the length index included.

    Not ``ru_maxrss``, which begins with the size of the process that started this one.
    """
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


if __name__ == "__main__":
    tyro.cli(main)
