"""Work in several processes that can be interrupted: leftover files, and rejected options."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dataloading.jobs import begun, run_tasks
from tests.conftest import REPOSITORY
from tests.programs import wait_for


def die(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_no_process_and_a_killed_one_are_reported() -> None:
    assert list(run_tasks(die, [], 2)) == []
    with pytest.raises(ValueError, match="jobs is 0"):
        list(run_tasks(die, [1], 0))
    with pytest.raises(ValueError, match="a process was killed"):
        list(run_tasks(die, range(6), 2))


_PARENT = r"""
import os, sys, time
from dataloading.jobs import run_tasks

def work(number):
    os.write(1, f"{os.getpid()}\n".encode())  # at once, or lines of two processes mix
    time.sleep(3600)

list(run_tasks(work, [1, 2], 2))
"""


def test_processes_end_with_their_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(Path(f"/proc/{worker}/cmdline").exists() for worker in workers))


def test_a_failure_before_anything_is_finished_leaves_nothing(tmp_path: Path) -> None:
    def attempt(out: Path, finish: bool) -> None:
        with begun(out, "job.json", {"seed": 1}, finished="part_*"):
            (out / ".part_1.77.partial").touch()
            if finish:
                (out / "part_0").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(tmp_path / "new" / "deep", finish=False)
    assert not (tmp_path / "new" / "deep").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(KeyboardInterrupt):
        attempt(tmp_path / "empty", finish=False)
    assert not (tmp_path / "empty" / "job.json").exists()
    with pytest.raises(KeyboardInterrupt):
        attempt(tmp_path / "some", finish=True)
    with begun(tmp_path / "some", "job.json", {"seed": 1}, finished="part_*"):
        assert sorted(path.name for path in (tmp_path / "some").iterdir()) == ["job.json", "part_0"]


def test_others_at_work_in_the_folder_are_not_disturbed(tmp_path: Path) -> None:
    (tmp_path / ".job.json.5.partial").touch()
    with begun(tmp_path, "job.json", {}, finished="*", alone=False):
        (tmp_path / ".part_1.6.partial").touch()
    with begun(tmp_path, "job.json", {}, finished="*", alone=False):
        assert len(list(tmp_path.glob(".*.partial"))) == 2
