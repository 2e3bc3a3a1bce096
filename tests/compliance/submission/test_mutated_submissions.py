"""Submissions with one fault each: the check must say that one, where it is, under which rule, and its remedy."""

# ruff: noqa: E501 - the cases are a table, a row each

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from compliance.check.checker import check_file
from compliance.log import rules
from compliance.log.findings import Finding, Verdict
from compliance.log.schedule import evaluation_interval
from compliance.official import package as official_package
from compliance.official.package import Answer
from compliance.submission import check as submission
from tests.compliance.submission.submission_trees import (
    SYSTEM,
    without_chain,
    write_description,
    write_log,
    write_submission,
)

pytestmark = pytest.mark.slow

LOG = f"results/{SYSTEM}/bert/result_3.txt"
FOLDER = f"results/{SYSTEM}/bert"
DESCRIPTION = f"systems/{SYSTEM}.json"

Lines = list[str]
Mutation = Callable[[Path], int | None]
"""Makes one fault in the submission at a path; returns the line that the finding must name, if it must name one."""


@dataclass(frozen=True)
class Case:
    """One fault and what must be said about it.

    Attributes:
        where: file or folder of the finding, "." for the submission.
        key, severity: of the finding.
        rule, found, remedy: parts of its texts.
        accepted: whether the check as a whole passes all the same.
    """

    name: str
    mutate: Mutation
    where: str
    key: str
    rule: str
    found: str
    remedy: str
    severity: str = "error"
    accepted: bool = False


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """example: a valid submission of logs without a chain of digests; chained: one log with it."""
    folder = tmp_path_factory.mktemp("originals")
    root = write_submission(folder / "example")
    shutil.copy(root / LOG, folder / "chained.txt")
    for log in (root / FOLDER).iterdir():
        without_chain(log)
    return folder


@pytest.fixture
def root(originals: Path, tmp_path: Path) -> Path:
    return shutil.copytree(originals / "example", tmp_path / "example")


@pytest.fixture(scope="module")
def remembered() -> dict[tuple[str, str], submission.FolderRun]:
    return {}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, remembered: dict[tuple[str, str], submission.FolderRun]) -> None:
    """Logs that have been checked are not checked again, and the official package tools are not asked."""
    read_run = submission._read_run

    def read_once(path: Path, ruleset: str) -> submission.FolderRun:
        key = (hashlib.sha256(path.read_bytes()).hexdigest(), ruleset)
        if key not in remembered:
            remembered[key] = read_run(path, ruleset)
        run = remembered[key]
        return replace(run, verdict=replace(run.verdict, path=path), findings=[])

    def all_pass(benchmarks: list[Any], descriptions: list[Path], root: Path | None, _: str) -> Any:
        answer = Answer("pass")
        return [answer] * len(benchmarks), [answer] * len(descriptions), answer if root else None

    monkeypatch.setattr(submission, "_read_run", read_once)
    monkeypatch.setattr(official_package, "ask", all_pass)


def findings_of(verdicts: list[Verdict], root: Path) -> list[tuple[str, Finding]]:
    """(place, finding) of all findings, but for what a folder says of logs that have findings of their own."""
    pairs = [(os.path.relpath(verdict.path, root), finding) for verdict in verdicts for finding in verdict.findings]
    return [(where, finding) for where, finding in pairs if not is_consequence(finding)]


def is_consequence(finding: Finding) -> bool:
    return finding.rule == "TR 12" and finding.key == "" and "result_" in finding.found


# Mutations of one log


def edit_lines(change: Callable[[Lines], int | None], root: Path, log: str = LOG) -> int | None:
    """Rewrite a log by its lines; `change` returns the index of the line to be named."""
    lines = (root / log).read_text().splitlines(keepends=True)
    index = change(lines)
    (root / log).write_text("".join(lines))
    return None if index is None else index + 1


def place(lines: Lines, key: str, occurrence: int = 0) -> int:
    """Index of the line with an occurrence of a key."""
    return [index for index, line in enumerate(lines) if f'"key": "{key}"' in line][occurrence]


