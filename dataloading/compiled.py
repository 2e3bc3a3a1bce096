"""Functions that Numba compiles, kept between runs where nobody else can put anything.

What Numba keeps are pickles, and to read one is to run whatever code is in it. It keeps them beside the source, which is
trusted as the source is, or else in ``NUMBA_CACHE_DIR`` or the user's cache folder, which in a container is often in /tmp.
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
    """``function``, compiled when it is first called, or taken from an earlier run."""
    njit: Any = numba.njit
    try:
        kept = njit(cache=True)(function)
    except RuntimeError:  # no folder can be written
        return njit(function)
    if kept is function:  # NUMBA_DISABLE_JIT is set
        return function
    return kept if _is_trusted(Path(kept.stats.cache_path)) else njit(function)


# Once a folder: each module has several functions, and one warning is enough.
@lru_cache
def _is_trusted(folder: Path) -> bool:
    # Beside the source, whoever can write there can write the source.
    if Path(__file__).parent in folder.parents or is_private(folder):
        return True
    _LOG.warning(
        "%s can be written by others: compiled functions are not kept there; set NUMBA_CACHE_DIR to another folder",
        folder,
    )
    return False
