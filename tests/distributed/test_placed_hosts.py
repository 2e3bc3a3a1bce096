"""Hosts under two leaves that only measuring tells apart: ranks in the order of ``place`` train faster than by name."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.hosts import environment_of, why_not
from benchmarks.training.placed_hosts import NAMES, TwoLeaves, median_step_seconds, training
from cluster.__main__ import main
from tests.conftest import MAX_SEQ_LENGTH, VOCAB_SIZE, SmallRun
from tests.programs import PATIENCE_S, Program

ATTEMPTS = 3
"""How often leaves are looked for: other tests beside this one can blur them."""


def run(namespaces: Sequence[str], order: Sequence[str], module: Sequence[str]) -> list[int]:
    """Exit statuses of a module on every host."""
    ranks = [
        Program(
            "tests.distributed.workers.host_worker",
            [namespaces[NAMES.index(host)], host, "any", *module],
            **environment_of(rank, [NAMES.index(other) for other in order]),
        )
        for rank, host in enumerate(order)
    ]
    try:
        return [rank.wait(PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.measured
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_ranks_in_the_order_of_place_train_faster(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    view, hosts = tmp_path / "cluster.json", tmp_path / "hosts.txt"
    shape = [f"--model.vocab-size={VOCAB_SIZE}", f"--model.max-position-embeddings={MAX_SEQ_LENGTH}"]
    shape += [f"--data.vocab={small_run.folder}/vocab.txt"]
    seconds = {}
    with TwoLeaves() as namespaces:
        for _ in range(ATTEMPTS):
            assert set(run(namespaces, NAMES, ["cluster", "probe", "--out", str(view), "--seconds", "4"])) <= {0, 1}
            monkeypatch.setattr("sys.argv", ["cluster", "place", str(view), "--out", str(hosts)])
            assert main() == 0, capsys.readouterr()
            placed = hosts.read_text().split()
            if placed != NAMES:
                break
        assert placed == ["h0", "h2", "h1", "h3"]
        for name, order in (("placed", placed), ("by name", NAMES)):
            module = ["bert.train", *training(small_run.folder, tmp_path / name, steps=4), *shape]
            assert set(run(namespaces, order, module)) <= {0, 1}
            seconds[name] = median_step_seconds(tmp_path / name)
    assert seconds["by name"] > 1.3 * seconds["placed"]
