"""Findings as SARIF 2.1.0: the parts of the specification that code scanning reads, and nothing that breaks it."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from compliance.__main__ import app
from compliance.check.sarif import sarif, write_sarif
from compliance.log.findings import Finding, Verdict
from tests.compliance.submission.submission_trees import SYSTEM, write_log

URI_CHARACTERS = set(string.ascii_letters + string.digits + "-._~:/?#[]@!$&'()*+,;=%")


def verdict(path: Path, *findings: Finding) -> Verdict:
    return Verdict(path, "5.0.0", "pass", findings, "closed", "success")


EARLY = Finding(432, "eval_accuracy", "TR 24.4", "value 1, expected 2", "evaluate on the schedule", "bert/train.py:212")
LATE = Finding(None, "", "SR Directory structure", "9 logs, expected 10", "add one", severity="warning", more=2)


def check_structure(log: dict[str, Any]) -> None:
    """What the specification demands of the properties that are used here."""
    assert log.keys() == {"$schema", "version", "runs"}
    assert log["version"] == "2.1.0"
    [run] = log["runs"]
    assert run.keys() <= {"tool", "originalUriBaseIds", "columnKind", "invocations", "results", "properties"}
    driver = run["tool"]["driver"]
    assert driver["name"]
    identifiers = [rule["id"] for rule in driver["rules"]]
    assert len(identifiers) == len(set(identifiers))
    for rule in driver["rules"]:
        assert all(rule[text]["text"] for text in ("shortDescription", "fullDescription", "help"))
    for base in run["originalUriBaseIds"].values():
        assert re.fullmatch(r"file:///(.*/)?", base["uri"])
    assert run["columnKind"] in ("unicodeCodePoints", "utf16CodeUnits")
    for result in run["results"]:
        assert identifiers[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note", "none")
        assert result["message"]["text"]
        [location] = result["locations"]
        physical = location["physicalLocation"]
        artifact = physical["artifactLocation"]
        assert set(artifact["uri"]) <= URI_CHARACTERS
        assert ("uriBaseId" in artifact) is not artifact["uri"].startswith("file:///")
        assert artifact.get("uriBaseId", "%SRCROOT%") in run["originalUriBaseIds"]
        assert isinstance(physical["region"]["startLine"], int)
        assert physical["region"]["startLine"] >= 1
        assert re.fullmatch(r"[0-9a-f]{16}:1", result["partialFingerprints"]["primaryLocationLineHash"])


def test_a_finding_has_rule_level_place_and_message(tmp_path: Path) -> None:
    log = sarif([verdict(tmp_path / "results/a/bert/result_0.txt", EARLY)], tmp_path)
    check_structure(log)
    [result] = log["runs"][0]["results"]
    assert result["ruleId"] == "TR-24.4"
    assert log["runs"][0]["tool"]["driver"]["rules"][0]["shortDescription"]["text"] == "TR 24.4"
    assert result["level"] == "error"
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "results/a/bert/result_0.txt", "uriBaseId": "%SRCROOT%"}
    assert place["region"] == {"startLine": 432}
    text = result["message"]["text"]
    assert text == (
        "eval_accuracy: value 1, expected 2. Remedy: evaluate on the schedule. Logged at bert/train.py:212."
    )


def test_a_finding_without_a_line_stands_at_the_first(tmp_path: Path) -> None:
    log = sarif([verdict(tmp_path / "a.txt", LATE)], tmp_path)
    check_structure(log)
    [result] = log["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": 1}
    assert result["level"] == "warning"
    assert "(and 2 more like it)" in result["message"]["text"]


def test_what_is_found_in_a_folder_stands_at_its_first_log(tmp_path: Path) -> None:
    for name in ("result_1.txt", "result_0.txt", "notes.md"):
        (tmp_path / name).touch()
    log = sarif([verdict(tmp_path, LATE)], tmp_path)
    check_structure(log)
    [result] = log["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "result_0.txt"
    assert result["message"]["text"].startswith("In this folder: 9 logs")


def test_an_empty_folder_is_named_itself(tmp_path: Path) -> None:
    log = sarif([verdict(tmp_path / "x", LATE), verdict(tmp_path, LATE)], tmp_path)
    check_structure(log)
    uris = [
        result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in log["runs"][0]["results"]
    ]
    assert uris == ["x", "."]


def test_rules_are_listed_once(tmp_path: Path) -> None:
    log = sarif([verdict(tmp_path / "a.txt", EARLY, LATE), verdict(tmp_path / "b.txt", LATE, EARLY)], tmp_path)
    check_structure(log)
    assert [rule["id"] for rule in log["runs"][0]["tool"]["driver"]["rules"]] == ["TR-24.4", "SR-Directory-structure"]
    assert [result["ruleIndex"] for result in log["runs"][0]["results"]] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    "name", ["run all.txt", "Größe.txt", "100%.txt", "a#b?c.txt", "tab\t.txt", "line\nend.txt", "\udcff.txt"]
)
def test_odd_names_become_references(tmp_path: Path, name: str) -> None:
    log = sarif([verdict(tmp_path / name, EARLY)], tmp_path)
    check_structure(log)
    uri = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert unquote(uri, errors="surrogateescape") == name
    json.dumps(log).encode()


def test_a_file_elsewhere_keeps_its_whole_path(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    log = sarif([verdict(tmp_path / "there" / "a.txt", EARLY)], tmp_path / "here")
    check_structure(log)
    artifact = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert artifact == {"uri": (tmp_path / "there" / "a.txt").as_uri()}


def test_the_fingerprint_outlives_a_shift_of_lines(tmp_path: Path) -> None:
    later = Finding(EARLY.line and EARLY.line + 7, EARLY.key, EARLY.rule, EARLY.found, EARLY.remedy)
    other = Finding(EARLY.line, EARLY.key, EARLY.rule, "value 3, expected 2", EARLY.remedy)
    log = sarif([verdict(tmp_path / "a.txt", EARLY, later, other)], tmp_path)
    prints = [result["partialFingerprints"]["primaryLocationLineHash"] for result in log["runs"][0]["results"]]
    assert prints[0] == prints[1] != prints[2]


def test_no_finding_is_an_empty_run(tmp_path: Path) -> None:
    log = sarif([verdict(tmp_path / "a.txt")], tmp_path)
    check_structure(log)
    assert log["runs"][0]["results"] == []
    assert log["runs"][0]["tool"]["driver"]["rules"] == []


def test_a_rule_without_words_has_an_identifier(tmp_path: Path) -> None:
    log = sarif([verdict(tmp_path / "a.txt", Finding(1, "", "", "x, expected y", "z"))], tmp_path)
    check_structure(log)
    assert log["runs"][0]["results"][0]["ruleId"] == "log-format"


def test_the_file_is_written_beside_the_other_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    log = write_log(tmp_path / "results" / SYSTEM / "bert" / "result_0.txt", 0)
    log.write_text(log.read_text().replace('"status": "success"', '"status": "done"'))
    arguments = ["check", f"results/{SYSTEM}/bert/result_0.txt", "--sarif", "out/findings.sarif", "--json"]
    assert app.run("compliance", arguments) == 1
    shown = json.loads(capsys.readouterr().out)
    written = json.loads((tmp_path / "out/findings.sarif").read_text())
    check_structure(written)
    results = written["runs"][0]["results"]
    assert [result["level"] for result in results] == [finding["severity"] for finding in shown[0]["findings"]]
    assert results
    for result in results:
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == f"results/{SYSTEM}/bert/result_0.txt"


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written"):
        write_sarif(tmp_path / "file" / "out.sarif", [])
