"""Locks on folders that several processes could use at the same time, on one machine or on several.

A lock is a flock on a file. The kernel releases it when the process ends, however that happens, so no stale lock is
left behind. Locks hold between machines on NFS, and on Lustre mounted with flock.
"""

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from console.text import visible

_NOTE_BYTES = 200
_POLL_S = 0.2


class BusyError(ValueError):
    """Error for a lock that another process holds. The message is what that process wrote to the lock file."""


def lock_file(path: Path, *, shared: bool = False, patience_s: float = 0.0) -> int:
    """Lock ``path``, creating it if needed, until this process ends or closes the descriptor that is returned.

    The file lies in the folder that the lock protects. Several processes may hold the lock at once if all of them pass
    ``shared``. Another process that holds the lock gets ``patience_s`` seconds to release it. Raises `BusyError` if it
    does not, and ``OSError`` if the file cannot be written or its file system has no locks.
    """
    # Other users may be able to write to the folder, so do not follow a link or wait for a pipe.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    deadline = time.monotonic() + patience_s
    try:
        while True:
            # flock and not lockf: a POSIX lock is lost as soon as the process closes any descriptor of the file.
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise BusyError(visible(os.pread(descriptor, _NOTE_BYTES, 0).decode(errors="replace")))
            time.sleep(_POLL_S)
        with suppress(OSError):  # the lock also holds without the note, on a full disk
            # Write in place, because a new file of this name would be another file to lock.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on host {socket.gethostname()}".encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
