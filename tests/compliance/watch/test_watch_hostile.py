"""Hostile logs do not stop the watch, block it, or let its memory grow without limit."""

import json
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from compliance.watch import running
from compliance.watch.watched import Watch, results_in
from tests.compliance import command, run_logs
from tests.compliance.watch.test_running import BASE, begun, evaluate, line
from tests.compliance.watch.test_watch import shown
from tests.conftest import at_most

NUMBERS = [*range(-1, 2), 448, 2**53, 2**63 - 1, 2**63, 10**400, 0.0, 1e-320, 0.5, 0.72, 1e308, -1e308, True, None, "x"]
NUMBERS += [[], {}]
ODD_LINES = [
    line("eval_accuracy", 0.1, epoch_num=0),
    line("eval_accuracy", 0.71, epoch_num=0),
    line("eval_start", None, kind="INTERVAL_START", epoch_num=0),
    line("seed", "x" * 100_000),
    line("eval_accuracy", "nested").replace(b'"nested"', b"[" * 900 + b"]" * 900),
    b":::MLLOG " * 50_000,
]


def look(watched: Watch, now_ms: float) -> str:
    """Return a run's display as printed on a terminal."""
    watched.run.check_initialisation(now_ms)
    return shown(watched, now_ms)


lines = st.builds(
    lambda key, value, time_ms, metadata: line(key, value, time_ms, **metadata),
    st.sampled_from(["eval_accuracy", "eval_start", "block_start", "run_start", "init_start", "quality_target", "seed"])
    | st.sampled_from(["global_batch_size", "eval_interval_samples", "d_batch_size", "gradient_accumulation_steps"]),
    st.sampled_from(NUMBERS) | st.floats(0, 1),
    st.sampled_from([0, 1, BASE, BASE + 1, 2**63 - 1]),
    st.dictionaries(st.sampled_from(["epoch_num", "samples_count", "status"]), st.sampled_from(NUMBERS)),
)
steps = st.builds(
    lambda samples, rate: json.dumps({"event": "step", "samples": samples, "sequences_per_s": rate, "text": [samples]}),
    st.sampled_from(NUMBERS),
    st.sampled_from(NUMBERS),
)


@at_most(50)
@given(
    st.lists(lines | st.binary(max_size=200) | st.sampled_from(ODD_LINES), max_size=12),
    st.lists(steps, max_size=3),
    st.sampled_from(["open", "closed"]),
)
def test_hostile_numbers_do_not_end_the_watch(records: list[bytes], metrics: list[str], division: str) -> None:
    watched = Watch(Path("result_0.txt"), "5.0.0")
    watched.run = begun(division)
    for number, record in enumerate(records):
        watched.run.take(record)
        assert look(watched, BASE + number)
    for entry in metrics:
        watched.run.take_metrics(entry.encode())
    for now_ms in (0.0, BASE + 1.0, 1e15):
        assert look(watched, now_ms)


def test_many_warnings_leave_room_for_complaints_about_broken_rules() -> None:
    run = begun()
    for step in range(2 * running.MAX_COMPLAINTS):
        run.take(f"warning at step {step}: loss {step}.5 is not finite".encode())
        run.take_metrics(json.dumps({"event": "warning", "step": step, "text": "x" * 5000}).encode())
    assert len(run.complaints) == running.MAX_COMPLAINTS // 2 + 1
    assert max(map(len, run.complaints)) <= running.MAX_COMPLAINT
    evaluate(run, 450_240, 0.1, BASE + 1000)
    assert list(run.complaints)[-1].startswith("eval_start: evaluation at 450240 samples")


def test_the_numbers_of_complaints_and_header_lines_are_limited() -> None:
    run = begun()
    for index in range(running.MAX_COMPLAINTS + 500):
        run.take(line("eval_start", None, BASE + index, "INTERVAL_START", epoch_num=7 * index))
        run.take(b"# key %d: " % index + b"x" * (100_000 if index % 2 else 5))
    run.take(b"# last: line")
    assert len(run.complaints) == running.MAX_COMPLAINTS + 1
    assert len(run.header) == (running.MAX_COMPLAINTS + 500) // 2 + 1


def test_evaluations_beyond_the_maximum_number_are_ignored() -> None:
    run = begun("open", eval_interval_samples=32)
    for index in range(1, running.MAX_EVALUATIONS + 3):
        evaluate(run, 32 * index, 0.1, BASE + 1000 * index)
    assert list(run.complaints) == ["there are more than 1000 evaluations: the later ones are ignored"]
    assert len(run.curve) == running.MAX_EVALUATIONS == 1000


def watch_it(path: Path) -> tuple[int, str]:
    return command.run("watch", path, "--timeout", "0.1", "--stale", "0.1")


def test_the_watch_skips_pipes_devices_and_links_in_the_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "result_0.txt")
    (tmp_path / "result_1.txt").symlink_to("result_1.txt")
    (tmp_path / "result_2.txt").symlink_to("/dev/zero")
    (tmp_path / "result_3.txt").mkdir()
    (tmp_path / "result_4.txt").symlink_to("/dev/stdin")
    assert results_in(tmp_path) == {}
    assert watch_it(tmp_path)[0] == 1
    run_logs.write_run(tmp_path / "result_5.txt", "open")
    assert list(results_in(tmp_path)) == [tmp_path / "result_5.txt"]
    assert watch_it(tmp_path / "result_5.txt")[0] == 0  # also reads the other logs in the folder
    status, text = watch_it(tmp_path / "result_0.txt")
    assert (status, f"{tmp_path}/result_0.txt: a pipe or a device" in text) == (2, True)
