"""Requirements of Triton: the build tools that it calls, and a cache folder that other users cannot write to."""

import atexit
import os
import shutil
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

from console import processes
from console.files import is_private

LIBCUDA = "libcuda.so.1"
CACHE_VARIABLE = "TRITON_CACHE_DIR"


def require_private_cache() -> str | None:
    """Use a temporary cache and return a warning if Triton's usual cache folder is unusable or other users can write to it.

    In a container, the home folder is often /tmp, where another user may have created ``.triton``.
    """
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    folder = Path(os.environ.get(CACHE_VARIABLE) or home / ".triton" / "cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)  # create it before another user can
        if is_private(folder):
            return None
        why = f"other users can write to {folder}"
    except OSError as error:
        why = f"{folder} cannot be used ({error.strerror})"
    own = tempfile.mkdtemp(prefix="triton-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    os.environ[CACHE_VARIABLE] = own
    return f"{why}: compiled kernels are not kept; set {CACHE_VARIABLE} to another folder"


def missing_build_tools() -> list[str]:
    """List the build tools that Triton needs and that are missing here, each with a remedy.

    Before it runs its first kernel, Triton compiles a launcher in C against Python and the CUDA driver.
    """
    if find_spec("triton") is None:
        return []
    lacks = []
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        lacks.append(f"no C compiler ({' or '.join(compilers)}) for Triton: install gcc, or set CC")
    # On Debian, Python's headers are in the folder of the scheme posix_prefix, not in that of the default, posix_local.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme=scheme)["include"], "Python.h")
    if not header.is_file():
        lacks.append(f"no {header} for Triton: install Python's headers (Debian and Ubuntu: python3-dev)")
    if not _libcuda_is_found():
        remedy = f"run ldconfig (root), or set TRITON_LIBCUDA_PATH to the folder of {LIBCUDA}"
        lacks.append(f"no {LIBCUDA} of NVIDIA's driver for Triton: {remedy}")
    return lacks


def _libcuda_is_found() -> bool:
    if given := os.environ.get("TRITON_LIBCUDA_PATH"):
        return Path(given, LIBCUDA).exists()
    known = processes.run(["/sbin/ldconfig", "-p"], timeout_s=60).answer
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return LIBCUDA in known or any(Path(folder, LIBCUDA).exists() for folder in folders if folder)
