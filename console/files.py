"""Files that are written whole or not at all, and read with a bound."""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from console.text import visible

_MOST_SHOWN = 400  # characters

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]+\.partial")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` that becomes ``path``, safely on disk, when the block ends without an error.

    The block makes a file or a folder of that name, which nobody can know before. When it fails, what it made is removed.
    """
    temporary = path.absolute().with_name(f".{path.absolute().name}.{secrets.token_hex(8)}.partial")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        # The folder too, or a loss of power may take the name back.
        sync(path.absolute().parent)
    except OSError as error:
        # Writing to an open file fails without its name, and the temporary one means nothing to anybody.
        named = str(error.filename or temporary)
        raise OSError(
            error.errno, error.strerror or str(error), str(path) if named.startswith(str(temporary)) else named
        ) from None
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """``content`` as the file ``path``, which appears complete and safely on disk, or not at all."""
    # "x": what somebody put there first, such as a link to another file, is an error and not written through.
    with atomic_path(path) as temporary, temporary.open("xb") as file:
        file.write(content)


def require_writable(path: Path) -> None:
    """Raise ``ValueError`` unless a file can be made at ``path``, for programs that work for long before they write it."""
    try:
        # By trying: permissions do not tell of a file system that is read-only.
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({path.absolute().parent}: {error.strerror})") from None
    if path.is_dir():
        raise ValueError(f"{path} is a folder, expected the name of a file to write")


def is_temporary(path: Path) -> bool:
    """Tell whether a path has a name of `atomic_path`'s: something unfinished."""
    return _TEMPORARY.fullmatch(path.name) is not None


class NotAFileError(OSError):
    """A pipe or a device stands where a file is expected."""


def open_regular(path: Path) -> BufferedReader:
    """A file open for reading; OSError for what is none, such as a pipe, which may never answer, or a device without end."""
    # Opening a pipe would wait for somebody to write to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode) and not stat.S_ISDIR(mode):
            raise NotAFileError(errno.EINVAL, "a pipe or a device, expected a file", str(path))
        # Of a folder this raises IsADirectoryError, which says more than NotAFileError.
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file, in hex. ``OSError`` as from `open_regular`."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_bounded(path: Path, limit: int, remedy: str) -> bytes:
    """The bytes of a file of at most ``limit`` bytes.

    Raises:
        ValueError: it cannot be read, or is larger; ``remedy`` says what to do about either.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise ValueError(f"{path}: {size:,} bytes, expected at most {limit:,}; {remedy}")
            # No more than was measured: the file may grow meanwhile.
            return file.read(size)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {remedy}") from None


def read_json(path: Path, limit: int, remedy: str) -> Any:
    """Read a JSON file of at most ``limit`` bytes.

    Raises:
        ValueError: as of `read_bounded`, or it is no JSON, nested too deeply, or holds a number of thousands of digits.
    """
    content = read_bounded(path, limit, remedy)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # RecursionError: nested without end
        raise ValueError(f"{path}: damaged or of another kind ({shown(error)}); {remedy}") from None


def is_private(folder: Path) -> bool:
    """Tell whether nobody but this user and root can put anything into a folder, or put another in its place."""
    # From the root on: who may exchange a folder above may exchange all that is in it.
    for place in reversed([folder.resolve(), *folder.resolve().parents]):
        state = place.stat()
        is_ours, mode = state.st_uid == os.geteuid(), state.st_mode
        by_others = mode & (stat.S_IWGRP | stat.S_IWOTH)
        # In a folder with the sticky bit, as /tmp, others cannot replace what is there.
        if not (is_ours or state.st_uid == 0) or (by_others and (place == folder.resolve() or not mode & stat.S_ISVTX)):
            return False
        if is_ours and not mode & (stat.S_IRWXG | stat.S_IRWXO):
            return True  # nobody else gets past it
    return True


def shown(value: object) -> str:
    """Shorten what a file says for a message, and escape characters that a terminal would obey."""
    return visible(value, _MOST_SHOWN)


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    # A folder can be opened for reading only, and fsync asks for no more.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
