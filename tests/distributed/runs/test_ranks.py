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
