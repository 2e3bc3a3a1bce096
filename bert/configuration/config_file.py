"""Reader of settings from a TOML file or from the header of a result file."""

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from bert.configuration.config import flattened
from bert.configuration.recipes import RECIPES
from console.files import open_regular, read_bounded, shown
from console.text import did_you_mean, visible

_MOST_BYTES = 1 << 20
_MOST_SHOWN = 60  # a message shows at most this many characters of a name
_HEAD_BYTES = 1 << 16
"""Number of bytes that are read from the start of a result file. They include its header, which holds the configuration."""
_OF_ONE_RUN = ("dry_run", "log.run", "log.cache_cleared")
"""Settings that concern only a single run. Another run does not take them from its result file."""
_FORMER_NAMES = {
    "training.wire": "training.reduce_dtype",
    "training.fp32_sums": None,
    "training.in_network": None,
    "training.leave_out_stragglers": None,
    "evaluation.to_the_end": None,
    "data.prefetch": None,
    "training.bad_intervals": None,
    "training.warmup_steps": None,
}
"""Map from names of settings in earlier versions to current names, or to None if the setting was removed."""


def arguments_of(path: Path, recipe: str | None) -> tuple[str, list[str]]:
    """Return the recipe of a settings file, and its settings as command-line arguments.

    Raises ``ValueError`` if the file cannot be read, contains an unknown setting, or names a recipe other than ``recipe``.
    """
    named = ((_FORMER_NAMES.get(name, name), value) for name, value in _read(path))
    values = {name: value for name, value in named if name is not None}
    # The recipe comes first, because it determines the other settings and their defaults.
    stated = values.pop("recipe", None)
    if recipe is not None and stated not in (None, recipe):
        named = visible(stated, _MOST_SHOWN)
        raise ValueError(
            f"{path} is for the recipe {named}, but the command line names {recipe}: name {named} instead, or leave it out"
        )
    if recipe is None and stated is None:
        raise ValueError(
            f'{path} names no recipe: write it there (recipe = "tiny_cpu"), or put it before --config '
            f"{shlex.quote(str(path))} on the command line"
        )
    # Convert the recipe, because a value in a TOML file may be of any type.
    chosen = recipe or str(stated)
    if chosen not in RECIPES:
        raise ValueError(
            f"{path} names the recipe '{visible(chosen, _MOST_SHOWN)}': expected recipe = one of {', '.join(RECIPES)}"
        )
    # Check the names here, because tyro's error message would not mention the file.
    known = setting_names(chosen)
    for name in values:
        if name not in known:
            raise ValueError(f"{path}: there is no setting {visible(name, _MOST_SHOWN)}{did_you_mean(name, known)}")
    return chosen, [argument for name, value in values.items() for argument in option_of(name, value)]


def setting_names(recipe: str) -> list[str]:
    """Return the names of all settings, in the form section.field."""
    return [name.removeprefix("config.") for name, _ in flattened("config", RECIPES[recipe]())]


def _read(path: Path) -> Iterator[tuple[str, object]]:
    if path.suffix == ".toml":
        content = read_bounded(path, _MOST_BYTES, "expected TOML")
        try:
            return _flat("", tomllib.loads(content.decode()))
        # Invalid TOML and integers of thousands of digits raise ValueError. Deeply nested files raise RecursionError.
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not valid TOML: {shown(error)}") from None
    try:
        with open_regular(path) as file:
            # Replace invalid bytes, because the size limit may cut a multi-byte character in two.
            head = file.read(_HEAD_BYTES).decode(errors="replace")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    found = re.findall(r"^# config\.([\w.]+): ?(.*)$", head, re.M)
    if not found:
        raise ValueError(
            f"{path} is neither a .toml file nor a result file of this program: it states no configuration"
        )
    return ((name, value) for name, value in found if name not in _OF_ONE_RUN)


def _flat(prefix: str, table: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        name = f"{prefix}{key}"
        # Do not flatten training.implementations: this table is the value of one setting, and its keys are names of ops.
        if isinstance(value, dict) and name != "training.implementations":
            yield from _flat(f"{name}.", value)
        else:
            yield name, value


def option_of(name: str, value: object) -> list[str]:
    """Return the command-line arguments for a setting.

    The value is a TOML value, or the text of a value in the header of a result file.
    """
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, Mapping):
        return [option, *(str(part) for pair in value.items() for part in pair)]
    if name == "training.implementations":
        # In a result file, the value is the text of a Python dict of strings.
        return [option, *re.findall(r"'([^']*)'", str(value))]
    # In tyro, boolean options take no value: they are written --section.field or --section.no-field.
    if str(value) == "False":
        section, _, field = option.rpartition(".")
        return [f"{section}.no-{field}" if section else f"--no-{field.removeprefix('--')}"]
    if str(value) == "True":
        return [option]
    # Use "=", because a separate value that begins with a dash would be parsed as an option.
    return [f"{option}={value}"]
