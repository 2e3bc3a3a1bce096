"""Write files atomically, read them with a size limit, and lock folders that several processes use.

A lock is a flock on a file. The kernel releases it when the process ends, however that happens, so no stale lock is
left behind. Locks hold between machines on NFS, and on Lustre mounted with flock.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from console.text import visible

_MOST_SHOWN = 200  # maximum number of characters of a value in a message
_NOTE_BYTES = 200
_POLL_S = 0.2

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]+\.partial")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path for the block to create a file or folder at. Then sync it to disk and rename it to ``path``.

    Nobody can guess the temporary name. If the block fails, the file or folder is removed.
    """
    temporary = path.absolute().with_name(f".{path.absolute().name}.{secrets.token_hex(8)}.partial")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        # Without syncing the folder, a loss of power may undo the renaming.
        sync(path.absolute().parent)
    except OSError as error:
        # The error of a failed write names no file, and the temporary name means nothing to the user. So name `path`.
        named = str(error.filename or temporary)
        raise OSError(
            error.errno, error.strerror or str(error), str(path) if named.startswith(str(temporary)) else named
        ) from None
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write ``content`` to the file ``path``, which appears complete and synced to disk, or not at all."""
    # "x" refuses a file or link that somebody else has put there.
    with atomic_path(path) as temporary, temporary.open("xb") as file:
        file.write(content)


def require_writable(path: Path) -> None:
    """Raise ``ValueError`` unless a file can be made at ``path``. Long-running programs call this before they start."""
    try:
        # Permissions do not show that a file system is read-only, so try to write a file.
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({path.absolute().parent}: {error.strerror})") from None
    if path.is_dir():
        raise ValueError(f"{path} is a folder, expected the name of a file to write")


def is_temporary(path: Path) -> bool:
    """Tell whether a path has a temporary name of `atomic_path`, which marks an unfinished file."""
    return _TEMPORARY.fullmatch(path.name) is not None


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises ``OSError`` for pipes and devices, which may never answer or never end."""
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode) and not stat.S_ISDIR(mode):
            raise OSError(errno.EINVAL, "a pipe or a device, expected a file", str(path))
        # This raises IsADirectoryError for a folder.
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file, in hex. Raises ``OSError`` like `open_regular`."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_bounded(path: Path, limit: int, remedy: str) -> bytes:
    """Return the bytes of a file of at most ``limit`` bytes.

    Raises ``ValueError`` if the file cannot be read or is larger. The message ends with ``remedy``, which says what to
    do.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise ValueError(f"{path}: {size:,} bytes, expected at most {limit:,}; {remedy}")
            # Read no more than the checked size, because the file may be growing.
            return file.read(size)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {remedy}") from None


def read_json(path: Path, limit: int, remedy: str) -> Any:
    """Read a JSON file of at most ``limit`` bytes.

    Raises ``ValueError`` as `read_bounded` does, or if the file is not JSON, is nested too deeply, or has a number of
    thousands of digits.
    """
    content = read_bounded(path, limit, remedy)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # RecursionError is raised if it is nested too deeply
        raise ValueError(f"{path}: damaged or of another kind ({shown(error)}); {remedy}") from None


def is_private(folder: Path) -> bool:
    """Tell whether only this user and root can write to a folder or replace it."""
    # Check from the root down, because whoever may replace a parent folder may replace everything in it.
    for place in reversed([folder.resolve(), *folder.resolve().parents]):
        state = place.stat()
        is_ours, mode = state.st_uid == os.geteuid(), state.st_mode
        by_others = mode & (stat.S_IWGRP | stat.S_IWOTH)
        # In a folder with the sticky bit, such as /tmp, other users cannot replace existing entries.
        if not (is_ours or state.st_uid == 0) or (by_others and (place == folder.resolve() or not mode & stat.S_ISVTX)):
            return False
        if is_ours and not mode & (stat.S_IRWXG | stat.S_IRWXO):
            return True  # other users cannot reach what is below
    return True


def shown(value: object) -> str:
    """Shorten a value from a file for a message, and escape characters that a terminal would interpret."""
    return visible(value, _MOST_SHOWN)


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    # A folder can only be opened for reading, which is enough for fsync.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class BusyError(ValueError):
    """Error for a lock that another process holds. The message is what that process wrote to the lock file."""


def lock_file(path: Path, *, shared: bool = False, patience_s: float = 0.0) -> int:
    """Lock ``path``, creating it if needed, until this process ends or closes the descriptor that is returned.

    The file lies in the folder that the lock protects. Several processes may hold the lock at once if all of them pass
    ``shared``. If another process holds the lock, wait up to ``patience_s`` seconds. Raises `BusyError` if it is still
    held then, and ``OSError`` if the file cannot be written or its file system has no locks.
    """
    # Other users may have put a link or a pipe at this path, so do not follow a link and do not wait for a pipe.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    deadline = time.monotonic() + patience_s
    try:
        while True:
            # Do not use lockf. Its POSIX lock is lost as soon as the process closes any descriptor of the file.
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise BusyError(visible(os.pread(descriptor, _NOTE_BYTES, 0).decode(errors="replace")))
            time.sleep(_POLL_S)
        with suppress(OSError):  # the lock holds even if a full disk prevents this note
            # Write into the same file. A new file of this name would not be locked.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on host {socket.gethostname()}".encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
