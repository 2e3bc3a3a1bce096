"""Edits of a log for the tests beside this. A record is known by its key and its place among the records of that key."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from mlperf_logging.compliance_checker import mlp_compliance

from compliance.log.record import TOKEN

Edit = Callable[[str], str]


def edit(key: str, change: Callable[[dict], object], nth: int = 0) -> Edit:
    """Change the `nth` record of `key` (from the end if negative) as an object."""

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


def metadata(key: str, name: str, new: object, nth: int = 0) -> Edit:
    return edit(key, lambda fields: fields["metadata"].update({name: new}), nth)


def without_metadata(key: str, name: str, nth: int = 0) -> Edit:
    return edit(key, lambda fields: fields["metadata"].pop(name), nth)


def delete(key: str, nth: int | None = None) -> Edit:
    def apply(text: str) -> str:
        places = [number for number, line in enumerate(text.splitlines()) if f'"key": "{key}"' in line]
        gone = places if nth is None else [places[nth]]
        return "".join(line for number, line in enumerate(text.splitlines(keepends=True)) if number not in gone)

    return apply


def repeat(key: str) -> Edit:
    """Log the record a second time, right after itself."""
    return lambda text: re.sub(rf'(.*"key": "{key}".*\n)', r"\1\1", text, count=1)


def repeat_before(key: str, other: str) -> Edit:
    """Log the record of `key` a second time, right before that of `other`, with the time of `other`."""

    def apply(text: str) -> str:
        line = re.search(rf'.*"key": "{key}".*\n', text)
        at = re.search(rf'.*"key": "{other}".*\n', text)
        assert line
        assert at
        time_ms = json.loads(at[0][len(TOKEN) :])["time_ms"]
        copy = re.sub(r'"time_ms": \d+', f'"time_ms": {time_ms}', line[0])
        return text.replace(at[0], copy + at[0])

    return apply


def move_before(key: str, other: str) -> Edit:
    return lambda text: delete(key, 1)(repeat_before(key, other)(text))


def swap(key: str, other: str) -> Edit:
    """Exchange two records; each gets the time stamp of its new place."""

    def apply(text: str) -> str:
        lines = text.splitlines()
        a, b = (next(n for n, line in enumerate(lines) if f'"key": "{name}"' in line) for name in (key, other))
        times = [re.search(r'"time_ms": \d+', lines[n]) for n in (a, b)]
        assert times[0]
        assert times[1]
        first, second = lines[a], lines[b]
        lines[a] = second.replace(times[1][0], times[0][0])
        lines[b] = first.replace(times[0][0], times[1][0])
        return "\n".join(lines) + "\n"

    return apply


def glue(text: str) -> str:
    """Two records on one line."""
    return re.sub(r'(.*"key": "opt_base_learning_rate".*)\n', r"\1", text, count=1)


def epoch_nums(*counts: int) -> Edit:
    """The epoch_num of each evaluation."""

    def apply(text: str) -> str:
        for nth, count in enumerate(counts):
            text = metadata("eval_accuracy", "epoch_num", count, nth)(text)
        return text

    return apply


def log_after(key: str, other: str, new: object) -> Edit:
    """Log a further setting after that of `key`."""

    def apply(text: str) -> str:
        line = re.search(rf'.*"key": "{key}".*\n', text)
        assert line
        return text.replace(line[0], line[0] + value(other, new)(line[0].replace(f'"{key}"', f'"{other}"')))

    return apply


def epochs_for_blocks(text: str) -> str:
    """One epoch instead of the blocks."""
    return text.replace('"block_', '"epoch_').replace('"first_epoch_num": 1', '"epoch_num": 1')


def garble(key: str, replacement: str) -> Edit:
    return lambda text: re.sub(rf'(.*"key": "{key}".*)\}}\n', rf"\1{replacement}\n", text, count=1)


def original_verdict(path: Path, ruleset: str) -> str:
    """Of the official checker as it is in the package, on the whole file."""
    mlp_compliance.enqueued_configs.clear()
    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=False)
    try:
        return "pass" if checker.check_file(str(path), f"training_{ruleset}/common.yaml") else "fail"
    except Exception:
        return "fail"
