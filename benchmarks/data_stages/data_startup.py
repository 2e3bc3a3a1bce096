"""Ranks of a host that each read their own samples, against one that reads whole shards and broadcasts them.

    python benchmarks/data_stages/data_startup.py [--samples N] [--ranks N] [--folder DIR] [--rounds N] [--out FILE]

Both end with every rank's samples assembled: of all in the data set, and of 3 %, which is the part of Wikipedia that a run
takes. The files are not cached when a round begins. Read by itself, every rank maps the same files. Broadcast, rank 0 reads
each shard in one piece and sends it to the others over gloo on loopback; all keep it in memory (/dev/shm) and take their
samples from there. Bytes are those that the system fetched from the disk for each process (/proc/self/io).
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch.multiprocessing.spawn import spawn

from benchmarks.conditions import write_figures
from benchmarks.inputs import write_made_up_set
from dataloading.dataset.folder import open_dataset

PARTS = (1.0, 0.03)


def main(
    samples: int = 100_000, ranks: int = 4, folder: Path | None = None, rounds: int = 3, out: Path | None = None
) -> None:
    """Print bytes and seconds of both ways, and the ratio last.

    Args:
        samples: Samples in the data set, of about 0.9 kB.
        ranks: Processes, on this machine.
        folder: Where the data set is put: a folder on the disk that is measured. By default the system's for such files.
        rounds: Runs of each; they alternate.
        out: Write the figures here as JSON.
    """
    with tempfile.TemporaryDirectory(dir=folder) as own:
        source = Path(own) / "set"
        lengths = np.random.default_rng(0).integers(3, 512, samples)
        write_made_up_set(source, lengths)
        found = Path(own) / "found.pt"
        # Processes of their own, as ranks are: threads would have one account of reads together.
        spawn(_rank, (ranks, source, rounds, found), nprocs=ranks)
        figures = torch.load(found, weights_only=True)
        size = sum(path.stat().st_size for path in source.iterdir())
    # In memory or on a file system without an account of reads, both ways would look free.
    if not any(sum(figure["bytes_from_disk"]) for figure in figures):
        print("error: nothing was read from a disk: give a folder on one with --folder", file=sys.stderr)
        raise SystemExit(2)
    for figure in figures:
        shares = ", ".join(f"{count / size:.2f}" for count in figure["bytes_from_disk"])
        place = f"{figure['part']:.0%} of {samples:,} samples, {figure['way']}"
        print(f"{place}: {figure['seconds']:.2f} s; from the disk, of the files' size, by rank: {shares}")
    if out:
        write_figures(out, {"samples": samples, "ranks": ranks, "files_bytes": size, "ways": figures})
    seconds = {(figure["part"], figure["way"]): figure["seconds"] for figure in figures}
    for part in PARTS:
        ratio = seconds[part, "broadcast"] / seconds[part, "each by itself"]
        print(f"{part:.0%}: time of broadcast over each by itself: {ratio:.1f}x")


def _rank(rank: int, ranks: int, source: Path, rounds: int, found: Path) -> None:
    # Ranks share the cores.
    torch.set_num_threads(1)
    # A file as the meeting place: no port has to be free.
    dist.init_process_group("gloo", init_method=f"file://{found}.store", rank=rank, world_size=ranks)
    ways: dict[str, Callable[[Path, float], None]] = {"each by itself": _by_itself, "broadcast": _broadcast}
    figures = []
    for part in PARTS:
        rows: dict[str, list[tuple[float, list[int]]]] = {name: [] for name in ways}
        for _ in range(rounds):
            # Ways alternate within a round, so that a slow moment of the disk falls on both.
            for name, way in ways.items():
                rows[name].append(_measured(way, source, part))
        for name, measured in rows.items():
            seconds, read = sorted(measured)[len(measured) // 2]  # the bytes of the round whose seconds count
            figures.append({"part": part, "way": name, "seconds": seconds, "bytes_from_disk": read})
    if rank == 0:
        torch.save(figures, found)
    dist.barrier()
    dist.destroy_process_group()


def _measured(way: Callable[[Path, float], None], source: Path, part: float) -> tuple[float, list[int]]:
    """Seconds on the slowest rank, and each rank's bytes from the disk."""
    # Nobody may still be reading when the pages are dropped.
    dist.barrier()
    # One rank is enough: the page cache is the host's.
    if dist.get_rank() == 0:
        for path in source.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # the cache keeps what is not on the disk yet
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    # Nor may anybody begin before they are dropped.
    dist.barrier()
    before, begin = _read_bytes(), time.perf_counter()
    way(source, part)
    seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    counts = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    # One slot for each rank, so that a sum gathers them.
    counts[dist.get_rank()] = _read_bytes() - before
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(counts)
    return seconds.item(), counts.tolist()


def _by_itself(folder: Path, part: float) -> None:
    dataset = open_dataset(folder)
    dataset._verified_in_passing = False  # as one of many shards, which are not read for their digests
    count = int(part * len(dataset))
    # The same permutation on all ranks, strided: their samples are disjoint, as in training.
    own = np.random.default_rng(1).permutation(len(dataset))[:count][dist.get_rank() :: dist.get_world_size()]
    for start in range(0, len(own), 64):
        dataset.take(own[start : start + 64])


def _broadcast(source: Path, part: float) -> None:
    # /dev/shm is memory: what has been broadcast must not be read from the disk a second time.
    copy = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        # Sorted: all ranks must broadcast the same file at the same time.
        for path in sorted(source.iterdir()):
            content = torch.empty(path.stat().st_size, dtype=torch.uint8)
            if dist.get_rank() == 0:
                content = torch.from_numpy(np.fromfile(path, np.uint8))
            dist.broadcast(content, src=0)
            content.numpy().tofile(copy / path.name)
        _by_itself(copy, part)
    finally:
        shutil.rmtree(copy)


def _read_bytes() -> int:
    # read_bytes counts what came from the device, not what the cache served.
    return int(Path("/proc/self/io").read_text().partition("\nread_bytes: ")[2].split()[0])


if __name__ == "__main__":
    tyro.cli(main)
