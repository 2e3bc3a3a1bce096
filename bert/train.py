"""Train a model and write a result file: ``python -m bert.train RECIPE [--section.field value ...]``.

``--config FILE`` takes settings from a TOML file or from the result file of an earlier run. ``--plan FILE`` takes settings
from a plan. All these files name the recipe too. Settings on the command line override the settings in the file. ``--list``
lists the recipes. ``--print-config`` prints all settings in a form that ``--config`` can read, instead of starting the run.

Under torchrun, this program is one of many ranks; otherwise the run has one process. Exit status: 0 if the target was
reached, 1 if the run ended without reaching it, 2 for a wrong input or setting, 3 after a fault of a rank, 128 + n after
signal n. Under torchrun, the status of every orderly end is 0, because torchrun reports any other status as a crash. If
MLPERF_BERT_CLAIM is set, status 1 becomes 0. The log then shows whether the target was reached.
"""

import os
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
from bert.derived_settings import DERIVATIONS
from bert.guards.interruption import Interrupted
from bert.parallel.environment import CLAIM, Launch
from console.interruption import abandon_stdout, ignore_signals
from console.program import accept_any_text, answer_version, complain, parsed, say, say_document
from console.text import did_you_mean

_SETTINGS = (
    "All settings of a run. --config FILE takes them from a TOML file, or from the result file of an earlier run; settings "
    "on the command line override the file's. --print-config prints them, for --config, instead of starting a run."
)

_PRINT = "--print-config"
_OPTIONS = ("--help", "--list", "--version", "--config", "--plan", _PRINT)

OLDEST_TORCH = (2, 11)
"""Oldest supported release of PyTorch. pyproject.toml requires it too. NGC's images contain it from version 26.02 on."""


def main(arguments: Sequence[str]) -> int:
    accept_any_text()
    answer_version(arguments)
    try:
        if list(arguments) == ["--list"]:
            for name in RECIPES:
                say(f"{name:14}  {described(name)}")
            return 0
        config = parse(arguments)
        # Check this after parsing, because it imports PyTorch, which is slow.
        require_torch()
    except (ValueError, OSError) as error:
        return refused(error)
    # Import these only here, because they are slow and a wrong command line must be reported at once.
    from bert.parallel.mesh import leave_mesh
    from bert.run import run

    try:
        return run(config, arguments)
    except Interrupted as interrupted:
        if CLAIM not in os.environ:  # otherwise the launcher, which sets this variable, reports the interruption
            _complain(interrupted)
        return interrupted.status
    except (ValueError, OSError) as error:
        return refused(error)
    finally:
        ignore_signals()
        leave_mesh()


