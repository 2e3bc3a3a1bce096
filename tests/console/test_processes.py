"""Running a program: output, failure and time limit."""

import sys
from pathlib import Path

from console.processes import run
from tests.programs import is_alive, wait_for


def test_output_is_read_and_bytes_of_names_survive_and_a_failure_has_no_answer() -> None:
    says = r"import sys; sys.stdout.buffer.write(b'a\xff\n'); print('why', file=sys.stderr)"
    done = run([sys.executable, "-c", says])
    assert (done.answer, done.errors, done.trouble) == ("a\udcff\n", "why\n", "")
    done = run([sys.executable, "-c", "print('half'); raise SystemExit('error: disk full')"])
    assert (done.text, done.answer, done.complaint) == ("half\n", "", "disk full")
    assert "status 1" in done.trouble
    assert "program" in run(["/nonexistent/program"]).trouble


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    number = tmp_path / "child"
    number.touch()
    hanging = f"sleep 600 & echo $! > {number}; wait"
    done = run(["bash", "-c", hanging], timeout_s=0.5)
    assert "0.5 s" in done.trouble
    if child := number.read_text():  # a busy machine may be too slow to start the child in time
        wait_for(lambda: not is_alive(int(child)))
