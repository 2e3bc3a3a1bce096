"""With tensor and pipeline parallelism, one rank is slow and another is killed. The messages name their positions in
the mesh, and the run resumes from its checkpoint.
"""

import re
import signal
import socket
from pathlib import Path

import pytest

from bert.parallel.watchdog.watchdog import FAULT_STATUS
from tests.conftest import SmallRun
from tests.distributed.faulty import faulty
from tests.distributed.ranks import Ranks, assert_aborted, compare_steps, records, result_of, train

EVERY, LENGTH = 4, 14
PLACES = "data 0, pipeline 0, tensor 1", "data 0, pipeline 1, tensor 1"
"""Positions in the mesh of ranks 1 and 3, of four ranks."""


def settings(folder: Path) -> dict[str, object]:
    length: dict[str, object] = {"training__max_samples": 16 * LENGTH, "evaluation__interval_samples": 16 * LENGTH}
    checkpoints = {"checkpoint__folder": folder / "checkpoints", "checkpoint__every_steps": EVERY}
    return length | checkpoints | {"training__gradient_accumulation_steps": 2}


@pytest.mark.measured
def test_slow_and_killed_ranks_are_named_with_their_places_and_the_run_goes_on(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps before the fault and after resuming equal the steps of an undisturbed run on one rank."""
    monkeypatch.setenv("AT_STEP", str(LENGTH))  # rank 3 dies before the end, as warm-up steps count too
    unbroken, broken, resumed = (tmp_path / name for name in ("unbroken", "broken", "resumed"))
    expected = train(small_run, unbroken, 1, **settings(unbroken))
    changes = settings(tmp_path) | {"parallel__pipeline": 2, "parallel__tensor": 2}
    with Ranks(["drag:1,die:3", *small_run.arguments(broken, **changes)], 4, faulty) as started:
        assert started.ends() == [FAULT_STATUS] * 3 + [-signal.SIGKILL], started.output
    [message] = started.errors
    host = re.escape(socket.gethostname())
    named = rf"rank 3 on host {host} \({PLACES[1]}\)"
    assert re.fullmatch(rf"error: {named}: ended without a word, last in (exchange in )?\w+ of step \d+", message)
    assert_aborted(broken, message)
    slow = re.findall(r"rank (\d) on .* is slow: .*, ([\d.]+) times the median", result_of(broken).read_text())
    times = {int(rank): float(ratio) for rank, ratio in slow}
    assert times[1] > times.get(0, 0), "which waits for it"
    assert f" ({PLACES[0]}) is slow: " in result_of(broken).read_text()
    before = records(broken, "step")
    compare_steps(expected[: len(before)], before)
    changes |= {"resume": tmp_path / "checkpoints", "training__seed": None}
    after = train(small_run, resumed, 4, **changes)
    found = re.search(r"# resumed from: .*/step_(\d{8})\n", result_of(resumed).read_text())
    assert found
    assert int(found[1]) in (EVERY, 2 * EVERY, 3 * EVERY)  # a checkpoint is written in the background
    compare_steps(expected[int(found[1]) :], after)
    assert f'"samples_count": {16 * LENGTH}' in result_of(resumed).read_text()
