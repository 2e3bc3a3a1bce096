"""Ranks of a host share what one of them has read, and read little besides what they ask for: bytes from the disk."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dataloading.batches.synthetic import synthetic_samples
from dataloading.dataset.folder import Dataset, open_dataset, write_dataset
from dataloading.shards.shard import DatasetInfo
from tests.conftest import REPOSITORY
from tests.programs import PATIENCE_S

pytestmark = pytest.mark.measured  # other tests have the system drop what it has cached

RANK = """
import os
import sys
from pathlib import Path
import numpy as np
from dataloading.dataset.folder import open_dataset

def read_bytes():
    return int(Path("/proc/self/io").read_text().partition("\\nread_bytes: ")[2].split()[0])

folder, rank, world, count, opened = sys.argv[1], *map(int, sys.argv[2:])
dataset = open_dataset(Path(folder))
dataset._verified_in_passing = False  # as a large one
for index, record in enumerate(dataset.shards if opened else ()):
    dataset._shard(index).forget()
    with (dataset.folder / record.name).open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
chosen = np.random.default_rng(1).permutation(len(dataset))[:count][rank::world]
before = read_bytes()
for start in range(0, len(chosen), 64):
    dataset.take(chosen[start : start + 64])
print(read_bytes() - before)
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("large") / "set"
    lengths = np.random.default_rng(0).integers(3, 512, 20_000)
    info = DatasetInfo(30522, 512, 80, vocabulary_md5="", vocabulary_sha256="", options={}, sources={})
    write_dataset(folder, synthetic_samples(lengths, 30522), shards=4, info=info)
    made = open_dataset(folder)
    if not Path("/proc/self/io").exists() or sum(read_from_disk(made, ranks=1, samples=len(made))) < 1e6:
        pytest.skip("this system does not say what is read from the disk, or the folder is in memory")
    return made


def read_from_disk(dataset: Dataset, ranks: int, samples: int, opened: bool = False) -> list[int]:
    """Bytes that each rank had fetched from the disk, all at a time, for its share of random samples; nothing is cached.

    ``opened``: without what opening the shards reads.
    """
    for path in dataset.folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    numbers = [[str(number) for number in (rank, ranks, samples, int(opened))] for rank in range(ranks)]
    command = [sys.executable, "-c", RANK, str(dataset.folder)]
    running = [
        subprocess.Popen([*command, *rank], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) for rank in numbers
    ]
    outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in running]
    assert not any(process.returncode for process in running)
    return [int(output) for output in outputs]


def test_a_host_reads_each_shard_once_however_many_ranks_it_has(dataset: Dataset) -> None:
    size = sum(shard.file_bytes for shard in dataset.shards)
    shares = read_from_disk(dataset, ranks=3, samples=len(dataset))
    assert 0.9 * size < sum(shares) < 1.9 * size, (
        "three times, if each read for itself; some more where caches are dropped"
    )


def test_a_few_samples_cost_a_few_pages(dataset: Dataset) -> None:
    size = sum(shard.file_bytes for shard in dataset.shards)
    (read,) = read_from_disk(dataset, ranks=1, samples=200, opened=True)
    assert 200 * 4096 < read < 200 * 8 * 4096 < size / 2, (
        "ids, segments, positions, labels, offsets: a page each, or two"
    )
