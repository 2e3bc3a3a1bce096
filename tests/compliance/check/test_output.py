"""Output of `check`: totals, errors only, known findings, JSON, JUnit, SARIF 2.1.0, and GitHub's workflow annotations."""

import io
import json
import re
import string
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from compliance.check.output import sarif, say_annotations, say_verdicts, total, write_junit, write_sarif
from compliance.log.findings import Finding, Verdict
from tests.compliance.check.whole_logs import brief
from tests.compliance.command import run
from tests.compliance.log_edits import value
from tests.hostile import NAME

URI_CHARACTERS = set(string.ascii_letters + string.digits + "-._~:/?#[]@!$&'()*+,;=%")
EARLY = Finding(432, "eval_accuracy", "TR 24.4", "value 1, expected 2", "evaluate on the schedule", "bert/train.py:212")
LATE = Finding(None, "", "SR Directory structure", "9 logs, expected 10", "add one", severity="warning", more=2)


def verdict(name: str | Path, *findings: Finding, ruleset: str = "5.0.0") -> Verdict:
    return Verdict(Path(name), ruleset, "pass", findings, "closed", "success")


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of a valid log, and of a log with one error and one warning, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("good.txt").write_text(brief())
    Path("bad.txt").write_text(value("cache_clear", None)(value("seed", None)(brief())))
    return ["good.txt", "bad.txt"]


def said(*arguments: object) -> tuple[int, str]:
    """Return the exit status and the output of `check` without the source positions of records."""
    status, text = run("check", *arguments)
    return status, re.sub(r"; logged at [^\]]*| Logged at \S*", "", text)


def test_the_total_counts_verdicts_and_names_the_first_five_failures() -> None:
    good, bad = verdict("a/result_0.txt"), [verdict(f"b/result_{number}.txt", EARLY) for number in range(7)]
    other = replace(verdict("a.json", EARLY), part="description")
    named = ", ".join(f"b/result_{number}.txt" for number in range(5))
    one = "2 logs: 1 passes, 1 fails: b/result_0.txt; each folder passes without the log that fails"
    for verdicts, accepted, ignored, text in (
        ([], False, 0, "0 logs: 0 pass"),
        ([good], True, 0, "1 log: 1 passes"),
        ([good, *bad[:5]], False, 1, f"6 logs: 1 passes, 5 fail: {named}; 1 known finding ignored"),
        ([*bad, other], False, 0, f"7 logs: 7 fail: {named} and 2 more; 1 folder or description: 1 fails: a.json"),
        ([replace(other, findings=())] * 2, True, 0, "2 folders and descriptions: 2 pass"),
        ([good, bad[0]], True, 0, one),
        ([verdict("a", ruleset="2.0.0"), good], True, 0, "2 logs: 2 pass; checked under ruleset 2.0.0, 5.0.0"),
    ):
        assert total(verdicts, is_accepted=accepted, ignored=ignored) == text


PASSES = "PASS good.txt: official pass, ours pass: valid closed log, ruleset 5.0.0\n"
FAILS = "FAIL bad.txt: official pass, ours fail: 1 error, 1 warning, ruleset 5.0.0\n"
WARNING = "    warning: line 1: cache_clear: value null; expected a value [common.yaml; TR 6.1]"
SEED = "value null; expected an integer of at most 128 bits"
ERROR = f"    error: line 8: seed: {SEED} [seed checker of the package checker; TR 5.1]"
REMEDY = "correct the value that is logged"
TOTAL = "2 logs: 1 passes, 1 fails: bad.txt\n"


def test_check_prints_only_errors_json_or_new_findings_on_request(logs: list[str]) -> None:
    assert said("good.txt") == (0, f"{PASSES}1 log: 1 passes\n")
    assert said(*logs) == (1, f"{PASSES}{FAILS}{WARNING}; {REMEDY}\n{ERROR}; {REMEDY}\n{TOTAL}")
    assert said(*logs, "--quiet") == (1, f"{FAILS}{ERROR}; {REMEDY}\n{TOTAL}")
    status, text = run("check", "bad.txt", "--json", "--ruleset", "3.0.0")
    [entry] = json.loads(text)
    assert entry.pop("findings")[1] | {"source": ""} == {
        "line": 8,
        "key": "seed",
        "rule": "seed checker of the package checker; TR 5.1",
        "found": SEED,
        "remedy": REMEDY,
        "source": "",
        "severity": "error",
    }
    verdict = {"file": "bad.txt", "ruleset": "3.0.0", "missed": "", "official": "pass", "ours": "fail"}
    assert (status, entry) == (1, verdict)
    Path("known.json").write_text(run("check", *logs, "--json")[1])
    status, text = said(*logs, "--ignore", "known.json")
    assert (status, text.splitlines()[-1]) == (0, "2 logs: 2 pass; 2 known findings ignored")
    Path("bad.txt").write_text(value("global_batch_size", 0)(Path("bad.txt").read_text()))
    status, text = run("check", *logs, "--ignore", "known.json", "--json")
    assert [finding["key"] for entry in json.loads(text) for finding in entry["findings"]] == ["global_batch_size"]
    for content in ("", "[1]", '[{"file": [], "findings": [{"key": []}]}]'):
        Path("known.json").write_text(content)
        status, text = said("bad.txt", "--ignore", "known.json")
        assert (status, text.count("\n"), text.startswith("error: known.json")) == (2, 1, True)


USAGES = "check; check x --json --format github; check none.txt; check x --ruleset 5.1.0; report none; summary ."


