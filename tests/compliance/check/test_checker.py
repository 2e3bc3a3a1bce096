import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert.mllog import MLLog
from compliance.check import checks
from compliance.check.checker import check_file
from compliance.log import records as log_module
from compliance.log import rules
from compliance.log.record import TOKEN
from compliance.official import checker as official
from compliance.report import summary
from compliance.report.page import render
from compliance.report.results import load_results
from tests.compliance.log_edits import delete, edit, metadata, original_verdict, value
from tests.compliance.run_logs import initialise, without_chain, write_run


@pytest.fixture(scope="module")
def closed_log(tmp_path_factory: pytest.TempPathFactory) -> str:
    return without_chain(write_run(tmp_path_factory.mktemp("closed") / "result_0.txt").read_text())


@pytest.fixture(scope="module")
def open_log(tmp_path_factory: pytest.TempPathFactory) -> str:
    return without_chain(write_run(tmp_path_factory.mktemp("open") / "result_0.txt", "open").read_text())


def test_init_limit_depends_on_the_division(tmp_path: Path, closed_log: str, open_log: str) -> None:
    def slow(text: str, minutes: float) -> str:
        return edit("init_start", lambda f: f.update(time_ms=f["time_ms"] - int(minutes * 60_000)))(text)

    path = tmp_path / "result_0.txt"
    for text, minutes, passes in (
        (closed_log, 29, True),
        (closed_log, 30, False),
        (open_log, 30, True),
        (open_log, 240, False),
    ):
        path.write_text(slow(text, minutes))
        verdict = check_file(path)
        assert verdict.passed == passes
        if not passes:
            assert [finding.key for finding in verdict.findings] == ["init_stop"]
            assert "initialisation took" in verdict.findings[0].found