def changed(line: str, **fields: Any) -> str:
    """A record with other fields; a dict is merged into the old one, and None in it removes."""
    prefix, _, text = line.partition("{")
    record = json.loads("{" + text)
    for name, value in fields.items():
        if isinstance(value, dict) and isinstance(record[name], dict):
            merged = record[name] | value
            value = {inner: given for inner, given in merged.items() if given is not None}
        record[name] = value
    return f"{prefix}{json.dumps(record)}\n"


def edit(key: str, occurrence: int = 0, log: str = LOG, **fields: Any) -> Mutation:
    def change(lines: Lines) -> int:
        index = place(lines, key, occurrence)
        lines[index] = changed(lines[index], **fields)
        return index

    return lambda root: edit_lines(change, root, log)


def edit_every(key: str, field: Callable[[int], dict[str, Any]], named: int = 0) -> Mutation:
    """Change each record of a key by its number from 1; the finding names the record `named`."""

    def change(lines: Lines) -> int:
        places = [index for index, line in enumerate(lines) if f'"key": "{key}"' in line]
        for number, index in enumerate(places, start=1):
            lines[index] = changed(lines[index], **field(number))
        return places[named]

    return partial(edit_lines, change)


def remove(*keys: str, occurrence: int | None = None, at: tuple[str, int] | None = None) -> Mutation:
    """Remove the records of the keys, or one of each; the finding names the record `at` of what is left."""

    def change(lines: Lines) -> int | None:
        for key in keys:
            count = sum(f'"key": "{key}"' in line for line in lines)
            for number in reversed(range(count)) if occurrence is None else [occurrence]:
                del lines[place(lines, key, number)]
        return place(lines, *at) if at else None

    return partial(edit_lines, change)


def insert_copy(key: str, before: str, **fields: Any) -> Mutation:
    """Log a record again, before the first record of another key, at that record's time."""

    def change(lines: Lines) -> int:
        index = place(lines, before)
        time_ms = json.loads(lines[index].partition(" ")[2])["time_ms"]
        lines.insert(index, changed(lines[place(lines, key)], **({"time_ms": time_ms} | fields)))
        return index

    return partial(edit_lines, change)


def join_lines(lines: Lines, key: str = "train_samples") -> int:
    index = place(lines, key)
    lines[index] = lines[index].rstrip("\n") + lines.pop(index + 1)
    return index


def shift_init(lines: Lines) -> int:
    index = place(lines, "init_start")
    record = json.loads(lines[index].partition(" ")[2])
    lines[index] = changed(lines[index], time_ms=record["time_ms"] - 31 * 60_000)
    return place(lines, "init_stop")


def go_back(lines: Lines) -> int:
    index = place(lines, "block_start", 3)
    record = json.loads(lines[index].partition(" ")[2])
    lines[index] = changed(lines[index], time_ms=record["time_ms"] - 60_000)
    return index


def evaluate_early(lines: Lines) -> int:
    source = [lines[place(lines, key)] for key in ("eval_start", "eval_accuracy", "eval_stop")]
    for key in ("eval_start", "eval_accuracy", "eval_stop"):
        del lines[place(lines, key)]
    index = place(lines, "run_start")
    time_ms = json.loads(lines[index].partition(" ")[2])["time_ms"]
    lines[index:index] = [changed(line, time_ms=time_ms) for line in source]
    return index


def append_to(key: str, text: str) -> Mutation:
    def change(lines: Lines) -> int:
        index = place(lines, key)
        lines[index] = lines[index].rstrip("\n") + text + "\n"
        return index

    return partial(edit_lines, change)


def cut(key: str) -> Mutation:
    def change(lines: Lines) -> int:
        index = place(lines, key)
        lines[index] = lines[index][: lines[index].index('"value"')] + "\n"
        return index

    return partial(edit_lines, change)


def end_aborted(log: str, root: Path) -> int:
    def change(lines: Lines) -> int:
        index = place(lines, "eval_accuracy", -1)
        lines[index] = changed(lines[index], value=0.7101)
        index = place(lines, "run_stop")
        lines[index] = changed(lines[index], metadata={"status": "aborted"})
        return index

    line = edit_lines(change, root, log)
    assert line is not None
    return line


def seed_of_another(lineno: int | None, root: Path) -> int | None:
    return edit("seed", value=1000, metadata={"lineno": lineno} if lineno else {})(root)


