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
    assert done.trouble == f"{Path(sys.executable).name} failed with status 1"
    done = run(["bash", "-c", "echo $WORD $PWD; exit 3"], folder=Path("/"), environment={"WORD": "a"})
    assert (done.text, done.answer, done.complaint) == ("a /\n", "", "bash failed with status 3")
    for program, trouble in (
        ("/no/program", "no command program here"),
        ("/etc", "etc cannot be started: Permission denied"),
    ):
        assert (run([program]).trouble, run([program]).answer) == (trouble, "")


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    number = tmp_path / "child"
    number.touch()
    hanging = f"sleep 600 & echo $! > {number}; wait"
    done = run(["bash", "-c", hanging], timeout_s=0.5)
    assert done.trouble == "bash gave no answer within 0.5 s"
    if child := number.read_text():  # a busy machine may be too slow to start the child in time
        wait_for(lambda: not is_alive(int(child)))
