"""A disk fills up during a run. A small tmpfs mount holds the results."""

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SmallRun
from tests.distributed.faulty import faulty
from tests.distributed.ranks import Ranks

FULL = os.strerror(errno.ENOSPC)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Mount a small disk, set ``$DISK`` to its folder, and yield the folder."""
    (folder := tmp_path / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=18000k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here: it needs root")
    monkeypatch.setenv("DISK", str(folder))
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("count", [1, 2])
def test_a_full_disk_ends_the_run_with_one_error_line(small_run: SmallRun, disk: Path, count: int) -> None:
    arguments = small_run.arguments(disk, training__max_samples=10_000_000)
    with Ranks(["fill:0", *arguments], count, faulty) as ranks:
        assert ranks.ends() == [2] * count, ranks.output
    [message] = ranks.errors
    written = disk / "tiny_cpu" / "bert"
    assert any(message.endswith(f": {written / name}: {FULL}") for name in ("result_0.txt", "metrics_0.jsonl"))
    assert "Traceback" not in ranks.output
    assert "Exception" not in ranks.output
    *whole, _ = (written / "metrics_0.jsonl").read_text().splitlines()
    # A busy machine may cause warnings about slow ranks.
    assert {json.loads(line)["event"] for line in whole} - {"warning"} == {"run", "step", "eval"}
    text = (written / "result_0.txt").read_text()
    assert '"run_start"' in text
    assert '"success"' not in text  # the status is "aborted", or is missing because the disk is full