def fill(path: str, size: int, root: Path) -> None:
    """A file of zeros."""
    with (root / path).open("wb") as file:
        file.truncate(size)


def log_of_51_mib(root: Path) -> None:
    with (root / LOG).open("a") as file:
        for _ in range(51):
            file.write("throughput 1234.5 sequences/s, " * (2**20 // 31) + "\n")


# Mutations of names, folders and the description


def rename(old: str, new: str, root: Path) -> None:
    (root / old).rename(root / new)


def describe(root: Path, field: str | None = None, **changes: Any) -> int | None:
    """Write the description again; the finding names the line of a field."""
    lines = write_description(root, **changes).read_text().splitlines()
    return next((number for number, line in enumerate(lines, start=1) if f'"{field}"' in line), None)


def write_text(path: str, text: str, root: Path) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def link(path: str, target: str, root: Path) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).symlink_to(target)


def eleven(root: Path) -> None:
    without_chain(write_log(root / FOLDER / "result_10.txt", 10))


def rewrite_all(root: Path, **options: Any) -> None:
    """All ten logs by other runs."""
    for number in range(10):
        path = root / FOLDER / f"result_{number}.txt"
        path.unlink()
        without_chain(write_log(path, number, **options))


def without_result_9(root: Path) -> None:
    (root / FOLDER / "result_9.txt").unlink()


def measure_power(root: Path) -> None:
    for number in range(10):
        for node in range(1 if number == 4 else 2):
            write_text(f"{FOLDER}/power/result_{number}/node_{node}.txt", "", root)


def at_same_time(root: Path) -> None:
    path = root / FOLDER / "result_5.txt"
    path.unlink()
    without_chain(write_log(path, 5))
    text = path.read_text()
    for line in text.splitlines():
        time_ms = json.loads(line.partition(" ")[2])["time_ms"]
        text = text.replace(f'"time_ms": {time_ms}', f'"time_ms": {time_ms - 10_800_000 + 60_000}')
    path.write_text(text)


def chained(change: Callable[[Lines], int | None], originals: Path, root: Path) -> int | None:
    shutil.copy(originals / "chained.txt", root / LOG)
    return edit_lines(change, root)


EVALUATION = ("eval_start", "eval_accuracy", "eval_stop")
SOURCE = "benchmarks/bert/implementations/pytorch"
LARGE_BATCH = {"global_batch_size": 20480, "eval_interval_samples": evaluation_interval(20480)}
STATUS_WORDS = "Research, Development, or Internal"


def samples(count: int) -> dict[str, Any]:
    return {"metadata": {"epoch_num": count, "samples_count": count}}


CASES = (
    # The clock
    Case("init of 31 min", partial(edit_lines, shift_init), LOG, "init_stop", "TR 11", "less than 30", "", accepted=True),
    Case("second run_start", insert_copy("run_start", "train_samples"), LOG, "run_start", "TR 11", "again", "once"),
    Case("aborted", partial(end_aborted, LOG), LOG, "run_stop", "TR 11", "aborted", "run again", accepted=True),
    Case("time goes back", partial(edit_lines, go_back), LOG, "block_start", "TR 11", "ms before", "clock"),
    Case("unknown status", edit("run_stop", metadata={"status": "done"}), LOG, "run_stop", "TR 11", "'done'", "status"),
    Case("no status", edit("run_stop", metadata={"status": None}), LOG, "run_stop", "TR 11", "no metadata status", "log", accepted=True),
    Case("block not closed", remove("block_stop", occurrence=4, at=("block_start", 5)), LOG, "block_start", "TR 11", "open", "stop"),
    Case("evaluation not closed", remove("eval_stop", occurrence=4, at=("eval_start", 5)), LOG, "eval_start", "TR 11", "open", "stop"),
    Case("resumed", partial(edit_lines, lambda lines: lines.insert(0, "# resumed from: step_3350\n")), LOG, "", "TR 11", "step_3350", "start"),
    # The evaluations
    Case("off schedule", edit("eval_accuracy", 4, **samples(770_000)), LOG, "eval_accuracy", "TR 24.4", "770000", "schedule"),
    Case("one left out", remove(*EVALUATION, occurrence=4, at=("eval_accuracy", 4)), LOG, "eval_accuracy", "TR 24.4", "750400", "schedule"),
    Case("before run_start, a count", insert_copy("eval_accuracy", "run_start"), LOG, "eval_accuracy", "TR 11", "between", "when it happens"),
    Case("before run_start", insert_copy("eval_accuracy", "run_start", **samples(0)), LOG, "eval_accuracy", "TR 11", "between", "when it happens"),
    Case("9,999 sequences", edit("eval_samples", value=9999), LOG, "eval_samples", "TR 6.3", "10000", "setting"),
    Case("accuracy below target", edit("eval_accuracy", -1, value=0.7199), LOG, "eval_accuracy", "TR 24.2", "0.72", "target", accepted=True),
    Case("accuracy null", edit("eval_accuracy", 5, value=None), LOG, "eval_accuracy", "TR 24.6", "fraction", "value", accepted=True),
    Case("accuracy in percent", edit("eval_accuracy", -1, value=72.7), LOG, "eval_accuracy", "TR 24.6", "fraction", "value", accepted=True),
    Case("another target", edit("quality_target", value=0.6), LOG, "quality_target", "TR 24.2", "0.72", "open"),
    # Counts of samples
    Case("train_samples of the data set", edit("train_samples", value=156_725_653), LOG, "train_samples", "TR 24.6", "2550016", "convergence", "warning", accepted=True),
    Case("epochs in epoch_num", edit_every("eval_accuracy", samples), LOG, "eval_accuracy", "TR 24.6", "1 to 17", "count", "warning", accepted=True),
    Case("no epoch_num", edit("eval_accuracy", 4, metadata={"epoch_num": None}), LOG, "eval_accuracy", "TR 24.6", "epoch_num", "log epoch_num", accepted=True),
    # Settings
    Case("division in upper case", edit("submission_division", value="Closed"), LOG, "submission_division", "TR 4", "'Closed'", "", accepted=True),
    Case("one log of another division", edit("submission_division", value="open"), LOG, "submission_division", "TR 12", "'closed'", "folder"),
    Case("benchmark in upper case", edit("submission_benchmark", value="BERT"), LOG, "submission_benchmark", "closed_common.yaml", "'bert'", "", accepted=True),
    Case("another organisation", edit("submission_org", value="Other"), LOG, "submission_org", "TR 12", "'Example'", "folder", "warning", accepted=True),
    Case("another batch size", edit("global_batch_size", value=512), LOG, "global_batch_size", "RCP", "512, expected 448", "configuration"),
    Case("another learning rate", edit("opt_base_learning_rate", value=3e-4), LOG, "opt_base_learning_rate", "TR 9.1", "0.000425", "configuration"),
    Case("no accumulation", edit("gradient_accumulation_steps", value=0), LOG, "gradient_accumulation_steps", "closed_common.yaml", "> 0", "", accepted=True),
    Case("caches kept", edit("cache_clear", value=False), LOG, "cache_clear", "TR 6.1", "dropped", "drop the caches"),
    Case("seed of another run", partial(seed_of_another, None), LOG, "seed", "TR 5.1", "result_0.txt line 8", "/dev/urandom"),
    Case("seed of another run, logged elsewhere", partial(seed_of_another, 77), LOG, "seed", "TR 5.1", "1000", "/dev/urandom"),
    Case("seed twice", insert_copy("seed", "init_stop"), LOG, "seed", "TR 5.1", "in line 8", "once"),
    Case("no seed", remove("seed"), LOG, "seed", "TR 5.1", "no record", "log"),
    # Lines
    Case("an interval and another on a line", partial(edit_lines, partial(join_lines, key="eval_start")), LOG, "", "log format", "2 records", "line of its own"),
    Case("an evaluation and another on a line", partial(edit_lines, partial(join_lines, key="eval_accuracy")), LOG, "", "log format", "2 records", "line of its own"),
    Case("two records on a line", partial(edit_lines, join_lines), LOG, "", "log format", "2 records", "line of its own", accepted=True),
    Case("text after a record", append_to("seed", " done"), LOG, "", "log format", "'done'", "line of its own", accepted=True),
    Case("half a record", cut("seed"), LOG, "", "log format", "JSON", "whole", accepted=True),
    Case("an empty log", partial(write_text, LOG, ""), LOG, "", "log format", "no MLLOG record", "", accepted=True),
    Case("a log of 51 MiB", log_of_51_mib, LOG, "", "SR", "50 MiB", "other files"),
    # The system description
    Case("division Closed", partial(describe, field="division", division="Closed"), DESCRIPTION, "division", "SR", "'Closed'", "closed or open"),
    Case("division open", partial(describe, field="division", division="open"), DESCRIPTION, "division", "TR 4", "'closed'", "correct"),
    Case("nodes as a number", partial(describe, field="number_of_nodes", number_of_nodes=1), DESCRIPTION, "number_of_nodes", "SR", "text", "quotes", "warning", accepted=True),
    Case("nodes in words", partial(describe, field="number_of_nodes", number_of_nodes="two"), DESCRIPTION, "number_of_nodes", "summarizer", "whole number", "alone"),
    Case("accelerators as a number", partial(describe, field="accelerators_per_node", accelerators_per_node=8), DESCRIPTION, "accelerators_per_node", "SR", "traceback", "quotes"),
    Case("old status word", partial(describe, field="status", status="onprem"), DESCRIPTION, "status", "SR", STATUS_WORDS, "true"),
    Case("status unlike the log's", partial(describe, field="status", status="Preview"), DESCRIPTION, "status", "SR", "'research'", "correct", "warning", accepted=True),
    Case("submitter unlike the log's", partial(describe, field="submitter", submitter="Other"), DESCRIPTION, "submitter", "SR", "'Example'", "correct", "warning", accepted=True),
    Case("fields missing", partial(describe, cooling=None, sw_notes=None), DESCRIPTION, "cooling", "SR", "cooling, sw_notes", "may be empty"),
    Case("no description", lambda root: (root / DESCRIPTION).unlink(), FOLDER, "", "SR", f"no {DESCRIPTION}", "write it"),
    Case("broken description", lambda root: write_text(DESCRIPTION, "{,}", root) or 1, DESCRIPTION, "", "SR", "not JSON", "write it again"),
    Case("a list for a description", partial(write_text, DESCRIPTION, "[1]"), DESCRIPTION, "", "SR", "JSON list", "write it again"),
    # Names and numbers of files
    Case("9 logs", without_result_9, FOLDER, "", "TR 12", "9 logs", "add the missing"),
    Case("11 logs", eleven, FOLDER, "", "TR 12", "11 logs", "package"),
    Case("results_0.txt", partial(rename, f"{FOLDER}/result_0.txt", f"{FOLDER}/results_0.txt"), FOLDER, "", "SR", "results_0.txt is not counted", "rename"),
    Case("result_0.log", partial(rename, f"{FOLDER}/result_0.txt", f"{FOLDER}/result_0.log"), FOLDER, "", "SR", "result_0.log is not counted", "rename"),
    Case("result_a.txt", partial(rename, f"{FOLDER}/result_0.txt", f"{FOLDER}/result_a.txt"), FOLDER, "", "SR", "result_a.txt", "number", "warning", accepted=True),
    Case("folder BERT", partial(rename, FOLDER, f"results/{SYSTEM}/BERT"), f"results/{SYSTEM}/BERT", "", "SR", "expected bert", "rename it to bert"),
    Case("a file among the logs", partial(write_text, f"{FOLDER}/notes.md", ""), FOLDER, "", "SR", "notes.md", "move", "warning", accepted=True),
    Case("a file of 51 MiB", partial(fill, "benchmarks/bert/weights.bin", 51 * 2**20), ".", "", "repository", "weights.bin is too large", "shrink"),
    Case("a space in a name", partial(write_text, f"{SOURCE}/run all.sh", ""), ".", "", "repository", "run all.sh has a space", "rename"),
    Case("a hidden file", partial(write_text, f"{SOURCE}/.gitignore", ""), ".", "", "repository", "leading dot", "rename"),
    Case("a link", partial(link, "benchmarks/bert/README.md", "implementations/pytorch/README.md"), ".", "", "repository", "link", "itself"),
    Case("a link to nothing", partial(link, "benchmarks/bert/README.md", "nowhere.md"), ".", "", "repository", "link", "itself"),
    Case("a link for a log", lambda root: ((root / LOG).unlink(), link(LOG, "nowhere.txt", root))[1], FOLDER, "", "SR", "result_3.txt", "itself"),
    Case("a loop of links", partial(link, "results/loop", "../results"), ".", "", "repository", "results/loop", "itself"),
    # The runs together
    Case("faster than the reference", partial(rewrite_all, evaluations=14), FOLDER, "eval_accuracy", "RCP", "2,274,732", "reference"),
    Case("no reference", partial(rewrite_all, settings=LARGE_BATCH), FOLDER, "global_batch_size", "RCP", "20480", "batch size"),
    Case("runs at one time", at_same_time, FOLDER, "run_start", "TR 12", "while result_4.txt", "README", "warning", accepted=True),
    Case("a meter missing", measure_power, FOLDER, "", "power", "power/result_4", "meters"),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("quick")
def test_one_fault_gets_one_clear_message(root: Path, case: Case) -> None:
    line = case.mutate(root)
    verdicts = submission.check_paths([root], "5.0.0")
    found = findings_of(verdicts, root)
    assert len(found) == 1, [f"{where}: {finding}" for where, finding in found]
    [(where, finding)] = found
    assert (where, finding.line, finding.key, finding.severity) == (case.where, line, case.key, case.severity)
    assert case.rule in finding.rule
    assert case.found in finding.found
    assert "expected" in finding.found or "reference" in finding.found
    assert finding.remedy
    assert case.remedy in finding.remedy
    assert submission.accepted(verdicts) is case.accepted


CHAINED: dict[str, Callable[[Lines, int], Any]] = {
    "a changed line": lambda lines, index: lines.__setitem__(index, lines[index].replace("POINT", "POINT ")),
    "a removed line": lambda lines, index: lines.pop(index),
    "an added line": lambda lines, index: lines.insert(index, "a line that no run wrote\n"),
    "moved lines": lambda lines, index: lines.insert(index, lines.pop(index + 1)),
}


@pytest.mark.parametrize("name", CHAINED)
@pytest.mark.usefixtures("quick")
def test_a_log_that_is_not_as_the_run_wrote_it(originals: Path, root: Path, name: str) -> None:
    lines = (originals / "chained.txt").read_text().splitlines(keepends=True)
    index = next(number for number, line in enumerate(lines) if "layer_9/output/dense/bias" in line)
    before = max(number for number, line in enumerate(lines[:index]) if line.startswith("# digest"))
    CHAINED[name](lines, index)
    (root / LOG).write_text("".join(lines))
    verdicts = submission.check_paths([root], "5.0.0")
    broken = [finding for where, finding in findings_of(verdicts, root) if where == LOG and "digest" in finding.found]
    assert [finding.line for finding in broken] == [before + 2]  # the first line that the broken digest covers
    assert "as the run wrote it" in broken[0].remedy
    assert not submission.accepted(verdicts)


@pytest.mark.usefixtures("quick")
def test_an_unchanged_chained_log_is_fine(originals: Path, root: Path) -> None:
    shutil.copy(originals / "chained.txt", root / LOG)
    verdicts = submission.check_paths([root], "5.0.0")
    assert findings_of(verdicts, root) == []
    assert submission.accepted(verdicts)


REQUIRED = [key for key, rule in rules.KEYS.items() if rule.required_in("5.0.0", "closed")]
ONCE = [key for key, rule in rules.KEYS.items() if rule.once and rule.required_in("5.0.0", "closed")]
WRONG: list[tuple[str, object]] = [
    (key, value)
    for key in REQUIRED
    for value in ({}, "many", -1.5, True)
    if (rule := rules.KEYS[key].value) and not rule.accepts(value)
]


@pytest.fixture(scope="module")
def log_lines(originals: Path) -> Lines:
    return (originals / "example" / LOG).read_text().splitlines(keepends=True)


def of_key(path: Path, lines: Lines, key: str) -> list[Finding]:
    """The findings of an edited log that are about a key."""
    path.write_text("".join(lines))
    return [finding for finding in check_file(path, "5.0.0").findings if finding.key == key]


@pytest.mark.parametrize("key", REQUIRED)
def test_every_required_key_is_missed(tmp_path: Path, log_lines: Lines, key: str) -> None:
    lines = [line for line in log_lines if f'"key": "{key}"' not in line]
    assert len(lines) < len(log_lines)
    [finding] = of_key(tmp_path / "result_0.txt", lines, key)
    assert (finding.line, finding.severity) == (None, "error")
    assert "no record" in finding.found
    assert key in finding.remedy


@pytest.mark.parametrize("key", ONCE)
def test_every_single_key_is_doubled(tmp_path: Path, log_lines: Lines, key: str) -> None:
    lines = list(log_lines)
    index = place(lines, key)
    lines.insert(index + 1, lines[index])
    [finding] = of_key(tmp_path / "result_0.txt", lines, key)
    assert finding.line == index + 2
    assert f"line {index + 1}" in finding.found
    assert "once" in finding.remedy


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_every_value_has_its_type(tmp_path: Path, log_lines: Lines, key: str, value: object) -> None:
    lines = list(log_lines)
    index = place(lines, key)
    lines[index] = changed(lines[index], value=value)
    found = of_key(tmp_path / "result_0.txt", lines, key)
    assert {finding.line for finding in found} == {index + 1}, found
    assert value == -1.5 or found[0].severity == "error"  # some accepted logs hold odd numbers
    assert all(finding.remedy for finding in found)


# The official tools themselves

ASKED: dict[str, tuple[Callable[[Path], object], str]] = {
    "aborted": (partial(end_aborted, LOG), "pass"),
    "two aborted": (lambda root: [end_aborted(f"{FOLDER}/result_{number}.txt", root) for number in (3, 7)], "fail"),
    "seed of another run": (partial(seed_of_another, None), "fail"),
    "no seed": (remove("seed"), "fail"),
    "another batch size": (edit("global_batch_size", value=512), "fail"),
    "results_0.txt": (partial(rename, f"{FOLDER}/result_0.txt", f"{FOLDER}/results_0.txt"), "fail"),
    "a link to nothing": (lambda root: [(root / LOG).unlink(), link(LOG, "nowhere.txt", root)], "fail"),
    "folder BERT": (partial(rename, FOLDER, f"results/{SYSTEM}/BERT"), "pass"),
    "seeds left out": (
        lambda root: [
            seed_of_another(None, root),
            write_text(f"{FOLDER}/package_checker_params", "seed-checker-bypass", root),
        ],
        "pass",
    ),
    "division Closed": (lambda root: [describe(root, division="Closed"), seed_of_another(None, root)], "pass"),
    "no division": (partial(describe, division=None), "pass"),  # judged with the description
    "text after a record": (append_to("seed", " done"), "fail"),
    "no description": (lambda root: (root / DESCRIPTION).unlink(), "fail"),
    "faster than the reference": (partial(rewrite_all, evaluations=14), "fail"),
}
"""Mutations with the verdict of the official package checker on the folder of the logs, as it was seen."""


def test_what_the_official_package_checker_fails_fails_here(originals: Path, tmp_path: Path) -> None:
    asked, ours = [], {}
    for number, (name, (mutate, _)) in enumerate(ASKED.items()):
        root = shutil.copytree(originals / "example", tmp_path / str(number))
        mutate(root)
        [folder] = submission.find(root).benchmarks
        asked.append((folder, "closed"))
        ours[name] = root
    answers, _, _ = official_package.ask(asked, [], None, "5.0.0")
    assert {name: answer.outcome for name, answer in zip(ASKED, answers, strict=True)} == {
        name: outcome for name, (_, outcome) in ASKED.items()
    }
    for (name, root), answer, (folder, _) in zip(ours.items(), answers, asked, strict=True):
        runs = [submission._read_run(log, "5.0.0") for log in folder.logs]
        verdict, *_ = submission._check_folder(folder, runs, "closed", answer, "5.0.0")
        assert answer.outcome == "pass" or not verdict.passed, (name, root)
        assert answer.outcome == "pass" or len(verdict.errors) == 1, (name, verdict.errors)
