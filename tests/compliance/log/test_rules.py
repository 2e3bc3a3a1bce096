import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from compliance.log import rules, schedule

spec = find_spec("mlperf_logging")
assert spec
assert spec.origin
OFFICIAL = Path(spec.origin).parent / "compliance_checker"


def official_requirements(ruleset: str, division: str) -> dict[str, str]:
    """Return the required cardinality of each key in the official checker's rule files."""
    required: dict[str, str] = {}
    for name in ("common", f"{division}_common", f"{division}_bert"):
        for entry in yaml.load((OFFICIAL / f"training_{ruleset}" / f"{name}.yaml").read_text(), yaml.BaseLoader):
            if "REQ" in entry.get("KEY", {}):
                required[entry["KEY"]["NAME"]] = entry["KEY"]["REQ"]
    return required


@pytest.mark.parametrize("division", rules.DIVISIONS)
@pytest.mark.parametrize("ruleset", rules.RULESETS)
def test_table_asks_what_the_official_rule_files_ask(ruleset: str, division: rules.Division) -> None:
    official = official_requirements(ruleset, division)
    own = {key for key, rule in rules.KEYS.items() if rule.required_in(ruleset, division)}
    for key, cardinality in official.items():
        if cardinality in ("EXACTLY_ONE", "AT_LEAST_ONE"):
            assert key in own
            assert rules.KEYS[key].once == (cardinality == "EXACTLY_ONE")
    beyond = {"block_start", "block_stop"} | ({"seed"} if division == "closed" else set())
    assert own - set(official) <= beyond


@given(st.integers(1, 10**6))
def test_evaluation_interval_is_the_formula_of_the_rules(batch: int) -> None:
    exact = 5 * (23023 * batch + 300_000_000)  # 10,000 times the number of samples, to stay in integers
    assert schedule.evaluation_interval(batch) == exact // 10_000 // 25_000 * 25_000


@given(st.integers(1, 50), st.integers(1, 10**6), st.integers(1, 20_000))
def test_scheduled_evaluations_are_on_schedule(index: int, interval: int, batch: int) -> None:
    samples = schedule.evaluation_samples(index, interval, batch)
    assert samples % batch == 0
    assert index * interval <= samples < index * interval + batch
    previous = schedule.evaluation_samples(index - 1, interval, batch)
    assert schedule.EvaluationSchedule(interval, batch).allows(index, samples, previous)


@pytest.mark.parametrize(
    ("interval", "batch", "index", "samples", "previous", "allowed"),
    [
        (150_000, 448, 15, 2_250_304, 14 * 150_080, True),  # the multiple is rounded up to whole batches
        (150_000, 448, 15, 15 * 150_080, 14 * 150_080, True),  # the interval is rounded up to whole batches
        (150_000, 768, 17, 2_549_468, 2_400_100, True),  # packed sequences: the log counts real sequences
        (150_000, 768, 15, 2_251_500, 2_100_325, True),  # up to two partial batches are allowed
        (150_000, 768, 15, 2_251_900, 2_100_325, False),
        (325_000, 16_384, 5, 1_645_000, 1_300_000, False),  # but not if batches are large
        (150_000, 1536, 2, 350_000, 175_000, False),
        (150_000, 448, 2, 450_000, 150_000, False),
    ],
)
def test_both_roundings_of_the_schedule_are_accepted(
    interval: int, batch: int, index: int, samples: int, previous: int, allowed: bool
) -> None:
    assert schedule.EvaluationSchedule(interval, batch).allows(index, samples, previous) is allowed


def test_weight_tensors_are_those_of_the_official_rule_file() -> None:
    text = (OFFICIAL / "training_2.1.0" / "closed_bert.yaml").read_text()
    assert sorted(rules.weight_tensors(24)) == sorted(re.findall(r'"((?:bert|cls)/[^"]+)"', text))
    assert len(rules.weight_tensors(24)) == 398
    assert len(set(rules.weight_tensors(6))) == 14 + 16 * 6


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
def test_values_that_a_rule_takes(rule: rules.ValueRule, taken: list[object], refused: list[object]) -> None:
    assert [value for value in taken if not rule.accepts(value)] == []
    assert [value for value in refused if rule.accepts(value)] == []


@pytest.mark.parametrize("ruleset", ["5.1.0", "6.0.0", "0.7.0", ""])
def test_rulesets_without_bert_are_refused(ruleset: str) -> None:
    with pytest.raises(ValueError, match=r"expected one of 1\.0\.0.*5\.0\.0"):
        rules.check_ruleset(ruleset)


def test_system_fields_are_those_of_the_official_checker() -> None:
    source = (OFFICIAL.parent / "system_desc_checker" / "system_desc_checker.py").read_text()
    listed = source.partition("required_fields = [")[2].partition("]")[0]
    assert tuple(re.findall(r'"([^"]+)"', listed)) == rules.SYSTEM_FIELDS
    assert len(rules.SYSTEM_FIELDS) == 33
    for status in rules.SYSTEM_STATUSES.values():
        assert f'"{status}"' in source
