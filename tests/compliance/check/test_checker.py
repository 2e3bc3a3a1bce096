"""Verdicts of the official checker and of ours on valid and damaged logs, and the choice of the ruleset."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert.log.mllog import MLLog
from compliance.check import checks
from compliance.check.checker import check_file, check_logs
from compliance.log import reader, rules
from compliance.log.reader import read_log
from compliance.log.record import TOKEN
from compliance.log.rules import AUTO
from compliance.official import checker as official
from compliance.official.checker import Complaint
from compliance.report.page import render_as
from compliance.report.results import load_results
from tests.compliance.check.conftest import VerdictText
from tests.compliance.check.whole_logs import brief, timed
from tests.compliance.command import run
from tests.compliance.log_edits import Edit, delete, in_turn, metadata, move_before, original_verdict, swap, value
from tests.compliance.result_folders import benchmark_folder, write_log, write_submission
from tests.compliance.run_logs import initialise
from tests.conftest import at_most


def test_logs_that_we_write_pass_every_ruleset(verdict_text: VerdictText, closed_log: str, open_log: str) -> None:
    for division, text in (("closed", closed_log), ("open", open_log)):
        for ruleset in rules.RULESETS:
            assert verdict_text(text, ruleset) == f"official pass, valid {division} log, ruleset {ruleset}"


TELEMETRY = "keep telemetry and other programs' output in other files"
ONE_RUN = f"the rest of the file was not read [SR Submission form]; log each run to its own file, and {TELEMETRY}"


def test_a_log_above_a_size_limit_gets_one_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_log: str
) -> None:
    path, remedy = tmp_path / "result_0.txt", "write every record from one process, whole, on a line of its own"
    full = open_log + "#" * (2**20 - len(open_log))

    def outcome(text: str) -> str:
        path.write_text(text)
        verdict = check_file(path)
        return "; ".join([verdict.official, *map(str, verdict.findings)])

    monkeypatch.setattr(checks, "MAX_FILE_BYTES", 2**20)
    assert outcome(full) == "pass"
    found = "a file of 1.0 MiB; expected at most 1 MiB"
    assert outcome(full + "#") == f"pass; error: {found} [SR Submission form]; {TELEMETRY}"
    monkeypatch.setattr(reader, "MAX_LOG_BYTES", 2**20)
    assert outcome(full) == "pass"
    assert outcome(full + "#") == f"fail; error: a file of more than 1 MiB; expected at most 50 MiB: {ONE_RUN}"
    monkeypatch.setattr(reader, "MAX_RECORD_LINES_BYTES", sum(map(len, open_log.splitlines())))
    assert outcome(full) == "pass"
    found = "more than 0 MiB of records; expected the records of one run"
    assert outcome(open_log.replace('"metadata"', ' "metadata"', 1)) == f"fail; error: {found}: {ONE_RUN}"
    # The official checker gets no overlong record, because it would take hours.
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 2**18)
    found = "a line of more than 262144 bytes; expected at most 16384 [log format]"
    overlong = open_log + TOKEN + "x" * 2**18
    assert outcome(overlong) == f"fail; error: line {1 + open_log.count(chr(10))}: {found}; {remedy}"


@pytest.mark.parametrize("division", rules.DIVISIONS)
def test_the_log_of_an_interrupted_run_has_one_finding(tmp_path: Path, division: str) -> None:
    for reached in ("init", "evaluation"):
        path = tmp_path / f"{reached}.txt"
        with pytest.raises(KeyboardInterrupt), MLLog(path) as log:  # noqa: PT012
            if reached == "init":
                log.event("cache_clear", False)
                log.event("init_start")
            else:
                initialise(log, division)
                log.block_start(0)
                log.eval_start(1024 if division == "open" else 150_080)
            raise KeyboardInterrupt
        for ruleset in ("2.1.0", "5.0.0"):
            verdict = check_file(path, ruleset)
            assert [finding.key for finding in verdict.findings] == ["run_stop"], verdict.findings
            assert verdict.summary == f"not a valid result (aborted), 1 error, ruleset {ruleset}"
            assert (verdict.official, verdict.status) == (original_verdict(path, ruleset), "aborted")


def complaint(*keys: str, **options: Any) -> Complaint:
    return Complaint("x", frozenset(keys), **options)


WARNING = complaint(severity="warning")
UNEXPLAINED: list[tuple[Edit, list[Complaint], list[str]]] = [
    (in_turn(), [complaint("seed", line=8)], ["error: line 8: seed: x"]),
    (in_turn(), [complaint("seed", severity="warning")], ["warning: seed: x", "error: "]),
    # After an error, complaints without a key are consequences and get no finding.
    (in_turn(), [complaint("seed", "init_stop"), complaint(), WARNING], ["error: init_stop: x", "warning: x"]),
    (value("seed", "x"), [complaint("seed"), complaint("init_stop", about_state=True)], ["error: init_stop: x"]),
    (value("seed", "x"), [complaint("eval_stop", absent=True)], ["error: eval_stop: x"]),
    # Our warning about a key explains an official warning about this key, but not an official error.
    (value("seed", "1"), [complaint("seed"), complaint("seed", severity="warning")], ["error: seed: x"]),
    # Records out of order explain conditions on earlier records, and an aborted run explains missing last records.
    (swap("init_stop", "run_start"), [complaint("seed", about_state=True), complaint("seed")], ["error: seed: x"]),
    (timed("seed", 0), [complaint("init_stop", about_state=True)], []),
    (
        in_turn(metadata("run_stop", "status", "aborted"), value("seed", "x")),
        [complaint("eval_stop", absent=True), complaint("eval_stop")],
        ["error: eval_stop: x"],
    ),
    (lambda _: "", [complaint("seed")], []),
]  # fmt: skip


def test_complaints_only_of_the_official_checker_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result_0.txt"
    for edit, complaints, expected in UNEXPLAINED:
        path.write_text(edit(brief()))
        monkeypatch.setattr(official, "opinion", lambda *_, said=tuple(complaints): official.Opinion("fail", said))
        found = [finding for finding in check_file(path).findings if finding.rule == "mlperf-logging, ruleset 5.0.0"]
        said = [str(finding).replace("the official checker says: ", "").partition(" [")[0] for finding in found]
        assert [re.sub("error: the official checker fails.*", "error: ", each) for each in said] == expected
        assert all(re.search("training_5.0.0|on this file", finding.remedy) for finding in found)


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
def test_a_mangled_log_passes_only_if_the_official_checker_passes_it(
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
"""Edit that makes a log like the logs of round 2.1. The final rule files of 2.1 reject it, so 2.0.0 is chosen."""
OF_NEW = delete("opt_epsilon")
NO_SEED, NO_EPSILON = (f"{key}: no record; expected one record" for key in ("seed", "opt_lamb_epsilon"))

CHOICES: list[tuple[Edit, str]] = [
    (in_turn(), "valid closed log, ruleset 5.0.0"),
    (OF_2_1, f"valid closed log, ruleset 2.0.0 (5.0.0 would fail it: {NO_EPSILON})"),
    (delete("seed"), f"valid closed log, ruleset 4.0.0 (5.0.0 would fail it: {NO_SEED}), 1 warning"),
    (
        in_turn(OF_2_1, delete("seed")),
        f"valid closed log, ruleset 2.0.0 (5.0.0 would fail it: {NO_SEED} and 1 other error), 1 warning",
    ),
    (
        in_turn(OF_2_1, value("eval_accuracy", 0.7, -1)),  # one error under 2.0.0, two under later rulesets
        f"1 error, ruleset 2.0.0 (5.0.0 would fail it: {NO_EPSILON} and 1 other error)",
    ),
    (value("submission_division", "Closed"), "1 error, ruleset 5.0.0"),
    (in_turn(*(timed(key, 0) for key in ("submission_org", "submission_status", "seed"))), "1 error, ruleset 5.0.0"),
    # Only old rulesets accept a submission_division after init_stop.
    (
        move_before("submission_division", "run_start"),
        "valid closed log, ruleset 1.1.0 (5.0.0 would fail it: init_stop: logged before submission_division on line 421, "
        "which sets the limit of the initialisation; expected submission_division before it)",
    ),
]  # fmt: skip


def test_auto_chooses_the_newest_accepting_ruleset_and_says_what_5_0_0_rejects(tmp_path: Path, closed_log: str) -> None:
    path = tmp_path / "result_0.txt"
    for edit, summary in CHOICES:
        path.write_text(edit(closed_log))
        assert check_file(path, AUTO).summary == summary
    path.write_text(OF_2_1(closed_log))
    assert check_file(path, "2.0.0").missed == ""
    # Logs of this repository are always checked under the newest ruleset.
    log = write_log(path, 0)
    log.write_text(delete("seed")(log.read_text()))
    assert (check_file(log, AUTO).ruleset, check_file(log, AUTO).ours) == ("5.0.0", "fail")


def test_auto_chooses_the_ruleset_under_which_most_logs_pass_both_checks(
    tmp_path: Path, closed_log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result_0.txt"

    def chosen(*edits: Edit) -> list[tuple[str, str, str]]:
        logs = []
        for edit in edits:
            path.write_text(edit(closed_log))
            logs.append(read_log(path))
        return [(verdict.ruleset, verdict.ours, verdict.missed) for verdict in check_logs(logs, AUTO)]

    missed = f"5.0.0 would fail it: {NO_EPSILON}"
    old, accepted = ("2.0.0", "pass", missed), ("2.0.0", "pass", "")
    assert chosen(OF_2_1, in_turn(), in_turn()) == [old, accepted, accepted]
    assert chosen(OF_2_1, OF_NEW, OF_NEW) == [("5.0.0", "fail", ""), *[("5.0.0", "pass", "")] * 2]
    assert chosen(OF_2_1, OF_2_1, OF_NEW) == [old, old, ("2.0.0", "fail", "")]
    asked = official.opinion

    def strict(lines: Any, ruleset: str) -> official.Opinion:
        return official.Opinion("fail") if ruleset in refused else asked(lines, ruleset)

    monkeypatch.setattr(official, "opinion", strict)
    refused = {"2.0.0"}
    assert chosen(OF_2_1, in_turn()) == [("5.0.0", "fail", ""), ("5.0.0", "pass", "")]
    refused = {"5.0.0"}
    assert chosen(OF_2_1, in_turn()) == [old, ("2.0.0", "pass", "the official checker rejects it under 5.0.0")]


def test_each_submission_of_a_round_is_checked_and_a_round_needs_bert_logs(tmp_path: Path) -> None:
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
