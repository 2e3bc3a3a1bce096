"""A folder that one process works in, or several that make parts of one result."""

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from console.program import complain


class BusyError(ValueError):
    """Another process works in the folder."""


@contextmanager
def locked(folder: Path, *, shared: bool) -> Iterator[None]:
    """Hold the folder's lock, which ends with the process, alone or with others that share it.

    Raises:
        BusyError: another process holds it.
    """
    # Record locks, not flock(2): they are not inherited by forked processes, and work on NFS.
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.lockf(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise BusyError(
                    f"{folder.parent}: another process is at work there; wait for it, or name another --out"
                ) from None
            complain(f"{folder}: no locks on this file system ({error.strerror}); run one command at a time", "warning")
        yield