@pytest.mark.parametrize("ruleset", rules.RULESETS)
def test_written_logs_pass_every_ruleset_and_the_official_checker_alone(
    tmp_path: Path, closed_log: str, open_log: str, ruleset: str
) -> None:
    for division, text in (("closed", closed_log), ("open", open_log)):
        path = tmp_path / f"{division}.txt"
        path.write_text(text)
        command = [
            sys.executable,
            "-m",
            "mlperf_logging.compliance_checker",
            "--usage",
            "training",
            "--ruleset",
            ruleset,
        ]
        command += ["--werror", "--log_output", str(tmp_path / "checker.log"), str(path)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        verdict = check_file(path, ruleset)
        assert verdict.passed, verdict.findings
        assert (verdict.division, verdict.status) == (division, "success")


def test_open_log_is_held_to_its_own_target_and_interval(tmp_path: Path, open_log: str) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(value("eval_accuracy", 0.29, -1)(open_log))
    assert [finding.key for finding in check_file(path).findings] == ["eval_accuracy"]
    assert check_file(path).summary.startswith("1 error, ruleset ")
    path.write_text(metadata("eval_accuracy", "epoch_num", 1500)(open_log))
    assert "every 1000 samples" in check_file(path).findings[0].found
    path.write_text(delete("eval_interval_samples")(delete("quality_target")(open_log)))
    assert check_file(path).passed  # nothing to hold it to: both are this repository's own keys


def test_a_published_log_of_another_shape_passes(tmp_path: Path, closed_log: str) -> None:
    """As large submissions log: init_start by every rank out of order, one block, no eval_start, floats, packed counts."""
    text = closed_log
    for key in ("eval_start", "eval_stop", "quality_target", "eval_interval_samples", "submission_status"):
        text = delete(key)(text)
    for key in ("block_start", "block_stop"):
        place = 0 if key == "block_start" else -1
        kept = [line for line in text.splitlines(keepends=True) if f'"key": "{key}"' in line][place]
        text = "".join(line for line in text.splitlines(keepends=True) if f'"key": "{key}"' not in line or line == kept)
    text = value("num_warmup_steps", 10000.0)(value("start_warmup_step", -9500.0)(text))
    text = metadata("eval_accuracy", "epoch_num", 299_800, 1)(text)
    text = re.sub(r"\S*:::MLLOG", "0: :::MLLOG", text)
    first = next(line for line in text.splitlines(keepends=True) if '"key": "init_start"' in line)
    early = re.sub(r'"time_ms": (\d+)', lambda match: f'"time_ms": {int(match[1]) - 3}', first)
    text = text.replace(first, first + early + first)
    stats = json.dumps(
        {"namespace": "", "time_ms": 0, "event_type": "POINT_IN_TIME", "key": "tracked_stats"} | {"value": {}}
    )
    text += TOKEN + stats[:-1] + ', "metadata": {"step": [2, 912]}}\n'
    path = tmp_path / "result_0.txt"
    path.write_text(text.replace('"time_ms": 0,', '"time_ms": 1800000000000,'))
    verdict = check_file(path)
    assert verdict.passed, "\n".join(map(str, verdict.findings))


def test_samples_count_may_stand_for_epochs_where_the_ruleset_says_so(tmp_path: Path, closed_log: str) -> None:
    text = re.sub(r'"first_epoch_num": 1, ("epoch_count": 1, )?', "", closed_log)
    path = tmp_path / "result_0.txt"
    path.write_text(text)
    assert check_file(path, "5.0.0").passed
    verdict = check_file(path, "3.0.0")
    assert {finding.key for finding in verdict.findings} == {"block_start", "block_stop"}


def test_a_file_too_large_for_a_submission_is_a_finding(
    tmp_path: Path, closed_log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "MAX_FILE_BYTES", 2**16)
    path = tmp_path / "result_0.txt"
    path.write_text(closed_log)
    (finding,) = check_file(path).findings
    assert (finding.rule, finding.severity) == ("SR Submission form", "error")
    assert "a file of 0.1 MiB" in finding.found


def test_a_record_too_long_to_be_read_leaves_no_official_verdict(tmp_path: Path, closed_log: str) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(closed_log + TOKEN + "x" * 2**21)
    verdict = check_file(path)
    assert (verdict.official, verdict.ours) == ("fail", "fail")
    assert [finding.line for finding in verdict.findings] == [closed_log.count("\n") + 1]


def test_json_is_exactly_as_documented(tmp_path: Path, closed_log: str) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(value("seed", None)(closed_log))
    (entry,) = json.loads(json.dumps([check_file(path).as_dict()]))
    (finding,) = entry.pop("findings")
    assert entry == {"file": str(path), "ruleset": "5.0.0", "official": "pass", "ours": "fail"}
    assert finding.pop("line") == 8
    assert finding.pop("source").startswith("tests/compliance/run_logs.py:")
    assert finding == {
        "key": "seed",
        "rule": "seed checker of the package checker; TR 5.1",
        "found": "value null; expected an integer",
        "remedy": "correct the value that is logged",
        "severity": "error",
    }


def test_many_files_one_verdict_each(tmp_path: Path, closed_log: str) -> None:
    paths = [tmp_path / f"result_{number}.txt" for number in range(3)]
    for path in paths:
        path.write_text(closed_log if path.name != "result_1.txt" else "")
    verdicts = [check_file(path, "3.0.0") for path in paths]
    assert [(verdict.path, verdict.ours) for verdict in verdicts] == list(
        zip(paths, ["pass", "fail", "pass"], strict=True)
    )
    assert {verdict.ruleset for verdict in verdicts} == {"3.0.0"}


def run_until(reached: str, path: Path, division: str) -> None:
    """A run that Ctrl-C ends during its initialisation, between blocks, in a block, or in an evaluation."""
    with MLLog(path) as log:
        if reached == "init":
            log.cache_clear(False)
            log.init_start()
            raise KeyboardInterrupt
        initialise(log, division)
        if reached != "run":
            log.block_start(0)
        if reached == "evaluation":
            samples = 1024 if division == "open" else 150_080
            log.block_stop(samples)
            log.eval_start(samples)
        raise KeyboardInterrupt


@pytest.mark.parametrize("reached", ["init", "run", "block", "evaluation"])
@pytest.mark.parametrize("division", rules.DIVISIONS)
def test_aborted_log_says_so_and_nothing_else(tmp_path: Path, reached: str, division: str) -> None:
    path = tmp_path / "result_0.txt"
    with pytest.raises(KeyboardInterrupt):
        run_until(reached, path, division)
    for ruleset in ("2.1.0", "5.0.0"):
        verdict = check_file(path, ruleset)
        assert [finding.key for finding in verdict.findings] == ["run_stop"], verdict.findings
        assert verdict.summary.startswith("not a valid result (aborted)")
        assert verdict.status == "aborted"


def test_complaints_of_the_official_checker_that_nothing_explains_are_kept(
    tmp_path: Path, closed_log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaint = official.Complaint("seed fails the condition x", frozenset({"seed"}), line=4)
    monkeypatch.setattr(official, "opinion", lambda _lines, _ruleset: official.Opinion("fail", (complaint,)))
    path = tmp_path / "result_0.txt"
    path.write_text("plain\n" + closed_log)
    finding = check_file(path).findings[0]
    assert (finding.line, finding.key, finding.severity) == (4, "seed", "error")
    assert finding.found == "the official checker says: seed fails the condition x"
    assert "mlperf-logging" in finding.rule


def test_nothing_passes_that_the_official_checker_fails_without_a_word(
    tmp_path: Path, closed_log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(official, "opinion", lambda _lines, _ruleset: official.Opinion("fail"))
    path = tmp_path / "result_0.txt"
    path.write_text(closed_log)
    (finding,) = check_file(path).findings
    assert (finding.severity, finding.line) == ("error", None)
    assert "without saying why" in finding.found


def test_values_that_steer_a_terminal_are_escaped(tmp_path: Path, closed_log: str) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(value("seed", "\x1b[2J" + "x" * 1000)(closed_log))
    shown = str(check_file(path).findings[0])
    assert "\x1b" not in shown
    assert len(shown) < 400


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "compliance", *arguments], capture_output=True, text=True, check=False)


def test_command_line(tmp_path: Path, closed_log: str) -> None:
    good, bad = tmp_path / "result_0.txt", tmp_path / "result_1.txt"
    good.write_text(closed_log)
    bad.write_text(delete("seed")(closed_log))
    passed = command("check", str(good))
    assert (passed.returncode, passed.stdout.count("\n")) == (0, 1)
    assert passed.stdout.startswith(f"PASS {good}")
    failed = command("check", str(good), str(bad))
    assert failed.returncode == 1
    assert f"FAIL {bad}" in failed.stdout
    assert "\n    error: seed: no record" in failed.stdout
    assert "official pass, ours fail" in failed.stdout
    verdicts = json.loads(command("check", str(bad), "--json", "--ruleset", "3.0.0").stdout)
    assert verdicts[0]["findings"][0]["key"] == "seed"
    assert verdicts[0]["ruleset"] == "3.0.0"


@pytest.mark.parametrize(
    "arguments",
    [
        ["check"],
        ["check", "nothing.txt"],
        ["check", "nothing.txt", "--ruleset", "5.1.0"],
        ["report", "nothing"],
        ["summary", "."],
    ],
)
def test_bad_usage_is_one_line_and_exit_status_2(arguments: list[str]) -> None:
    run = command(*arguments)
    assert run.returncode == 2
    assert run.stderr.startswith("error: ")
    assert run.stderr.count("\n") == 1
    assert not run.stdout


AWKWARD = [None, True, 0, -1, 10**400, 1.5, 1e308, "", "0.72", [], {}, [1], {"a": 1}, "\x1b[2J", "closed", "Open"]


def mangled(data: st.DataObject, text: str) -> str:
    """The log with up to four lines dropped, doubled, moved, cut or changed."""
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


@given(data=st.data())
def test_no_log_however_bad_makes_the_checker_or_the_report_fail(
    tmp_path_factory: pytest.TempPathFactory, open_log: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("system") / "bert"
    folder.mkdir()
    (folder / "result_0.txt").write_text(mangled(data, open_log))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(official, "opinion", lambda _lines, _ruleset: official.Opinion("pass"))
        results = load_results(folder)
        render(results)
        for run in results.runs:
            summary.cells(run)
            assert "\x1b" not in "".join(map(str, run.verdict.findings))
            json.dumps(run.verdict.as_dict())


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_nothing_passes_that_the_official_checker_fails(
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


@pytest.mark.parametrize("kind", ["sparse", "records"])
def test_a_log_beyond_all_bounds_gets_one_clear_finding(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed_log: str
) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(closed_log)
    if kind == "sparse":
        os.truncate(path, 2**40)
        words = "a file of 1,048,576.0 MiB; expected at most 256 MiB to be read at all: the rest was not read"
    else:
        monkeypatch.setattr(log_module, "MAX_RECORD_LINES_BYTES", 10_000)
        words = "more than 0 MiB of records; expected those of one run: the rest was not read"
    verdict = check_file(path)
    assert (verdict.official, verdict.ours) == ("fail", "fail")
    (finding,) = verdict.findings
    assert (finding.found, finding.rule) == (words, "SR Submission form")
    assert "telemetry" in finding.remedy
