"""Files are written completely or not at all, under unpredictable temporary names, and strange JSON is refused."""

import contextlib
import os
import secrets
from pathlib import Path

import pytest

from console.files import atomic_path, read_json, write_atomically


def test_a_link_under_the_name_of_the_unfinished_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attacker who guesses the random name cannot make the program write through a symbolic link."""
    victim, known = tmp_path / "victim", "0123456789abcdef"
    victim.write_text("of somebody else")
    (tmp_path / f".new.{known}.partial").symlink_to(victim)
    write_atomically(tmp_path / "new", b"content")
    monkeypatch.setattr(secrets, "token_hex", lambda _: known)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "new", b"other")
    assert victim.read_text() == "of somebody else"
    assert (tmp_path / "new").read_bytes() == b"content"


def test_unfinished_names_differ_and_vanish_with_what_failed(tmp_path: Path) -> None:
    names = set()
    for make in (Path.mkdir, Path.touch):
        with contextlib.suppress(RuntimeError), atomic_path(tmp_path / "new") as unfinished:
            names.add(unfinished.name)
            make(unfinished)
            raise RuntimeError
    assert len(names) == 2
    assert list(tmp_path.iterdir()) == []


def test_files_have_the_modes_that_the_user_has_asked_for(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "new", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("content", ["[" * 100_000, "1" * 100_000, "{", "\ud800"])
def test_strange_json_is_a_line_with_the_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(ValueError, match=f"{path}: damaged or of another kind .*; mend it"):
        read_json(path, 1 << 20, "mend it")
