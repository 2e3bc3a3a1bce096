"""What an installation without extras lacks, said in a way that helps."""

import sys
from importlib.util import find_spec


def require_extra(extra: str, *modules: str) -> None:
    """Go on only where all ``modules`` of an extra are installed.

    Raises ``ModuleNotFoundError`` with what to install; while Python looks for the module of ``python -m``, as the first
    entry of ``sys.argv`` then says, it ends the program with that in one line and exit status 2.
    """
    missing = next((module for module in modules if find_spec(module) is None), None)
    if missing is None:
        return
    error = ModuleNotFoundError(f"{missing} is not installed: pip install 'mlperf-bert[{extra}]'", name=missing)
    if sys.argv[:1] != ["-m"]:
        raise error
    from console.program import complain  # takes time that is lost where nothing is missing

    complain(error)
    raise SystemExit(2)
