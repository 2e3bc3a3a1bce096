"""Commands on files and folders with hostile names print no harmful text."""

import json
import re
from pathlib import Path

import pytest

from compliance.log.rules import SYSTEM_FIELDS
from compliance.report import summary
from tests.compliance import command, run_logs
from tests.hostile import FORGED, LONG, NAME, assert_harmless
from tests.programs import python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """results/<NAME>/bert with one valid open log, a description with hostile texts, and unrelated files."""
    results = tmp_path_factory.mktemp("names") / NAME / "results"
    folder = results / NAME / "bert"
    folder.mkdir(parents=True)
    run_logs.write_run(folder / "result_0.txt", "open")
    run_logs.write_metrics(folder / "metrics_0.jsonl")
    (folder / f"result_{NAME}.txt").symlink_to("/nowhere")
    (folder / LONG).write_text("")
    (results / "systems").mkdir()
    fields = dict.fromkeys(SYSTEM_FIELDS, NAME) | {"division": "open", "number_of_nodes": "1"}
    (results / "systems" / f"{NAME}.json").write_text(json.dumps(fields))
    return results


@pytest.fixture(scope="module")
def log(results: Path) -> Path:
    """A valid log whose file name is hostile."""
    path = results.parent / f"{NAME}.txt"
    path.write_bytes((results / NAME / "bert" / "result_0.txt").read_bytes())
    return path


COMMANDS = {
    0: """check LOG; check LOG --json; summary BERT; convergence BERT; watch LOG; system --out OUT/NAME.json
    report BERT --format markdown; report BERT --format json; report BERT --format csv; report BERT --out OUT/NAME.html""",
    1: """check RESULTS; check RESULTS --quiet; check RESULTS --sarif OUT/NAME.sarif; watch OUT/NAME --timeout 0.1""",
    2: """NAME; check OUT/LONG; check LOG --ruleset NAME; doctor --recipe NAME; doctor --checkpoint OUT/NAME
    system --out OUT/x.json --set NAME; package --org NAME --system x.json --runs BERT --out OUT
    package --org x --system OUT/NAME.json --runs BERT --out OUT""",
    None: "doctor --data BERT --results RESULTS --quick",
}
"""Command lines by expected exit status. None stands for a status that depends on the machine."""


@pytest.mark.parametrize(
    ("status", "words"), [(status, line.strip()) for status in COMMANDS for line in re.split("[;\n]", COMMANDS[status])]
)
def test_output_escapes_hostile_names(words: str, status: int | None, results: Path, log: Path, tmp_path: Path) -> None:
    places = {"LOG": log, "RESULTS": results, "BERT": results / NAME / "bert", "OUT": tmp_path}
    arguments = words.split()
    given = [re.sub("^OUT/", f"{tmp_path}/", str(places.get(word, word))) for word in arguments]
    found, text = command.run(*(word.replace("LONG", LONG).replace("NAME", NAME) for word in given))
    assert_harmless(text)
    assert "Traceback" not in text
    assert found in ((0, 1) if status is None else (status,)), text
    if arguments == ["check", "LOG"]:
        assert (text[:5], text.count("\n"), FORGED in text) == ("PASS ", 2, True)
    if status == 2:
        assert text.startswith("error: ")
        assert text.count("\n") == 1
    if "--json" in arguments or "json" in arguments:
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    if "markdown" in arguments:
        table = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
        assert [line.count("|") for line in table] == 3 * [len(summary.COLUMNS) + 1]
        assert "[bold red]" not in text  # brackets are escaped for Markdown
        assert "`" not in text.replace("\\`", "")


def test_the_check_escapes_names_for_an_ascii_terminal(log: Path) -> None:
    (log.parent / "größe.txt").write_bytes(log.read_bytes())
    done = python("-m", "compliance", "check", log, log.parent / "größe.txt", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout[:5], done.stderr) == (0, "PASS ", "")
    assert r"gr\xf6\xdfe.txt: official pass" in done.stdout
