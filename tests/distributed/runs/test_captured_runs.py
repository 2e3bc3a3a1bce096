"""Runs with CUDA graphs on two ranks: same losses as without graphs, and no graph is left when process groups end.

They run on a CPU, with test doubles for CUDA graphs and NCCL.
"""

import signal
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import bert.run
import bert.setup
from bert.train import main
from tests.bert.recording import Recording, groups_that_wait_for_graphs, recordable_attention
from tests.conftest import SmallRun
from tests.distributed.ranks import Ranks, records, result_of

SETTINGS: dict[str, object] = {
    "training__gradient_accumulation_steps": 2,
    "training__global_batch_size": 32,
    "training__max_samples": 320,
    "training__reduction": "sharded_world",
    "evaluation__interval_samples": 160,
}
"""Settings with which micro-batches have two roles (first and last of a step) and several shapes."""


def captured(mode: str, *arguments: str) -> int:
    """Run ``bert.train`` on a rank in one of several modes.

    The mode "eager" pads like a captured run but captures nothing, "few" captures only the smallest shape, "refused"
    raises an error after capturing, and any other mode captures all shapes.
    """
    with ExitStack() as stack:
        stack.enter_context(recordable_attention())
        stack.enter_context(groups_that_wait_for_graphs())
        stack.enter_context(patch.object(bert.setup, "captures", lambda *_: True))
        stack.enter_context(patch.object(bert.run, "captures", lambda *_: mode != "eager"))
        stack.enter_context(patch.object(bert.run, "CudaCapturer", lambda _: Recording()))
        if mode == "few":
            choose = bert.setup.choose_shapes
            stack.enter_context(patch.object(bert.setup, "choose_shapes", lambda *given: choose(*given)[:1]))
        if mode == "refused":
            stack.enter_context(patch.object(bert.setup, "build_loader", side_effect=ValueError("no loader")))
        return main(arguments)


def start(run: SmallRun, results: Path, mode: str, **changes: object) -> Ranks:
    return Ranks([mode, *run.arguments(results, **SETTINGS | changes)], 2, captured)


def test_a_captured_run_is_the_run_and_ends(small_run: SmallRun, tmp_path: Path) -> None:
    """The log also reports that some micro-batches ran without a graph, which is so in the mode "few"."""
    found, logs = [], []
    for mode in ("eager", "few"):
        with start(small_run, tmp_path / mode, mode) as ranks:
            assert ranks.ends() == [1, 1], ranks.output
        steps, evaluations = (records(tmp_path / mode, event) for event in ("step", "eval"))
        losses = [(each["loss"], each["gradient_norm"]) for each in steps]
        found.append((losses, [each["correct"] for each in evaluations]))
        logs.append(result_of(tmp_path / mode).read_text())
    assert len(found[0][0]) == 10
    assert found == found[:1] * 2
    assert ["without a CUDA graph" in log for log in logs] == [False, True]


def test_a_signal_and_a_refusal_leave_no_graphs(small_run: SmallRun, tmp_path: Path) -> None:
    with start(small_run, tmp_path / "signal", "recorded", training__max_samples=160_000) as ranks:
        ranks.wait_for(lambda: "step " in ranks.output)
        for process in ranks.processes:
            process.send_signal(signal.SIGTERM)
        assert ranks.ends() == [128 + signal.SIGTERM] * 2, ranks.output
    assert "CaptureError" not in ranks.output
    with start(small_run, tmp_path / "refused", "refused") as ranks:
        assert ranks.ends() == [2, 2], ranks.output
    (error,) = ranks.errors
    assert "no loader" in error
