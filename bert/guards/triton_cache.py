"""Protection of Triton's cache of compiled kernels, from which Triton loads and runs shared libraries."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from console.files import is_private

VARIABLE = "TRITON_CACHE_DIR"


def require_private_cache() -> str | None:
    """Use a temporary cache and return a warning if other users can write to Triton's usual cache folder.

    In a container, the home folder is often /tmp, where another user may have created ``.triton``.
    """
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    folder = Path(os.environ.get(VARIABLE) or home / ".triton" / "cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)  # a missing folder could be created by another user
        if is_private(folder):
            return None
    except OSError:
        pass  # the folder is not usable, so use a temporary one
    own = tempfile.mkdtemp(prefix="triton-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    os.environ[VARIABLE] = own
    return f"other users can write to {folder}: compiled kernels are not kept; set {VARIABLE} to another folder"
