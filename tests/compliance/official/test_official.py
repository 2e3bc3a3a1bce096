import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.compliance_checker.mlp_parser import ruleset_300, ruleset_500

from compliance.log import rules
from compliance.log.record import TOKEN
from compliance.log.records import read_log
from compliance.official import checker as official
from compliance.official import process
from compliance.official.checker import opinion
from compliance.official.worker import token_lines
from tests.compliance.run_logs import without_chain, write_run

Lines = list[tuple[int, bytes]]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    path = write_run(tmp_path_factory.mktemp("closed") / "result_0.txt")
    path.write_text("plain\n" + without_chain(path.read_text()))
    return list(read_log(path).evidence)


def edited(lines: Lines, old: str, new: str) -> Lines:
    assert any(old.encode() in line for _, line in lines)
    return [(number, line.replace(old.encode(), new.encode())) for number, line in lines]


def without(lines: Lines, key: str) -> Lines:
    return [(number, line) for number, line in lines if f'"{key}"'.encode() not in line]


@pytest.mark.parametrize("ruleset", rules.RULESETS)
def test_good_log_passes_without_a_word(lines: Lines, ruleset: str) -> None:
    assert opinion(lines, ruleset) == official.Opinion("pass")


def test_messages_are_understood(lines: Lines) -> None:
    (absent,) = opinion(without(lines, "opt_lamb_beta_1"), "5.0.0").complaints
    assert (absent.keys, absent.absent, absent.severity) == ({"opt_lamb_beta_1"}, True, "error")
    assert absent.text == "Required EXACTLY_ONE occurrence of 'opt_lamb_beta_1' but found 0"

    late = opinion(without(lines, "run_start"), "5.0.0")
    at = {complaint.line: complaint for complaint in late.complaints if complaint.about_state}
    place = [number for number, line in lines if b'"block_start"' in line][-1]
    assert at[place].keys == {"block_start"}
    assert at[place].text == "block_start fails the condition s['run_started']"

    value = opinion(
        edited(lines, '"gradient_accumulation_steps", "value": 1', '"gradient_accumulation_steps", "value": 0'), "5.0.0"
    )
    (condition,) = value.complaints
    assert (condition.keys, condition.about_state) == ({"gradient_accumulation_steps"}, False)
    assert dict(lines)[condition.line or 0].count(b"gradient_accumulation_steps")

    (target,) = opinion(edited(lines, '"value": 0.756', '"value": 0.7'), "5.0.0").complaints
    assert (target.keys, target.absent) == ({"eval_accuracy"}, True)

    groups = opinion(without(without(lines, "block_start"), "eval_start"), "5.0.0").complaints
    assert {"block_start", "eval_start"} <= frozenset().union(*(complaint.keys for complaint in groups))

    (weights,) = opinion(edited(lines, "layer_0/output/dense/bias", "x"), "2.0.0").complaints
    assert (weights.keys, weights.text) == ({"weights_initialization"}, "the list of initialised tensors is wrong")

    parsing = opinion([*lines, (9999, TOKEN.encode() + b"{")], "5.0.0")
    assert (parsing.outcome, parsing.complaints[0].keys) == ("fail", frozenset())


def test_what_is_only_a_warning_there_passes(lines: Lines) -> None:
    again = next(line for _, line in lines if b'"run_start"' in line)
    verdict = opinion([*lines, (1000, again)], "5.0.0")
    assert verdict.outcome == "pass"
    assert [(complaint.keys, complaint.severity) for complaint in verdict.complaints] == [({"run_start"}, "warning")]
    other = again.replace(b'"value": null', b'"value": 1')
    verdict = opinion([*lines, (1000, other)], "5.0.0")
    assert (verdict.outcome, verdict.complaints[0].severity) == ("fail", "error")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"value": 0.756', '"value": null', "TypeError"),
        ('"metadata"', '"meta"', "KeyError: 'metadata'"),
        ('"closed"', '"Closed"', "FileNotFoundError"),
        ('"seed", "value": 1234', '"seed", "value": ' + "[" * 5000 + "]" * 5000, "RecursionError"),
    ],
)
def test_a_crash_is_a_failure_in_words_and_the_next_log_is_judged(lines: Lines, old: str, new: str, words: str) -> None:
    verdict = opinion(edited(lines, old, new), "5.0.0")
    assert verdict.outcome == "fail"
    assert words in verdict.complaints[0].text
    assert opinion(lines, "5.0.0").outcome == "pass"


