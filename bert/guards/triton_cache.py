"""Folder of what Triton has compiled: shared libraries and programs for the GPU, which it loads and runs."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from console.files import is_private

VARIABLE = "TRITON_CACHE_DIR"


def require_private_cache() -> str | None:
    """Have Triton use a folder of this process's own where others can write to the usual one; returns a warning then.

    In a container the home folder is often /tmp, where somebody else can have made ``.triton`` before.
    """
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    folder = Path(os.environ.get(VARIABLE) or home / ".triton" / "cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)  # or somebody else could, from here on
        if is_private(folder):
            return None
    except OSError:
        pass  # nothing can be kept there
    own = tempfile.mkdtemp(prefix="triton-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    os.environ[VARIABLE] = own
    return f"{folder} can be written by others: compiled kernels are not kept; set {VARIABLE} to another folder"
