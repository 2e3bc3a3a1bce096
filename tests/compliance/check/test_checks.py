"""Each fault of a log causes one finding, and a file that is not the log of one complete run causes only one in all."""

from pathlib import Path

import pytest

from compliance.check.checker import check_file
from compliance.log import rules
from compliance.log.rules import FIRST_MS
from tests.compliance.check import whole_logs as whole
from tests.compliance.check.conftest import VerdictText
from tests.compliance.log_edits import (
    Edit,
    delete,
    edit,
    epoch_nums,
    epochs_for_blocks,
    garble,
    glue,
    in_turn,
    later,
    lines_of,
    log_after,
    metadata,
    move_before,
    repeat,
    repeat_before,
    swap,
    value,
    without_metadata,
)
from tests.compliance.run_logs import START_MS, log_of

VALUES: dict[str, tuple[object, ...]] = {
    "cache_clear": (False, None),
    "submission_benchmark": ("resnet",),
    "submission_division": ("Closed", "../../evil"),
    "seed": ("x", "\u0663", "1234", -(2**63), 2**64 - 1, 2**128 - 1, 2**128),
    "global_batch_size": (0, 448 * 512),
    "gradient_accumulation_steps": (448, 449),
    "opt_base_learning_rate": (1e-6, 9.9e-7, 0.1),
    "opt_lamb_epsilon": (0.01, 0.5),
    "opt_lamb_beta_2": (1.0,),
    "opt_learning_rate_training_steps": (0,),
    "num_warmup_steps": (0.5,),
    "quality_target": (0.7199992, 0.7199994, 0.7200000286102295, 0.7200008),
    "eval_interval_samples": (150_447, 150_448),
    "eval_accuracy": (0.7199, 0.72, 0.8, 0.80001, 75.6),
    "train_samples": (447, 448, 450_241, [450_240]),
    "eval_samples": (9_999, 10_001, 20_000),
}
"""Values that replace the value of the last record of a key."""

OTHER_SETTINGS: dict[str, float] = {
    "global_batch_size": 512,
    "seed": 77,
    "opt_epsilon": 1e-7,
    "opt_lamb_learning_rate_decay_poly_power": 2.0,
    "max_sequence_length": 128,
    "max_predictions_per_seq": 80,
    "opt_gradient_clip_norm": 5,
}
"""Settings that are logged after eval_interval_samples, the last setting of the log."""

