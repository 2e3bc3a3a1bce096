"""The table of rules, compared with the official rule files, and violations of the order of records."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from mlperf_logging.compliance_checker import mlp_compliance

from bert.log.mllog import MLLog, RuleViolation
from compliance.log import rules, schedule
from compliance.log.findings import shown
from compliance.log.logged_run import LoggedRun
from compliance.log.order import left_open, unearned_success, violations
from compliance.log.reader import read_log
from compliance.log.record import Record
from tests.compliance.run_logs import CLOSED, START_MS, counting_clock, initialise

OFFICIAL = Path(mlp_compliance.__file__).parent


def official_requirements(ruleset: str, division: str) -> dict[str, str | None]:
    """Return the requirement (REQ) of each key in the official checker's rule files; None for optional keys."""
    required: dict[str, str | None] = {}
    for name in ("common", f"{division}_common", f"{division}_bert"):
        for entry in yaml.load((OFFICIAL / f"training_{ruleset}" / f"{name}.yaml").read_text(), yaml.BaseLoader):
            if "KEY" in entry:
                required[entry["KEY"]["NAME"]] = entry["KEY"].get("REQ")
    return required


@pytest.mark.parametrize("division", rules.DIVISIONS)
@pytest.mark.parametrize("ruleset", rules.RULESETS)
def test_our_rules_require_the_keys_of_the_official_rule_files(ruleset: str, division: rules.Division) -> None:
    official = official_requirements(ruleset, division)
    assert official.keys() <= rules.KEYS.keys()  # the official checker gets only records with known keys
    own = {key for key, rule in rules.KEYS.items() if rule.required_in(ruleset, division)}
    for key, cardinality in official.items():
        if cardinality in ("EXACTLY_ONE", "AT_LEAST_ONE"):
            assert key in own
            assert rules.KEYS[key].once == (cardinality == "EXACTLY_ONE")
    beyond = {"block_start", "block_stop"} | ({"seed"} if division == "closed" else set())
    assert own - set(official) <= beyond


@given(st.integers(1, 10**6))
def test_the_evaluation_interval_follows_the_formula_of_the_rules(batch: int) -> None:
    exact = 5 * (23023 * batch + 300_000_000)  # in units of 1/10,000 sample, to stay in integers
    assert schedule.evaluation_interval(batch) == exact // 10_000 // 25_000 * 25_000


@given(st.integers(1, 50), st.integers(1, 10**6), st.integers(1, 20_000))
@example(1, 150_000, 448)
@example(2, 150_000, 448)
def test_a_schedule_finds_and_allows_its_own_evaluations(index: int, interval: int, batch: int) -> None:
    of_run = schedule.EvaluationSchedule(interval, batch)
    samples = of_run.samples(index)
    assert samples % batch == 0
    assert index * interval <= samples < index * interval + batch
    assert of_run.allows(index, samples, of_run.samples(index - 1))
    following = of_run.index_after(samples)
    assert of_run.samples(following) == samples
    assert of_run.samples(of_run.index_after(samples + 0.5)) > samples
    assert following == 1 or interval < batch or of_run.samples(following - 1) < samples


@pytest.mark.parametrize(
    ("interval", "batch", "index", "samples", "previous", "allowed"),
    [
        (150_000, 448, 15, 2_250_304, 14 * 150_080, True),  # the multiple is rounded up to whole batches
        (150_000, 448, 15, 15 * 150_080, 14 * 150_080, True),  # the interval is rounded up to whole batches
        (150_000, 768, 17, 2_549_468, 2_400_100, True),  # with packing, the log counts unpacked sequences
        (150_000, 768, 15, 2_251_500, 2_100_325, True),  # up to two partial batches are allowed
        (150_000, 768, 15, 2_251_900, 2_100_325, False),
        (325_000, 16_384, 5, 1_645_000, 1_300_000, True),  # packing may put each of the two counts a batch off
        (325_000, 16_384, 5, 1_660_000, 1_300_000, False),
        (150_000, 1536, 2, 350_000, 175_000, False),
        *((150_000, 448, 15, 2_250_000 + off, 0, abs(off) < 448) for off in (-448, -447, 447, 448)),
        *((150_000, 448, 15, 500_000 + off, 350_000, abs(off) < 896) for off in (-896, -895, 895, 896)),
        (150_000, 448, 2, 450_000, 150_000, False),
    ],
)
def test_the_schedule_accepts_both_roundings_and_rejects_larger_deviations(
    interval: int, batch: int, index: int, samples: int, previous: int, allowed: bool
) -> None:
    assert schedule.EvaluationSchedule(interval, batch).allows(index, samples, previous) is allowed


@pytest.mark.parametrize(
    ("rule", "taken", "refused"),
    [
        (rules.POSITIVE_INTEGER, [1, 2**63 - 1], [True, "1", None, 0, -1, 1.5, [1], 2**63]),
        (rules.FRACTION, [0, 0.7, 1], [float("nan"), float("inf"), -0.1, 72.0, True, None, "0.7", 10**400]),
        (rules.STEP, [-9500.0], [0.5]),
        (rules.STEPS, [0, 1024.0], [0.5, -1]),
        (rules.POSITIVE_STEPS, [1024.0], [0]),
        (rules.DECAY, [0, 0.999], [1, -0.1]),
    ],
)
def test_value_rules_accept_valid_and_reject_invalid_values(
    rule: rules.ValueRule, taken: list[object], refused: list[object]
) -> None:
    assert [value for value in taken if not rule.accepts(value)] == []
    assert [value for value in refused if rule.accepts(value)] == []


