"""Programs of several commands, by tyro. `console.program`, beside it, needs no installed package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from tyro.extras import SubcommandApp

from console.extras import needed
from console.interruption import reader_has_gone
from console.program import accept_any_text, answer_version, bound, complain, parsed


class Commands(SubcommandApp):
    """Commands of one program: the command line is understood before one of them runs."""

    def command(self, function: Callable[..., Any] | None = None, *, name: str | None = None) -> Any:
        """Register a function as a command, under its own name or another."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            # tyro calls the function while it parses. Bound, that call only takes the arguments: the command runs after
            # it, so that errors of its own are not taken for errors in the options.
            super(Commands, self).command(name=name)(bound(function))
            return function

        return register(function) if function is not None else register

    def run(self, program: str, arguments: Sequence[str] | None = None) -> Any:
        """Run the command that the command line, or `arguments`, names, and return what it returns.

        Raises:
            ValueError: see `parsed`.
        """
        answer_version(sys.argv[1:] if arguments is None else arguments)
        return parsed(partial(self.cli, prog=program, args=arguments))()

    def main(self, program: str) -> int:
        """Run the command and return the exit status; a user's error is one line on standard error, and 2."""
        accept_any_text()
        try:
            return self.run(program) or 0
        # An OSError too, so it is caught first: a reader that has gone is no error to report.
        except BrokenPipeError:
            return reader_has_gone()
        except (ValueError, OSError) as error:
            complain(error)
            return 2
        # Commands import what they need when they run, and only some need more than an installation without extras has.
        except ModuleNotFoundError as error:
            package = (error.name or "").split(".")[0]
            if not package or find_spec(package) is not None:
                raise
            complain(needed(package))
            return 2
