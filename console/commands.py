"""Programs with several commands, parsed by tyro. A program that must run without tyro uses `console.program` instead."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import tyro
from tyro.extras import subcommand_cli_from_dict

from console.extras import needed
from console.interruption import abandon_stdout, end_in_order
from console.program import accept_any_text, answer_version, bound, complain, parsed, unknown_option
from console.text import did_you_mean


class Commands:
    """Commands of one program. The whole command line is parsed before a command runs."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}

    def command(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Add the command that has the name of ``function``, without a leading underscore."""
        self._functions[function.__name__.lstrip("_").replace("_", "-")] = function
        return function

    def run(self, program: str, arguments: Sequence[str] | None = None) -> Any:
        """Run the command that the first argument names, and return its result. `arguments` defaults to the command line.

        Raises ``ValueError`` if the command or its options are wrong, see `parsed`.
        """
        given = sys.argv[1:] if arguments is None else arguments
        answer_version(given)
        _refuse_empty(given)
        # tyro calls the chosen function while it parses, and would report the command's errors as errors in the options.
        # So pass functions from `bound`, which only store their arguments. The command runs after parsing.
        commands = {name: bound(function) for name, function in self._functions.items()}
        try:
            call = parsed(partial(subcommand_cli_from_dict, commands, prog=program, args=arguments))
        except ValueError as error:
            raise ValueError(self._complaint(given) or str(error)) from None
        return call()

    def _complaint(self, given: Sequence[str]) -> str:
        """Return the complaint about an unknown command or option, with a suggestion; "" if both are known."""
        command, *words = given or [""]
        function = self._functions.get(command)
        if function is not None:
            wrong = unknown_option(function, words)
            return f"{command} has {wrong}" if wrong else ""
        if not command:
            return ""
        known = [*self._functions] if not command.startswith("-") else ["--help", "--version"]
        kind = "command" if not command.startswith("-") else "option"
        return f"there is no {kind} {command}, expected one of {', '.join(known)}{did_you_mean(command, known)}"

    def main(self, program: str) -> int:
        """Run the command and return the exit status. A wrong input gives one line on standard error and status 2."""
        return _status_of(lambda: self.run(program))


def run_program(function: Callable[..., Any], program: str) -> int:
    """Call ``function`` with the options of a program without commands. Return the exit status, see `Commands.main`."""
    return _status_of(lambda: _call(function, program))


def _call(function: Callable[..., Any], program: str) -> Any:
    answer_version(sys.argv[1:])
    _refuse_empty(sys.argv[1:])
    try:
        call = parsed(partial(tyro.cli, bound(function), prog=program))
    except ValueError as error:
        wrong = unknown_option(function, sys.argv[1:])
        raise ValueError(f"there is {wrong}" if wrong else str(error)) from None
    return call()


def _refuse_empty(words: Sequence[str]) -> None:
    # `Path("")` is the current folder. If a variable in a script is unset, a program would work there by mistake.
    if "" in words:
        raise ValueError("an argument is empty; is a variable in the calling script unset?")


def _status_of(run: Callable[[], Any]) -> int:
    end_in_order()
    accept_any_text()
    try:
        return run() or 0
    # The program that reads the output has ended. This is no error, so catch it before its base class OSError.
    except BrokenPipeError:
        return abandon_stdout()
    except (ValueError, OSError) as error:
        complain(error)
        return 2
    # Commands import packages when they run, so it is noticed only here that a package is missing.
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if not package or find_spec(package) is not None:
            raise
        complain(needed(package))
        return 2