def test_values_are_shown_as_json_and_shortened() -> None:
    for value, text in (
        (None, "null"), (True, "true"), (1.5, "1.5"), ("\x1b\xe9", r"'\x1b\xe9'"), ([1], "[1]"),
        (78 * "x", f"'{78 * 'x'}'"), (79 * "x", f"'{76 * 'x'}..."), (10**80, f"1{76 * '0'}..."),
    ):  # fmt: skip
        assert shown(value) == text


def test_system_fields_and_statuses_equal_those_of_the_official_checker() -> None:
    source = (OFFICIAL.parent / "system_desc_checker" / "system_desc_checker.py").read_text()
    listed = source.partition("required_fields = [")[2].partition("]")[0]
    assert tuple(re.findall(r'"([^"]+)"', listed)) == rules.SYSTEM_FIELDS
    assert len(rules.SYSTEM_FIELDS) == 33
    for status in rules.SYSTEM_STATUSES.values():
        assert f'"{status}"' in source


def test_the_writer_rejects_a_closed_run_whose_settings_differ_from_the_benchmark(tmp_path: Path) -> None:
    log = MLLog(tmp_path / "written.txt", clock_ms=counting_clock(10))
    with pytest.raises(RuleViolation, match="max_sequence_length: value 128 in a closed log"):
        initialise(log, "closed", CLOSED | {"max_sequence_length": 128})
    assert "run_start" not in read_log(tmp_path / "written.txt").run.first


# Order of records that this repository's writer enforces


def run_until(*keys: str, samples: int = 150_080, resumed: int = 0) -> LoggedRun:
    """Return a closed run with batch size 448 that ends with a record for each of `keys`. Their epoch_num is `samples`."""
    run = LoggedRun()
    run.resumed_samples = resumed
    settings = {"submission_division": "closed", "global_batch_size": 448}
    for line, key in enumerate(("init_start", *settings, "init_stop", "run_start", *keys), start=1):
        count = {"epoch_num": samples} if line > 5 else {}
        run.add(Record(line, START_MS, "", key, settings.get(key, 0.5), count))
    return run


SCHEDULE = "every 150000 samples, rounded up to a whole batch (TR 24.4)"
EVALUATION = "(closed_bert.yaml, open_bert.yaml; TR 24.6)"
NO_RESULT = f"the evaluation has no result, expected eval_accuracy first {EVALUATION}"
BROKEN: list[tuple[LoggedRun, str, int, list[str]]] = [
    (run_until(), "eval_start", 150_080, []),
    (run_until(), "eval_start", 150_079, [f"evaluation at 150079 samples, expected evaluation 1 at 150080: {SCHEDULE}"]),
    (run_until(), "eval_start", 0, [f"evaluation at 0 samples, expected evaluation 1 at 150080: {SCHEDULE}"]),
    (run_until("eval_accuracy"), "eval_start", 300_160, []),
    (run_until(resumed=150_080), "eval_start", 150_080, []),
    (run_until(resumed=150_081), "eval_start", 300_160, []),
    (run_until(), "eval_accuracy", 150_080, [f"no evaluation is open, expected eval_start first {EVALUATION}"]),
    (run_until("eval_start"), "eval_accuracy", 150_080, []),
    (
        run_until("eval_start"), "eval_accuracy", 150_528,
        [
            f"epoch_num 150528, expected 150080, the samples of its eval_start {EVALUATION}",
            f"evaluation at 150528 samples, expected evaluation 1 at 150080: {SCHEDULE}",
        ],
    ),
    (
        run_until("eval_start", "eval_accuracy"), "eval_accuracy", 150_080,
        [
            f"logged a second time in one evaluation, expected eval_stop {EVALUATION}",
            f"evaluation at 150080 samples, expected evaluation 2 at 300160: {SCHEDULE}",
        ],
    ),
    (run_until("eval_start"), "eval_stop", 150_080, [NO_RESULT]),
    (run_until("eval_start", "eval_accuracy"), "eval_stop", 150_080, []),
    (run_until("eval_start", "eval_accuracy"), "eval_stop", 150_079, ["150079 samples, expected at least 150080 (TR 11)"]),
    (run_until(), "eval_stop", 150_080, ["nothing is open, expected eval_start first (TR 11)",
                                         NO_RESULT]),
    (
        run_until("eval_start"), "eval_start", 150_080,
        ["the eval_start on line 6 is still open, expected eval_stop first (TR 11)"],
    ),
]  # fmt: skip


def test_records_out_of_order_yield_the_expected_violations() -> None:
    for number, (run, key, samples, expected) in enumerate(BROKEN):
        event = rules.KEYS[key].event_type
        record = Record(9, START_MS, event, key, 0.5, {"epoch_num": samples})
        assert [each.sentence for each in violations(run, record)] == [f"{key}: {each}" for each in expected], number
    [unknown] = violations(run_until(), Record(9, START_MS, "POINT_IN_TIME", "eval_acuracy", 1, {}))
    assert unknown.sentence.startswith("eval_acuracy: an unknown key, expected a key of the log")
    [unearned] = unearned_success(run_until(), None)
    assert unearned.sentence == "eval_accuracy: no evaluation, expected at least the target 0.72 (TR 24.2)"
    assert [each.key for each in left_open(run_until("block_start", "eval_start"))] == ["block_start", "eval_start"]
