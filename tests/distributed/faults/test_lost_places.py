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
from tests.distributed.ranks import Ranks, result_of, trained
from tests.distributed.test_shapes import same_steps, without_dropout

EVERY, LENGTH = 4, 14
SHAPE = ["--parallel.pipeline=2", "--parallel.tensor=2"]
PLACES = "data 0, pipeline 0, tensor 1", "data 0, pipeline 1, tensor 1"
"""Positions in the mesh of ranks 1 and 3, of four ranks."""


def settings(folder: Path) -> dict[str, object]:
    length = {"training__max_samples": 16 * LENGTH, "evaluation__interval_samples": 16 * LENGTH}
    checkpoints = {"checkpoint__folder": folder / "checkpoints", "checkpoint__every_steps": EVERY}
    return without_dropout() | length | checkpoints | {"training__gradient_accumulation_steps": 2}


@pytest.mark.measured
def test_slow_and_killed_ranks_are_named_with_their_places_and_the_run_goes_on(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps before the fault and after resuming equal the steps of an undisturbed run on one rank."""
    monkeypatch.setenv("AT_STEP", str(LENGTH))  # rank 3 dies before the end, as warm-up steps count too
    unbroken, broken, resumed = (tmp_path / name for name in ("unbroken", "broken", "resumed"))
    trained(small_run, unbroken, 1, **settings(unbroken))
    changes = settings(tmp_path)
    arguments = small_run.arguments(broken, **changes) + SHAPE
    with Ranks(["drag:1,die:3", *arguments], 4, faulty) as started:
        assert started.ends() == [FAULT_STATUS] * 3 + [-signal.SIGKILL], started.output
    [message] = started.errors
    host = re.escape(socket.gethostname())
    named = rf"rank 3 on host {host} \({PLACES[1]}\)"
    assert re.fullmatch(rf"error: {named}: ended without a word, last in (exchange in )?\w+ of step \d+", message)
    assert f"# ended by a fault: {message.removeprefix('error: ')}\n" in result_of(broken).read_text()
    slow = re.findall(r"rank (\d) on .* is slow: .*, ([\d.]+) times the median", result_of(broken).read_text())
    times = {int(rank): float(ratio) for rank, ratio in slow}
    assert times[1] > times.get(0, 0), "which waits for it"
    assert f" ({PLACES[0]}) is slow: " in result_of(broken).read_text()
    same_steps(unbroken, broken)
    changes |= {"resume": tmp_path / "checkpoints", "training__seed": None}
    with Ranks(small_run.arguments(resumed, **changes) + SHAPE, 4) as again:
        assert again.ends() == [1] * 4, again.output  # the target is missed because the tokens are random
    found = re.search(r"# resumed from: .*/step_(\d{8})\n", result_of(resumed).read_text())
    assert found
    assert int(found[1]) in (EVERY, 2 * EVERY, 3 * EVERY)  # a checkpoint is written in the background
    same_steps(unbroken, resumed, since=int(found[1]) + 1)
    assert f'"samples_count": {16 * LENGTH}' in result_of(resumed).read_text()
