"""Weights and ends of runs on one rank and on two ranks over gloo."""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bert.parallel.watchdog.watchdog import FAULT_STATUS
from tests.conftest import SmallRun
from tests.distributed.faulty import faulty
from tests.distributed.ranks import ENDLESS, Ranks, records, result_of, train


def test_evaluated_and_saved_weights_are_whole(small_run: SmallRun, tmp_path: Path) -> None:
    """Steps are so large that evaluating or saving old weights of another rank's shard would change the results."""
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


def test_a_run_may_be_limited_in_steps_and_in_minutes(small_run: SmallRun, tmp_path: Path) -> None:
    taken = train(small_run, tmp_path / "steps", 2, training__max_steps=6, log__interval_steps=4)
    assert [record["step"] for record in taken] == [4, 5, 6], "an interval, what an evaluation ended, and the rest"
    taken = train(small_run, tmp_path / "minutes", 2, **ENDLESS, training__max_minutes=0.001)
    assert 1 <= len(taken) < 10_000_000 // 16, "whichever rank's time was up first has stopped both"
    assert [record["status"] for record in records(tmp_path / "minutes", "end")] == ["aborted"]


def test_where_agents_start_again_a_rank_that_gets_no_signal_of_its_own_asks_for_it(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal to one rank means that its host leaves the run. The other rank ends as after a fault, to be restarted."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    arguments = small_run.arguments(tmp_path, **ENDLESS)
    with Ranks(["hurry:0,hurry:1", *arguments], 2, faulty) as started:
        started.wait_for_text(result_of(tmp_path), '"eval_stop"')
        started.processes[1].send_signal(signal.SIGTERM)
        assert started.ends() == [FAULT_STATUS, 128 + signal.SIGTERM], started.output
    assert "stopped with ranks of another host: to be started again without them" in started.output
    assert [record["status"] for record in records(tmp_path, "end")] == ["aborted"]
