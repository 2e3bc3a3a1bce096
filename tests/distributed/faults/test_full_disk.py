"""Disks fill up during a run. Small tmpfs mounts hold the checkpoints or the results."""

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import SmallRun
from tests.distributed.faulty import faulty
from tests.distributed.ranks import Ranks, program, records
from tests.programs import PATIENCE_S, Program

FULL = os.strerror(errno.ENOSPC)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Function that mounts a disk with a size in KiB and returns its folder."""
    mounted: list[Path] = []

    def mount(kibibytes: int) -> Path:
        folder = tmp_path / f"disk_{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("a tmpfs cannot be mounted here: it needs root")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


Disk = Callable[[int], Path]


def test_a_checkpoint_that_does_not_fit_is_a_warning_and_the_one_before_stays(
    small_run: SmallRun, tmp_path: Path, disk: Disk
) -> None:
    folder = disk(2000)
    settings = {"training__max_samples": 16 * 12, "evaluation__interval_samples": 96, "checkpoint__every_steps": 4}
    arguments = small_run.arguments(tmp_path, checkpoint__folder=folder, **settings)
    process = Program(*program(faulty, ["fill:0", *arguments]), DISK=folder)
    assert process.wait(PATIENCE_S) == 1, process.output
    assert [record["step"] for record in records(tmp_path, "step")] == list(range(1, 13))
    texts = [str(record["text"]) for record in records(tmp_path, "warning")]
    assert texts == [f"no checkpoint was written: {folder}/step_{step:08d}: {FULL}" for step in (8, 12)]
    assert [record["status"] for record in records(tmp_path, "end")] == ["aborted"]
    assert {path.name for path in folder.iterdir()} - {"ballast", ".lock"} == {"step_00000004"}
    changes = settings | {"checkpoint__folder": None, "resume": folder}
    process = Program("bert.train", small_run.arguments(tmp_path / "resumed", **changes))
    assert process.wait(PATIENCE_S) == 1, process.output
    assert [record["step"] for record in records(tmp_path / "resumed", "step")] == list(range(5, 13))


@pytest.mark.parametrize("count", [1, 2])
def test_a_file_that_cannot_be_written_ends_the_run_with_one_line(
    small_run: SmallRun, disk: Disk, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = disk(18_000)
    monkeypatch.setenv("DISK", str(folder))
    arguments = small_run.arguments(folder, training__max_samples=10_000_000)
    with Ranks(["fill:0", *arguments], count, faulty) as ranks:
        assert ranks.ends() == [2] * count, ranks.output
    [message] = ranks.errors
    written = folder / "tiny_cpu" / "bert"
    assert any(message.endswith(f": {written / name}: {FULL}") for name in ("result_0.txt", "metrics_0.jsonl"))
    assert "Traceback" not in ranks.output
    assert "Exception" not in ranks.output
    *whole, _ = (written / "metrics_0.jsonl").read_text().splitlines()
    # A busy machine may cause warnings about slow ranks.
    assert {json.loads(line)["event"] for line in whole} - {"warning"} == {"run", "step", "eval"}
    text = (written / "result_0.txt").read_text()
    assert '"run_start"' in text
    assert '"success"' not in text  # the status may be "aborted", or missing without room for it
