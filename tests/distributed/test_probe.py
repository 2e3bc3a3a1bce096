"""The probe over hosts that are network namespaces with shaped links: faults are named, and nothing else."""

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.hosts import BridgedHosts, why_not
from cluster.model.rates import rates_of_view
from cluster.model.step import predict_step
from cluster.model.strategy import Strategy
from cluster.view import View, read_view
from tests.cluster.model.test_predicted_step import TINY
from tests.distributed.ranks import Ranks, free_port
from tests.programs import PATIENCE_S, Program

HOSTS = 4
RATE, THIRD = "300mbit", "100mbit"
CORES = sorted(os.sched_getaffinity(0))
needs_hosts = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def shape(namespace: str, rate: str) -> None:
    shaped = ("qdisc", "replace", "dev", "v0", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
    subprocess.run(["ip", "netns", "exec", namespace, "tc", *shaped], check=True, capture_output=True)


def start(
    names: Sequence[str], arguments: Sequence[str], pinned: int | None = None, absent: int | None = None
) -> list[Program]:
    """A rank on every host but the ``absent`` one; the ``pinned`` one has a quarter of a core while it is measured."""
    port, world = free_port(), len(names)
    return [
        Program(
            "tests.distributed.workers.host_worker",
            [name, f"h{rank}", str(CORES[0]) if rank == pinned else "any", "cluster", "probe", *arguments],
            RANK=rank,
            WORLD_SIZE=world,
            LOCAL_RANK=0,
            LOCAL_WORLD_SIZE=1,
            MASTER_ADDR="10.77.0.1",
            MASTER_PORT=port,
            GLOO_SOCKET_IFNAME="v0",
            OMP_NUM_THREADS=1,
        )
        for rank, name in enumerate(names)
        if rank != absent
    ]


def ended(processes: Sequence[Program]) -> tuple[list[int], str]:
    """Exit statuses, and what all wrote."""
    try:
        statuses = [process.wait(PATIENCE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return statuses, "".join(process.output for process in processes)


def check_whole(view: View) -> None:
    assert [host.name for host in view.hosts] == [f"h{number}" for number in range(HOSTS)]
    assert len(view.links) == HOSTS * (HOSTS - 1)
    assert [each.operation for each in view.collectives] == [
        "all-reduce",
        "reduce-scatter",
        "all-gather",
        "all-to-all",
    ]  # fmt: skip
    assert all(each.seconds > 0 for each in view.computations)
    assert predict_step(TINY, Strategy(32), rates_of_view(view)).total > 0
    assert all(each.points[0][0] == 65536 and len(each.points) >= 2 for each in view.collectives)
    assert all(rate.seconds > 0 for rank in view.ranks for rate in rank.rates)


@needs_hosts
@pytest.mark.measured
@pytest.mark.skipif(len(CORES) < 2, reason="on one core every rank shares it with what is busy")
def test_a_slow_link_and_a_rank_with_a_quarter_of_a_core_are_named_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "cluster.json"
    with BridgedHosts(HOSTS, RATE) as names:
        shape(names[2], THIRD)
        statuses, output = ended(start(names, ["--out", str(out), "--seconds", "4"], pinned=1))
    assert statuses == [1] * HOSTS, output
    view = read_view(out)
    check_whole(view)
    slow = {outlier.name: outlier for outlier in view.outliers}
    assert set(slow) == {"rank 1 on host h1", "network link of host h2, card v0, sending"}, output
    assert slow["network link of host h2, card v0, sending"].ratio == pytest.approx(3, rel=0.15)
    assert 1.8 < slow["rank 1 on host h1"].ratio < 6
    assert len(re.findall("^SLOW", output, re.M)) == 2


@needs_hosts
@pytest.mark.measured
def test_an_even_cluster_has_nothing_to_name(tmp_path: Path) -> None:
    out = tmp_path / "cluster.json"
    with BridgedHosts(HOSTS, RATE) as names:
        statuses, output = ended(start(names, ["--out", str(out), "--seconds", "3"]))
    view = read_view(out)
    check_whole(view)
    assert (statuses, view.outliers) == ([0] * HOSTS, ()), output
    rate = 300e6 / 8
    assert all(0.7 * rate < 1 / link.seconds_per_byte < 1.1 * rate for link in view.links)


@needs_hosts
def test_a_host_that_does_not_come_is_named_within_the_limit(tmp_path: Path) -> None:
    out = tmp_path / "cluster.json"
    with BridgedHosts(HOSTS, RATE) as names:
        for limit in (4, 16, 64):  # a busy machine starts slowly
            statuses, output = ended(start(names, ["--out", str(out), "--limit", str(limit)], absent=3))
            if f"1 of 4 ranks have not come within {limit} s (rank 3 on node 3 from 0)" in output:
                break
    assert statuses == [2] * (HOSTS - 1), output
    assert not out.exists()
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == HOSTS - 1
    assert "rank 3 on node 3 from 0" in errors[0]
    assert "Traceback" not in output


def test_ranks_of_one_host_are_measured_over_its_links(tmp_path: Path) -> None:
    out = tmp_path / "cluster.json"
    with Ranks(["probe", "--out", str(out), "--seconds", "1"], 2, "cluster") as ranks:
        assert ranks.ends() == [0, 0], ranks.output
    view = read_view(out)
    assert len(view.hosts) == 1
    assert [(link.source, link.target) for link in view.links] == [(0, 1), (1, 0)]
    assert {each.scope for each in view.collectives} == {"world"}
    assert [rate.quantity for rank in view.ranks for rate in rank.rates] == ["product", "copy"] * 2


def test_a_wrong_sum_names_the_rank(tmp_path: Path) -> None:
    out = tmp_path / "cluster.json"
    with Ranks(["--out", str(out)], 2, "tests.distributed.workers.wrong_sum_worker") as ranks:
        assert ranks.ends() == [1, 1], ranks.output
    view = read_view(out)
    assert {outlier.ranks for outlier in view.outliers} == {(1,)}
    assert {outlier.quantity for outlier in view.outliers} == {"wrong result"}
    assert re.search(r"BROKEN  rank 1 on host \S+ got 1 wrong elements from all-reduce \(world\)", ranks.output)
