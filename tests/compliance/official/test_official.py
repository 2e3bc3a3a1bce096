import json
import logging
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlperf_logging.compliance_checker.mlp_parser import ruleset_300, ruleset_500

from compliance.log.record import TOKEN
from compliance.official import checker as official
from compliance.official import process
from compliance.official.checker import Complaint, Opinion, opinion
from compliance.official.worker import _shorten, judge_part, reference, token_lines
from tests.compliance.log_edits import Edit, delete, in_turn, lines_of, swap, value
from tests.programs import PATIENCE_S, python

Ask = Callable[..., Opinion]


@pytest.fixture
def ask(closed_log: str) -> Ask:
    """Return a function that edits the log and returns the official checker's opinion. Records begin on line 2."""

    def of(change: Edit, ruleset: str = "5.0.0") -> Opinion:
        return opinion([*enumerate(change(closed_log).encode().splitlines(), start=2)], ruleset)

    return of


def test_messages_of_the_official_checker_are_parsed(ask: Ask, closed_log: str) -> None:
    place = 2 + closed_log.splitlines().index(lines_of(closed_log, "init_stop")[0].strip())
    low = "Failed checks for eval_accuracy : (v['value'] >= 0.720) and v['value'] < 1.0"
    none = "Required EXACTLY_ONE occurrence of 'global_batch_size' but found 0"
    early = {"run_start": " ( s['init_stopped'] == True )", "init_stop": "not s['run_started']"}
    tensors = Complaint("the list of initialised tensors is wrong", frozenset({"weights_initialization"}), absent=True)
    swapped = [
        Complaint(f"{key} fails the condition {early[key]}", frozenset({key}), place + number, about_state=True)
        for number, key in enumerate(early)
    ]
    for change, complaints in (
        (value("eval_accuracy", 0.1, -1), [Complaint(low, frozenset({"eval_accuracy"}), absent=True)]),
        (delete("global_batch_size"), [Complaint(none, frozenset({"global_batch_size"}), absent=True)]),
        (swap("init_stop", "run_start"), swapped),
    ):
        assert ask(change) == Opinion("fail", tuple(complaints))
    renamed = ask(lambda text: text.replace("layer_0/output/dense/bias", "x"), "2.0.0")
    assert renamed.complaints == (tensors,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (value("eval_accuracy", None, -1), "TypeError"),
        (lambda text: text.replace('"metadata"', '"meta"'), "KeyError: 'metadata'"),
        (value("submission_division", "Closed"), "FileNotFoundError"),
        (lambda text: text.replace(": 1234,", ": " + "[" * 5000 + "]" * 5000 + ","), "RecursionError"),
    ],
)
def test_a_crash_of_the_official_checker_fails_only_the_log_that_caused_it(ask: Ask, change: Edit, words: str) -> None:
    verdict = ask(change)
    assert verdict.outcome == "fail"
    assert words in verdict.complaints[0].text
    assert ask(in_turn()).outcome == "pass"


def test_messages_of_the_official_checker_are_shortened_and_escaped(ask: Ask) -> None:
    odd = [TOKEN + json.dumps({"time_ms": 1, "key": f"k{number}" + "x" * 1000}) + "\n" for number in range(50)]
    for change in (value("submission_division", "\x1b[2Jx"), lambda text: text + "".join(odd)):
        verdict = ask(change)
        assert verdict.outcome == "fail"
        assert all(complaint.text.isprintable() for complaint in verdict.complaints)
        assert all(len(complaint.text) <= official.MAX_TEXT_CHARACTERS for complaint in verdict.complaints)


# The checker's process


