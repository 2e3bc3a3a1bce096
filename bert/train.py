"""The timed run, from configuration to result file: ``python -m bert.train RECIPE [--section.field value ...]``.

``--config FILE`` takes settings from a TOML file, or from the result file of an earlier run, ``--plan FILE`` from a plan;
both include the recipe. Settings on the command line override the file's. ``--list`` lists the recipes. ``--print-config``
prints all settings of a run, for ``--config``, instead of starting it.

Under torchrun this program is one of many ranks, otherwise a run of one process. Exit status: 0 target reached, 1 run ended
without it, 2 wrong input or setting, 3 fault of a rank, 128 + n after signal n. Under torchrun every orderly end is 0,
because torchrun reports anything else as a crash; the log has the verdict.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import tyro

from bert.configuration.config import Config, flattened
from bert.configuration.config_file import arguments_of, setting_names
from bert.configuration.recipes import RECIPES, described
from bert.configuration.run_plan import read_plan
from bert.guards.interruption import Interrupted
from bert.own_text import FOLLOWING
from bert.parallel.launch import Launch
from console.interruption import end_in_order, reader_has_gone
from console.program import accept_any_text, answer_version, bound, complain, parsed, say, say_document
from console.text import did_you_mean

_SETTINGS = (
    "All settings of a run. --config FILE takes them from a TOML file, or from the result file of an earlier run; settings "
    "on the command line override the file's. --print-config prints them, for --config, instead of starting a run."
)

_PRINT = "--print-config"

OLDEST_TORCH = (2, 11)
"""Oldest supported release of PyTorch: that of NGC's images from 26.02 on. Installing asks for it too."""


def main(arguments: Sequence[str]) -> int:
    """Parse, check, run; return the exit status."""
    accept_any_text()
    answer_version(arguments)
    try:
        if list(arguments) == ["--list"]:
            for name in RECIPES:
                say(f"{name:14}  {described(name)}")
            return 0
        config = parse([argument for argument in arguments if argument != _PRINT])
        if _PRINT in arguments:
            for name, value in flattened("config", config):
                say(f"# {name}: {value}")
            return 0
        # After the parsing, since it imports PyTorch.
        require_torch()
    except (ValueError, OSError) as error:
        return refused(error)
    from bert.run import leave_mesh, run  # PyTorch and kernels: seconds that a wrong command line need not wait for

    try:
        return run(config, arguments)
    except Interrupted as interrupted:
        _complain(interrupted)
        return interrupted.status
    except (ValueError, OSError) as error:
        return refused(error)
    finally:
        leave_mesh()


def parse(arguments: Sequence[str], module: str = "bert.train") -> Config:
    """Parse the command line of ``module``, with the settings of ``--config`` and ``--plan``.

    Raises ``ValueError`` for an unknown recipe or a wrong value.
    """
    known = ", ".join(RECIPES)
    # tyro can list only the settings of a recipe, whose values are the defaults.
    if arguments and arguments[0] in ("-h", "--help"):
        say_document(f"{__doc__}\nRecipes: {known}\n\nThe settings of a recipe: python -m bert.train RECIPE --help")
        raise SystemExit(0)
    file, given = _without_option("--config", arguments)
    named, *rest = given if given and not given[0].startswith("-") else (None, *given)
    if named is not None and named not in RECIPES:
        raise ValueError(f"unknown recipe {named!r}: expected one of {known}{did_you_mean(named, list(RECIPES))}")
    recipe, settings = (named, []) if file is None else arguments_of(Path(file), named)
    # The last value of a setting counts.
    settings += rest
    plan_file, _ = _without_option("--plan", settings)
    # The head of a result file says None for a run that had no plan.
    plan = None if plan_file in (None, "None") else read_plan(Path(plan_file))
    if plan is not None:
        # In front, so that a setting which contradicts the plan wins here, and ``require_settings`` finds it.
        recipe, settings = plan.recipe_for(recipe), [*plan.arguments(), *settings]
    if recipe is None:
        raise ValueError(f"no recipe given: expected one of {known}, or --config FILE")
    read = partial(tyro.cli, Config, prog=f"python -m {module} {recipe}", args=settings, description=_SETTINGS)
    try:
        config = parsed(partial(read, default=RECIPES[recipe]()))
        for follow in FOLLOWING.get(recipe, ()):
            # Parsed again, so that given settings override derived ones. Without implementations: tyro would make
            # settings of the ops in the default.
            default = follow(config)
            default = replace(default, training=replace(default.training, implementations={}))
            config = parsed(partial(read, default=default))
        if plan is not None:
            plan.require_settings(config)
        return config
    except ValueError as error:
        unknown = re.match(r"Unrecognized options: --([^\s,=]+)", str(error))
        if unknown is None:
            raise
        name = unknown[1].replace("-", "_")
        raise ValueError(f"there is no setting --{unknown[1]}{did_you_mean(name, setting_names(recipe))}") from None


def _without_option(name: str, arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the last value of an option that takes a file, and the other arguments."""
    value, others, words = None, [], iter(arguments)
    for word in words:
        option, equals, given = word.partition("=")
        if option != name:
            others.append(word)
            continue
        value = given if equals else next(words, "")
        if not value:
            raise ValueError(f"{name}: expected a file after it")
    return value, others


def require_torch() -> None:
    """Raise ``ValueError`` if PyTorch is older than the oldest supported release."""
    import torch

    # The first two numbers alone: what follows is no number in the pre-releases of NGC's images.
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ValueError(
            f"PyTorch is {torch.__version__} here, expected {oldest} or newer: install it, or take a newer image"
        )


def run_command(function: Callable[..., None], module: str) -> int:
    """Parse the command line of ``python -m module`` for ``function`` and call it; return the exit status."""
    # On SIGTERM, unfinished files are removed on the way out.
    end_in_order()
    accept_any_text()
    answer_version(sys.argv[1:])
    try:
        # Bound while parsing and called after it, because ``parsed`` holds back stderr for tyro's complaints.
        parsed(partial(tyro.cli, bound(function), prog=f"python -m {module}"))()
    except (ValueError, OSError) as error:
        return refused(error)
    return 0


def refused(error: ValueError | OSError) -> int:
    """Say what is wrong with the input, unless the reader of the output has gone; return the exit status."""
    if isinstance(error, BrokenPipeError):
        return reader_has_gone()
    _complain(error)
    return 2


def _complain(error: Exception) -> None:
    """Print the error in one line, on every rank that has one: a single machine may be wrong."""
    try:
        rank = Launch.from_environment().rank
    except ValueError:  # the environment is what is wrong
        rank = 0
    complain(error, f"error: rank {rank}" if rank else "error")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
