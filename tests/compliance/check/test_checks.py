"""Each fault of a log causes one clear finding, and a file that is not one complete run's log causes only one."""

import re
from pathlib import Path

import pytest

from compliance.check.checker import check_file
from compliance.log import rules
from compliance.log.findings import Verdict
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
    original_verdict,
    repeat,
    repeat_before,
    swap,
    time_of,
    value,
    without_metadata,
)
from tests.compliance.run_logs import log_of, without_chain


@pytest.fixture(scope="module")
def brief_log(closed_log: str) -> str:
    """Closed log without records of weights. Ruleset 5.0.0 does not require them, and checks are faster without them."""
    return delete("weights_initialization")(closed_log)


@pytest.fixture
def checked(tmp_path: Path):
    def check(text: str, ruleset: str = "5.0.0") -> Verdict:
        path = tmp_path / "result_0.txt"
        path.write_text(text)
        return check_file(path, ruleset)

    return check


def evaluated_at(*samples: int) -> Edit:
    return in_turn(epoch_nums(*samples), value("train_samples", samples[-1]))


EPOCHS_ALONE = in_turn(epochs_for_blocks, *[delete("eval_stop", nth=0)] * 2, delete("eval_start"))

Mutations = dict[str, Edit]
"""Edits of a valid closed log, by name."""

REFUSED: Mutations = {
    "wrong-case division": value("submission_division", "Closed"),
    "path as division": value("submission_division", "../../evil"),
    "other benchmark": value("submission_benchmark", "resnet"),
    "init_stop after run_start": swap("init_stop", "run_start"),
    "block too early": swap("run_start", "block_start"),
    "late init_start": repeat_before("init_start", "block_start"),
    "other batch size": log_after("global_batch_size", "global_batch_size", 512),
    "accuracy in percent": value("eval_accuracy", 75.6, -1),
    "accuracy below target": value("eval_accuracy", 0.7199, -1),
    "no epoch_num": without_metadata("eval_accuracy", "epoch_num", 1),
    "no status": without_metadata("run_stop", "status"),
    "text after a record": garble("seed", "} hello"),
    "broken record": garble("run_start", ""),
    "two records on a line": glue("opt_lamb_beta_1"),
    "neither blocks nor eval_start": EPOCHS_ALONE,
    "empty file": lambda _: "",
}

UNSEEN: Mutations = {
    # Faults that only our checker detects.
    "caches kept": value("cache_clear", False),
    "late second run_start": repeat_before("run_start", "train_samples"),
    "batch size zero": value("global_batch_size", 0),
    "seed that is no number": value("seed", "x"),
    "seed in other digits": value("seed", "\u0663"),
    "lower target": value("quality_target", 0.7),
    "rarer evaluation": value("eval_interval_samples", 300_000),
    "rarer evaluation than rounding explains": value("eval_interval_samples", 150_448),
    "a target beyond single precision": value("quality_target", 0.7200008),
    "a target below single precision": value("quality_target", 0.7199992),
    "one block_stop missing": delete("block_stop", nth=0),
    "last block_stop missing": delete("block_stop", nth=-1),
    "one block_start missing": delete("block_start", nth=1),
    "one eval_stop missing": delete("eval_stop", nth=1),
    "no eval_stop": delete("eval_stop"),
    "epoch_num as text": metadata("eval_accuracy", "epoch_num", "150080"),
    "epoch_num placeholder": epoch_nums(150_080, 1),
    "epoch_num repeated": epoch_nums(150_080, 150_080),
    "epoch_num of one sequence more": epoch_nums(150_080, 150_081),
    "skipped evaluation": delete("eval_accuracy", nth=1),
    "off schedule": epoch_nums(155_000),
    "accuracy too early": move_before("eval_accuracy", "init_stop"),
    "part of the evaluation set": value("eval_samples", 5000),
    "aborted": metadata("run_stop", "status", "aborted"),
    "unknown status": metadata("run_stop", "status", "finished"),
    "time goes back": later("block_stop", -500),
    "time goes back by 251 ms": later("block_stop", -261),
    "run_stop before the last evaluation": later("run_stop", -500),
    "init_stop before init_start": later("init_start", 900_000),
    "run_start before init_stop": later("run_start", -15),
    "an early evaluation": evaluated_at(150_080, 300_160, 375_200),
    "train_samples of less than a batch": value("train_samples", 447),
    "train_samples of one batch": value("train_samples", 448),
    "fewer train_samples": value("train_samples", 300_160),
    "half as many evaluations": evaluated_at(300_160, 600_320, 900_032),
    "an evaluation too many": evaluated_at(150_080, 225_120, 300_160),
    "other decay": log_after("seed", "opt_lamb_learning_rate_decay_poly_power", 2.0),
    "shorter sequences": log_after("seed", "max_sequence_length", 128),
    "more predictions": log_after("seed", "max_predictions_per_seq", 80),
    "no clipping": log_after("seed", "opt_gradient_clip_norm", 5),
    "an evaluation glued": glue("eval_accuracy"),
    "an interval glued": glue("eval_start"),
    "resumed": lambda text: "# resumed from: checkpoints/step_00000008\n" + text,
}