def test_rule_files_named_by_the_log_are_not_opened(lines: Lines, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "evil_common.yaml").write_text(f"- BEGIN:\n    CODE: \"open({str(marker)!r}, 'w')\"\n")
    package = Path(mlp_compliance.__file__).parent / "training_5.0.0"
    division = os.path.relpath(tmp_path / "evil", package)
    verdict = opinion(
        edited(lines, '"submission_division", "value": "closed"', f'"submission_division", "value": "{division}"'),
        "5.0.0",
    )
    assert verdict.outcome == "fail"
    assert not marker.exists()


def test_log_contents_cannot_steer_a_terminal(lines: Lines) -> None:
    complaints = opinion(edited(lines, '"closed"', '"\\u001b[2Jx"'), "5.0.0").complaints
    assert complaints
    assert all(complaint.text.isprintable() for complaint in complaints)


def test_a_checker_that_takes_too_long_is_ended_and_started_again(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(official, "TIMEOUT_S", 0)
    verdict = opinion(lines * 3, "5.0.0")
    assert (verdict.outcome, verdict.complaints[0].text) == ("fail", "the official checker did not end within 0 s")
    monkeypatch.undo()
    assert opinion(lines, "5.0.0") == official.Opinion("pass")  # and not the late answer, which has warnings


def test_a_worker_that_died_between_two_logs_is_started_again(lines: Lines) -> None:
    assert opinion(lines, "5.0.0").outcome == "pass"
    running = process.the_worker().process
    assert running
    running.kill()
    running.wait()
    assert opinion(lines, "5.0.0").outcome == "pass"


def test_one_process_serves_many_logs(lines: Lines) -> None:
    opinion(lines, "5.0.0")
    started = process.the_worker().process
    began = time.monotonic()
    for _ in range(10):
        opinion(lines, "5.0.0")
    assert process.the_worker().process is started
    assert time.monotonic() - began < 5


fragments = st.sampled_from([TOKEN, TOKEN.rstrip(), ":::", " ", "{}", "text", "\x85", "\xa0", "\t", "\x1c", "\xff"])


@settings(deadline=None)
@given(st.lists(st.lists(fragments, max_size=6).map("".join), max_size=4))
def test_cutting_at_the_token_is_what_the_package_does(texts: list[str]) -> None:
    lines = [text + "\n" for text in texts]
    for module in (ruleset_300, ruleset_500):
        assert token_lines(lines) == module.strip_and_dedup(lines)


def test_long_records_take_no_quadratic_time(lines: Lines) -> None:
    began = time.monotonic()
    long = edited(lines, '"seed", "value": 1234', f'"seed", "value": "{"x" * 900_000}"')
    assert opinion(long, "5.0.0").outcome == "pass"  # minutes, at the package's own pace
    assert time.monotonic() - began < 10


def test_the_rules_know_every_key_that_a_rule_file_names() -> None:
    """Other records are not shown to the official checker."""
    folder = Path(mlp_compliance.__file__).parent
    for ruleset in rules.RULESETS:
        for name in ("common", "closed_common", "open_common", "closed_bert", "open_bert"):
            text = (folder / f"training_{ruleset}" / f"{name}.yaml").read_text()
            for line in text.splitlines():
                if line.strip().startswith("NAME:"):
                    assert line.split()[-1] in rules.KEYS


def test_answers_are_bounded(lines: Lines) -> None:
    many = [(number, TOKEN.encode() + json.dumps({"time_ms": 1, "key": f"k{number}"}).encode()) for number in range(50)]
    verdict = opinion([*lines, *many], "5.0.0")
    assert verdict.outcome == "fail"
    assert all(len(complaint.text) <= official.MAX_TEXT_CHARACTERS for complaint in verdict.complaints)
