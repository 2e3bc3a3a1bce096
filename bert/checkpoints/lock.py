"""Lock on a checkpoint folder, so that only one run at a time uses it."""

import os
import shutil
from pathlib import Path

from console.files import is_temporary
from console.locks import BusyError, lock_file

NAME = ".lock"


def lock_checkpoints(folder: Path, patience_s: float) -> int:
    """Lock ``folder``, creating it if necessary, until this process ends or closes the returned descriptor.

    Unfinished checkpoints of killed runs are removed. ``patience_s`` is the number of seconds to wait for another process to
    end, such as an earlier process of the same run.

    Raises:
        ValueError: another run holds the lock.
        OSError: the folder cannot be written, or its file system has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = lock_file(folder / NAME, patience_s=patience_s)
    except BusyError as owner:
        raise ValueError(
            f"{folder} is where another run writes its checkpoints ({owner}): set checkpoint.folder to another folder, or "
            "wait until that run has ended"
        ) from None
    try:
        # No other process writes these while this process has the lock.
        for left in filter(is_temporary, folder.glob(".step_*.partial")):
            shutil.rmtree(left, ignore_errors=True)  # plain files and other users' folders remain
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
