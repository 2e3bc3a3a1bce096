"""The same run on 1, 2 and 4 ranks, over gloo: the same losses, the same log."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, SmallRun

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def launch(arguments: list[str], ranks: int) -> subprocess.Popen[str]:
    launcher = [sys.executable]
    if ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={port}"]
    command = [*launcher, "-m", "bert.train", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY, env=ENVIRONMENT
    )


def records(results: Path, event: str) -> list[dict[str, float]]:
    lines = (results / "tiny_cpu" / "bert" / "metrics_0.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["event"] == event]


def train(run: SmallRun, results: Path, ranks: int, **changes: object) -> list[dict[str, float]]:
    process = launch(run.arguments(results, **changes), ranks)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == (0 if ranks > 1 else 1), output  # alone, a run that misses its target says so
    return records(results, "step")


@pytest.fixture(scope="module")
def one_rank(small_run: SmallRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    results = tmp_path_factory.mktemp("one_rank")
    return results, train(small_run, results, ranks=1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_more_ranks_give_the_same_losses(
    small_run: SmallRun, tmp_path: Path, one_rank: tuple[Path, list[dict[str, float]]], ranks: int
) -> None:
    alone_results, alone = one_rank
    together = train(small_run, tmp_path, ranks)
    assert len(together) == len(alone) == 10
    for one, other in zip(alone, together, strict=True):
        for name in ("masked_lm_loss", "next_sentence_loss", "gradient_norm", "learning_rate"):
            assert other[name] == pytest.approx(one[name], rel=2e-5, abs=2e-6), (one["step"], name)
    counts = [(record["correct"], record["count"]) for record in records(tmp_path, "eval")]
    assert [count for _, count in counts] == [len(small_run.evaluation.masked_lm_ids)] * 2
    assert counts == [(record["correct"], record["count"]) for record in records(alone_results, "eval")]


def test_accumulation_gives_the_same_losses(
    small_run: SmallRun, tmp_path: Path, one_rank: tuple[Path, list[dict[str, float]]]
) -> None:
    accumulated = train(small_run, tmp_path, ranks=1, training__gradient_accumulation_steps=4)
    losses = [record["loss"] for record in one_rank[1]]
    assert [record["loss"] for record in accumulated] == pytest.approx(losses, rel=2e-5)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_as_aborted_with_the_log_complete(
    small_run: SmallRun, tmp_path: Path, ranks: int, number: signal.Signals
) -> None:
    process = launch(
        small_run.arguments(tmp_path, training__max_samples=10_000_000, evaluation__interval_samples=1600), ranks
    )
    result = tmp_path / "tiny_cpu" / "bert" / "result_0.txt"
    wait_for(lambda: result.exists() and '"eval_stop"' in result.read_text(), process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    text = result.read_text()
    assert '"status": "aborted"' in text, output
    assert text.count('"run_stop"') == text.count('"train_samples"') == text.count('"eval_samples"') == 1
    assert text.count('"block_start"') == text.count('"block_stop"')
    assert '"event": "end", "status": "aborted"' in (result.parent / "metrics_0.jsonl").read_text()
    if ranks == 1:
        assert process.returncode == 128 + number
        assert "Traceback" not in output


def wait_for(condition: object, process: subprocess.Popen[str], seconds: float = 90) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run did not get that far"
        time.sleep(0.05)
