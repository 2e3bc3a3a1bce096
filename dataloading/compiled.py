"""Compilation with Numba, cached between runs in folders that no other user can write.

Numba's cache contains pickles, which can run any code. A cache beside the source is as trustworthy as the source. But Numba
may also put its cache into ``NUMBA_CACHE_DIR`` or into the user's cache folder, which is often in /tmp in a container.
"""

import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numba

from console.files import is_private

Function = TypeVar("Function", bound=Callable[..., Any])

_LOG = logging.getLogger(__name__)


def compiled(function: Function) -> Function:
    """Compile ``function`` when it is first called, or load it from the cache."""
    njit: Any = numba.njit
    try:
        kept = njit(cache=True)(function)
    except RuntimeError:  # no folder is writable
        return njit(function)
    if kept is function:  # NUMBA_DISABLE_JIT is set
        return function
    return kept if _is_trusted(Path(kept.stats.cache_path)) else njit(function)


# Cache the result, so that each folder gets only one warning.
@lru_cache
def _is_trusted(folder: Path) -> bool:
    if Path(__file__).parent in folder.parents or is_private(folder):
        return True
    _LOG.warning(
        "%s can be written by others, so compiled functions are not cached there; set NUMBA_CACHE_DIR to another folder",
        folder,
    )
    return False
