"""The timed run, from configuration to result file: ``python -m bert.train RECIPE [--section.field value ...]``.

``--config FILE`` takes settings from a TOML file, or those of an earlier run from its result file, recipe included; what
stands on the command line counts more. ``--plan FILE`` takes those of a plan, recipe included. ``--list`` lists the recipes,
``--print-config`` prints all settings of a run, for ``--config``, instead of starting it.

Under torchrun it is one rank of many, and by itself a run of one process. It exits with 0 when the target was reached, 1
when the run ended without, 2 when an input or a setting is wrong, 3 after a fault (``bert.parallel.watchdog``), and 128 + n
after signal n. Under torchrun every orderly end is 0, because torchrun takes anything else for a crash and says so at
length; the log tells how the run ended.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from bert.configuration.config import Config, flattened
from bert.configuration.config_file import arguments_of, setting_names
from bert.configuration.recipes import RECIPES, described
from bert.configuration.run_plan import read_plan
from bert.guards.interruption import Interrupted
from bert.own_text import FOLLOWING
from bert.parallel.launch import Launch
from console.interruption import reader_has_gone
from console.program import accept_any_text, answer_version, complain, parsed, say, say_document
from console.text import did_you_mean

if TYPE_CHECKING:
    from bert.run import Forecast, Look

_SETTINGS = (
    "All settings of a run. --config FILE takes them from a TOML file, or from the result file of an earlier run; what "
    "stands on the command line counts more. --print-config prints them, for --config, instead of starting a run."
)

_PRINT = "--print-config"

OLDEST_TORCH = (2, 11)
"""PyTorch's oldest release that this is tested with, of the images of NGC from 26.02 on. Installing asks for it too."""


def main(arguments: Sequence[str], look: Look | None = None, forecast: Forecast | None = None) -> int:
    """Parse, check, run; returns the exit status. ``look`` and ``forecast``: see ``bert.run.run``."""
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
        # Behind the parsing, since it imports PyTorch.
        require_torch()
    except (ValueError, OSError) as error:
        return refused(error)
    from bert.run import leave_mesh, run  # PyTorch and kernels: seconds that a wrong command line need not wait for

    try:
        return run(config, arguments, look, forecast)
    except Interrupted as interrupted:
        _complain(interrupted)
        return interrupted.status
    except (ValueError, OSError) as error:
        return refused(error)
    finally:
        leave_mesh()


def parse(arguments: Sequence[str], module: str = "bert.train") -> Config:
    """The configuration that the command line of ``module`` asks for, after ``--config FILE`` if it is given.

    Raises ``ValueError`` at an unknown recipe or a wrong value.
    """
    known = ", ".join(RECIPES)
    # tyro can list settings of a recipe alone, whose values are the defaults.
    if arguments and arguments[0] in ("-h", "--help"):
        say_document(f"{__doc__}\nRecipes: {known}\n\nThe settings of a recipe: python -m bert.train RECIPE --help")
        raise SystemExit(0)
    file, given = _config_file(arguments)
    named, *rest = given if given and not given[0].startswith("-") else (None, *given)
    if named is not None and named not in RECIPES:
        raise ValueError(f"unknown recipe {named!r}: expected one of {known}{did_you_mean(named, list(RECIPES))}")
    recipe, settings = (named, []) if file is None else arguments_of(file, named)
    # Behind the file's: of a setting that is given twice, the latter counts.
    settings += rest
    # --plan stays among the settings, being one of ``Config``, and may come from --config; the latter is none.
    plan_file = _plan_file(settings)
    plan = None if plan_file is None else read_plan(plan_file)
    if plan is not None:
        # In front, so that a setting which contradicts the plan wins here, and ``require_settings`` finds it.
        recipe, settings = plan.recipe_for(recipe), [*plan.arguments(), *settings]
    if recipe is None:
        raise ValueError(f"no recipe given: expected one of {known}, or --config FILE")
    program = f"python -m {module} {recipe}"
    read = partial(tyro.cli, Config, prog=program, args=settings, description=_SETTINGS)
    try:
        config = parsed(partial(read, default=RECIPES[recipe]()))
        for follow in FOLLOWING.get(recipe, ()):  # what is given counts more than what would follow
            default = follow(config)  # without ops: what tyro finds of them there would become settings of their own
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


def _config_file(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file of ``--config FILE``, which may stand anywhere, and the other arguments."""
    rest = list(arguments)
    for place, argument in enumerate(rest):
        option, equals, value = argument.partition("=")
        if option == "--config":
            if not equals and place + 1 == len(rest):
                raise ValueError("--config: expected a file behind it")
            del rest[place : place + (1 if equals else 2)]
            return Path(value if equals else arguments[place + 1]), rest
    return None, rest


def _plan_file(arguments: Sequence[str]) -> Path | None:
    """The file of the last ``--plan FILE``, if there is one."""
    found = None
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option == "--plan" and (equals or place + 1 < len(arguments)):
            found = value if equals else arguments[place + 1]
    # The head of a result file says None of a run that had no plan.
    return Path(found) if found not in (None, "None") else None


def require_torch() -> None:
    """Raise ``ValueError`` where PyTorch is older than this is tested with."""
    import torch

    # The first two numbers alone: what follows is no number in the pre-releases of NGC's images.
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ValueError(
            f"PyTorch is {torch.__version__} here, expected {oldest} or newer: install it, or take a newer image"
        )


def refused(error: ValueError | OSError) -> int:
    """Say what is wrong with the input; returns the exit status. Where nobody reads on, as behind ``head``, say nothing."""
    if isinstance(error, BrokenPipeError):
        return reader_has_gone()
    _complain(error)
    return 2


def _complain(error: Exception) -> None:
    """Print the error in one line, on every rank that has one: what is wrong may be wrong on a single machine."""
    try:
        rank = Launch.from_environment().rank
    except ValueError:  # the environment is what is wrong
        rank = 0
    complain(error, f"error: rank {rank}" if rank else "error")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
