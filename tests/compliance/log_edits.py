"""Edits of a log for tests. A record is identified by its key and its index among the records with that key."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import reduce
from pathlib import Path

from mlperf_logging.compliance_checker import mlp_compliance

from compliance.log.record import TOKEN
from compliance.official.worker import RuleFiles

Edit = Callable[[str], str]

mlp_compliance.yaml = RuleFiles()  # saves a tenth of a second per log


def in_turn(*edits: Edit) -> Edit:
    return lambda text: reduce(lambda text, change: change(text), edits, text)


def lines_of(text: str, key: str) -> list[str]:
    """Return the log lines that contain a record of `key`."""
    return [line for line in text.splitlines(keepends=True) if f'"key": "{key}"' in line]


def time_of(line: str) -> int:
    return json.loads(line.partition(TOKEN)[2])["time_ms"]


def edit(key: str, change: Callable[[dict], object], nth: int = 0) -> Edit:
    """Return an edit that changes the parsed `nth` record of `key`; negative numbers count from the end."""

    def apply(text: str) -> str:
        lines = text.splitlines()
        place = [number for number, line in enumerate(lines) if f'"key": "{key}"' in line][nth]
        fields = json.loads(lines[place][len(TOKEN) :])
        change(fields)
        lines[place] = TOKEN + json.dumps(fields)
        return "\n".join(lines) + "\n"

    return apply


def value(key: str, new: object, nth: int = 0) -> Edit:
    return edit(key, lambda fields: fields.update(value=new), nth)


def later(key: str, by_ms: int, nth: int = 0) -> Edit:
    return edit(key, lambda fields: fields.update(time_ms=fields["time_ms"] + by_ms), nth)


def metadata(key: str, name: str, new: object, nth: int = 0) -> Edit:
    return edit(key, lambda fields: fields["metadata"].update({name: new}), nth)


def without_metadata(key: str, name: str, nth: int = 0) -> Edit:
    return edit(key, lambda fields: fields["metadata"].pop(name), nth)


def delete(*keys: str, nth: int | None = None) -> Edit:
    """Return an edit that deletes all records of the given keys, or only one record per key."""

    def apply(text: str) -> str:
        lines = text.splitlines(keepends=True)
        for key in keys:
            places = [number for number, line in enumerate(lines) if f'"key": "{key}"' in line]
            gone = places if nth is None else [places[nth]]
            lines = [line for number, line in enumerate(lines) if number not in gone]
        return "".join(lines)

    return apply


def repeat(key: str) -> Edit:
    """Return an edit that duplicates a record directly after itself."""
    return lambda text: re.sub(rf'(.*"key": "{key}".*\n)', r"\1\1", text, count=1)


def repeat_before(key: str, other: str) -> Edit:
    """Return an edit that copies a record of `key` before a record of `other`, with the time stamp of `other`."""

    def apply(text: str) -> str:
        at = lines_of(text, other)[0]
        copy = re.sub(r'"time_ms": \d+', f'"time_ms": {time_of(at)}', lines_of(text, key)[0])
        return text.replace(at, copy + at, 1)

    return apply


def move_before(key: str, other: str) -> Edit:
    return in_turn(repeat_before(key, other), delete(key, nth=1))


def swap(key: str, other: str) -> Edit:
    """Return an edit that exchanges two records. Time stamps stay in their places."""

    def apply(text: str) -> str:
        first, second = lines_of(text, key)[0], lines_of(text, other)[0]
        early, late = (f'"time_ms": {time_of(line)}' for line in (first, second))
        exchanged = {first: second.replace(late, early), second: first.replace(early, late)}
        return "".join(exchanged.get(line, line) for line in text.splitlines(keepends=True))

    return apply


def glue(key: str) -> Edit:
    """Return an edit that joins a record and the next one in a single line."""
    return lambda text: re.sub(rf'(.*"key": "{key}".*)\n', r"\1", text, count=1)


def epoch_nums(*counts: int) -> Edit:
    """Return an edit that sets the epoch_num of each evaluation."""
    return in_turn(*(metadata("eval_accuracy", "epoch_num", count, nth) for nth, count in enumerate(counts)))


def log_after(key: str, other: str, new: object) -> Edit:
    """Return an edit that inserts another setting after the record of `key`."""

    def apply(text: str) -> str:
        line = lines_of(text, key)[0]
        return text.replace(line, line + value(other, new)(line.replace(f'"{key}"', f'"{other}"')))

    return apply


def epochs_for_blocks(text: str) -> str:
    """Replace the blocks by a single epoch."""
    return text.replace('"block_', '"epoch_').replace('"first_epoch_num": 1', '"epoch_num": 1')


def garble(key: str, replacement: str) -> Edit:
    return lambda text: re.sub(rf'(.*"key": "{key}".*)\}}\n', rf"\1{replacement}\n", text, count=1)


def original_verdict(path: Path, ruleset: str) -> str:
    """Run the unmodified official checker on the whole file and return its verdict."""
    mlp_compliance.enqueued_configs.clear()
    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=False)
    try:
        return "pass" if checker.check_file(str(path), f"training_{ruleset}/common.yaml") else "fail"
    except Exception:
        return "fail"
