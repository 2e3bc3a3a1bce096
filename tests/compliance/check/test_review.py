"""Findings for code review: SARIF 2.1.0 and GitHub's workflow annotations."""

import json
import re
import string
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from compliance.check.output import sarif, write_sarif
from compliance.log.findings import Finding, Verdict
from tests.compliance.command import run
from tests.compliance.log_edits import metadata, value
from tests.hostile import NAME

URI_CHARACTERS = set(string.ascii_letters + string.digits + "-._~:/?#[]@!$&'()*+,;=%")
EARLY = Finding(432, "eval_accuracy", "TR 24.4", "value 1, expected 2", "evaluate on the schedule", "bert/train.py:212")
LATE = Finding(None, "", "SR Directory structure", "9 logs, expected 10", "add one", severity="warning", more=2)


def run_of(root: Path, *found: tuple[Path, list[Finding]]) -> dict[str, Any]:
    verdicts = [Verdict(path, "5.0.0", "pass", tuple(findings), "closed", "success") for path, findings in found]
    return sarif(verdicts, root)["runs"][0]


def place_of(result: dict[str, Any]) -> dict[str, Any]:
    return result["locations"][0]["physicalLocation"]


def test_the_whole_document(tmp_path: Path) -> None:
    path = tmp_path / "results/a/bert/result_0.txt"
    document = sarif([Verdict(path, "5.0.0", "pass", (EARLY, LATE), "closed", "success")], tmp_path)
    text = json.dumps(document, indent=2).replace(tmp_path.as_uri(), "file:///checkout")
    assert text + "\n" == Path(__file__).with_name("findings.sarif").read_text()


def test_what_is_found_in_a_folder_stands_at_its_first_log_or_at_itself(tmp_path: Path) -> None:
    uris = [place_of(of)["artifactLocation"]["uri"] for of in run_of(tmp_path, (tmp_path, [LATE]))["results"]]
    assert uris == ["."]
    for name in ("result_1.txt", "result_0.txt", "notes.md"):
        (tmp_path / name).touch()
    result, none = run_of(tmp_path, (tmp_path, [LATE]), (tmp_path / "none", [LATE]))["results"]
    assert place_of(result)["artifactLocation"]["uri"] == "result_0.txt"
    assert result["message"]["text"].startswith("In this folder: 9 logs")
    assert place_of(none)["artifactLocation"]["uri"] == "none"


@pytest.mark.parametrize(
    "name", ["run all.txt", "Größe.txt", "100%.txt", "a#b?c.txt", "tab\t.txt", "line\nend.txt", "\udcff.txt"]
)
def test_odd_names_become_references(tmp_path: Path, name: str) -> None:
    run = run_of(tmp_path, (tmp_path / name, [EARLY]))
    uri = place_of(run["results"][0])["artifactLocation"]["uri"]
    assert set(uri) <= URI_CHARACTERS
    assert unquote(uri, errors="surrogateescape") == name
    json.dumps(run).encode()


def test_a_file_elsewhere_keeps_its_whole_path(tmp_path: Path) -> None:
    [result] = run_of(tmp_path / "here", (tmp_path / "there" / "a.txt", [EARLY]))["results"]
    assert place_of(result)["artifactLocation"] == {"uri": (tmp_path / "there" / "a.txt").as_uri()}


def test_the_fingerprint_outlives_a_shift_of_lines(tmp_path: Path) -> None:
    findings = [EARLY, replace(EARLY, line=439), replace(EARLY, found="value 3, expected 2")]
    results = run_of(tmp_path, (tmp_path / "a.txt", findings))["results"]
    prints = [result["partialFingerprints"]["primaryLocationLineHash"] for result in results]
    assert prints[0] == prints[1] != prints[2]


def test_the_file_is_written_beside_the_other_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_log: str
) -> None:
    monkeypatch.chdir(tmp_path)
    log = Path("results/node/bert/result_0.txt")
    log.parent.mkdir(parents=True)
    log.write_text(metadata("run_stop", "status", "done")(open_log))
    status, said = run("check", log, "--sarif", "out/findings.sarif", "--json")
    results = json.loads(Path("out/findings.sarif").read_text())["runs"][0]["results"]
    levels = [finding["severity"] for finding in json.loads(said)[0]["findings"]]
    assert (status, [result["level"] for result in results]) == (1, levels)
    assert {place_of(result)["artifactLocation"]["uri"] for result in results} == {str(log)}
    with pytest.raises(ValueError, match="cannot be written"):
        write_sarif(log / "out.sarif", [])


@pytest.mark.parametrize("name", ["result_0.txt", f"{NAME}.txt"], ids=["plain", "hostile"])
def test_the_command_adds_annotations_to_its_verdict(
    tmp_path: Path, name: str, open_log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(value("submission_division", "OPEN")(open_log))
    status, plain = run("check", name)
    *verdict, total = plain.splitlines()
    found, text = run("check", name, "--format", "github")
    assert (status, found, text.splitlines()[:2], text.splitlines()[3]) == (1, 1, verdict, total)
    added = text.splitlines()[2]
    said = "submission_division: value 'OPEN'; expected 'closed' or 'open' (lower case). Remedy: correct the value"
    assert re.fullmatch(
        rf"::error file=[^:,]+,line=4,title=common\.yaml; TR 4::{re.escape(said)} that is logged\. .*", added
    )
    assert added.isprintable()
    assert name != "result_0.txt" or added.startswith("::error file=result_0.txt,line=4,")
