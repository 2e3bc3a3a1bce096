"""Running a program: output, failure and time limit."""

import contextlib
import signal
import sys
from pathlib import Path

import pytest

from console.processes import run
from tests.programs import is_alive, wait_for


def test_running_a_program_gives_its_output_or_the_reason_of_its_failure() -> None:
    says = r"import sys; sys.stdout.buffer.write(b'a\xff\n'); print('why', file=sys.stderr)"
    done = run([sys.executable, "-c", says])
    assert (done.answer, done.errors, done.trouble) == ("a\udcff\n", "why\n", "")
    done = run([sys.executable, "-c", "print('half'); raise SystemExit('error: disk full')"])
    assert (done.text, done.answer, done.complaint) == ("half\n", "", "disk full")
    assert done.trouble == f"{Path(sys.executable).name} failed with status 1"
    done = run(["bash", "-c", "echo $WORD $PWD; exit 3"], folder=Path("/"), environment={"WORD": "a"})
    assert (done.text, done.answer, done.complaint) == ("a /\n", "", "bash failed with status 3")
    assert [run([program]).trouble for program in ("/no/program", "/etc")] == [
        "no command program here",
        "etc cannot be started: Permission denied",
    ]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_hanging_or_interrupted_program_is_killed_with_its_children(tmp_path: Path) -> None:
    numbers, before = tmp_path / "numbers", signal.signal(signal.SIGALRM, interrupt)
    hanging = ["bash", "-c", f"sleep 600 & echo $$ $! > {numbers}; wait"]
    try:
        for timeout_s in (0.3, None):
            numbers.write_text("")
            signal.setitimer(signal.ITIMER_REAL, 0 if timeout_s else 0.3)
            with contextlib.nullcontext() if timeout_s else pytest.raises(KeyboardInterrupt):
                assert run(hanging, timeout_s=timeout_s).trouble == "bash gave no answer within 0.3 s"
            if text := numbers.read_text():  # a busy machine may be too slow to start the child in time
                program, child = map(int, text.split())
                assert not Path(f"/proc/{program}").exists(), "its parent has waited for it"
                wait_for(lambda child=child: not is_alive(child))
    finally:
        signal.signal(signal.SIGALRM, before)