TIMES = (0, 1, FIRST_MS // 1000, FIRST_MS)

CLOSED: dict[str, Edit] = {
    **{f"{key} {new!r}": value(key, new, -1) for key, news in VALUES.items() for new in news},
    **{f"added {key}": log_after("eval_interval_samples", key, new) for key, new in OTHER_SETTINGS.items()},
    **{f"seed at {time_ms} ms": whole.timed("seed", time_ms) for time_ms in TIMES},
    # Phases, intervals and formats
    "init_stop after run_start": swap("init_stop", "run_start"),
    "block too early": swap("run_start", "block_start"),
    "late init_start": repeat_before("init_start", "block_start"),
    "late cache_clear": repeat_before("cache_clear", "block_start"),
    "accuracy too early": move_before("eval_accuracy", "init_stop"),
    "late division": move_before("submission_division", "run_start"),
    "batch size below the evaluations": in_turn(
        epoch_nums(150_080, 170_000), move_before("global_batch_size", "run_stop")
    ),
    "late second run_start": repeat_before("run_start", "train_samples"),
    "run_start after run_stop": lambda text: text + later("run_start", whole.HOUR_MS)(lines_of(text, "run_start")[0]),
    "two run_stop": repeat("run_stop"),
    "no epoch_num": without_metadata("eval_accuracy", "epoch_num", 1),
    "no status": without_metadata("run_stop", "status"),
    "unknown status": metadata("run_stop", "status", "finished"),
    "aborted, with other settings": in_turn(
        metadata("run_stop", "status", "aborted"), *(value(key, 0.5) for key in ("quality_target", "opt_epsilon")),
        value("cache_clear", False),
    ),
    "text after a record": garble("seed", "} hello"),
    "broken record": garble("run_start", ""),
    "two records on a line": glue("opt_lamb_beta_1"),
    "an evaluation glued": glue("eval_accuracy"),
    "an interval glued": glue("eval_start"),
    "point event": edit("block_start", lambda fields: fields.update(event_type="POINT_IN_TIME")),
    "interval for a setting": edit("seed", lambda fields: fields.update(event_type="INTERVAL_END")),
    "unknown event": edit("block_start", lambda fields: fields.update(event_type="POINT")),
    "neither blocks nor eval_start": in_turn(
        epochs_for_blocks, *[delete("eval_stop", nth=0)] * 2, delete("eval_start")
    ),
    "one block_stop missing": delete("block_stop", nth=0),
    "last block_stop missing": delete("block_stop", nth=-1),
    "one block_start missing": delete("block_start", nth=1),
    "no eval_stop": delete("eval_stop"),
    "an epoch unclosed": whole.epoch_unclosed,
    "resumed": lambda text: "# resumed from: checkpoints/step_00000008\n" + text,
    "a key that steers a terminal": whole.odd_key,
    "caches dropped by one process": in_turn(repeat("cache_clear"), value("cache_clear", False)),
    "as published": whole.published,
    # Times. The unedited log has one record per second.
    "time goes back by 251 ms": later("block_stop", -1251),
    "jitter of 250 ms": later("block_stop", -1250),
    "the same time": later("block_stop", -1000),
    "run_stop before the last evaluation": later("run_stop", -1490),
    "init_stop before init_start": later("init_start", 900_000),
    "run_start before init_stop": later("run_start", -1005),
    "a setting before its turn, and no run_start": in_turn(later("seed", -5000), delete("run_start")),
    "a setting stamped by a clock ahead": later("opt_lamb_beta_2", whole.MINUTE_MS),
    "init_stop with init_start": whole.stamped("init_stop", "init_start", 0),
    "initialised in time": whole.stamped("init_start", "init_stop", 1 - 30 * whole.MINUTE_MS),
    "initialised in half an hour": whole.stamped("init_start", "init_stop", -30 * whole.MINUTE_MS),
    "run_start in seconds": edit("run_start", lambda fields: fields.update(time_ms=fields["time_ms"] // 1000)),
    "microseconds": whole.each_time(lambda ms: ms * 1000),
    "nanoseconds": whole.each_time(lambda ms: ms * 10**6),
    "no time between": whole.each_time(lambda _: START_MS),
    "a run of milliseconds": whole.each_time(lambda ms: START_MS + (ms - START_MS) // 1000),
    "a run of 52 days": whole.stamped("run_stop", "run_start", 4_502_400_000),
    "a slower run": whole.stamped("run_stop", "run_start", 4_502_400_001),
    "settings at 0": in_turn(*(whole.timed(key, 0) for key in ("submission_org", "submission_status", "seed"))),
    # Evaluations
    "epoch_num as text": metadata("eval_accuracy", "epoch_num", "150080"),
    "epoch_num repeated": epoch_nums(150_080, 150_080),
    "epoch_num of one sequence more": epoch_nums(150_080, 150_081),
    "skipped evaluation": delete("eval_accuracy", nth=1),
    "off schedule": epoch_nums(155_000),
    "an evaluation too many": whole.evaluated_at(150_080, 225_120, 300_160),
    "an interval longer by 25,000 and a batch": whole.evaluated_at(175_448, 350_896, 526_344),
    "an interval longer by more": whole.evaluated_at(175_449, 350_898, 526_347),
    "an interval 3 % longer": whole.evaluated_at(154_500, 304_500, 454_500),
    "an interval longer than 3 %": whole.evaluated_at(154_501, 304_501, 454_501),
    "packed batches, each count a batch off": whole.at_steps(225_000 + 6911, *[225_000 - 6912, 225_000 + 6912] * 4),
    "packed batches, each count within a batch": whole.at_steps(231_000, 220_000, 238_000, 212_500, 238_500),
    "the interval of a neighbouring batch size": whole.at_steps(*[204_000, 196_000] * 4, 212_000),
    "packed batches, two batches off": whole.at_steps(225_000, 225_000, 225_000 + 2 * 6912, 225_000),
    "packed batches, more than two batches off": whole.at_steps(225_000, 225_000, 225_000 + 2 * 6912 + 1, 225_000),
    "evaluations counted, with gaps": epoch_nums(1, 2, 4),
    "evaluations counted, and a planned number": in_turn(epoch_nums(1, 2, 3), value("train_samples", 3_000_000)),
    "epochs counted, an evaluation missing": in_turn(epoch_nums(1, 1, 1), delete("eval_accuracy", nth=1)),
    "size of the data set": epoch_nums(*[156_725_653] * 3),
    "the untrained model first": whole.untrained,
    "the untrained model first, then an early evaluation": in_turn(
        whole.untrained, whole.evaluated_at(0, 150_080, 300_160, 375_200)
    ),
    "went on after the target": whole.of(0.5, 0.721, 0.722, 0.73),
    "went on, and ends below the target": in_turn(whole.of(0.5, 0.721, 0.73), value("eval_accuracy", 0.71, -1)),
    "stopped before the last evaluation": whole.stopped_early,
    "extended for the power meter": whole.extended(0.74),
    "another count in a block": in_turn(
        log_after("seed", "d_batch_size", 56), metadata("block_stop", "samples_count", 450_000, -1)
    ),
    "blocks counted each": in_turn(*(metadata("block_stop", "samples_count", 150_080, nth) for nth in range(3))),
    **{f"evaluated after training, {what}": in_turn(whole.evaluated_offline, change) for what, change in {
        "and ended a second later": later("run_stop", 1000),
        "and ended more than a second later": later("run_stop", 1001),
        "a second after a checkpoint": later("block_stop", -1000, -1),
        "more than a second after any checkpoint": later("block_stop", -1001, -1),
        "out of order": later("eval_accuracy", 90_000),
    }.items()},
    # Several attempts, several processes, and parts of a log
    "died before init_start": whole.died("cache_clear", whole.HOUR_MS),
    "died after three settings": whole.died("submission_platform", whole.MINUTE_MS),
    "died after the seed": whole.died("seed", whole.MINUTE_MS, again=delete("cache_clear")),
    "died after the batch size": whole.died("global_batch_size", whole.MINUTE_MS, again=delete("cache_clear")),
    "died after initialisation": whole.died("init_stop", 1_000_000),
    "died after success": whole.died("run_stop", 1_000_000, seed=77),
    "silent for less than half an hour": whole.silent("init_start", 30 * whole.MINUTE_MS - 1),
    "silent for half an hour": whole.silent("init_start", 30 * whole.MINUTE_MS),
    "silent for less than ten seconds": whole.silent("global_batch_size", 9_999),
    "silent for ten seconds": whole.silent("global_batch_size", 10_000),
    "a process that starts after the settings": whole.after("global_batch_size", "init_start", "init_start"),
    "seeds of every process": whole.after("seed", "init_start", "seed", "init_start", "seed"),
    "caches of every process": in_turn(whole.after("init_start", "cache_clear", "init_start"), repeat("cache_clear")),
    "a setting of a launcher": in_turn(
        whole.after("submission_org", "init_start"), whole.after("global_batch_size", "submission_org")
    ),
    "a process with a clock ahead": in_turn(repeat("init_start"), later("init_start", whole.HOUR_MS // 4)),
    "a process with a clock far ahead": in_turn(repeat("init_start"), later("init_start", whole.HOUR_MS, 1)),
    "caches of a clock behind": in_turn(repeat("cache_clear"), later("cache_clear", -whole.HOUR_MS // 3)),
    "caches dropped twice before a queue": in_turn(repeat("cache_clear"), later("cache_clear", -whole.HOUR_MS)),
    "caches dropped before a queue": later("cache_clear", -whole.HOUR_MS),
    "records of three processes": whole.side_by_side(3, interleaved=True),
    "records of two processes, phase by phase": whole.side_by_side(2, interleaved=False),
    "cut off before run_stop": whole.lines_from(0, 0.98),
    "cut off, with a bad setting": in_turn(whole.lines_from(0, 0.9), value("global_batch_size", 0)),
    "the end alone": whole.lines_from(0.8),
    "an empty file": lambda _: "",
}  # fmt: skip

OPEN: dict[str, Edit] = {
    "caches kept, and an odd setting": in_turn(value("cache_clear", False), value("opt_epsilon", 0.5)),
    "below its own target": value("eval_accuracy", 0.29, -1),
    "off its own schedule": metadata("eval_accuracy", "epoch_num", 1500),
    # Logs of other software may lack these settings.
    "without a schedule and a target": delete("eval_interval_samples", "quality_target"),
    "two targets": log_after("seed", "quality_target", 0.2),
    "two batch sizes": log_after("seed", "global_batch_size", 64),
    "intervals unpaired": delete("block_start", nth=-1),
    "initialised in time": whole.stamped("init_start", "init_stop", 1 - 240 * whole.MINUTE_MS),
    "initialised in four hours": whole.stamped("init_start", "init_stop", -240 * whole.MINUTE_MS),
}

counts_of_samples = in_turn(
    *(without_metadata("block_start", name, nth) for name in ("first_epoch_num", "epoch_count") for nth in range(3))
)
RULESETS: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "two organisations and no seed": (in_turn(repeat("submission_org"), delete("seed")), ("4.0.0", "4.1.0")),
    "other status": (value("submission_status", "Available on-premise"), ("4.0.0", "4.1.0")),
    "counts of samples": (counts_of_samples, ("3.0.0", "5.0.0")),
}
"""Edits of a closed log, and the rulesets under which it is checked."""

CASES = {
    **{name: ("closed", change, "5.0.0") for name, change in CLOSED.items()},
    **{f"open: {name}": ("open", change, "5.0.0") for name, change in OPEN.items()},
    **{f"{name}, {old}": ("closed", change, old) for name, (change, rulesets) in RULESETS.items() for old in rulesets},
}
VERDICTS = dict(line.split(" => ") for line in Path(__file__).with_name("verdicts.txt").read_text().splitlines())
"""The verdict on each edited log, by the edit's name. Edits without a verdict here leave a valid log without findings."""


@pytest.mark.parametrize("name", CASES)
def test_each_edit_of_a_log_gets_the_recorded_verdict(verdict_text: VerdictText, name: str) -> None:
    division, change, ruleset = CASES[name]
    valid = f"official pass, valid {division} log, ruleset {ruleset}"
    assert verdict_text(change(whole.brief(division=division)), ruleset) == VERDICTS.get(name, valid)


REQUIRED = [key for key, rule in rules.KEYS.items() if rule.required_in("5.0.0", "closed") and key != "run_stop"]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_repeated_or_wrongly_typed_required_key_gets_one_finding(tmp_path: Path, key: str) -> None:
    text, path, rule = whole.brief(), tmp_path / "result_0.txt", rules.KEYS[key]
    place = 1 + text.splitlines(keepends=True).index(lines_of(text, key)[0])
    path.write_text(delete(key)(text))
    verdict = check_file(path)
    [missing] = verdict.findings
    assert (missing.line, missing.key, missing.severity, missing.rule) == (None, key, "error", rule.source)
    assert missing.found == f"no record; expected {'one' if rule.once else 'at least one'} record"
    assert missing.remedy.startswith(f"log {key} ")
    assert verdict.official == ("pass" if key == "seed" else "fail")
    if rule.once:
        path.write_text(repeat(key)(text))
        verdict = check_file(path)
        [double] = verdict.findings
        assert (double.line, double.key, verdict.official) == (place + 1, key, "pass")
        assert f"logged again, first on line {place}; expected exactly one record" in double.found
        assert double.severity == ("error" if key == "run_start" else "warning")
    for wrong in ({}, "many", -1.5, True):
        if rule.value and not rule.value.accepts(wrong):
            path.write_text(value(key, wrong)(text))
            found = [finding for finding in check_file(path).findings if finding.key == key]
            assert {finding.line for finding in found} == {place}, found
            # -1.5 may get only a warning, because some accepted logs contain such numbers.
            assert wrong == -1.5 or found[0].severity == "error"


def test_a_log_cut_off_or_joined_to_another_log_gets_one_error(verdict_text: VerdictText) -> None:
    text = log_of((0.5, 0.6, 0.73)).decode()
    for share in (0.05, 0.3, 0.9, 0.97, 0.985):
        cut = whole.lines_from(0, share)(text)
        assert verdict_text(cut).count("error:") == 1
        other = log_of((0.5, 0.6, 0.7, 0.73), seed=77, start_ms=1_800_000_000_000).decode()
        second = cut.count("\n") + 2  # the second log's first line only announces digests
        assert f"error: line {second}: two attempts in one file" in (said := verdict_text(cut + other)), said
        assert said.count("error:") == 1
