"""Files appear whole or not at all, are read within a limit, and are locked for one holder."""

import contextlib
import itertools
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from console import files
from console.documents import FileKind, read_typed


@pytest.fixture(autouse=True)
def _no_file_stays_open() -> Iterator[None]:
    before = set(Path("/proc/self/fd").iterdir())
    yield
    assert set(Path("/proc/self/fd").iterdir()) <= before  # files of earlier tests may have been closed


def test_a_file_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, synced = os.fsync, list[Path]()
    monkeypatch.setattr(os, "fsync", lambda at: (synced.append(Path(f"/proc/self/fd/{at}").readlink()), wait(at)))
    files.write_atomically(tmp_path / "new", b"content")
    assert [(path.parent, files.is_temporary(path)) for path in synced] == [(tmp_path, True), (tmp_path.parent, False)]
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("new", b"content")]


def test_unfinished_files_are_removed_and_symbolic_links_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attacker who guesses the random name cannot make the program write through a symbolic link."""
    names = set()
    for make in (Path.mkdir, Path.touch):
        with contextlib.suppress(RuntimeError), files.atomic_path(tmp_path / "new") as unfinished:
            names.add(unfinished.name)
            make(unfinished)
            raise RuntimeError
    assert len(names) == 2
    assert list(tmp_path.iterdir()) == []
    before = os.umask(0o027)
    try:
        files.write_atomically(tmp_path / "new", b"content")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
    victim, known = tmp_path / "victim", "0123456789abcdef"
    victim.write_text("of somebody else")
    (tmp_path / f".new.{known}.partial").symlink_to(victim)
    monkeypatch.setattr(secrets, "token_hex", lambda _: known)
    with pytest.raises(FileExistsError):
        files.write_atomically(tmp_path / "new", b"other")
    assert (victim.read_text(), (tmp_path / "new").read_bytes()) == ("of somebody else", b"content")


def fail(path: Path, error: OSError | None) -> None:
    with files.atomic_path(path) as unfinished:
        if error is not None:
            (unfinished / "within").mkdir(parents=True)
            raise error


def test_an_error_without_a_file_name_gets_the_name_of_the_requested_file(tmp_path: Path) -> None:
    for place, error, expected in (
        ("new", OSError(28, "No space left"), (28, "No space left", str(tmp_path / "new"))),
        ("new", OSError("odd"), (None, "odd", str(tmp_path / "new"))),
        ("new", OSError(13, "Permission denied", "other"), (13, "Permission denied", "other")),
        ("none/new", None, (2, "No such file or directory", str(tmp_path / "none/new"))),
    ):
        with pytest.raises(OSError) as caught:  # noqa: PT011, compared below
            fail(tmp_path / place, error)
        assert (caught.value.errno, caught.value.strerror, caught.value.filename) == expected
        assert list(tmp_path.iterdir()) == []


def test_an_unwritable_file_is_refused_before_the_work_begins(tmp_path: Path) -> None:
    files.require_writable(tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []
    for place in (tmp_path / "none" / "plan.json", tmp_path, Path("/proc/plan.json")):
        with pytest.raises(ValueError, match=f"^{place} "):
            files.require_writable(place)


def test_folders_pipes_and_files_beyond_the_limit_are_not_read(tmp_path: Path) -> None:
    path, pipe = tmp_path / "file", tmp_path / "pipe"
    os.mkfifo(pipe)
    for size in (0, 4096):
        path.write_bytes(b"x" * size)
        assert files.read_bounded(path, 4096, "cut it") == b"x" * size
    path.write_bytes(b"x" * 4097)
    reasons = {path: "4,097 bytes, expected at most 4,096", pipe: "a pipe or a device, expected a file"}
    reasons |= {tmp_path: "Is a directory", tmp_path / "none": "No such file or directory"}
    for place, reason in reasons.items():
        with pytest.raises(ValueError, match=f"^{place}: {reason}; cut it$"):
            files.read_bounded(place, 4096, "cut it")
    assert (files.shown("x" * 200), files.shown("x" * 201)) == ("x" * 200, "x" * 197 + "...")
    for content in ("[" * 100_000, "1" * 100_000, "{", "\ud800"):
        path.write_bytes(content.encode(errors="surrogatepass"))
        with pytest.raises(ValueError, match=f"^{path}: damaged or of another kind .*; mend it$"):
            files.read_json(path, 1 << 20, "mend it")


def test_a_folder_is_private_if_no_other_user_can_write_or_replace_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """If only this user can enter the outer folder, any inner mode is private. No other owner but root is trusted."""
    modes = {(0o755, 0o755): True, (0o755, 0o770): False, (0o755, 0o1777): False, (0o777, 0o755): False}
    modes |= {(0o1777, 0o755): True, (0o700, 0o777): True}
    user = os.geteuid()
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # other users cannot enter pytest's own folders
        outer, inner = Path(place), Path(place) / "inner"
        inner.mkdir()
        for stranger, ((of_outer, of_inner), private) in itertools.product((False, True), modes.items()):
            monkeypatch.setattr(os, "geteuid", lambda stranger=stranger: user + stranger)
            outer.chmod(of_outer)
            inner.chmod(of_inner)
            expected = private and (not stranger or (user == 0 and of_outer != 0o700))
            assert files.is_private(inner) == expected, (oct(of_outer), oct(of_inner), stranger)


def test_a_lock_names_its_holder_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("a note that is longer than the note of this process" * 9)
    held = files.lock_file(path)
    holder = f"process {os.getpid()} on host {socket.gethostname()}"
    assert path.read_text() == holder
    for shared in (False, True):
        with pytest.raises(files.BusyError, match=f"^{holder}$"):
            files.lock_file(path, shared=shared)
    threading.Timer(0.1, os.close, [held]).start()
    readers = [files.lock_file(path, shared=True, patience_s=600), files.lock_file(path, shared=True)]
    with pytest.raises(files.BusyError):
        files.lock_file(path)
    for descriptor in (*readers, files.lock_file(tmp_path / "new")):
        os.close(descriptor)
    assert (tmp_path / "new").stat().st_mode & 0o111 == 0


@dataclass(frozen=True)
class Plan:
    hosts: tuple[str, ...]
    seconds: float = 1.5

    def check(self) -> None:
        if not self.hosts:
            raise ValueError("no hosts")


def test_a_document_is_read_as_it_was_written_or_refused(tmp_path: Path) -> None:
    kind, path = FileKind(Plan, "a plan", 2, "plan", "make plan", 2000, Plan.check), tmp_path / "plan.json"
    kind.write(Plan(("a", "b")), path)
    text = path.read_text()
    assert read_typed(path, dict, 2000, "")["content"] == {"hosts": ["a", "b"], "seconds": 1.5}
    for old, new, reason in (
        ("1.5", "1.25", "edited or damaged: its content does not match its digest"),
        ('"version": 2', '"version": 3', "its format is a plan 3, expected a plan 2"),
        ("a plan", "a view", "its format is a view 2, expected a plan 2"),
        ('"digest"', '"digits"', "Object missing required field `digest`"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=rf"^{path}: not a valid plan \({reason}\); run `make plan` again$"):
            kind.read(path)
    path.write_text(text.replace("\n", "\n\n"))
    assert kind.read(path) == Plan(("a", "b"))
    with pytest.raises(ValueError, match="null"):
        kind.write(Plan(("a",), float("nan")), path)
    kind.write(Plan(()), path)
    with pytest.raises(ValueError, match="no hosts"):
        kind.read(path)
    with pytest.raises(ValueError, match=f"^{path}: .*; mend it$"):
        read_typed(path, list[int], 2000, "mend it")
