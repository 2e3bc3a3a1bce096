"""Verdicts of the official checker and of ours on valid and damaged logs, and the choice of the ruleset."""

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert.log.mllog import MLLog
from compliance.check import checks
from compliance.check.checker import check_file, check_log
from compliance.log import reader as log_module
from compliance.log import rules
from compliance.log.reader import read_log
from compliance.log.record import TOKEN
from compliance.log.rules import AUTO
from compliance.official import checker as official
from compliance.report.page import render_as
from compliance.report.results import load_results
from tests.compliance.command import run
from tests.compliance.log_edits import (
    Edit,
    delete,
    in_turn,
    later,
    lines_of,
    log_after,
    metadata,
    original_verdict,
    value,
)
from tests.compliance.result_folders import SYSTEM, benchmark_folder, write_log, write_series, write_submission
from tests.compliance.run_logs import initialise, without_chain
from tests.conftest import at_most


@pytest.mark.parametrize("ruleset", rules.RULESETS)
@pytest.mark.parametrize("division", rules.DIVISIONS)
def test_written_logs_pass_every_ruleset_and_the_official_checker_alone(
    tmp_path: Path, closed_log: str, open_log: str, division: str, ruleset: str
) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(closed_log if division == "closed" else open_log)
    verdict = check_file(path, ruleset)
    assert verdict.findings == ()
    assert (verdict.official, verdict.division, verdict.status) == ("pass", division, "success")
    assert original_verdict(path, ruleset) == "pass"


def test_open_log_is_held_to_its_own_target_and_interval(tmp_path: Path, open_log: str) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(value("eval_accuracy", 0.29, -1)(open_log))
    assert [finding.key for finding in check_file(path).findings] == ["eval_accuracy"]
    assert check_file(path).summary.startswith("1 error, ruleset ")
    path.write_text(metadata("eval_accuracy", "epoch_num", 1500)(open_log))
    assert "every 1000 samples" in check_file(path).findings[0].found
    path.write_text(delete("eval_interval_samples", "quality_target")(open_log))
    assert check_file(path).passed  # these keys are only in this repository's logs
    path.write_text(log_after("seed", "quality_target", 0.2)(open_log))
    assert [finding.key for finding in check_file(path).findings if finding.severity == "error"] == ["quality_target"]


def test_a_published_log_of_another_shape_passes(tmp_path: Path, closed_log: str) -> None:
    """Large submissions log each rank's init_start (unordered), one block, no eval_start, floats, and packed counts."""
    inner = [delete("block_stop", nth=0), delete("block_start", nth=-1)] * 2
    text = in_turn(
        delete("eval_start", "eval_stop", "quality_target", "eval_interval_samples", "submission_status"),
        *inner,
        value("num_warmup_steps", 10000.0),
        value("start_warmup_step", -9500.0),
        metadata("eval_accuracy", "epoch_num", 299_800, 1),
    )(closed_log)
    first = lines_of(text, "init_start")[0]
    text = text.replace(first, first + later("init_start", -3)(first) + first)
    stats = {"namespace": "", "time_ms": 1800000000000, "event_type": "POINT_IN_TIME", "key": "tracked_stats"}
    stats |= {"value": {}, "metadata": {"step": [2, 912]}}
    path = tmp_path / "result_0.txt"
    path.write_text(re.sub(r"\S*:::MLLOG", "0: :::MLLOG", f"{text}{TOKEN}{json.dumps(stats)}\n"))
    verdict = check_file(path)
    assert verdict.passed, "\n".join(map(str, verdict.findings))


def test_a_record_too_long_to_be_read_leaves_no_official_verdict(tmp_path: Path, closed_log: str) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(closed_log + TOKEN + "x" * 2**21)
    verdict = check_file(path)
    assert (verdict.official, verdict.ours) == ("fail", "fail")
    assert [finding.line for finding in verdict.findings] == [closed_log.count("\n") + 1]


@pytest.mark.parametrize(
    ("kind", "official_verdict", "words"),
    [
        ("large", "pass", "a file of 0.1 MiB; expected at most 0 MiB"),
        ("sparse", "fail", "a file of more than 256 MiB; expected at most 50 MiB: the rest was not read"),
        ("records", "fail", "more than 0 MiB of records; expected the records of one run: the rest was not read"),
    ],
)
def test_a_log_beyond_a_bound_gets_one_clear_finding(
    kind: str, official_verdict: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed_log: str
) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(closed_log)
    if kind == "sparse":
        os.truncate(path, 2**40)
    elif kind == "large":
        monkeypatch.setattr(checks, "MAX_FILE_BYTES", 2**16)
    else:
        monkeypatch.setattr(log_module, "MAX_RECORD_LINES_BYTES", 10_000)
    verdict = check_file(path)
    assert (verdict.official, verdict.ours) == (official_verdict, "fail")
    (finding,) = verdict.findings
    assert (finding.found, finding.rule) == (words, "SR Submission form")
    assert "telemetry" in finding.remedy


