"""Resumable jobs in several processes: leftover files of an interrupted job, and rejected options."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dataloading import jobs
from dataloading.jobs import StageProgress, WorkPart, begun, run_tasks
from tests.conftest import REPOSITORY
from tests.programs import is_alive, wait_for


def die(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


class Garbage:
    """Object that only a garbage collection removes, and whose finalizer works only in the process that made it."""

    def __init__(self) -> None:
        self.itself, self.made_in = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.made_in:
            os._exit(1)


def collect(_: int) -> int:
    return gc.collect()


def test_a_worker_process_does_not_collect_its_parents_garbage() -> None:
    Garbage()
    assert len(list(run_tasks(collect, [1, 2], 2))) == 2


def test_zero_jobs_and_a_killed_process_are_errors() -> None:
    assert list(run_tasks(die, [], 2)) == []
    with pytest.raises(ValueError, match="jobs is 0"):
        list(run_tasks(die, [1], 0))
    with pytest.raises(ValueError, match="a process was killed"):
        list(run_tasks(die, range(6), 2))
    for count, most, own in ((1, 2, True), (2, 1, True), (2, 2, False)):
        processes = list(run_tasks(die, range(count), most))
        assert (len(processes), os.getpid() in processes) == (count, own)
        assert multiprocessing.active_children() == []


def test_a_part_is_a_consecutive_range_of_tasks() -> None:
    assert [WorkPart(index, 3).share_of(8) for index in (1, 2, 3)] == [range(2), range(2, 5), range(5, 8)]
    assert WorkPart(2, 2).share_of(2) == range(1, 2)
    with pytest.raises(ValueError, match="--part is 1/3 for 2 texts; expected at most 2 parts"):
        WorkPart(1, 3).share_of(2)


def test_each_new_percent_is_printed_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """40 of the expected 400 s are added to measured and expected times. Results of earlier attempts take no time."""
    now = 1000.0
    monkeypatch.setattr(jobs, "time", SimpleNamespace(perf_counter=lambda: now))
    progress = StageProgress({"read": 300.0, "write": 100.0})
    progress.set("read", 0.0)  # left: (0 + 40) / (0 + 40) of the expected 400 s
    now += 60
    progress.set("read", 0.2)  # (60 + 40) / (60 + 40) of 340 s
    progress.set("read", 0.201)  # still 15 %, so nothing is printed
    progress.set("another", 0.5)
    progress.set("write", 0.5, kept=True)
    progress.set("write", 1.0, kept=True)  # (60 + 40) / (60.3 + 40) of 239.7 s
    now += 161
    progress.add("read", 0.199)  # (221 + 40) / (120 + 40) of 180 s
    progress.add("read", 0.7)
    assert capsys.readouterr().out.splitlines() == [
        "[  0 %] read, about 6:40 left",
        "[ 15 %] read, about 5:40 left",
        "[ 27 %] write, about 4:49 left",
        "[ 40 %] write, about 3:59 left",
        "[ 55 %] read, about 4:54 left",
        "[100 %] read, about 0:00 left",
    ]


def test_two_processes_may_begin_the_same_job_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process writes the description just before this process lists the folder."""
    listed = Path.iterdir

    def begin_first(folder: Path) -> Iterator[Path]:
        (folder / "job.json").write_text("{}")
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", begin_first)
    with begun(tmp_path, "job.json", {}, finished="part_*", alone=False):
        assert (tmp_path / "job.json").exists()


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
def test_interrupted_jobs_leave_no_files_and_killed_jobs_leave_no_processes(
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


def stop_job(out: Path, *finished: str, **settings: object) -> None:
    with begun(out, "job.json", settings or {"seed": 1}, finished="part_*"):
        for name in finished:
            (out / name).touch()
        raise KeyboardInterrupt


def test_a_failed_job_restores_its_folder_unless_a_file_is_finished(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, before, finished, left in (
        ("new/deep", False, False, None),
        ("empty", False, False, []),
        ("begun", True, False, ["job.json"]),
        ("finished", False, True, ["job.json", "part_1"]),
    ):
        out = tmp_path / name
        if before:
            with begun(out, "job.json", {"seed": 1}, finished="part_*"):
                assert [path.name for path in out.iterdir()] == ["job.json"]
        with pytest.raises(KeyboardInterrupt):
            stop_job(out, *["part_1"] * finished)
        assert (sorted(path.name for path in out.iterdir()) if out.exists() else None) == left
    (tmp_path / "file").touch()
    (tmp_path / "new" / "other").touch()
    for name, settings, why in (
        ("file", {}, "is not an empty folder; name one that does not exist or is empty"),
        ("new", {}, "is not an empty folder; name one that does not exist or is empty"),
        ("finished", {"jobs": 2, "seed": (2,)}, r"begun with other settings \(jobs, seed\); give the same settings"),
    ):
        with pytest.raises(ValueError, match=f"{tmp_path / name}:? {why}"):
            stop_job(tmp_path / name, **settings)


def test_temporary_files_are_removed_unless_other_processes_may_use_the_folder(tmp_path: Path) -> None:
    (tmp_path / ".job.json.5.partial").touch()
    with begun(tmp_path, "job.json", {}, finished="*", alone=False):
        (tmp_path / "folder").mkdir()
        for name in (".part_1.6.partial", "folder/.part_2.7a.partial", ".of somebody.partial"):
            (tmp_path / name).touch()
    for alone, left in ((False, 4), (True, 1)):
        with begun(tmp_path, "job.json", {}, finished="*", alone=alone):
            assert len(list(tmp_path.rglob(".*.partial"))) == left
