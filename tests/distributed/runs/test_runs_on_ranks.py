"""Runs on several ranks over gloo: with CUDA graphs, with shards of the weights, and after signals and errors.

CUDA graphs and NCCL have test doubles, which raise an error if a process group ends before its graphs.
"""

import signal
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

import bert.run
import bert.setup
from bert.parallel.watchdog.watchdog import FAULT_STATUS
from bert.train import main
from tests.bert.recording import Recording, groups_that_wait_for_graphs, recordable_attention
from tests.conftest import SmallRun
from tests.distributed.faulty import faulty
from tests.distributed.ranks import ENDLESS, Ranks, compare_steps, records, result_of, train, trained

SETTINGS: dict[str, object] = {
    "training__gradient_accumulation_steps": 2,
    "training__global_batch_size": 32,
    "training__max_samples": 320,
    "training__reduction": "sharded_world",
    "evaluation__interval_samples": 160,
}
"""Settings with which micro-batches have two roles (first and last of a step) and several shapes."""


def captured(mode: str, *arguments: str) -> int:
    """Run ``bert.train`` on a rank, with test doubles of CUDA graphs.

    The mode "refused" raises an error after capturing.
    """
    with ExitStack() as stack:
        stack.enter_context(recordable_attention())
        stack.enter_context(groups_that_wait_for_graphs())
        stack.enter_context(patch.object(bert.setup, "captures", lambda *_: True))
        stack.enter_context(patch.object(bert.run, "captures", lambda *_: True))
        stack.enter_context(patch.object(bert.run, "CudaCapturer", lambda _: Recording()))
        if mode == "refused":
            stack.enter_context(patch.object(bert.setup, "build_loader", side_effect=ValueError("no loader")))
        return main(arguments)


def start(run: SmallRun, results: Path, mode: str, **changes: object) -> Ranks:
    return Ranks([mode, *run.arguments(results, **SETTINGS | changes)], 2, captured)


def test_graphs_are_closed_after_a_signal_and_after_an_error(small_run: SmallRun, tmp_path: Path) -> None:
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


def test_flat_and_sharded_reduction_give_equal_evaluations_and_weights(small_run: SmallRun, tmp_path: Path) -> None:
    """A high learning rate ensures that using old weights of another rank's shard would change the results."""
    saved, counts = [], []
    for reduction in ("flat", "sharded"):
        folder = tmp_path / reduction
        saved.append(folder / "saved.safetensors")
        changes = {"max_samples": 88, "global_batch_size": 8, "seed": 8, "reduction": reduction}
        train(
            small_run,
            folder,
            2,
            optimizer__base_learning_rate=1.0,
            evaluation__interval_samples=16,
            save_checkpoint=saved[-1],
            **{f"training__{name}": value for name, value in changes.items()},
        )
        counts.append([record["correct"] for record in records(folder, "eval")])
    assert len(set(counts[0])) > 1
    assert counts[0] == counts[1]
    one, other = map(load_file, saved)
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-3)


def test_a_rank_ends_with_the_fault_status_if_only_another_host_is_stopped(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal to one rank means that its host leaves the run. The other rank fails so that its agent restarts it."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    arguments = small_run.arguments(tmp_path, **ENDLESS)
    with Ranks(["hurry:0,hurry:1", *arguments], 2, faulty) as started:
        started.wait_for_text(result_of(tmp_path), '"eval_stop"')
        started.processes[1].send_signal(signal.SIGTERM)
        assert started.ends() == [FAULT_STATUS, 128 + signal.SIGTERM], started.output
    assert "ranks on another host were stopped: this host ends too, to be restarted without them" in started.output
    assert [record["status"] for record in records(tmp_path, "end")] == ["aborted"]


def test_dividing_the_model_gives_the_results_of_one_rank(small_run: SmallRun, tmp_path: Path) -> None:
    """Compare steps, evaluations and saved weights, and resume each run from the other run's checkpoint."""
    common = {"model__num_hidden_layers": 4, "checkpoint__keep": 9}
    shape = {"parallel__tensor": 2, "parallel__pipeline": 2, "training__gradient_accumulation_steps": 2}
    for name, ranks, changes in (("one", 1, {}), ("shared", 4, shape)):
        folder = tmp_path / name
        settings = {"checkpoint__folder": folder / "checkpoints", "checkpoint__every_steps": 4}
        settings |= common | changes | {"save_checkpoint": folder / "saved"}
        output = trained(small_run, folder, ranks, **settings)
    assert output.count("data 1 x pipeline 2 x tensor 2, reduction: flat (one rank)") == 1
    one, other = tmp_path / "one", tmp_path / "shared"
    compare_steps(records(one, "step"), records(other, "step"))
    expected, found = ([(row["correct"], row["count"]) for row in records(folder, "eval")] for folder in (one, other))
    assert found == expected
    saved = load_file(other / "saved")
    for name, tensor in load_file(one / "saved").items():
        torch.testing.assert_close(saved[name], tensor, rtol=2e-5, atol=1e-5)
    evaluated = common | shape | {"data__initial_checkpoint": other / "saved"}
    with Ranks(small_run.arguments(tmp_path, **evaluated), 4, "bert.evaluate") as started:
        assert started.ends() == [0] * 4, started.output
    assert "{:,} of {:,} masked tokens".format(*expected[-1]) in started.output
    for source, ranks, changes in (("one", 4, shape), ("shared", 1, {})):
        folder = tmp_path / f"from {source}"
        settings = {"checkpoint__folder": folder / "checkpoints", "training__max_steps": 5, "training__seed": None}
        settings |= {"checkpoint__every_steps": 1, "resume": tmp_path / source / "checkpoints" / "step_00000004"}
        resumed = train(small_run, folder, ranks, **common | changes | settings)
        compare_steps(records(tmp_path / source, "step")[4:5], resumed)
