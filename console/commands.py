"""Programs with several commands, parsed by tyro. Programs that must run without tyro use only `console.program`."""

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from tyro.extras import subcommand_cli_from_dict

from console.extras import needed
from console.interruption import reader_has_gone
from console.program import accept_any_text, answer_version, bound, complain, parsed
from console.text import did_you_mean


class Commands:
    """Commands of one program. The whole command line is parsed before a command runs."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}

    def command(self, function: Callable[..., Any] | None = None, *, name: str | None = None) -> Any:
        if function is None:
            return partial(self.command, name=name)
        self._functions[name or function.__name__.replace("_", "-")] = function
        return function

    def run(self, program: str, arguments: Sequence[str] | None = None) -> Any:
        """Run the command that the first argument names, and return its result. `arguments` defaults to the command line.

        Raises ``ValueError`` if the command or its options are wrong, see `parsed`.
        """
        given = sys.argv[1:] if arguments is None else arguments
        answer_version(given)
        # As a path, an empty argument would be the current folder.
        if "" in given:
            raise ValueError(f"{given[0]}: an empty argument: is a variable of the script unset?")
        # tyro calls a function while it parses. A bound function only stores its arguments, so that the command runs later,
        # and its own errors are not reported as errors in the options.
        commands = {name: bound(function) for name, function in self._functions.items()}
        try:
            call = parsed(partial(subcommand_cli_from_dict, commands, prog=program, args=arguments))
        except ValueError as error:
            unknown = re.match(r"Unrecognized (?:or misplaced )?options: ([^\s,=]+)", str(error))
            raise ValueError(self._unknown(unknown[1], given[0]) if unknown else str(error)) from None
        return call()

    def _unknown(self, name: str, command: str) -> str:
        """Return the complaint about an unknown command, option or argument, with a suggestion."""
        function = self._functions.get(command)
        if function is None and not command.startswith("-"):
            known = ", ".join(self._functions)
            return f"there is no command {command}, expected one of {known}{did_you_mean(command, self._functions)}"
        if function is None or not name.startswith("-"):
            return f"unexpected argument {name}"
        parameters = inspect.signature(function).parameters.values()
        options = [
            f"--{each.name.replace('_', '-')}" for each in parameters if "Positional" not in str(each.annotation)
        ]
        return f"{command} has no option {name}{did_you_mean(name, options)}"

    def main(self, program: str) -> int:
        """Run the command and return the exit status. A wrong input gives one line on standard error and status 2."""
        accept_any_text()
        try:
            return self.run(program) or 0
        # Handled before its base class OSError, because it is not an error if the reader of the output has ended.
        except BrokenPipeError:
            return reader_has_gone()
        except (ValueError, OSError) as error:
            complain(error)
            return 2
        # Commands import their packages when they run, so a missing extra shows only now.
        except ModuleNotFoundError as error:
            package = (error.name or "").split(".")[0]
            if not package or find_spec(package) is not None:
                raise
            complain(needed(package))
            return 2
