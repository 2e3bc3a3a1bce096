"""Work that is timed on a device."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.probe.computing import READ_BYTES, cells_of


def read_from_disk(action: Callable[[], object]) -> int:
    """Bytes that the system fetched for this process meanwhile."""

    def count() -> int:
        return int(Path("/proc/self/io").read_text().partition("\nread_bytes: ")[2].split()[0])

    before = count()
    action()
    return count() - before


def read_again(path: Path) -> None:
    """Read a file after what the page cache has of it is dropped."""
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.read()


def test_data_are_read_from_where_they_are_stored_each_time(tmp_path: Path) -> None:
    """The largest files first, and no more than is asked for."""
    (tmp_path / "small").write_bytes(bytes(2**20))
    (tmp_path / "large").write_bytes(bytes(READ_BYTES))
    if not Path("/proc/self/io").exists() or not read_from_disk(lambda: read_again(tmp_path / "large")):
        pytest.skip("this system does not say what is read from the disk, or the folder is in memory")
    cell = cells_of(torch.device("cpu"), tmp_path)[-1]
    assert (cell.quantity, cell.size) == ("read", READ_BYTES)
    for _ in range(2):
        assert READ_BYTES / 2 < read_from_disk(cell.action) < READ_BYTES * 3 / 2
