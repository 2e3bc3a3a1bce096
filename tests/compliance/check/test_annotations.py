"""Annotations for a workflow: what GitHub documents of its commands, and that no name forges one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compliance.check.annotations import say_annotations
from compliance.log.findings import Finding, Verdict
from console.text import annotation
from tests.compliance.command import run
from tests.compliance.log_edits import value
from tests.hostile import NAME

COMMAND = re.compile(r"::(\w+)(?: ([^:]*))?::(.*)")
"""A command as the runner splits it: at the first "::" after the properties, which are split at commas."""


def decoded(line: str) -> tuple[str, dict[str, str], str]:
    """Level, properties and message of an annotation as the runner reads them."""
    match = COMMAND.fullmatch(line)
    assert match, line
    pairs = dict(pair.split("=", 1) for pair in match[2].split(",")) if match[2] else {}
    codes = {"%0D": "\r", "%0A": "\n", "%3A": ":", "%2C": ",", "%25": "%"}  # the last one last, as the runner does

    def plain(text: str) -> str:
        for code, letter in codes.items():
            text = text.replace(code, letter)
        return text

    return match[1], {name: plain(value) for name, value in pairs.items()}, plain(match[3])


@pytest.mark.parametrize(
    "text", ["plain", "100 %", "%0A", "a:b,c", "two\nlines\r", "::error::forged", ",file=x", "::", "%25", "größe"]
)
def test_parts_come_back_as_they_were(text: str) -> None:
    line = annotation("error", f"of {text}", {"file": text, "line": 3, "title": f"TR {text}"})
    assert decoded(line) == ("error", {"file": text, "line": "3", "title": f"TR {text}"}, f"of {text}")
    assert "\n" not in line
    assert "\r" not in line


def test_hostile_parts_make_one_harmless_line() -> None:
    line = annotation("warning", NAME, {"file": NAME, "title": NAME})
    assert line.isprintable()
    assert not re.search(r"##\w*\[", line)
    level, properties, _ = decoded(line)
    assert (level, properties.keys()) == ("warning", {"file", "title"})
    line.encode()


def test_an_annotation_stands_at_the_line_of_each_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "results" / "vm" / "bert" / "result_0.txt"
    log.parent.mkdir(parents=True)
    log.write_text("")
    early = Finding(432, "eval_accuracy", "TR 24.4", "value 1, expected 2", "train on")
    few = Finding(None, "", "SR Directory structure", "9 logs, expected 10", "add one", severity="warning")
    say_annotations(
        [
            Verdict(log, "5.0.0", "pass", (early,), "open", "success"),
            Verdict(log.parent, "5.0.0", "pass", (few,), None, None),
            Verdict(Path("-"), "5.0.0", "pass", (early,), "open", "success"),
        ]
    )
    at_log, in_folder, of_stdin = map(decoded, capsys.readouterr().out.splitlines())
    path = "results/vm/bert/result_0.txt"
    assert at_log[:2] == ("error", {"file": path, "line": "432", "title": "TR 24.4"})
    assert at_log[2].startswith("eval_accuracy: value 1, expected 2. ")
    assert in_folder[:2] == ("warning", {"file": path, "line": "1", "title": "SR Directory structure"})
    assert in_folder[2].startswith("In this folder: 9 logs")
    assert of_stdin[:2] == ("error", {"title": "TR 24.4"})


@pytest.mark.parametrize("name", ["result_0.txt", f"{NAME}.txt"], ids=["plain", "hostile"])
def test_the_command_adds_annotations_to_its_verdict(tmp_path: Path, name: str, open_log: str) -> None:
    log = tmp_path / name
    log.write_text(value("submission_division", "OPEN")(open_log))
    status, plain = run("check", log)
    found, text = run("check", log, "--format", "github")
    *verdict, total = plain.splitlines()
    *above, last = text.splitlines()
    assert (status, found, above[: len(verdict)], last) == (1, 1, verdict, total)
    added = above[len(verdict) :]
    assert len(added) == len(verdict) - 1  # the verdict has a line of its own
    for level, properties, _ in map(decoded, added):
        assert level in ("error", "warning")
        assert properties.keys() <= {"file", "line", "title"}
    assert all(line.isprintable() for line in added)


def test_annotations_beside_json_are_refused(tmp_path: Path) -> None:
    status, text = run("check", tmp_path, "--json", "--format", "github")
    assert (status, text) == (2, "error: --format github and --json: choose one of them\n")
