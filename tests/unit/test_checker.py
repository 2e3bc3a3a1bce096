import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert.mllog import MLLog
from compliance import official, rules, summary
from compliance.checker import check_file
from compliance.log import TOKEN
from compliance.report import render
from compliance.results import load_results
from tests.unit.run_logs import initialise, write_run

Edit = Callable[[str], str]


@pytest.fixture(scope="module")
def closed_log(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_run(tmp_path_factory.mktemp("closed") / "result_0.txt").read_text()


@pytest.fixture(scope="module")
def open_log(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_run(tmp_path_factory.mktemp("open") / "result_0.txt", "open").read_text()


# Edits of a log. A record is known by its key and its place among the records of that key.


def edit(key: str, change: Callable[[dict], object], nth: int = 0) -> Edit:
    """Change the `nth` record of `key` (from the end if negative) as an object."""

    def apply(text: str) -> str:
        lines = text.splitlines()
        place = [number for number, line in enumerate(lines) if f'"key": "{key}"' in line][nth]
        fields = json.loads(lines[place][len(TOKEN) :])
        change(fields)
        lines[place] = TOKEN + json.dumps(fields)
        return "\n".join(lines) + "\n"

    return apply


def value(key: str, new: object, nth: int = 0) -> Edit:
    return edit(key, lambda fields: fields.update(value=new), nth)


def metadata(key: str, name: str, new: object, nth: int = 0) -> Edit:
    return edit(key, lambda fields: fields["metadata"].update({name: new}), nth)


def without_metadata(key: str, name: str, nth: int = 0) -> Edit:
    return edit(key, lambda fields: fields["metadata"].pop(name), nth)


def delete(key: str, nth: int | None = None) -> Edit:
    def apply(text: str) -> str:
        places = [number for number, line in enumerate(text.splitlines()) if f'"key": "{key}"' in line]
        gone = places if nth is None else [places[nth]]
        return "".join(line for number, line in enumerate(text.splitlines(keepends=True)) if number not in gone)

    return apply


def repeat(key: str) -> Edit:
    """Log the record a second time, right after itself."""
    return lambda text: re.sub(rf'(.*"key": "{key}".*\n)', r"\1\1", text, count=1)


def repeat_before(key: str, other: str) -> Edit:
    """Log the record of `key` a second time, right before that of `other`, with the time of `other`."""

    def apply(text: str) -> str:
        line = re.search(rf'.*"key": "{key}".*\n', text)
        at = re.search(rf'.*"key": "{other}".*\n', text)
        assert line
        assert at
        time_ms = json.loads(at[0][len(TOKEN) :])["time_ms"]
        copy = re.sub(r'"time_ms": \d+', f'"time_ms": {time_ms}', line[0])
        return text.replace(at[0], copy + at[0])

    return apply


def move_before(key: str, other: str) -> Edit:
    return lambda text: delete(key, 1)(repeat_before(key, other)(text))


def swap(key: str, other: str) -> Edit:
    """Exchange two records; each gets the time stamp of its new place."""

    def apply(text: str) -> str:
        lines = text.splitlines()
        a, b = (next(n for n, line in enumerate(lines) if f'"key": "{name}"' in line) for name in (key, other))
        times = [re.search(r'"time_ms": \d+', lines[n]) for n in (a, b)]
        assert times[0]
        assert times[1]
        first, second = lines[a], lines[b]
        lines[a] = second.replace(times[1][0], times[0][0])
        lines[b] = first.replace(times[0][0], times[1][0])
        return "\n".join(lines) + "\n"

    return apply


def glue(text: str) -> str:
    """Two records on one line."""
    return re.sub(r'(.*"key": "opt_base_learning_rate".*)\n', r"\1", text, count=1)


def garble(key: str, replacement: str) -> Edit:
    return lambda text: re.sub(rf'(.*"key": "{key}".*)\}}\n', rf"\1{replacement}\n", text, count=1)


MUTATIONS = {
    # one edit of a valid closed log: (the edit, the key of the one finding, words of it)
    "wrong-case division": (
        value("submission_division", "Closed"),
        "submission_division",
        "'Closed'; expected 'closed' or",
    ),
    "path as division": (value("submission_division", "../../evil"), "submission_division", "evil"),
    "path as benchmark": (value("submission_benchmark", "../evil"), "submission_benchmark", "expected 'bert'"),
    "no division": (delete("submission_division"), "submission_division", "no record"),
    "no benchmark": (delete("submission_benchmark"), "submission_benchmark", "no record"),
    "other benchmark": (value("submission_benchmark", "resnet"), "submission_benchmark", "expected 'bert'"),
    "no cache_clear": (delete("cache_clear"), "cache_clear", "no record"),
    "caches kept": (value("cache_clear", False), "cache_clear", "caches kept"),
    "cache_clear without value": (value("cache_clear", None), "cache_clear", "expected a value"),
    "no init_start": (delete("init_start"), "init_start", "no record"),
    "no init_stop": (delete("init_stop"), "init_stop", "no record"),
    "no run_start": (delete("run_start"), "run_start", "no record"),
    "no run_stop": (delete("run_stop"), "run_stop", "no record"),
    "second run_start": (repeat("run_start"), "run_start", "logged again"),
    "late second run_start": (repeat_before("run_start", "train_samples"), "run_start", "change the measured time"),
    "second run_stop": (repeat("run_stop"), "run_stop", "logged again"),
    "second init_stop": (repeat("init_stop"), "init_stop", "logged again"),
    "second seed": (repeat("seed"), "seed", "logged again"),
    "second batch size": (repeat("global_batch_size"), "global_batch_size", "logged again"),
    "second train_samples": (repeat("train_samples"), "train_samples", "logged again"),
    "init_stop after run_start": (swap("init_stop", "run_start"), "run_start", "before init_stop"),
    "block before run_start": (
        swap("run_start", "block_start"),
        "block_start",
        "logged between init_stop and run_start",
    ),
    "late init_start": (
        repeat_before("init_start", "block_start"),
        "init_start",
        "logged between run_start and run_stop",
    ),
    "no seed": (delete("seed"), "seed", "no record"),
    "seed as text": (value("seed", "1234"), "seed", "expected an integer"),
    "no batch size": (delete("global_batch_size"), "global_batch_size", "no record"),
    "batch size as text": (value("global_batch_size", "448"), "global_batch_size", "integer > 0"),
    "batch size zero": (value("global_batch_size", 0), "global_batch_size", "integer > 0"),
    "accumulation zero": (value("gradient_accumulation_steps", 0), "gradient_accumulation_steps", "integer > 0"),
    "learning rate as text": (value("opt_base_learning_rate", "4e-4"), "opt_base_learning_rate", "a number > 0"),
    "beta one": (value("opt_lamb_beta_2", 1.0), "opt_lamb_beta_2", "not including, 1"),
    "weight decay null": (value("opt_lamb_weight_decay_rate", None), "opt_lamb_weight_decay_rate", "a number >= 0"),
    "half a step": (value("num_warmup_steps", 0.5), "num_warmup_steps", "whole number"),
    "no epsilon": (delete("opt_lamb_epsilon"), "opt_lamb_epsilon", "no record"),
    "no warm-up start": (delete("start_warmup_step"), "start_warmup_step", "no record"),
    "lower target": (value("quality_target", 0.7), "quality_target", "0.7 in a closed log"),
    "rarer evaluation": (value("eval_interval_samples", 300_000), "eval_interval_samples", "expected 150000"),
    "no block_start": (delete("block_start"), "block_start", "no record"),
    "no block_stop": (delete("block_stop"), "block_stop", "no record"),
    "one block_stop missing": (delete("block_stop", 0), "block_start", "is still open"),
    "last block_stop missing": (delete("block_stop", -1), "block_start", "never closed"),
    "one block_start missing": (delete("block_start", 1), "block_stop", "nothing is open"),
    "one eval_stop missing": (delete("eval_stop", 1), "eval_start", "is still open"),
    "no eval_stop": (delete("eval_stop"), "eval_start", "and 2 more like it"),
    "point event": (edit("block_start", lambda f: f.update(event_type="POINT_IN_TIME")), "block_start", "event_type"),
    "no eval_accuracy": (delete("eval_accuracy"), "eval_accuracy", "no record"),
    "accuracy in percent": (value("eval_accuracy", 75.6, -1), "eval_accuracy", "fraction"),
    "accuracy null": (value("eval_accuracy", None, -1), "eval_accuracy", "fraction"),
    "accuracy below target": (
        value("eval_accuracy", 0.7199, -1),
        "eval_accuracy",
        "last accuracy 0.71990; expected at least",
    ),
    "accuracy without epoch_num": (
        without_metadata("eval_accuracy", "epoch_num", 1),
        "eval_accuracy",
        "no metadata epoch_num",
    ),
    "epoch_num as text": (
        metadata("eval_accuracy", "epoch_num", "150080", 0),
        "eval_accuracy",
        "epoch_num is '150080'",
    ),
    "epoch_num placeholder": (
        metadata("eval_accuracy", "epoch_num", 1, 1),
        "eval_accuracy",
        "epoch_num 1 after 150080",
    ),
    "skipped evaluation": (delete("eval_accuracy", 1), "eval_accuracy", "evaluation at 450240 samples"),
    "evaluation off schedule": (
        metadata("eval_accuracy", "epoch_num", 155_000),
        "eval_accuracy",
        "evaluation 1 at 150080",
    ),
    "accuracy before the run": (
        move_before("eval_accuracy", "init_stop"),
        "eval_accuracy",
        "logged between init_start and init_stop",
    ),
    "planned train_samples": (value("train_samples", 3_000_000), "train_samples", "the samples at the last evaluation"),
    "no train_samples": (delete("train_samples"), "train_samples", "no record"),
    "train_samples empty": (value("train_samples", ""), "train_samples", "integer >= 0"),
    "no eval_samples": (delete("eval_samples"), "eval_samples", "no record"),
    "part of the evaluation set": (value("eval_samples", 5000), "eval_samples", "expected 10000"),
    "aborted": (metadata("run_stop", "status", "aborted"), "run_stop", "not a valid result (aborted)"),
    "unknown status": (metadata("run_stop", "status", "finished"), "run_stop", "status is 'finished'"),
    "no status": (without_metadata("run_stop", "status"), "run_stop", "no metadata status"),
    "time goes back": (edit("block_stop", lambda f: f.update(time_ms=f["time_ms"] - 500)), "block_stop", "before line"),
    "text after a record": (garble("seed", "} hello"), "", "text after the record: 'hello'"),
    "broken record": (garble("run_start", ""), "", "broken JSON"),
    "two records on a line": (glue, "", "2 records on one line"),
    "resumed": (lambda text: "# resumed from: checkpoints/step_00000008\n" + text, "", "went on from a checkpoint"),
    "empty file": (lambda _: "", "", "no MLLOG record"),
    "no log": (lambda _: "hello\n", "", "no MLLOG record"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_of_a_good_log_gives_one_clear_finding(tmp_path: Path, closed_log: str, name: str) -> None:
    change, key, words = MUTATIONS[name]
    path = tmp_path / "result_0.txt"
    path.write_text(change(closed_log))
    verdict = check_file(path)
    assert not verdict.passed
    assert len(verdict.findings) == 1, "\n".join(map(str, verdict.findings))
    (finding,) = verdict.findings
    assert finding.key == key
    assert words in str(finding)
    assert finding.expected
    assert finding.remedy
    assert finding.source
    if finding.line and key:
        assert f'"key": "{key}"' in path.read_text().splitlines()[finding.line - 1]
        assert finding.logged_at == "tests/unit/run_logs.py:" + str(finding.logged_at).rpartition(":")[2]


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
    path.write_text(metadata("eval_accuracy", "epoch_num", 1500)(open_log))
    assert "every 1000 samples" in check_file(path).findings[0].expected
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
    complaint = official.Complaint("seed fails the condition x", frozenset({"seed"}), record=2)
    monkeypatch.setattr(official, "complaints", lambda _path, _ruleset: [complaint])
    path = tmp_path / "result_0.txt"
    path.write_text("plain\n" + closed_log)
    finding = check_file(path).findings[0]
    assert (finding.line, finding.key, finding.found) == (4, "seed", "seed fails the condition x")
    assert "mlperf-logging" in finding.source


def test_messages_of_the_official_checker_are_understood() -> None:
    line = "-" * 30
    printed = (
        "INFO - Running\nWARNING -  CHECK for 'block_start' failed in line 7:\n:::MLLOG {}\nfailed test: s['run_started']\n"
        f"current context[s]={{}}\n{line}\nRequired EXACTLY_ONE occurrence of 'seed' but found 2\n{line}\n"
        f"Required AT_LEAST_ONE occurrence of 'a' or 'b'\n{line}\n"
        "Failed checks for eval_accuracy : v['value'] < 1.0\nERROR - FAILED\n"
    )
    first, second, third, fourth = official.parse_messages(printed)
    assert (first.keys, first.record, first.about_state, first.absent) == ({"block_start"}, 7, True, False)
    assert (second.keys, second.absent) == ({"seed"}, False)
    assert (third.keys, third.absent) == ({"a", "b"}, True)
    assert (fourth.keys, fourth.absent) == ({"eval_accuracy"}, True)
    crash = official.parse_messages("INFO - x\nTraceback (most recent call last):\nFileNotFoundError: \x1b[2Jno\n")
    assert crash == [official.Complaint("the official checker ended with an error: FileNotFoundError: ?[2Jno")]


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
    assert "\n    seed: no record" in failed.stdout
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


@given(data=st.data())
def test_no_log_however_bad_makes_the_checker_or_the_report_fail(
    tmp_path_factory: pytest.TempPathFactory, open_log: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("system") / "bert"
    folder.mkdir()
    lines = open_log.splitlines()
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(lines) - 1))
        action = data.draw(st.sampled_from(["drop", "double", "move", "cut", "value", "metadata", "time_ms"]))
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
    (folder / "result_0.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(official, "complaints", lambda _path, _ruleset: [])
        results = load_results(folder)
        render(results)
        for run in results.runs:
            summary.cells(run)
            assert "\x1b" not in "".join(map(str, run.verdict.findings))
            json.dumps(run.verdict.as_dict())