def test_one_process_judges_all_logs_until_it_dies_or_hangs(closed_log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [*enumerate(closed_log.encode().splitlines(), start=1)]
    assert opinion(lines, "5.0.0") == Opinion("pass")
    running = process.the_worker().process
    assert running
    assert opinion(lines, "5.0.0").outcome == "pass"
    assert process.the_worker().process is running
    running.kill()
    running.wait()
    assert opinion(lines, "5.0.0").outcome == "pass"
    monkeypatch.setitem(process.TIMEOUTS_S, "log", 0)
    verdict = opinion(lines * 3, "5.0.0")
    assert verdict == Opinion("fail", (Complaint("the official compliance checker did not end within 0 s"),))
    monkeypatch.undo()
    assert opinion(lines, "5.0.0") == Opinion("pass")  # this answer must not be the late answer to the previous request


fragments = st.sampled_from([TOKEN, TOKEN.rstrip(), ":::", " ", "{}", "text", "\x85", "\xa0", "\t", "\x1c", "\xff"])


@given(st.lists(st.lists(fragments, max_size=6).map("".join), max_size=4))
def test_lines_with_the_token_equal_those_of_the_official_parser(texts: list[str]) -> None:
    lines = [text + "\n" for text in texts]
    for module in (ruleset_300, ruleset_500):
        assert token_lines(lines) == module.strip_and_dedup(lines)


def test_long_records_are_checked_in_linear_time(ask: Ask) -> None:
    began = time.monotonic()
    assert ask(value("seed", "x" * 900_000)).outcome == "pass"  # the unmodified checker takes minutes
    assert time.monotonic() - began < 60


def test_long_official_messages_keep_the_failed_condition() -> None:
    assert _shorten(4000 * "x") == 4000 * "x"
    assert _shorten(4001 * "x") == 2000 * "x"
    assert _shorten(f"{4001 * 'x'}\nfailed test: v > 1\n{{}}") == f"{2000 * 'x'}\nfailed test: v > 1"


def test_the_message_of_an_official_tool_is_its_last_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])

    def tool(path: str, _ruleset: str) -> bool:
        for level, text in ((logging.ERROR, "first"), (logging.ERROR, f" {path} "), (logging.WARNING, "no error")):
            logging.log(level, text)
        return path == "good"

    assert judge_part(tool, "good", "5.0.0") == {"passed": True, "message": "good"}
    assert judge_part(tool, 401 * "X", "5.0.0") == {"passed": False, "message": 400 * "X"}
    crash = {"passed": False, "message": "it ends with ZeroDivisionError: integer division or modulo by zero"}
    assert judge_part(lambda *_: bool(1 // 0), "", "5.0.0") == crash
    assert judge_part(lambda *_: True, "", "5.0.0") == {"passed": True, "message": ""}


def test_the_reference_is_a_point_or_interpolated_between_two_points() -> None:
    low, high, between = (reference(batch, "5.0.0") for batch in (448, 4608, 500))
    figures = {"mean": 2_414_421, "stdev": 197_392, "minimum": 2_274_732}
    assert {name: round(low[name]) for name in figures} == figures
    assert (low["origin"], low["points"], low["largest"]) == ("exact", [448], 16_384)
    assert (between["origin"], between["points"]) == ("interpolated", [448, 4608])
    share = (500 - 448) / (4608 - 448)
    assert between["mean"] == pytest.approx(low["mean"] + share * (high["mean"] - low["mean"]))
    assert reference(64, "5.0.0") == low | {"origin": "smallest"}
    assert reference(20_480, "5.0.0") == {"origin": "none", "points": [], "largest": 16_384}


INTERRUPTED = """
import signal, subprocess
from compliance.official.process import TIMEOUTS_S, Worker
from console.interruption import end_in_order

end_in_order()
worker = Worker()
worker.process = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGTERM))
signal.setitimer(signal.ITIMER_REAL, 0.1)
TIMEOUTS_S["log"] = PATIENCE
worker.answer("log", "log.txt", "5.0.0")
"""
"""A program that gets SIGTERM while the official checker works on an answer."""


def test_sigterm_does_not_wait_for_the_official_checkers_answer() -> None:
    done = python("-c", INTERRUPTED.replace("PATIENCE", str(2 * PATIENCE_S)))
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")
