import json
import re
from pathlib import Path

import pytest

from compliance.check.checker import check_file
from compliance.log.record import TOKEN
from tests.compliance.log_edits import (
    delete,
    edit,
    epoch_nums,
    epochs_for_blocks,
    garble,
    glue,
    log_after,
    metadata,
    move_before,
    original_verdict,
    repeat,
    repeat_before,
    swap,
    value,
    without_metadata,
)
from tests.compliance.run_logs import without_chain, write_run


@pytest.fixture(scope="module")
def closed_log(tmp_path_factory: pytest.TempPathFactory) -> str:
    return without_chain(write_run(tmp_path_factory.mktemp("closed") / "result_0.txt").read_text())


@pytest.fixture(scope="module")
def open_log(tmp_path_factory: pytest.TempPathFactory) -> str:
    return without_chain(write_run(tmp_path_factory.mktemp("open") / "result_0.txt", "open").read_text())


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
    "train_samples empty": (value("train_samples", ""), "train_samples", "whole number >= 0"),
    "no eval_samples": (delete("eval_samples"), "eval_samples", "no record"),
    "part of the evaluation set": (value("eval_samples", 5000), "eval_samples", "expected 10000"),
    "aborted": (metadata("run_stop", "status", "aborted"), "run_stop", "not a valid result (aborted)"),
    "unknown status": (metadata("run_stop", "status", "finished"), "run_stop", "status is 'finished'"),
    "no status": (without_metadata("run_stop", "status"), "run_stop", "no metadata status"),
    "time goes back": (edit("block_stop", lambda f: f.update(time_ms=f["time_ms"] - 500)), "block_stop", "before line"),
    "text after a record": (garble("seed", "} hello"), "", "text after the record: 'hello'"),
    "broken record": (garble("run_start", ""), "", "broken JSON"),
    "two records on a line": (glue, "", "2 records on one line"),
    "time goes back by the jitter of processes": (
        edit("block_stop", lambda f: f.update(time_ms=f["time_ms"] - 30)),
        "block_stop",
        "before line",
    ),
    "run_stop before the last evaluation": (
        edit("run_stop", lambda f: f.update(time_ms=f["time_ms"] - 500)),
        "run_stop",
        "before line",
    ),
    "init_stop before init_start": (
        edit("init_start", lambda f: f.update(time_ms=f["time_ms"] + 900_000)),
        "init_stop",
        "before every init_start",
    ),
    "run_start before init_stop": (
        edit("run_start", lambda f: f.update(time_ms=f["time_ms"] - 15)),
        "run_start",
        "is 5 ms before line",
    ),
    "a setting before its turn": (
        edit("seed", lambda f: f.update(time_ms=f["time_ms"] - 5000)),
        "seed",
        "before line",
    ),
    "evaluations counted": (
        epoch_nums(1, 2, 3),
        "eval_accuracy",
        "epoch_num 1 to 3 at 3 evaluations; expected the seq",
    ),
    "evaluations counted, with gaps": (epoch_nums(1, 2, 4), "eval_accuracy", "epoch_num 1 to 4 at 3 evaluations"),
    "an early evaluation": (
        lambda text: value("train_samples", 375_200)(epoch_nums(150_080, 300_160, 375_200)(text)),
        "eval_accuracy",
        "evaluation at 375200 samples",
    ),
    "epochs counted": (epoch_nums(1, 1, 1), "eval_accuracy", "epoch_num 1 at 3 evaluations"),
    "epochs counted, an evaluation missing": (
        lambda text: delete("eval_accuracy", 1)(epoch_nums(1, 1, 1)(text)),
        "eval_accuracy",
        "epoch_num 1 at 2 evaluations, and train_samples 450240 would be after evaluation 3",
    ),
    "size of the data set": (epoch_nums(*[156_725_653] * 3), "eval_accuracy", "epoch_num 156725653 at 3 evaluations"),
    "train_samples of the data set": (value("train_samples", 156_725_653), "train_samples", "expected 450240"),
    "train_samples as epochs": (
        value("train_samples", 3),
        "train_samples",
        "value 3; expected at least one batch of 448",
    ),
    "fewer train_samples": (value("train_samples", 300_160), "train_samples", "value 300160; expected 450240"),
    "another schedule": (
        lambda text: value("train_samples", 525_056)(epoch_nums(175_168, 350_336, 525_056)(text)),
        "eval_accuracy",
        "evaluation at 175168 samples; expected evaluation 1 at 150080: every 150000 samples",
    ),
    "half as many evaluations": (
        lambda text: value("train_samples", 900_032)(epoch_nums(300_160, 600_320, 900_032)(text)),
        "eval_accuracy",
        "evaluation at 300160 samples",
    ),
    "an evaluation too many": (
        lambda text: value("train_samples", 300_160)(epoch_nums(150_080, 225_120, 300_160)(text)),
        "eval_accuracy",
        "evaluation at 225120 samples",
    ),
    "other decay": (
        log_after("seed", "opt_lamb_learning_rate_decay_poly_power", 2.0),
        "opt_lamb_learning_rate_decay_poly_power",
        "value 2.0 in a closed log; expected 1.0",
    ),
    "shorter sequences": (log_after("seed", "max_sequence_length", 128), "max_sequence_length", "expected 512"),
    "more predictions": (log_after("seed", "max_predictions_per_seq", 80), "max_predictions_per_seq", "expected 76"),
    "no clipping": (log_after("seed", "opt_gradient_clip_norm", 5), "opt_gradient_clip_norm", "expected 1.0"),
    "odd accumulation": (
        value("gradient_accumulation_steps", 3),
        "gradient_accumulation_steps",
        "a divisor of the batch",
    ),
    "other batch size": (
        log_after("global_batch_size", "global_batch_size", 512),
        "global_batch_size",
        "with another value",
    ),
    "no training steps": (value("opt_learning_rate_training_steps", 0), "opt_learning_rate_training_steps", "> 0"),
    "seed that is no number": (value("seed", "x"), "seed", "expected an integer"),
    "neither blocks nor eval_start": (
        lambda text: delete("eval_start")(delete("eval_stop", 0)(delete("eval_stop", 0)(epochs_for_blocks(text)))),
        "eval_start",
        "no record",
    ),
    "resumed": (lambda text: "# resumed from: checkpoints/step_00000008\n" + text, "", "went on from a checkpoint"),
    "empty file": (lambda _: "", "", "no MLLOG record"),
    "no log": (lambda _: "hello\n", "", "no MLLOG record"),
}


