"""Run commands of ``python -m compliance`` in the tests' own process, to save time."""

import io
import sys
import warnings

import pytest

from compliance import __main__ as program


def run(*arguments: object) -> tuple[int, str]:
    """Run `python -m compliance ARGUMENTS` in this process. Return its exit status and all output, in UTF-8."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["compliance", *map(str, arguments)])
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        patch.setattr(warnings, "showwarning", warnings.showwarning)
        patch.setattr("console.commands.end_in_order", lambda: None)  # leave pytest's signal handlers in place
        status = program.main()
    stream.seek(0)
    return status, stream.read()