WARNED: Mutations = {
    # Faults that accepted submissions have, too.
    "cache_clear without value": value("cache_clear", None),
    "seed as text": value("seed", "1234"),
    "beta one": value("opt_lamb_beta_2", 1.0),
    "half a step": value("num_warmup_steps", 0.5),
    "point event": edit("block_start", lambda f: f.update(event_type="POINT_IN_TIME")),
    "one more of train_samples": value("train_samples", 450_241),
    "planned train_samples": value("train_samples", 3_000_000),
    "jitter of processes": later("block_stop", -30),
    "jitter of 250 ms": later("block_stop", -260),
    "a setting before its turn": later("seed", -5000),
    "evaluations counted": epoch_nums(1, 2, 3),
    "evaluations counted, with gaps": epoch_nums(1, 2, 4),
    "epochs counted": epoch_nums(1, 1, 1),
    "epochs counted, an evaluation missing": in_turn(epoch_nums(1, 1, 1), delete("eval_accuracy", nth=1)),
    "size of the data set": epoch_nums(*[156_725_653] * 3),
    "another schedule": evaluated_at(175_168, 350_336, 525_056),
    # All evaluations are late, and the first distance is 3 % longer than the others.
    "partial batches": evaluated_at(154_048, 304_512, 454_976),
    "no training steps": value("opt_learning_rate_training_steps", 0),
}
VERDICTS = {("fail", "fail"): REFUSED, ("pass", "fail"): UNSEEN, ("pass", "pass"): WARNED}


FINDINGS = dict(line.split(" => ") for line in Path(__file__).with_name("findings.txt").read_text().splitlines())
"""The finding about each mutation, by its name."""


@pytest.mark.parametrize(
    ("verdicts", "name", "change"),
    [
        pytest.param(verdicts, *mutation, id=mutation[0])
        for verdicts, mutations in VERDICTS.items()
        for mutation in mutations.items()
    ],
)
def test_each_mutation_of_a_good_log_gives_one_clear_finding(
    brief_log: str, checked, verdicts: tuple[str, str], name: str, change: Edit
) -> None:
    verdict = checked(change(brief_log))
    assert (verdict.official, verdict.ours) == verdicts
    assert verdict.official == original_verdict(verdict.path, "5.0.0")
    (finding,) = verdict.findings
    said, places = re.subn(r"; logged at tests/compliance/run_logs\.py:\d+(?=\])", "", str(finding))
    assert said == FINDINGS[name]
    assert places == bool(finding.line and finding.key)


def test_rounding_of_settings_and_times_is_no_fault(brief_log: str, checked) -> None:
    exact = later("block_stop", -10)  # the time of the block_start
    single = value("quality_target", 0.7200000286102295)
    for change in (exact, single, value("quality_target", 0.7199994), value("eval_interval_samples", 150_447)):
        assert checked(change(brief_log)).findings == ()
    assert checked(value("gradient_accumulation_steps", 448)(brief_log)).findings == ()


REQUIRED = [key for key, rule in rules.KEYS.items() if rule.required_in("5.0.0", "closed")]
ONCE = [key for key in REQUIRED if rules.KEYS[key].once]
WRONG: list[tuple[str, object]] = [
    (key, wrong)
    for key in REQUIRED
    for wrong in ({}, "many", -1.5, True)
    if (rule := rules.KEYS[key].value) and not rule.accepts(wrong)
]


@pytest.mark.parametrize("key", REQUIRED)
def test_every_required_key_is_missed(brief_log: str, checked, key: str) -> None:
    verdict = checked(delete(key)(brief_log))
    (finding,) = verdict.findings
    assert (finding.line, finding.key, finding.severity) == (None, key, "error")
    assert "no record" in finding.found and key in finding.remedy  # noqa: PT018
    assert verdict.official == ("pass" if key == "seed" else "fail")


def test_without_run_start_times_are_held_as_before_it(brief_log: str, checked) -> None:
    found = checked(delete("run_start")(later("seed", -1000)(brief_log))).findings
    assert {(finding.key, finding.severity) for finding in found} == {("run_start", "error"), ("seed", "warning")}


