"""The command line of compliance in this process, for the tests beside this: a start less for each."""

from __future__ import annotations

import io
import sys
import warnings

import pytest

from compliance import __main__ as program


def run(*arguments: object) -> tuple[int, str]:
    """Exit status and whole output of `python -m compliance ARGUMENTS`, on a terminal that knows UTF-8."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["compliance", *map(str, arguments)])
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        patch.setattr(warnings, "showwarning", warnings.showwarning)
        patch.setattr(program, "end_in_order", lambda: None)  # signals are for the tests
        status = program.main()
    stream.seek(0)
    return status, stream.read()