@pytest.mark.parametrize("arguments", USAGES.split("; "))
def test_a_usage_error_prints_one_line_and_exits_with_status_2(arguments: str) -> None:
    status, text = run(*arguments.split())
    assert (status, text.count("\n"), text.startswith("error: ")) == (2, 1, True)


def test_junit_has_a_case_per_verdict_and_sarif_a_result_per_finding(logs: list[str]) -> None:
    status, text = run("check", *logs, "--junit", "out/results.xml", "--sarif", "out/findings.sarif", "--json")
    suite = ElementTree.parse("out/results.xml").getroot()
    assert (status, suite.attrib) == (1, {"name": "compliance", "tests": "2", "failures": "1", "errors": "0"})
    passed, failed = suite.findall("testcase")
    assert (passed.get("name"), len(passed), failed.get("file")) == ("good.txt", 0, "bad.txt")
    assert (failed.findtext("failure") or "").startswith(f"{ERROR.strip()[:-1]}; logged at ")
    assert (failed.findtext("system-out") or "").startswith(f"{WARNING.strip()[:-1]}; logged at ")
    results = json.loads(Path("out/findings.sarif").read_text())["runs"][0]["results"]
    levels = [finding["severity"] for finding in json.loads(text)[1]["findings"]]
    assert [(uri_of(result), result["level"]) for result in results] == [("bad.txt", level) for level in levels]
    with pytest.raises(ValueError, match="cannot be written"):
        write_sarif(Path("bad.txt/out.sarif"), [])
    write_junit(Path("out.xml"), [verdict(NAME + ']]>"&<', EARLY)])
    [case] = ElementTree.parse("out.xml").getroot()
    assert case.get("name", "").isprintable()


@pytest.mark.parametrize("coloured", [True, False])
def test_verdicts_are_coloured_only_on_terminals_with_colours(monkeypatch: pytest.MonkeyPatch, coloured: bool) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    for name in ("FORCE_COLOR", "COLUMNS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color" if coloured else "dumb")
    say_verdicts([verdict("x[bold]" * 20 + "\x1b[2J"), verdict("b", EARLY)])
    shown = terminal.getvalue()
    assert ("\x1b[1;32mPASS" in shown, "\x1b[1;31mFAIL" in shown) == (coloured, coloured)
    assert ("x[bold]" * 20 in shown, "\x1b[2J" in shown, shown.count("\n")) == (True, False, 3)


# Output for code review


def uri_of(result: dict[str, Any]) -> str:
    return result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]


def test_the_sarif_output_equals_the_recorded_document(tmp_path: Path) -> None:
    document = sarif([verdict(tmp_path / "results/a/bert/result_0.txt", EARLY, LATE)], tmp_path)
    text = json.dumps(document, indent=2).replace(tmp_path.as_uri(), "file:///checkout")
    assert text + "\n" == Path(__file__).with_name("findings.sarif").read_text()


def test_sarif_has_a_valid_location_and_a_stable_fingerprint_per_finding(tmp_path: Path) -> None:
    def results(*paths: Path, root: Path = tmp_path) -> list[dict[str, Any]]:
        document = sarif([verdict(path, LATE) for path in paths], root)
        json.dumps(document).encode()
        return document["runs"][0]["results"]

    assert [uri_of(result) for result in results(tmp_path)] == ["."]
    for name in ("result_1.txt", "result_0.txt", "notes.md"):
        (tmp_path / name).touch()
    first, none = results(tmp_path, tmp_path / "none")
    assert (uri_of(first), uri_of(none)) == ("result_0.txt", "none")
    assert first["message"]["text"].startswith("In this folder: 9 logs")
    for name in ("run all.txt", "Größe.txt", "100%.txt", "a#b?c.txt", "tab\t.txt", "line\nend.txt", "\udcff.txt"):
        [result] = results(tmp_path / name)
        assert set(uri_of(result)) <= URI_CHARACTERS
        assert unquote(uri_of(result), errors="surrogateescape") == name
    [result] = results(tmp_path / "there" / "a.txt", root=tmp_path / "here")
    place = {"uri": (tmp_path / "there" / "a.txt").as_uri()}
    assert result["locations"][0]["physicalLocation"]["artifactLocation"] == place
    moved = [EARLY, replace(EARLY, line=439), replace(EARLY, found="value 3, expected 2")]
    found = sarif([verdict(tmp_path / "a.txt", *moved)], tmp_path)["runs"][0]["results"]
    prints = [result["partialFingerprints"]["primaryLocationLineHash"] for result in found]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("name", ["bad.txt", f"{NAME}.txt"], ids=["plain", "hostile"])
def test_check_with_format_github_adds_an_annotation_per_finding(
    logs: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(logs[1]).rename(name)
    status, text = said(path, "--format", "github")
    plain = said(path)[1].splitlines()
    assert (status, text.splitlines()[:3], text.splitlines()[5:]) == (1, plain[:3], plain[3:])
    added = text.splitlines()[3:5]
    seed = f"title=seed checker of the package checker; TR 5.1::seed: {SEED}. Remedy: {REMEDY}."
    assert added[1].endswith(f",line=8,{seed}")
    assert all(line.isprintable() for line in added)
    assert name != "bad.txt" or added[1] == f"::error file=bad.txt,line=8,{seed}"
    say_annotations([verdict("a.txt", LATE)])
    expected = "9 logs, expected 10 (and 2 more like it). Remedy: add one."
    assert capsys.readouterr().out == f"::warning file=a.txt,line=1,title=SR Directory structure::{expected}\n"
