"""Settings from a file: TOML, or the head of a result file, whose run is then configured once more."""

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from bert.configuration.config import flattened
from bert.configuration.recipes import RECIPES
from console.files import open_regular, read_bounded
from console.text import did_you_mean

_MOST_BYTES = 1 << 20
_HEAD_BYTES = 1 << 16
"""Of a result file, which may be long: its configuration stands at the top."""
_OF_ONE_RUN = ("dry_run", "log.run", "log.cache_cleared")
"""Settings of a result file that are that run's own."""
_FORMER_NAMES = {
    "training.wire": "training.reduce_dtype",
    "training.fp32_sums": None,
    "training.in_network": None,
    "training.leave_out_stragglers": None,
    "training.shard_gradients": None,
}
"""Settings of earlier versions by their names today; None for settings that were removed."""


def arguments_of(path: Path, recipe: str | None) -> tuple[str, list[str]]:
    """The recipe and the command line that a file stands for.

    Raises ``ValueError`` when it cannot be read, names another recipe than ``recipe``, or a setting that there is not.
    """
    named = ((_FORMER_NAMES.get(name, name), value) for name, value in _read(path))
    values = {name: value for name, value in named if name is not None}
    # Taken out first: it decides which settings there are, and their defaults.
    stated = values.pop("recipe", None)
    if recipe is not None and stated not in (None, recipe):
        raise ValueError(f"{path} is of the recipe {stated}, expected {recipe}: name that one, or leave the recipe out")
    if recipe is None and stated is None:
        raise ValueError(
            f'{path} names no recipe: write it there (recipe = "tiny_cpu"), or put it before --config '
            f"{shlex.quote(str(path))} on the command line"
        )
    # TOML may have a number or a list there.
    chosen = recipe or str(stated)
    if chosen not in RECIPES:
        raise ValueError(f"{path} names the recipe {chosen!r}: expected recipe = one of {', '.join(RECIPES)}")
    # tyro would name the option and not the file that it comes from.
    known = setting_names(chosen)
    for name in values:
        if name not in known:
            raise ValueError(f"{path}: there is no setting {name}{did_you_mean(name, known)}")
    return chosen, [argument for name, value in values.items() for argument in option_of(name, value)]


def setting_names(recipe: str) -> list[str]:
    """All settings, as section.field."""
    return [name.removeprefix("config.") for name, _ in flattened("config", RECIPES[recipe]())]


def _read(path: Path) -> Iterator[tuple[str, object]]:
    if path.suffix == ".toml":
        try:
            content = tomllib.loads(read_bounded(path, _MOST_BYTES, "expected TOML").decode())
        # The parser recurses: a file that nests deeply is a wrong one, not a crash.
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is no TOML: {error}") from None
        return _flat("", content)
    head = _head(path)
    found = re.findall(r"^# config\.([\w.]+): ?(.*)$", head, re.M)
    if not found:
        raise ValueError(
            f"{path} is neither a .toml file nor a result file of this program: it states no configuration"
        )
    return ((name, value) for name, value in found if name not in _OF_ONE_RUN)


def _head(path: Path) -> str:
    try:
        with open_regular(path) as file:
            # The bound may cut a character in two.
            return file.read(_HEAD_BYTES).decode(errors="replace")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


def _flat(prefix: str, table: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        name = f"{prefix}{key}"
        # The one setting that is a table itself: its keys are names of ops.
        if isinstance(value, dict) and name != "training.implementations":
            yield from _flat(f"{name}.", value)
        else:
            yield name, value


def option_of(name: str, value: object) -> list[str]:
    """Write a setting for a command line. In TOML what is None is left out; in a head values stand as Python prints them."""
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, Mapping):
        return [option, *(str(part) for pair in value.items() for part in pair)]
    if name == "training.implementations":
        # As Python prints a dict of texts, in the head of a result file.
        return [option, *re.findall(r"'([^']*)'", str(value))]
    # tyro's booleans take no value: --section.field, and --section.no-field.
    if str(value) == "False":
        section, _, field = option.rpartition(".")
        return [f"{section}.no-{field}" if section else f"--no-{field.removeprefix('--')}"]
    if str(value) == "True":
        return [option]
    # With =, since a text that begins with a dash would be taken for an option.
    return [f"{option}={value}"]
