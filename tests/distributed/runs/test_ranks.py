"""Runs on 1, 2 and 4 ranks over gloo with the same settings give the same losses and logs."""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bert.parallel.watchdog.watchdog import FAULT_STATUS
from tests.conftest import SmallRun
from tests.distributed.faulty import faulty
from tests.distributed.ranks import Ranks, records, result_of, train, trained
from tests.programs import PATIENCE_S, Program, wait_for

ENDLESS: dict[str, object] = {"training__max_samples": 10_000_000, "evaluation__interval_samples": 320}


def test_more_ranks_give_the_same_losses(small_run: SmallRun, tmp_path: Path) -> None:
    alone = train(small_run, tmp_path / "alone", 1)
    assert "reduction: flat (one host)" in trained(small_run, tmp_path, 4)
    together = records(tmp_path, "step")
    assert len(together) == len(alone) == 10
    for one, other in zip(alone, together, strict=True):
        for name in ("masked_lm_loss", "next_sentence_loss", "gradient_norm", "learning_rate"):
            assert other[name] == pytest.approx(one[name], rel=2e-5, abs=2e-6), (one["step"], name)
    counts = [(record["correct"], record["count"]) for record in records(tmp_path, "eval")]
    assert [count for _, count in counts] == [len(small_run.evaluation.masked_lm_ids)] * 2
    assert counts == [(record["correct"], record["count"]) for record in records(tmp_path / "alone", "eval")]


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
    endless = {"training__max_samples": 10_000_000, "training__max_minutes": 0.001}
    taken = train(small_run, tmp_path / "minutes", 2, **endless)
    assert 1 <= len(taken) < 10_000_000 // 16, "whichever rank's time was up first has stopped both"
    assert [record["status"] for record in records(tmp_path / "minutes", "end")] == ["aborted"]


def test_a_signal_ends_the_run_as_aborted_with_the_log_complete(small_run: SmallRun, tmp_path: Path) -> None:
    process = Program("bert.train", small_run.arguments(tmp_path, **ENDLESS))
    result = result_of(tmp_path)
    wait_for(lambda: result.exists() and '"eval_stop"' in result.read_text(), process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in output
    text = result.read_text()
    assert '"status": "aborted"' in text, output
    assert text.count('"run_stop"') == text.count('"train_samples"') == text.count('"eval_samples"') == 1
    assert text.count('"block_start"') == text.count('"block_stop"')
    assert [record["status"] for record in records(tmp_path, "end")] == ["aborted"]


def test_where_agents_start_again_a_rank_that_gets_no_signal_of_its_own_asks_for_it(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal to one rank means that its host leaves the run. The other rank ends as after a fault, to be restarted."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    arguments = small_run.arguments(tmp_path, **ENDLESS)
    with Ranks(["hurry:0,hurry:1", *arguments], 2, faulty) as started:
        started.wait_for(lambda: result_of(tmp_path).exists() and '"eval_stop"' in result_of(tmp_path).read_text())
        started.processes[1].send_signal(signal.SIGTERM)
        assert started.ends() == [FAULT_STATUS, 128 + signal.SIGTERM], started.output
    assert "stopped with ranks of another host: to be started again without them" in started.output
    assert [record["status"] for record in records(tmp_path, "end")] == ["aborted"]