@pytest.mark.parametrize("key", ONCE)
def test_every_single_key_is_doubled(brief_log: str, checked, key: str) -> None:
    verdict = checked(repeat(key)(brief_log))
    (finding,) = verdict.findings
    assert verdict.official == "pass"
    place = 1 + brief_log.splitlines(keepends=True).index(lines_of(brief_log, key)[0])
    assert (finding.key, finding.line) == (key, place + 1)
    assert f"logged again, first on line {place};" in finding.found
    assert "once" in finding.remedy
    assert finding.severity == ("error" if key in ("run_start", "run_stop") else "warning")


@pytest.mark.parametrize(("key", "wrong"), WRONG)
def test_every_value_has_its_type(brief_log: str, checked, key: str, wrong: object) -> None:
    found = [finding for finding in checked(value(key, wrong)(brief_log)).findings if finding.key == key]
    place = 1 + brief_log.splitlines(keepends=True).index(lines_of(brief_log, key)[0])
    assert {finding.line for finding in found} == {place}, found
    assert wrong == -1.5 or found[0].severity == "error"  # some accepted logs contain such numbers


def test_what_is_reached_after_run_stop_does_not_count(brief_log: str, checked) -> None:
    lines = brief_log.splitlines(keepends=True)
    last = max(n for n, line in enumerate(lines) if '"eval_start"' in line)
    early = edit("run_stop", lambda f: f.update(time_ms=time_of(lines[last])))(lines[-1])
    verdict = checked("".join([*lines[:last], early, *lines[last:-1]]))
    assert (verdict.official, verdict.ours) == ("pass", "fail")
    accuracy = [finding.found for finding in verdict.errors if finding.key == "eval_accuracy"]
    assert "last accuracy 0.64800; expected at least the target 0.72" in accuracy
    assert [finding.key for finding in verdict.findings if "after run_stop" in finding.found] == ["eval_start"]


MINUTE_MS = 60_000


@pytest.mark.parametrize(
    ("division", "init_ms", "limit"),
    [
        ("closed", 30 * MINUTE_MS - 1, None),
        ("closed", 30 * MINUTE_MS, 30),
        ("open", 240 * MINUTE_MS - 1, None),
        ("open", 240 * MINUTE_MS, 240),
    ],
)
def test_init_limit_is_exclusive_to_the_millisecond(
    brief_log: str, open_log: str, checked, division: str, init_ms: int, limit: int | None
) -> None:
    text = brief_log if division == "closed" else open_log
    start_ms = time_of(lines_of(text, "init_stop")[0]) - init_ms
    verdict = checked(edit("init_start", lambda f: f.update(time_ms=start_ms))(text))
    assert (verdict.official, verdict.ours) == (("fail", "fail") if limit else ("pass", "pass"))
    found = [finding.found for finding in verdict.findings]
    assert found == ([f"initialisation took {limit}.0 min; expected less than {limit} min"] if limit else [])


def test_keys_that_steer_a_terminal_are_escaped(brief_log: str, checked) -> None:
    odd = edit("seed", lambda f: f.update(key="\x1b[2J" + "x" * 500, time_ms=1))(lines_of(brief_log, "seed")[0])
    stop = lines_of(brief_log, "run_stop")[0]
    (finding,) = checked(brief_log.replace(stop, odd + stop)).findings
    assert finding.key.startswith("\\x1b[2J")
    assert len(str(finding)) < 500


# Logs as in published, accepted submissions


def evaluated_offline(text: str) -> str:
    """Move all evaluations behind the training. Each keeps its time stamp, which is the time of its checkpoint."""
    moved = ("eval_accuracy", "train_samples", "eval_samples", "run_stop")
    rest = [line for line in text.splitlines(True) if any(f'"key": "{key}"' in line for key in moved)]
    training = delete("eval_start", "eval_stop", *moved)(text)
    return later("block_stop", 100_000, -1)(training + "".join(rest))


def test_evaluation_after_training_with_the_times_of_the_checkpoints(brief_log: str, checked) -> None:
    text = evaluated_offline(brief_log)
    verdict = checked(text)
    assert (verdict.official, verdict.ours) == ("pass", "pass")
    assert {"eval_accuracy", "run_stop"} <= {finding.key for finding in verdict.findings}
    ends = [("eval_accuracy", 0), ("eval_accuracy", 1), ("eval_accuracy", 2), ("run_stop", 0)]
    for broken in (
        later("run_stop", 5000),
        in_turn(*(later(key, 5000, nth) for key, nth in ends)),  # times at which there was no checkpoint
        later("eval_accuracy", 90_000),  # the evaluations are out of order
        later("eval_accuracy", 90_000, -1),
    ):
        assert checked(broken(text)).ours == "fail"


