"""Programs escape untrusted text, and end properly on errors, Ctrl-C and closed pipes."""

import json
import os
import signal
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console import interruption
from console.program import complain, drop_lost_output, say, say_annotation, say_document, say_json
from console.text import json_document, visible
from tests.conftest import SmallRun
from tests.hostile import NAME, assert_harmless
from tests.programs import REPOSITORY, python

WITH_TYRO = ("bert.train", "bert.convert", "cluster", "compliance", "dataloading")
ANY_TEXT = st.text(st.characters() | st.sampled_from("\n\r\x1b\x9b\u202e\u200b\udcff:#[\u034f\u3164"), max_size=60)


SHOWN: dict[object, str] = {
    "Größe 数 é": "Größe 数 é",
    "a\nb\r\tc": r"a\nb\r\tc",
    "\x1b[2J\x9b\x7f": r"\x1b[2J\x9b\x7f",
    "\u202eabc\u2066\u200b\ufeff\u2028": r"\u202eabc\u2066\u200b\ufeff\u2028",
    "a\u034f\u3164\ufe0f\U000e0100b": r"a\u034f\u3164\ufe0f\U000e0100b",
    os.fsdecode(b"a\xff"): r"a\udcff",
    "::error::x": r"\x3a:error::x",
    "  ::set-output": r"  \x3a:set-output",
    "std::vector": "std::vector",
    "x ##[error]y ##vso[task.x]": r"x \x23#[error]y \x23#vso[task.x]",
    ':::MLLOG {"key"': r'\x3a::MLLOG {"key"',
    7: "7",
}


def test_control_and_invisible_characters_are_escaped_and_long_text_is_cut() -> None:
    assert {text: visible(text) for text in SHOWN} == SHOWN
    assert {shown: visible(shown) for shown in SHOWN.values()} == {shown: shown for shown in SHOWN.values()}
    cut = {("a" * 10, 10): "a" * 10, ("a" * 11, 10): "a" * 7 + "...", ("\n" * 5, 9): r"\n\n\n...", ("ab", 1): "..."}
    assert {each: visible(*each) for each in cut} == cut


@given(ANY_TEXT)
def test_any_text_is_shown_as_one_harmless_line(text: str) -> None:
    shown = visible(text)
    assert_harmless(shown)
    assert "\n" not in shown
    assert not {unicodedata.category(letter) for letter in shown} & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    assert visible(shown) == shown
    limited = visible(text, 10)
    assert len(limited) <= 10
    assert limited.endswith("...") or limited == shown


@given(
    st.recursive(
        ANY_TEXT | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner), max_leaves=8
    )
)
def test_json_documents_are_ascii_that_every_parser_accepts(document: object) -> None:
    text = json_document(document)
    assert all(letter == "\n" or " " <= letter <= "~" for letter in text)
    loaded = json.dumps(json.loads(text), ensure_ascii=False)
    loaded.encode()  # fails if there is a lone surrogate
    clean = json.dumps(document, ensure_ascii=False)
    if clean.isascii():
        assert json.loads(text) == document


def test_all_functions_that_print_escape_untrusted_text(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"{NAME}: done")
    say_document("a\x1b[2J\n\n::error::b\n")
    for error in (ValueError(NAME), *(OSError(2, "No such file", name) for name in (NAME, os.fsencode(NAME)))):
        complain(error)
    say_json({NAME: [NAME]})
    out, err = capsys.readouterr()
    assert_harmless(out + err)
    shown = visible(NAME)
    assert err.splitlines() == [f"error: {shown}", *[f"error: {shown}: No such file"] * 2]
    assert out.split("\n")[:5] == [f"{shown}: done", r"a\x1b[2J", "", r"\x3a:error::b", "{"]
    document = '{\n  "\\u00e9": [\n    "b##[\\\\udcff",\n    1.5\n  ]\n}'
    assert json_document({"é": ["b##[\udcff", 1.5]}) == document
    assert json_document("\ud7ff\ud800\udfff\ue000") == r'"\ud7ff\\ud800\\udfff\ue000"'
    say_annotation("notice", "a:b, 50%\r\n", {})
    say_annotation("error", "\x1b", {"file": "a:b,c%\n", "line": 7})
    say_annotation("notice", "a", {"line": 3})
    said = ["::notice::a:b, 50%25%0D%0A", r"::error file=a%3Ab%2Cc%25%0A,line=7::\x1b", "::notice line=3::a"]
    assert capsys.readouterr().out.splitlines() == said


LOGS_AND_WARNS = """import logging, warnings; from console.program import accept_any_text; from tests.hostile import NAME
accept_any_text()
print('größe')
logging.getLogger('kernels.tuning.autotune').warning('%s is ignored', NAME)
warnings.warn(NAME)
try:
    raise ValueError('odd\\x1b[2J')
except ValueError:
    logging.getLogger('bert').exception(NAME)
"""


