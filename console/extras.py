"""Say what an installation without extras lacks, in a way that helps."""

import sys
from importlib.util import find_spec


def require_extra(extra: str, *modules: str) -> None:
    """End a program that lacks one of the ``modules`` of an extra, with what to install in one line and exit status 2.

    Only while Python looks for the module of ``python -m``, as the first entry of ``sys.argv`` then says: who imports a
    package may need less of it, as the benchmark of GPUs does.
    """
    if sys.argv[:1] != ["-m"]:
        return
    missing = next((module for module in modules if find_spec(module) is None), None)
    if missing is not None:
        from console.program import complain  # takes time that is lost where nothing is missing

        complain(needed(missing, extra))
        raise SystemExit(2)


def needed(module: str, extra: str = "train") -> str:
    """Say how to install a module that is missing."""
    # By path: no package index holds this project, and somebody else could take its name there.
    return f"{module} is not installed: pip install '.[{extra}]' in the repository's root"
