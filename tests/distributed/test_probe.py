"""The probe on network namespaces with limited bandwidth: it reports every fault and nothing else."""

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from benchmarks.hosts import bridged_hosts, raise_priority, run_ranks, why_not
from bert.parallel.mesh import join_mesh, leave_mesh
from cluster.model.rates import rates_of_view
from cluster.model.step import predict_step
from cluster.model.work import Strategy
from cluster.probe.links import measure_paths, rounds_of_pairs
from cluster.view import View, read_view
from tests.cluster.model.test_predicted_step import TINY
from tests.cluster.probe.test_findings import cluster
from tests.cluster.probe.test_findings import names as slow_parts
from tests.distributed.on_host import ranks_on_hosts

HOSTS = 4
RATE, THIRD = "300mbit", "100mbit"
CORES = sorted(os.sched_getaffinity(0))
needs_hosts = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def tc(namespace: str, kind: str, action: str, *options: str, device: str = "v0") -> None:
    command = ["ip", "netns", "exec", namespace, "tc", kind, action, "dev", device, *options]
    subprocess.run(command, check=True, capture_output=True)


def shape(namespace: str, rate: str, device: str = "v0") -> None:
    tc(namespace, "qdisc", "replace", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms", device=device)


def probe(names: Sequence[str], *arguments: object, pinned: int | None = None) -> tuple[list[int], str]:
    """Run the probe with one rank per host, and return the exit statuses and the output."""
    with ranks_on_hosts(names, ["cluster", "probe", *arguments], pinned=pinned) as ranks:
        return ranks.ends(), ranks.output


def check_whole(view: View) -> None:
    assert [host.name for host in view.hosts] == [f"h{number}" for number in range(HOSTS)]
    assert len(view.links) == HOSTS * (HOSTS - 1)
    operations = " ".join(each.operation for each in view.collectives)
    assert operations == "all-reduce reduce-scatter all-gather all-to-all"
    assert all(each.seconds > 0 for each in view.computations)
    assert predict_step(TINY, Strategy(32), rates_of_view(view)).total > 0
    assert all(each.points[0][0] == 65536 and len(each.points) >= 2 for each in view.collectives)
    assert all(rate.seconds > 0 for rank in view.ranks for rate in rank.rates)


@needs_hosts
@pytest.mark.measured
@pytest.mark.skipif(len(CORES) < 2, reason="on one core every rank shares it with what is busy")
def test_the_probe_reports_only_the_slow_link_and_the_slow_rank(tmp_path: Path) -> None:
    out = tmp_path / "cluster.json"
    with bridged_hosts(HOSTS, RATE) as names:
        shape(names[2], THIRD)
        statuses, output = probe(names, "--out", out, "--seconds", 4, pinned=1)
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
def test_the_probe_divides_hosts_with_slow_links_into_two_sites(tmp_path: Path) -> None:
    out = tmp_path / "cluster.json"
    with bridged_hosts(HOSTS) as names:
        for host, name in enumerate(names):
            tc(name, "qdisc", "add", "root", "handle", "1:", "htb", "default", "1")
            for number, rate in ((1, "600mbit"), (2, "60mbit")):
                tc(name, "class", "add", "parent", "1:", "classid", f"1:{number}", "htb", "rate", rate, "burst", "32kb")
            for other in (2, 3) if host < 2 else (0, 1):
                to_other = ("u32", "match", "ip", "dst", f"10.77.0.{other + 1}")
                tc(name, "filter", "add", "parent", "1:", "protocol", "ip", *to_other, "flowid", "1:2")
        statuses, output = probe(names, "--out", out, "--seconds", 1)
    view = read_view(out)
    assert (statuses, view.outliers) == ([0] * HOSTS, ()), output
    assert view.sites == {"site0": [0, 1], "site1": [2, 3]}
    assert re.search(
        r"2 sites by their links: site0 \(h0, h1\), site1 \(h2, h3\); .* MB/s between them, .* inside", output
    )


@needs_hosts
@pytest.mark.measured
@pytest.mark.parametrize(("hosts", "is_shaped"), [(4, True), (6, True), (6, False), (8, True)])
def test_a_slow_sender_and_a_slow_receiver_are_both_named(hosts: int, is_shaped: bool, tmp_path: Path) -> None:
    """Each host has one rank, which measures the links. Measurements of the devices are synthetic."""

    def name_slow_links() -> int:
        raise_priority()
        torch.set_num_threads(1)
        mesh = join_mesh("cpu", timedelta(seconds=60))
        between = measure_paths(mesh, rounds_of_pairs(hosts), turns=3, seconds=60.0)
        if mesh.is_main:
            (tmp_path / "slow").write_text("\n".join(slow_parts(replace(cluster(hosts, 1), between_hosts=between))))
        leave_mesh()
        return 0

    with bridged_hosts(hosts, RATE) as namespaces:
        if is_shaped:
            shape(namespaces[2], "120mbit")
            # The bridge's namespace holds the other end of each host's cable, which limits what the host receives.
            shape(namespaces[0].removesuffix("h0"), "80mbit", device="p3")
        run_ranks(namespaces, 1, name_slow_links, tmp_path)
    slow = [f"network link of host {end}" for end in ("h3, card v0, receiving", "h2, card v0, sending")]
    assert (tmp_path / "slow").read_text().splitlines() == (slow if is_shaped else [])