def test_untrusted_text_in_log_messages_and_warnings_is_escaped() -> None:
    done = python("-c", LOGS_AND_WARNS, PYTHONIOENCODING="ascii:strict")
    assert (done.returncode, done.stdout) == (0, "gr\\xf6\\xdfe\n")
    assert_harmless(done.stderr)
    lines = done.stderr.splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("x\\n")
    assert lines[0].endswith(" is ignored")
    assert lines[1].startswith("warning: <string>:5: UserWarning: x\\n")
    traceback = ["Traceback (most recent call last):", '  File "<string>", line 7, in <module>']
    assert lines[3:] == [*traceback, r"ValueError: odd\x1b[2J"]


@pytest.mark.parametrize(
    ("arguments", "imported"),
    [
        *((f"{name} --help", "tyro") for name in WITH_TYRO),
        # These programs import torch after they parse the command line.
        *(pytest.param(f"bert.{name} tiny_cpu", "torch", marks=pytest.mark.slow) for name in ("train", "evaluate")),
    ],
)
def test_ctrl_c_during_the_imports_prints_one_line(arguments: str, imported: str, tmp_path: Path) -> None:
    """The process kills itself by SIGINT, so that a shell sees status 130 and stops its script."""
    (tmp_path / f"{imported}.py").write_text("raise KeyboardInterrupt")
    # Unset TRITON_INTERPRET, which the tests of kernels set and which disables compiling.
    done = python("-m", *arguments.split(), PYTHONPATH=tmp_path, TRITON_INTERPRET=None)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "interrupted\n")


def test_a_signal_ends_a_program_with_its_status_and_later_signals_are_ignored(
    capsys: pytest.CaptureFixture[str],
) -> None:
    numbers = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        interruption.end_in_order()
        with pytest.raises(SystemExit) as stop:
            signal.raise_signal(signal.SIGTERM)
        assert stop.value.code == 143
        assert [signal.getsignal(number) for number in numbers] == [signal.SIG_IGN, signal.SIG_IGN, signal.SIG_DFL]
        interruption.ignore_signals()
        assert {signal.getsignal(number) for number in numbers} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    interruption.in_one_line(KeyboardInterrupt, KeyboardInterrupt(), None)
    interruption.in_one_line(ValueError, ValueError("wrong"), None)
    assert capsys.readouterr().err == "interrupted\nValueError: wrong\n"


def test_unexpected_errors_keep_their_traceback_and_importing_keeps_sys_excepthook(tmp_path: Path) -> None:
    assert python("-c", "import dataloading, sys; assert sys.excepthook is sys.__excepthook__").returncode == 0
    (tmp_path / "tyro.py").write_text("raise RuntimeError('broken')")
    done = python("-m", "dataloading", PYTHONPATH=tmp_path)
    assert "Traceback" in done.stderr
    assert "RuntimeError: broken" in done.stderr


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(["kernels", "--version"], marks=pytest.mark.slow),
        ["dataloading", "verify", "{run}/train"],
        ["compliance", "summary", "results/cpu_2cores/bert"],
    ],
)
def test_a_pipe_closed_early_causes_no_error_message(program: list[str], small_run: SmallRun) -> None:
    """A program prints no error if its reader closes the pipe early, as in ``python -m kernels | head -1``."""
    command = [sys.executable, "-m", *(part.format(run=small_run.folder) for part in program)]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_output_to_a_closed_stream_is_dropped() -> None:
    for closed, words, status in ((">&-", "check results/cpu_2cores", 0), ("2>&-", "check none", 2)):
        command = f'"$0" -m compliance {words} {closed}'
        done = subprocess.run(["bash", "-c", command, sys.executable], cwd=REPOSITORY, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


def test_the_loss_of_output_to_a_full_device_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    read, write = os.pipe2(os.O_NONBLOCK)  # a full pipe that does not block is no failure
    with Path("/dev/full").open("w") as output, Path("/dev/full").open("w") as errors, os.fdopen(write, "w") as crowded:
        for streams in ((output, errors), (crowded, errors)):
            for name, stream in zip(("stdout", "stderr"), streams, strict=True):
                monkeypatch.setattr(sys, name, stream)
            drop_lost_output(notes.append)
            for number in range(1000):
                say("x" * 1000)
                complain("x" * number)
    os.close(read)
    dropped = "failed (No space left on device): what it cannot take is dropped"
    assert notes == [f"standard output {dropped}", *[f"standard error {dropped}"] * 2]


@pytest.mark.parametrize("function", ["say", "complain"])
def test_lines_of_unbuffered_processes_do_not_mix(function: str, tmp_path: Path) -> None:
    program = f"from console.program import {function}\nfor _ in range(2000): {function}('a' * 60)"
    with (tmp_path / "out").open("ab") as out:
        command = [sys.executable, "-u", "-c", program]
        ranks = [subprocess.Popen(command, stdout=out, stderr=out, cwd=REPOSITORY) for _ in range(3)]
        assert [rank.wait() for rank in ranks] == [0, 0, 0]
    assert len({*(tmp_path / "out").read_text().splitlines()}) == 1
