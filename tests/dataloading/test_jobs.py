"""Resumable jobs in several processes: leftover files of an interrupted job, and rejected options."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dataloading.jobs import begun, run_tasks
from tests.conftest import REPOSITORY
from tests.programs import is_alive, wait_for


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


AT_ONCE = r"""
import os, sys
from pathlib import Path
from dataloading.jobs import begun

out = Path(sys.argv[1])

def begin_first(event, arguments):
    if event == "os.listdir" and not (out / "job.json").exists():
        (out / "job.json").write_text("{}")

out.mkdir()
sys.addaudithook(begin_first)
with begun(out, "job.json", {}, finished="part_*", alone=False):
    pass
"""


def test_two_processes_may_begin_the_same_job_at_once(tmp_path: Path) -> None:
    """The other process writes the description just before this one lists the folder."""
    subprocess.run([sys.executable, "-c", AT_ONCE, tmp_path / "out"], cwd=REPOSITORY, check=True)
    assert (tmp_path / "out" / "job.json").exists()


STOPPED = r"""
import os, sys, time
from pathlib import Path
from console.files import atomic_path
from console.interruption import end_in_order
from dataloading.jobs import begun, run_tasks

out, jobs = Path(sys.argv[1]), int(sys.argv[2])

def work(number):
    with atomic_path(out / f"part_{number}") as unfinished:
        unfinished.write_text("half")
        os.write(1, f"{os.getpid()}\n".encode())  # at once, or lines of two processes mix
        time.sleep(600)

end_in_order()
with begun(out, "job.json", {}, finished="part_*"):
    list(run_tasks(work, range(jobs), jobs))
"""


@pytest.mark.parametrize(
    ("number", "jobs"), [(signal.SIGTERM, 1), (signal.SIGHUP, 2), (signal.SIGINT, 2), (signal.SIGKILL, 2)]
)
def test_work_that_is_told_to_end_leaves_no_files_and_killed_work_no_processes(
    tmp_path: Path, number: int, jobs: int
) -> None:
    command = [sys.executable, "-c", STOPPED, str(tmp_path / "out"), str(jobs)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    workers = [int(process.stdout.readline()) for _ in range(jobs)]
    assert len(list((tmp_path / "out").glob(".part_*.partial"))) == jobs
    process.send_signal(number)
    if number == signal.SIGKILL:
        process.wait()
        wait_for(lambda: not any(map(is_alive, workers)))
        return
    process.communicate()
    if number != signal.SIGINT:
        assert process.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_a_failure_before_anything_is_finished_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "new" / "deep", tmp_path / "empty"):
        with pytest.raises(KeyboardInterrupt), begun(out, "job.json", {"seed": 1}, finished="part_*"):
            raise KeyboardInterrupt
    assert not (tmp_path / "new" / "deep").exists()
    assert list((tmp_path / "empty").iterdir()) == []


def test_others_at_work_in_the_folder_are_not_disturbed(tmp_path: Path) -> None:
    (tmp_path / ".job.json.5.partial").touch()
    with begun(tmp_path, "job.json", {}, finished="*", alone=False):
        (tmp_path / ".part_1.6.partial").touch()
    with begun(tmp_path, "job.json", {}, finished="*", alone=False):
        assert len(list(tmp_path.glob(".*.partial"))) == 2
