"""Name the extra to install when a package is missing."""

import sys
from importlib.util import find_spec


def require_extra(extra: str, *modules: str) -> None:
    """End the program with exit status 2 if one of the ``modules`` of an extra is missing, and print how to install it.

    Only programs started by ``python -m`` are checked: another program that imports the package may need less of it.
    """
    if sys.argv[:1] != ["-m"]:  # argv[0] is "-m" only while `python -m` looks for its module
        return
    missing = next((module for module in modules if find_spec(module) is None), None)
    if missing is not None:
        from console.program import complain  # this import takes time, so it is not at the top

        complain(needed(missing, extra))
        raise SystemExit(2)


def needed(module: str, extra: str = "train") -> str:
    """Return a message that a module is missing, with the command that installs it."""
    if module in ("bert", "dataloading", "kernels"):  # these packages exist only in a clone
        return f"{module} is not installed by pip: run this command in the root of a clone"
    # No package index has this project, and a stranger could register its name there. So install by path.
    return f"{module} is not installed: pip install '.[{extra}]' in the repository's root"
