"""Lock on a folder of checkpoints, so that one run at a time uses it.

A run keeps a lock (flock) on a file in the folder for as long as it lives. The kernel gives it up when the process ends,
however that happens, so nothing stale is left behind. Locks hold between machines on NFS, and on Lustre mounted with flock.
"""

import fcntl
import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

from console.files import is_temporary, shown

NAME = ".lock"
_NOTE_BYTES = 200
_POLL_S = 0.2


def lock_checkpoints(folder: Path, patience_s: float) -> int:
    """Lock ``folder``, which is made if need be, until this process ends or closes the descriptor that is returned.

    What killed runs have left unfinished there is removed. ``patience_s``: how long to wait for another process, such as one
    of the same run that is just being ended.

    Raises:
        ValueError: another run has it.
        OSError: the folder cannot be written, or its file system has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Others may write to the folder: no link of theirs is followed, and no pipe waited for.
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    deadline = time.monotonic() + patience_s
    try:
        while not _taken(descriptor):
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{folder} is where another run writes its checkpoints ({_owner(descriptor)}): set checkpoint.folder "
                    "to another folder, or wait until that run has ended"
                )
            time.sleep(_POLL_S)
        with suppress(OSError):  # a full disk keeps nobody from having the lock
            # Written in place: a new file under this name would be another one to lock.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on host {socket.gethostname()}".encode(), 0)
        # Nobody writes these while this process has the lock.
        for left in filter(is_temporary, folder.glob(".step_*.partial")):
            shutil.rmtree(left, ignore_errors=True)  # what is no folder, or somebody else's, stays
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _taken(descriptor: int) -> bool:
    try:
        # flock and not lockf: a POSIX lock is lost as soon as the process closes any descriptor of the file.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _owner(descriptor: int) -> str:
    """Return the owner of the lock, in its own words."""
    return shown(os.pread(descriptor, _NOTE_BYTES, 0).decode(errors="replace"))
