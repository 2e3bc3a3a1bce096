"""Disks fill up during a run. Small tmpfs mounts hold the checkpoints or the results."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bert.guards.faults import ended_together
from bert.log.mllog import MLLog
from bert.parallel.mesh import Mesh
from bert.train import parse
from tests.conftest import SmallRun
from tests.distributed.faulty import faulty
from tests.distributed.ranks import Ranks, program, records
from tests.programs import PATIENCE_S, REPOSITORY, Program

FULL = os.strerror(errno.ENOSPC)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a disk of the given size in KiB."""
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


def strict(line: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(line, parse_constant=refuse)


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
    # On a busy machine there may be warnings of slow ranks.
    assert {strict(line)["event"] for line in whole} - {"warning"} == {"run", "step", "eval"}
    text = (written / "result_0.txt").read_text()
    assert '"run_start"' in text
    assert '"success"' not in text  # if the metrics failed first, the log may have room to end as aborted


def test_a_run_goes_on_when_nobody_reads_its_output(small_run: SmallRun, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as output:
        command = [sys.executable, "-m", "bert.train", *small_run.arguments(tmp_path)]
        process = subprocess.run(command, cwd=REPOSITORY, stdout=output, stderr=output, timeout=PATIENCE_S, check=False)
    assert process.returncode == 1  # the target is missed
    assert [record["step"] for record in records(tmp_path, "step")] == list(range(1, 11))
    assert [record["status"] for record in records(tmp_path, "end")] == ["aborted"]
    text = (tmp_path / "tiny_cpu/bert/result_0.txt").read_text()
    assert text.count(f"# standard output failed ({os.strerror(errno.EPIPE)})") == 1
    assert '"train_samples", "value": 160' in text


def test_a_fault_that_the_log_cannot_take_is_the_only_one(small_run: SmallRun, tmp_path: Path, disk: Disk) -> None:
    """Closing the log after a fault skips lines that cannot be written, and closes the file."""
    path = disk(8) / "system" / "bert" / "result_0.txt"
    path.parent.mkdir(parents=True)
    log = MLLog(path)
    log.event("init_start")
    with pytest.raises(OSError, match=FULL):
        fill(log)
    config = parse(small_run.arguments(tmp_path))
    with ended_together(config, Mesh(0, 1, 0, torch.device("cpu")), log) as watchdog:
        watchdog._on_fault("a fault")
    assert path not in open_files()


def fill(log: MLLog) -> None:
    for _ in range(1000):
        log.line("x" * 100)


def open_files() -> set[Path]:
    return {link.readlink() for link in Path("/proc/self/fd").iterdir() if link.exists()}