def abort(path: Path, division: str, reached: str) -> None:
    """Write the log of a run that Ctrl-C ends during its initialization or an evaluation."""
    with MLLog(path) as log:
        if reached == "init":
            log.event("cache_clear", False)
            log.event("init_start")
        else:
            initialise(log, division)
            log.block_start(0)
            log.eval_start(1024 if division == "open" else 150_080)
        raise KeyboardInterrupt


@pytest.mark.parametrize("reached", ["init", "evaluation"])
@pytest.mark.parametrize("division", rules.DIVISIONS)
def test_aborted_log_says_so_and_nothing_else(tmp_path: Path, reached: str, division: str) -> None:
    path = tmp_path / "result_0.txt"
    with pytest.raises(KeyboardInterrupt):
        abort(path, division, reached)
    for ruleset in ("2.1.0", "5.0.0"):
        verdict = check_file(path, ruleset)
        assert [finding.key for finding in verdict.findings] == ["run_stop"], verdict.findings
        assert verdict.summary.startswith("not a valid result (aborted)")
        assert verdict.status == "aborted"


def test_complaints_of_the_official_checker_that_nothing_explains_are_kept(
    tmp_path: Path, closed_log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text("plain\n" + closed_log)
    complaint = official.Complaint("seed fails the condition x", frozenset({"seed"}), line=4)
    monkeypatch.setattr(official, "opinion", lambda _lines, _ruleset: official.Opinion("fail", (complaint,)))
    (finding,) = check_file(path).findings
    assert (finding.line, finding.key, finding.severity) == (4, "seed", "error")
    assert finding.found == "the official checker says: seed fails the condition x"
    assert "mlperf-logging" in finding.rule
    monkeypatch.setattr(official, "opinion", lambda _lines, _ruleset: official.Opinion("fail"))
    (finding,) = check_file(path).findings
    assert (finding.severity, finding.line) == ("error", None)
    assert "without saying why" in finding.found


def test_command_line(tmp_path: Path, closed_log: str) -> None:
    good, bad = tmp_path / "result_0.txt", tmp_path / "result_1.txt"
    good.write_text(closed_log)
    bad.write_text(value("seed", None)(closed_log))
    status, said = run("check", good)
    assert (status, said.splitlines()[1:]) == (0, ["1 log: 1 passes"])
    assert said.startswith(f"PASS {good}: official pass, ours pass")
    status, said = run("check", good, bad)
    assert (status, said.splitlines()[-1]) == (1, f"2 logs: 1 passes, 1 fails: {bad}")
    assert f"FAIL {bad}: official pass, ours fail" in said
    assert "\n    error: line 8: seed: value null" in said
    status, said = run("check", bad, "--json", "--ruleset", "3.0.0")
    (entry,) = json.loads(said)
    (finding,) = entry.pop("findings")
    assert entry == {"file": str(bad), "ruleset": "3.0.0", "missed": "", "official": "pass", "ours": "fail"}
    assert finding.pop("source").startswith("tests/compliance/run_logs.py:")
    assert finding == {
        "line": 8,
        "key": "seed",
        "rule": "seed checker of the package checker; TR 5.1",
        "found": "value null; expected an integer of at most 128 bits",
        "remedy": "correct the value that is logged",
        "severity": "error",
    }


USAGES = "check; check x --json --format github; check none.txt; check x --ruleset 5.1.0; report none; summary ."


@pytest.mark.parametrize("arguments", USAGES.split("; "))
def test_bad_usage_is_one_line_and_exit_status_2(arguments: str) -> None:
    status, said = run(*arguments.split())
    assert (status, said.count("\n")) == (2, 1)
    assert said.startswith("error: ")


# Damaged logs of every kind

AWKWARD = [None, True, 0, -1, 10**400, 1.5, 1e308, "", "0.72", [], {}, [1], {"a": 1}, "\x1b[2J", "closed", "Open"]


def mangled(data: st.DataObject, text: str) -> str:
    """Drop, duplicate, move, cut or change up to four lines of the log."""
    lines = text.splitlines()
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(lines) - 1))
        action = data.draw(st.sampled_from(["drop", "double", "move", "cut", "value", "metadata", "time_ms", "key"]))
        if action == "drop":
            del lines[place]
        elif action == "double":
            lines.insert(data.draw(st.integers(0, len(lines))), lines[place])
        elif action == "move":
            lines.insert(data.draw(st.integers(0, len(lines) - 1)), lines.pop(place))
        elif action == "cut":
            lines[place] = lines[place][: data.draw(st.integers(0, len(lines[place])))]
        elif lines[place].endswith("}}"):
            fields = json.loads(lines[place][len(TOKEN) :])
            target = fields["metadata"] if action == "metadata" else fields
            name = data.draw(st.sampled_from(sorted(target))) if action == "metadata" else action
            target[name] = data.draw(st.sampled_from(AWKWARD))
            lines[place] = TOKEN + json.dumps(fields)
    return "\n".join(lines)