def parse(arguments: Sequence[str], module: str = "bert.train") -> Config:
    """Parse the command line of ``module``, including the settings in the files of ``--config`` and ``--plan``.

    Raises ``ValueError`` for an unknown recipe or a wrong value, and ``SystemExit`` after it has answered --help or
    --print-config.
    """
    known = ", ".join(RECIPES)
    # Print only an overview: tyro's help needs a recipe, because it shows the recipe's values as defaults.
    if arguments and arguments[0] in ("-h", "--help"):
        say_document(f"{__doc__}\nRecipes: {known}\n\nThe settings of a recipe: python -m bert.train RECIPE --help")
        raise SystemExit(0)
    file, given = without_option("--config", [argument for argument in arguments if argument != _PRINT])
    named, *rest = given if given and not given[0].startswith("-") else (None, *given)
    if named is not None and named not in RECIPES:
        raise ValueError(f"unknown recipe {named!r}: expected one of {known}{did_you_mean(named, list(RECIPES))}")
    recipe, of_file = (named, []) if file is None else arguments_of(Path(file), named)
    # Append the command line's settings, because the last value of a setting overrides earlier values.
    settings = of_file + rest
    plan_file, _ = without_option("--plan", settings)
    # The header of a result file contains the text None if the run had no plan.
    plan = None if plan_file in (None, "None") else read_plan(Path(plan_file))
    if plan is not None:
        # Put the plan's settings first, so that the command line overrides them. `require_settings` later refuses
        # settings that differ from the plan.
        if recipe not in (None, plan.recipe):
            raise ValueError(f"the plan is for the recipe {plan.recipe}, expected {recipe}: make a plan for {recipe}")
        recipe, settings = plan.recipe, [*plan.arguments(), *settings]
    if recipe is None:
        if given and (close := did_you_mean(given[0], _OPTIONS)):
            raise ValueError(f"there is no option {given[0]}{close}")
        raise ValueError(f"no recipe given: expected one of {known}, or --config FILE")
    # Take help texts only from docstrings: searching the source for comments would take a third of the parser's time.
    no_comments = (tyro.conf.HelptextFromCommentsOff,)
    program = f"python -m {module} {recipe}"
    read = partial(tyro.cli, Config, prog=program, args=settings, description=_SETTINGS, config=no_comments)
    try:
        config = parsed(partial(read, default=RECIPES[recipe]()))
        for derive in DERIVATIONS.get(recipe, ()):
            # Parse again, so that given settings override derived settings. The default must not contain
            # implementations, because tyro would turn the ops in it into separate settings.
            default = derive(config)
            default = replace(default, training=replace(default.training, implementations={}))
            config = parsed(partial(read, default=default))
        if plan is not None:
            plan.require_settings(config)
    except ValueError as error:
        for path, own in ((file, of_file), (plan_file, plan.arguments() if plan else [])):
            if own and _complaint(partial(read, args=own, default=RECIPES[recipe]())) == str(error):
                raise ValueError(f"{path}: {_explained(error, recipe)}") from None
        raise ValueError(_explained(error, recipe)) from None
    if _PRINT in arguments:
        for name, value in flattened("config", config):
            say(f"# {name}: {value}")
        raise SystemExit(0)
    return config


def _complaint(read: Callable[[], Config]) -> str:
    """Return the error message about settings, or "" if they are valid."""
    try:
        parsed(read)
    except ValueError as error:
        return str(error)
    return ""


def _explained(error: ValueError, recipe: str) -> str:
    """Return the error message about settings. For an unknown setting, suggest a similar name."""
    unknown = re.match("unexpected argument (.+)", str(error))
    if unknown is None:
        return str(error)
    if not unknown[1].startswith("-"):
        return f"unexpected argument {unknown[1]!r}: expected settings, --section.field value"
    options = [*_OPTIONS, *(f"--{name.replace('_', '-')}" for name in setting_names(recipe))]
    return f"there is no setting {unknown[1]}{did_you_mean(unknown[1], options)}"


def without_option(name: str, arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return two results: the last value of an option (None if it is absent), and the arguments without the option.

    Raises ``ValueError`` if the option has no value.
    """
    value, others, words = None, [], iter(arguments)
    for word in words:
        option, equals, given = word.partition("=")
        if option != name:
            others.append(word)
            continue
        value = given if equals else next(words, "")
        if not value:
            raise ValueError(f"{name} needs a value after it")
    return value, others


def require_torch() -> None:
    """Raise ``ValueError`` if PyTorch is older than `OLDEST_TORCH`."""
    import torch

    # Compare only the first two components: in the pre-releases of NGC's images, the rest is not numeric.
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ValueError(
            f"PyTorch is {torch.__version__} here, expected {oldest} or newer: install a newer PyTorch, or use a newer image"
        )


def refused(error: ValueError | OSError) -> int:
    """Print an input error, unless it is a broken pipe, and return the exit status."""
    if isinstance(error, BrokenPipeError):
        return abandon_stdout()
    _complain(error)
    return 2


def _complain(error: Exception) -> None:
    """Print the error in one line. Ranks other than 0 add their number, because only their machine may be concerned."""
    try:
        rank = Launch.from_environment().rank
    except ValueError:  # the environment is invalid, which may be the error to print
        rank = 0
    complain(error, f"error: rank {rank}" if rank else "error")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