def test_a_setting_stamped_by_a_clock_ahead_does_not_count_against_the_run(brief_log: str, checked) -> None:
    verdict = checked(later("opt_lamb_beta_2", 60_000)(brief_log))
    assert verdict.passed
    keys = {finding.key for finding in verdict.findings}
    assert keys & {"init_stop", "run_start", "block_start", "eval_accuracy", "run_stop"} == {"init_stop", "run_start"}
    # Before run_start, compare init_stop only with init_start, not with settings.
    start_ms = time_of(lines_of(brief_log, "init_start")[0])
    for time_ms, passes in ((start_ms, True), (start_ms - 1, False)):
        moved = edit("init_stop", lambda fields, time_ms=time_ms: fields.update(time_ms=time_ms))
        assert checked(moved(brief_log)).passed is passes


def test_untrained_model_may_be_evaluated_first(brief_log: str, checked) -> None:
    start = lines_of(brief_log, "block_start")[0]
    untrained = {"time_ms": time_of(start), "value": 0.34, "metadata": {"epoch_num": 0}}
    zero = edit("eval_accuracy", lambda f: f.update(untrained))(lines_of(brief_log, "eval_accuracy")[0])
    assert checked(brief_log.replace(start, zero + start, 1)).findings == ()


def test_same_settings_twice_are_a_warning_and_the_seed_was_not_always_asked_for(brief_log: str, checked) -> None:
    text = in_turn(repeat("submission_org"), delete("seed"))(brief_log)
    verdict = checked(text, "4.0.0")
    found = {(finding.key, finding.severity) for finding in verdict.findings}
    assert found == {("submission_org", "warning"), ("seed", "warning")}
    assert not checked(text, "4.1.0").passed


def test_open_logs_may_leave_intervals_unpaired(brief_log: str, open_log: str, checked) -> None:
    missing = delete("block_start", nth=-1)
    assert checked(missing(open_log)).passed
    assert not checked(missing(brief_log)).passed
    start = lines_of(brief_log, "block_start")[0]
    epoch = start.replace("block_start", "epoch_start").replace("first_epoch_num", "epoch_num")
    (finding,) = checked(brief_log.replace(start, epoch + start, 1)).findings  # the epoch has no epoch_stop
    assert (finding.key, finding.severity) == ("epoch_start", "warning")


# Files that are not the log of one complete run


@pytest.fixture(params=["chain", "no chain"])
def log(request: pytest.FixtureRequest) -> str:
    text = log_of((0.5, 0.6, 0.73)).decode()
    return text if request.param == "chain" else without_chain(text)


def errors(tmp_path: Path, text: str) -> list[tuple[int | None, str]]:
    path = tmp_path / "result_0.txt"
    path.write_text(text)
    verdict = check_file(path)
    assert verdict.official == "fail" or verdict.errors
    return [(finding.line, finding.key) for finding in verdict.errors]


@pytest.mark.parametrize("left", [0.05, 0.3, 0.9, 0.97, 0.985])
def test_a_log_that_was_cut_off_is_one_finding(tmp_path: Path, log: str, left: float) -> None:
    lines = log.splitlines(keepends=True)
    assert errors(tmp_path, "".join(lines[: int(left * len(lines))])) == [(None, "run_stop")]


def test_other_faults_in_what_is_left_are_found(tmp_path: Path, log: str) -> None:
    text = without_chain(log)
    text = value("global_batch_size", 0)("".join(text.splitlines(keepends=True)[:-6]))
    first, second = errors(tmp_path, text)
    assert (first, second[1]) == ((None, "run_stop"), "global_batch_size")


def test_the_end_of_a_log_alone_is_one_finding(tmp_path: Path, log: str) -> None:
    lines = without_chain(log).splitlines(keepends=True)
    assert errors(tmp_path, "".join(lines[-8:])) == [(None, "run_start")]


@pytest.mark.parametrize("kept", [1.0, 0.98])
def test_joined_logs_are_one_finding(tmp_path: Path, log: str, kept: float) -> None:
    other = log_of((0.5, 0.6, 0.7, 0.73), seed=77, start_ms=1_800_000_000_000).decode()
    lines = log.splitlines(keepends=True)
    text = "".join(lines[: int(kept * len(lines))])
    second = 1 + len(text.splitlines()) + ("# chain" in other)
    assert errors(tmp_path, text + other) == [(second, "")]
    assert errors(tmp_path, text + "".join(other.splitlines(keepends=True)[:200])) == [(second, "")]
