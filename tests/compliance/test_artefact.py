"""Files and folders are written completely and flushed to disk, or not at all."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compliance.package.command import make_package
from tests.compliance import run_logs
from tests.compliance.package.test_package import PASSING, description, request
from tests.compliance.result_folders import write_series
from tests.conftest import REPOSITORY
from tests.programs import PATIENCE_S


@pytest.mark.slow
def test_files_of_a_package_are_flushed_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[int, str] = {}
    wait = os.fsync

    def record(descriptor: int) -> None:
        wait(descriptor)
        names[os.fstat(descriptor).st_ino] = str(Path(f"/proc/self/fd/{descriptor}").readlink())

    write_series(tmp_path / "runs", PASSING)
    monkeypatch.setattr(os, "fsync", record)
    made = make_package(request(tmp_path, tmp_path / "runs"))
    tree = made.request.tree
    entries = [tree, *tree.rglob("*")]
    assert len(entries) > 100
    for entry in entries:
        assert not names[entry.stat().st_ino].startswith(f"{tree}"), entry
    assert names[tree.parent.stat().st_ino] == str(tree.parent)


STALL = """
import os, sys, time, {module}
def stall(*_, **__):
    print("writing", flush=True)
    time.sleep(600)
{module}.{function} = stall
sys.argv = ["compliance", *sys.argv[1:]]
from compliance.__main__ import main
sys.exit(main())
"""


def report(folder: Path) -> list[str]:
    run_logs.write_run(folder / "results/node/bert/result_0.txt", "open")
    return ["report", str(folder / "results/node/bert")]


def package(folder: Path) -> list[str]:
    write_series(folder / "runs", PASSING)
    runs = ["--runs", str(folder / "runs"), "--out", str(folder / "out")]
    return ["package", "--org", "Example", "--system", str(description(folder)), *runs]


@pytest.mark.parametrize(("command", "module", "function"), [(report, "os", "fsync"), (package, "shutil", "copyfile")])
@pytest.mark.slow
def test_sigterm_while_writing_leaves_no_files(
    command: Callable[[Path], list[str]], module: str, function: str, tmp_path: Path
) -> None:
    arguments = command(tmp_path)
    before = set(tmp_path.rglob("*"))
    program = STALL.format(module=module, function=function)
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=REPOSITORY, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    assert set(tmp_path.rglob("*")) > before
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert set(tmp_path.rglob("*")) - before <= {tmp_path / "out"}
