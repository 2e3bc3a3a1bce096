"""Options of `check` for its output: totals, errors only, and ignored known findings."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from compliance.check.output import say_verdicts, total, write_junit
from compliance.log.findings import Finding, Verdict
from tests.compliance.command import run
from tests.compliance.log_edits import value
from tests.compliance.run_logs import without_chain
from tests.hostile import NAME

ERROR = Finding(7, "seed", "TR 5.1", "value null, expected an integer", "log it")


def verdict(name: str, *findings: Finding, ruleset: str = "5.0.0") -> Verdict:
    return Verdict(Path(name), ruleset, "pass", findings, "closed", "success")


@pytest.fixture
def logs(tmp_path: Path, closed_log: str) -> list[Path]:
    """A valid log, and a log with one error and one warning."""
    paths = [tmp_path / "result_0.txt", tmp_path / "result_1.txt"]
    text = without_chain(closed_log)
    paths[0].write_text(text)
    paths[1].write_text(value("cache_clear", None)(value("seed", None)(text)))
    return paths


def test_the_total_names_what_fails() -> None:
    good, bad = verdict("a/result_0.txt"), [verdict(f"b/result_{number}.txt", ERROR) for number in range(7)]
    other, named = (
        replace(verdict("a.json", ERROR), part="description"),
        ", ".join(map(str, (each.path for each in bad[:5]))),
    )
    for verdicts, accepted, ignored, text in (
        ([], False, 0, "0 logs: 0 pass"),
        ([good], True, 0, "1 log: 1 passes"),
        ([good, *bad[:5]], False, 1, f"6 logs: 1 passes, 5 fail: {named}; 1 known finding ignored"),
        ([*bad, other], False, 0, f"7 logs: 7 fail: {named} and 2 more; 1 folder or description: 1 fails: a.json"),
        ([replace(other, findings=())] * 2, True, 0, "2 folders and descriptions: 2 pass"),
        (
            [good, bad[0]],
            True,
            0,
            "2 logs: 1 passes, 1 fails: b/result_0.txt; each folder passes without the log that fails",
        ),
        ([verdict("a", ruleset="2.0.0"), good], True, 0, "2 logs: 2 pass; checked under ruleset 2.0.0, 5.0.0"),
    ):
        assert total(verdicts, is_accepted=accepted, ignored=ignored) == text


def test_quiet_prints_errors_and_the_total(logs: list[Path]) -> None:
    status, said = run("check", *logs, "--quiet")
    head, error, last = said.splitlines()
    assert (status, head) == (1, f"FAIL {logs[1]}: official pass, ours fail: 1 error, 1 warning, ruleset 5.0.0")
    assert error.startswith("    error: line 8: seed: value null; expected an integer")
    assert last == f"2 logs: 1 passes, 1 fails: {logs[1]}"
    assert run("check", logs[0], "--quiet") == (0, "1 log: 1 passes\n")


def test_known_findings_are_left_out(tmp_path: Path, logs: list[Path]) -> None:
    known = tmp_path / "known.json"
    status, said = run("check", *logs, "--json")
    known.write_text(said)
    assert status == 1
    status, said = run("check", *logs, "--ignore", known)
    assert (status, "FAIL" in said, "2 known findings ignored" in said.splitlines()[-1]) == (0, False, True)
    logs[1].write_text(value("global_batch_size", 0)(logs[1].read_text()))
    status, said = run("check", *logs, "--ignore", known, "--json")
    assert status == 1
    assert {finding["key"] for entry in json.loads(said) for finding in entry["findings"]} == {"global_batch_size"}


@pytest.mark.parametrize("content", ["", "[1]", '[{"file": [], "findings": [{"key": []}]}]'])
def test_a_file_that_holds_no_findings_is_refused(tmp_path: Path, logs: list[Path], content: str) -> None:
    known = tmp_path / "known.json"
    known.write_text(content)
    status, said = run("check", logs[1], "--ignore", known)
    assert (status, said.count("\n"), said.startswith(f"error: {known}")) == (2, 1, True)


def test_junit_has_a_case_for_each_verdict(tmp_path: Path, logs: list[Path]) -> None:
    out = tmp_path / "out" / "results.xml"
    assert run("check", *logs, "--junit", out)[0] == 1
    suite = ElementTree.parse(out).getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    passed, failed = suite.findall("testcase")
    assert (passed.get("name"), len(passed)) == (str(logs[0]), 0)
    assert "seed" in (failed.findtext("failure") or "")
    assert "cache_clear" in (failed.findtext("system-out") or "")
    write_junit(out, [verdict(NAME + ']]>"&<', ERROR)])
    [case] = ElementTree.parse(out).getroot()
    assert case.get("name", "").isprintable()


@pytest.mark.parametrize("coloured", [True, False])
def test_a_terminal_shows_the_verdict_in_colour(monkeypatch: pytest.MonkeyPatch, coloured: bool) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    for name in ("FORCE_COLOR", "COLUMNS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color" if coloured else "dumb")
    say_verdicts([verdict("x[bold]" * 20 + "\x1b[2J"), verdict("b", ERROR)])
    shown = terminal.getvalue()
    assert ("\x1b[1;32mPASS" in shown, "\x1b[1;31mFAIL" in shown) == (coloured, coloured)
    assert ("x[bold]" * 20 in shown, "\x1b[2J" in shown, shown.count("\n")) == (True, False, 3)
