"""Files that are written whole and to the disk, or not at all; nothing is left of what was not finished."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compliance.artefact import write_whole
from compliance.package import archive
from compliance.package.archive import write_archive
from compliance.package.assembly import make_package
from tests.compliance import run_logs
from tests.compliance.package.test_package import PASSING, description, request
from tests.compliance.run_series import write_series
from tests.conftest import REPOSITORY
from tests.programs import PATIENCE_S


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """The name under which each file and folder, by its inode, was last waited for."""
    names: dict[int, str] = {}
    wait = os.fsync

    def record(descriptor: int) -> None:
        wait(descriptor)
        names[os.fstat(descriptor).st_ino] = str(Path(f"/proc/self/fd/{descriptor}").readlink())

    monkeypatch.setattr(os, "fsync", record)
    return names


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_after(
    tmp_path: Path, synced: dict[int, str]
) -> None:
    path = tmp_path / "report.html"
    write_whole(path, "text")
    aside = Path(synced[path.stat().st_ino])
    assert aside.parent == tmp_path
    assert aside.name != path.name
    assert synced[tmp_path.stat().st_ino] == str(tmp_path)
    assert list(synced) == [path.stat().st_ino, tmp_path.stat().st_ino]
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "report.html").symlink_to("precious")
    write_whole(tmp_path / "report.html", "text")
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "report.html").is_symlink()


def test_what_cannot_be_put_in_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    (tmp_path / "report.html" / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        write_whole(tmp_path / "report.html", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_every_file_and_folder_of_a_tree_is_on_the_disk_before_the_tree_has_its_name(
    tmp_path: Path, synced: dict[int, str]
) -> None:
    write_series(tmp_path / "runs", PASSING)
    synced.clear()
    tree = make_package(request(tmp_path, tmp_path / "runs")).tree
    entries = [tree, *tree.rglob("*")]
    assert len(entries) > 100
    for entry in entries:
        assert entry.stat().st_ino in synced, entry
        assert not synced[entry.stat().st_ino].startswith(f"{tree}"), entry
    assert synced[tree.parent.stat().st_ino] == str(tree.parent)


def test_an_archive_is_on_the_disk_before_it_has_its_name(tmp_path: Path, synced: dict[int, str]) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_text("x" * 100_000)
    (tmp_path / "password").write_text("correct horse battery staple\n")
    target = tmp_path / "example.tgz.enc"
    write_archive(tmp_path / "tree", target, tmp_path / "password")
    assert synced[target.stat().st_ino] not in ("", str(target))
    assert synced[tmp_path.stat().st_ino] == str(tmp_path)


def test_an_old_tree_comes_back_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compliance.package.tree import _put_in_place

    old, new = tmp_path / "Example", tmp_path / ".partial-x"
    for folder in (old, new):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    replace = Path.replace

    def fail_once(path: Path, target: Path) -> Path:
        if path == new:
            raise OSError(28, "No space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail_once)
    with pytest.raises(OSError, match="No space"):
        _put_in_place(new, old)
    assert (old / "file").read_text() == "Example"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-x", "Example"]


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
def test_sigterm_in_the_middle_of_writing_leaves_nothing(
    command: Callable[[Path], list[str]], module: str, function: str, tmp_path: Path
) -> None:
    arguments = command(tmp_path)
    before = set(tmp_path.rglob("*"))
    program = STALL.format(module=module, function=function)
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=REPOSITORY, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    during = set(tmp_path.rglob("*"))
    assert during > before
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM
    left = set(tmp_path.rglob("*")) - before
    assert left <= {tmp_path / "out"}


def test_openssl_writes_into_the_open_file_and_not_to_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    start = subprocess.Popen

    def record(command: list[str], **options: object) -> object:
        started.append(command)
        return start(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(archive.subprocess, "Popen", record)
    (tmp_path / "tree").mkdir()
    (tmp_path / "password").write_text("correct horse battery staple\n")
    write_archive(tmp_path / "tree", tmp_path / "x.enc", tmp_path / "password")
    assert started
    assert not any("-out" in command for command in started)