WARNINGS = {
    # accepted submissions do the same
    "cache_clear without value",
    "second init_stop",
    "second seed",
    "second batch size",
    "second train_samples",
    "seed as text",
    "beta one",
    "half a step",
    "point event",
    "planned train_samples",
    "time goes back by the jitter of processes",
    "a setting before its turn",
    "evaluations counted",
    "epochs counted",
    "epochs counted, an evaluation missing",
    "size of the data set",
    "train_samples of the data set",
    "another schedule",
    "odd accumulation",
    "no training steps",
    "evaluations counted, with gaps",
}

UNSEEN = {
    "caches kept",
    "second run_start",
    "late second run_start",
    "second run_stop",
    "no seed",
    "batch size as text",
    "batch size zero",
    "learning rate as text",
    "weight decay null",
    "lower target",
    "rarer evaluation",
    "one block_stop missing",
    "last block_stop missing",
    "one block_start missing",
    "one eval_stop missing",
    "no eval_stop",
    "epoch_num as text",
    "epoch_num placeholder",
    "skipped evaluation",
    "evaluation off schedule",
    "accuracy before the run",
    "part of the evaluation set",
    "aborted",
    "unknown status",
    "time goes back",
    "resumed",
    "run_stop before the last evaluation",
    "init_stop before init_start",
    "run_start before init_stop",
    "train_samples as epochs",
    "fewer train_samples",
    "half as many evaluations",
    "an evaluation too many",
    "other decay",
    "shorter sequences",
    "more predictions",
    "no clipping",
    "seed that is no number",
    "an early evaluation",
}
"""What the official checker lets pass."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_of_a_good_log_gives_one_clear_finding(tmp_path: Path, closed_log: str, name: str) -> None:
    change, key, words = MUTATIONS[name]
    path = tmp_path / "result_0.txt"
    path.write_text(change(closed_log))
    verdict = check_file(path)
    assert verdict.ours == ("pass" if name in WARNINGS else "fail")
    assert verdict.official == ("pass" if name in UNSEEN | WARNINGS else "fail")
    assert verdict.official == original_verdict(path, "5.0.0")
    assert len(verdict.findings) == 1, "\n".join(map(str, verdict.findings))
    (finding,) = verdict.findings
    assert finding.key == key
    assert words in str(finding)
    assert finding.remedy
    assert finding.rule
    if finding.line and key:
        assert f'"key": "{key}"' in path.read_text().splitlines()[finding.line - 1]
        assert finding.source == "tests/compliance/run_logs.py:" + str(finding.source).rpartition(":")[2]


def test_what_is_reached_after_run_stop_does_not_count(tmp_path: Path, closed_log: str) -> None:
    lines = closed_log.splitlines(keepends=True)
    stop, last = lines[-1], max(n for n, line in enumerate(lines) if '"eval_start"' in line)
    time_ms = json.loads(lines[last][len(TOKEN) :])["time_ms"]
    early = edit("run_stop", lambda f: f.update(time_ms=time_ms))(stop)
    path = tmp_path / "result_0.txt"
    path.write_text("".join([*lines[:last], early, *lines[last:-1]]))
    verdict = check_file(path)
    assert (verdict.official, verdict.ours) == ("pass", "fail")
    accuracy = [finding.found for finding in verdict.errors if finding.key == "eval_accuracy"]
    assert "last accuracy 0.64800; expected at least the target 0.72" in accuracy
    assert "logged after run_stop; expected between run_start and run_stop" in accuracy


def test_init_limit_is_exclusive_to_the_millisecond(tmp_path: Path, closed_log: str) -> None:
    path = tmp_path / "result_0.txt"
    stop = next(line for line in closed_log.splitlines() if '"init_stop"' in line)
    stop_ms = json.loads(stop[len(TOKEN) :])["time_ms"]
    for before_ms, verdict in ((30 * 60_000 - 1, ("pass", "pass")), (30 * 60_000, ("fail", "fail"))):
        text = edit("init_start", lambda f, ms=before_ms: f.update(time_ms=stop_ms - ms))(closed_log)
        path.write_text(text)
        checked = check_file(path)
        assert (checked.official, checked.ours) == verdict
        found = [finding.found for finding in checked.errors]
        assert found == ([] if checked.passed else ["initialisation took 30.0 min; expected less than 30 min"])


def test_keys_that_steer_a_terminal_are_escaped(tmp_path: Path, closed_log: str) -> None:
    path = tmp_path / "result_0.txt"
    lines = closed_log.splitlines(keepends=True)
    odd = edit("seed", lambda f: f.update(key="\x1b[2J" + "x" * 500, time_ms=1))(
        next(line for line in lines if '"seed"' in line)
    )
    path.write_text("".join([*lines[:-1], odd, lines[-1]]))
    (finding,) = check_file(path).findings
    assert finding.key.startswith("\\x1b[2J")
    assert len(str(finding)) < 500


# What published, accepted submissions do


def evaluate_offline(text: str) -> str:
    """All evaluations after all training, with the times of their checkpoints."""
    lines = text.splitlines(keepends=True)
    training = [
        line for line in lines if not re.search(r'"eval_accuracy"|"eval_st|"run_stop"|"(train|eval)_samples"', line)
    ]
    rest = [line for line in lines if re.search(r'"eval_accuracy"|"run_stop"|"(train|eval)_samples"', line)]
    return "".join(training) + "".join(rest)


def test_evaluation_after_training_with_the_times_of_the_checkpoints(tmp_path: Path, closed_log: str) -> None:
    path = tmp_path / "result_0.txt"
    text = evaluate_offline(closed_log)
    text = edit("block_stop", lambda f: f.update(time_ms=f["time_ms"] + 100_000), -1)(text)
    path.write_text(text)
    verdict = check_file(path)
    assert (verdict.official, verdict.ours) == ("pass", "pass")
    found = {finding.key: finding for finding in verdict.findings}
    assert "eval_accuracy" in found
    assert "run_stop" in found
    # but not when they are out of order among themselves, or end after run_stop
    path.write_text(edit("run_stop", lambda f: f.update(time_ms=f["time_ms"] + 5000))(text))
    assert check_file(path).ours == "fail"
    late = text
    for key, nth in (("eval_accuracy", 0), ("eval_accuracy", 1), ("eval_accuracy", 2), ("run_stop", 0)):
        late = edit(key, lambda f: f.update(time_ms=f["time_ms"] + 5000), nth)(late)
    path.write_text(late)  # not the time of any checkpoint
    assert check_file(path).ours == "fail"
    for nth in (0, -1):
        path.write_text(edit("eval_accuracy", lambda f: f.update(time_ms=f["time_ms"] + 90_000), nth)(text))
        assert check_file(path).ours == "fail"


def test_a_setting_stamped_by_a_clock_ahead_does_not_count_against_the_run(tmp_path: Path, closed_log: str) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(edit("opt_lamb_beta_2", lambda f: f.update(time_ms=f["time_ms"] + 60_000))(closed_log))
    verdict = check_file(path)
    assert verdict.passed
    assert {"init_stop", "run_start"} <= {finding.key for finding in verdict.findings}
    assert not {"block_start", "eval_accuracy", "run_stop"} & {finding.key for finding in verdict.findings}


def test_untrained_model_may_be_evaluated_first(tmp_path: Path, closed_log: str) -> None:
    path = tmp_path / "result_0.txt"
    line = next(line for line in closed_log.splitlines(keepends=True) if '"eval_accuracy"' in line)
    start = next(line for line in closed_log.splitlines(keepends=True) if '"block_start"' in line)
    time_ms = json.loads(start[len(TOKEN) :])["time_ms"]
    zero = edit("eval_accuracy", lambda f: f.update(time_ms=time_ms, value=0.34, metadata={"epoch_num": 0}))(line)
    path.write_text(closed_log.replace(start, zero + start, 1))
    assert check_file(path).findings == ()


def test_partial_batches_may_be_counted_as_they_are(tmp_path: Path, closed_log: str) -> None:
    """A first step that is 3 % longer than the others, and all of them longer than the interval."""
    path = tmp_path / "result_0.txt"
    path.write_text(value("train_samples", 454_976)(epoch_nums(154_048, 304_512, 454_976)(closed_log)))
    verdict = check_file(path)
    assert [(finding.key, finding.severity) for finding in verdict.findings] == [("eval_accuracy", "warning")]


def test_same_settings_twice_are_a_warning_and_the_seed_was_not_always_asked_for(
    tmp_path: Path, closed_log: str
) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(delete("seed")(repeat("submission_org")(closed_log)))
    verdict = check_file(path, "4.0.0")
    assert {(finding.key, finding.severity) for finding in verdict.findings} == {
        ("submission_org", "warning"),
        ("seed", "warning"),
    }
    assert verdict.passed
    assert not check_file(path, "4.1.0").passed


def test_open_logs_may_leave_intervals_unpaired(tmp_path: Path, open_log: str, closed_log: str) -> None:
    path = tmp_path / "result_0.txt"
    for text, ours in ((open_log, "pass"), (closed_log, "fail")):
        path.write_text(delete("block_start", -1)(text))
        assert check_file(path).ours == ours
    path.write_text(delete("epoch_stop", -1)(log_epochs(closed_log)))
    assert [finding.severity for finding in check_file(path).findings] == ["warning"]


def log_epochs(text: str) -> str:
    """An epoch around all blocks."""
    start = next(line for line in text.splitlines(keepends=True) if '"block_start"' in line)
    stop = next(line for line in text.splitlines(keepends=True) if '"train_samples"' in line)
    epoch = start.replace("block_start", "epoch_start").replace("first_epoch_num", "epoch_num")
    end = stop.replace("train_samples", "epoch_stop").replace("POINT_IN_TIME", "INTERVAL_END")
    end = edit("epoch_stop", lambda f: f.update(value=None, metadata={"epoch_num": 1}))(end)
    return text.replace(start, epoch + start, 1).replace(stop, end + stop, 1)