@at_most(40)
@given(data=st.data())
@pytest.mark.slow
def test_nothing_passes_that_the_official_checker_fails_and_any_log_gives_a_report(
    tmp_path_factory: pytest.TempPathFactory, open_log: str, closed_log: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("log") / "result_0.txt"
    text, rulesets = data.draw(st.sampled_from([(open_log, rules.RULESETS), (closed_log, ("1.0.0", "3.1.0", "5.0.0"))]))
    path.write_text(mangled(data, text))
    ruleset = data.draw(st.sampled_from(rulesets))
    verdict = check_file(path, ruleset)
    assert verdict.official == original_verdict(path, ruleset)
    assert verdict.official == "pass" or verdict.ours == "fail"
    assert not any("without saying why" in finding.found for finding in verdict.findings)
    results = load_results(path.parent, ruleset)
    assert all(render_as(results, form) for form in ("html", "markdown", "json", "csv"))


# Automatic choice of the ruleset


OF_2_1 = delete("opt_lamb_epsilon")
"""Edit that makes a log like the logs of round 2.1. Later versions of that round's rule file reject such a log."""
LATE = in_turn(OF_2_1, value("eval_accuracy", 0.7, -1))


def chosen(path: Path, text: str, edit: Edit) -> tuple[str, str]:
    path.write_text(edit(text))
    verdict = check_log(read_log(path), AUTO)
    return verdict.ruleset, verdict.ours


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda text: text, ("5.0.0", "pass")),
        (OF_2_1, ("2.0.0", "pass")),
        (delete("seed"), ("4.0.0", "pass")),
        (LATE, ("2.0.0", "fail")),  # one error under this ruleset, two under later ones
        (value("submission_division", "Closed"), ("5.0.0", "fail")),
    ],
)
def test_the_newest_ruleset_that_accepts_a_log_is_taken(
    tmp_path: Path, closed_log: str, edit: Edit, expected: tuple[str, str]
) -> None:
    assert chosen(tmp_path / "result_0.txt", without_chain(closed_log), edit) == expected


def test_logs_of_this_repository_are_held_to_the_newest(tmp_path: Path) -> None:
    log = write_log(tmp_path / "result_0.txt", 0).read_text()
    assert chosen(tmp_path / "result_0.txt", log, delete("seed")) == ("5.0.0", "fail")


def test_a_folder_is_checked_under_one_ruleset_and_the_total_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "results" / SYSTEM / "bert"
    for number, path in enumerate(write_series(folder, [17] * 3)):
        text = without_chain(path.read_text())
        path.write_text(delete("seed")(text) if number == 1 else text)
    status, said = run("check", folder)
    assert status == 0
    verdicts = [line for line in said.splitlines() if line.startswith(("PASS", "FAIL"))]
    assert all("ruleset 4.0.0" in line for line in verdicts)
    assert said.splitlines()[-1].endswith("; checked under ruleset 4.0.0")
    status, said = run("check", folder, "--ruleset", "5.0.0")
    assert (status, "FAIL" in said) == (1, True)
    assert run("summary", folder)[0] == 0
    assert '"ruleset": "4.0.0"' in run("report", folder, "--format", "json")[1]


def test_a_round_is_a_folder_of_submissions(tmp_path: Path) -> None:
    for org in ("Example", "Other"):
        write_submission(tmp_path / org, runs=2, org=org)
    (tmp_path / "NoBert" / "results" / "node" / "resnet").mkdir(parents=True)
    (tmp_path / "NoBert" / "systems").mkdir()
    (tmp_path / "again").symlink_to("Example")
    status, said = run("check", tmp_path, "--json")
    assert status == 1  # each organization has two of the required ten logs
    for org in ("Example", "Other"):
        assert f'"file": "{benchmark_folder(tmp_path / org)}"' in said
    assert "again" not in said
    empty = tmp_path / "empty" / "NoBert"
    (empty / "results" / "systems").mkdir(parents=True)
    (empty / "systems").mkdir()
    for path in (empty.parent, empty, empty / "results", empty / "systems"):
        status, said = run("check", path)
        assert (status, "no logs" in said) == (2, True)
