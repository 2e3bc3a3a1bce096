"""Edits of a log for tests. A record is identified by its key and its index among the records with that key."""

import json
from collections.abc import Callable
from functools import reduce
from pathlib import Path

from mlperf_logging.compliance_checker import mlp_compliance

from compliance.log.record import TOKEN
from compliance.official.worker import RuleFiles

Edit = Callable[[str], str]

mlp_compliance.yaml = RuleFiles()  # caches rule files, which saves 0.1 s per log


def in_turn(*edits: Edit) -> Edit:
    return lambda text: reduce(lambda text, change: change(text), edits, text)


def lines_of(text: str, key: str) -> list[str]:
    """Return the log lines that contain a record of `key`."""
    return [line for line in text.splitlines(keepends=True) if f'"key": "{key}"' in line]


def time_of(line: str) -> int:
    return json.loads(line.partition(TOKEN)[2])["time_ms"]


def on_line(key: str, change: Callable[[str], str], nth: int = 0) -> Edit:
    """Return an edit that replaces the line of the `nth` record of `key`; negative numbers count from the end."""

    def apply(text: str) -> str:
        lines = text.splitlines(keepends=True)
        place = [number for number, line in enumerate(lines) if f'"key": "{key}"' in line][nth]
        lines[place] = change(lines[place])
        return "".join(lines)

    return apply


def edit(key: str, change: Callable[[dict], object], nth: int = 0) -> Edit:
    """Return an edit that changes the parsed `nth` record of `key`."""

    def changed(line: str) -> str:
        fields = json.loads(line[len(TOKEN) :])
        change(fields)
        return f"{TOKEN}{json.dumps(fields)}\n"

    return on_line(key, changed, nth)


def value(key: str, new: object, nth: int = 0) -> Edit:
    return edit(key, lambda fields: fields.update(value=new), nth)


def later(key: str, by_ms: int, nth: int = 0) -> Edit:
    return edit(key, lambda fields: fields.update(time_ms=fields["time_ms"] + by_ms), nth)


def metadata(key: str, name: str, new: object, nth: int = 0) -> Edit:
    return edit(key, lambda fields: fields["metadata"].update({name: new}), nth)


def without_metadata(key: str, name: str, nth: int = 0) -> Edit:
    return edit(key, lambda fields: fields["metadata"].pop(name), nth)


def epoch_nums(*counts: int) -> Edit:
    """Return an edit that sets the epoch_num of each evaluation."""
    return in_turn(*(metadata("eval_accuracy", "epoch_num", count, nth) for nth, count in enumerate(counts)))


def delete(*keys: str, nth: int | None = None) -> Edit:
    """Return an edit that deletes all records of the given keys, or only the `nth` record of each key."""
    if nth is not None:
        return in_turn(*(on_line(key, lambda _: "", nth) for key in keys))
    named = tuple(f'"key": "{key}"' for key in keys)
    return lambda text: "".join(line for line in text.splitlines(True) if not any(name in line for name in named))


def repeat(key: str) -> Edit:
    """Return an edit that duplicates a record directly after itself."""
    return on_line(key, lambda line: line + line)


def glue(key: str) -> Edit:
    """Return an edit that joins a record and the next one in a single line."""
    return on_line(key, lambda line: line.removesuffix("\n"))


def garble(key: str, replacement: str) -> Edit:
    """Return an edit that replaces the last brace of a record by `replacement`."""
    return on_line(key, lambda line: f"{line[: line.rindex('}')]}{replacement}\n")


def log_after(key: str, other: str, new: object) -> Edit:
    """Return an edit that inserts the setting `other` with the value `new` after the record of `key`."""
    return on_line(key, lambda line: line + value(other, new)(line.replace(f'"{key}"', f'"{other}"')))


def repeat_before(key: str, other: str) -> Edit:
    """Return an edit that copies a record of `key` before a record of `other`, with the time stamp of `other`."""

    def apply(text: str) -> str:
        copied = lines_of(text, key)[0]
        return on_line(other, lambda at: copied.replace(str(time_of(copied)), str(time_of(at))) + at)(text)

    return apply


def move_before(key: str, other: str) -> Edit:
    return lambda text: repeat_before(key, other)(text).replace(lines_of(text, key)[0], "", 1)


def swap(key: str, other: str) -> Edit:
    """Return an edit that exchanges two records, except for their time stamps."""

    def apply(text: str) -> str:
        first, second = lines_of(text, key)[0], lines_of(text, other)[0]
        early, late = str(time_of(first)), str(time_of(second))
        exchanged = {first: second.replace(late, early), second: first.replace(early, late)}
        return "".join(exchanged.get(line, line) for line in text.splitlines(keepends=True))

    return apply


def epochs_for_blocks(text: str) -> str:
    """Replace a log's blocks by a single epoch."""
    return text.replace('"block_', '"epoch_').replace('"first_epoch_num": 1', '"epoch_num": 1')


def original_verdict(path: Path, ruleset: str) -> str:
    """Run the unmodified official checker on the whole file and return its verdict."""
    mlp_compliance.enqueued_configs.clear()
    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=False)
    try:
        return "pass" if checker.check_file(str(path), f"training_{ruleset}/common.yaml") else "fail"
    except Exception:
        return "fail"
