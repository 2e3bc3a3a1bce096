"""Read and write the files of a results folder: never without bound, never by halves."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

MAX_FILE_BYTES = 50 * 2**20
"""Largest file that a submission may hold (submission rules)."""

PARTIAL = ".partial-"
"""How the names of files and folders begin that are not whole yet; what a killed program leaves may be removed."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; what is none does not make the program wait.

    Raises:
        ValueError: saying what stands in the way.
    """
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except FileNotFoundError:
        found = "no such file"
    except IsADirectoryError:
        found = "a folder"
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    else:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()
        found = "not a regular file"
    raise ValueError(f"{path}: {found}, expected a text file such as results/<system>/bert/result_0.txt")


def read_bounded(path: Path) -> bytes:
    """The bytes of a regular file of at most `MAX_FILE_BYTES`.

    Raises:
        ValueError: saying what stands in the way.
    """
    with open_regular(path) as file:
        try:
            content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(
            f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB, the most a submission may hold; "
            "keep telemetry in the metrics file"
        )
    return content


def write_whole(path: Path, text: str) -> None:
    """Write a text file aside, and put it in place when it is on the disk. What is no text is escaped.

    Raises:
        ValueError: saying why it could not be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as file:
            file.write(text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}; choose another folder") from error


@contextmanager
def written_aside(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that becomes `path`, safely on the disk, when the block ends without an error.

    Its name until then is random and its own: `tempfile` creates it with O_EXCL and O_NOFOLLOW.
    """
    with tempfile.NamedTemporaryFile(prefix=PARTIAL, dir=path.parent, delete=False) as file:
        aside = Path(file.name)
        try:
            yield file
            file.flush()
            aside.chmod(0o644)
            os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
