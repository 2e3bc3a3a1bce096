"""Reported outliers and sites: what is slow, by how much, and what it costs per step. Measurements are synthetic."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cluster.probe.computing import Cell
from cluster.probe.findings import Measurements, find_leaves, find_outliers
from cluster.probe.links import Paths, rounds_of_pairs
from cluster.probe.machine import Facts
from cluster.view import Host

TURNS = 10


def facts(host: int, switches: tuple[str, ...] = ()) -> Facts:
    return Facts("boot", Host(f"h{host}", 8, 1 << 30, ("v0",), switches), "CPU", 1 << 30, "v0")


def paths(rng: np.random.Generator, ranks: list[int], seconds_per_byte: float) -> Paths:
    pairs = [(ranks[a], ranks[b]) for pairs in rounds_of_pairs(len(ranks)) for a, b in pairs]
    source, target = np.array([*pairs, *(pair[::-1] for pair in pairs)]).T
    shape = (TURNS, len(source))
    latency, rate = (np.exp(rng.normal(0, deviation, shape)) for deviation in (0.1, 0.03))
    return Paths(source, target, 1e-5 * latency, seconds_per_byte * rate)


def cluster(hosts: int = 4, size: int = 2, seed: int = 0) -> Measurements:
    """Return synthetic measurements of CPU hosts with equal ranks and one network card per host."""
    rng = np.random.default_rng(seed)
    cells = [Cell("product", "fp32", 512, lambda: None), Cell("copy", "fp32", 1 << 25, lambda: None)]
    rates = np.array([5e-3, 4e-3]) * np.exp(rng.normal(0, 0.04, (hosts * size, TURNS, 2)))
    host_of = [rank // size for rank in range(hosts * size)]
    inside = [paths(rng, list(range(host * size, (host + 1) * size)), 1e-10) for host in range(hosts) if size > 1]
    fields = [(each.source_E, each.target_E, each.latency_TE, each.seconds_per_byte_TE) for each in inside]
    in_hosts = Paths(*(np.concatenate(field, axis=-1) for field in zip(*fields, strict=True))) if inside else None
    between = paths(rng, [host * size for host in range(hosts)], 1e-9) if hosts > 1 else None
    return Measurements([facts(host) for host in host_of], host_of, cells, rates, in_hosts, between)


def names(measured: Measurements) -> list[str]:
    return [each.name for each in find_outliers(measured, find_leaves(measured)[0])]


@pytest.mark.parametrize(("hosts", "size"), [(1, 1), (1, 8), (2, 1), (4, 1), (4, 2), (3, 4), (16, 8)])
def test_a_cluster_without_faults_has_no_outliers(hosts: int, size: int) -> None:
    """Ranks on all hosts but the first are three times as slow, but their devices differ, so they are not compared."""
    for seed in range(10):
        measured = cluster(hosts, size, seed)
        measured.rates_RTC[size:] *= 3
        newer = [replace(each, device="newer") if rank >= size else each for rank, each in enumerate(measured.facts)]
        even = replace(measured, facts=newer)
        assert (find_leaves(even)[1], names(even)) == ("unknown", [])


def slow_ranks(measured: Measurements, *ranks: int) -> None:
    measured.rates_RTC[ranks, :, 0] *= 2


def slow_paths(paths: Paths | None, source: int | None, target: int | None, factor: float, latency: float = 1) -> None:
    """Slow down all paths from a source rank, all paths to a target rank, or the path from one to the other."""
    assert paths
    ends = ((paths.source_E, source), (paths.target_E, target))
    at = np.all([of_E == end for of_E, end in ends if end is not None], axis=0)
    paths.seconds_per_byte_TE[:, at] *= factor
    paths.latency_TE[:, at] *= latency


def slow_card(measured: Measurements, factor: float = 3, latency: float = 1) -> None:
    for ends in ((4, None), (None, 4)):
        slow_paths(measured.between_hosts, *ends, factor, latency)


CARD = "network link of host h2, card v0"
FAULTS: dict[str, Callable[[Measurements], object]] = {
    "rank 3 on host h1": lambda measured: slow_ranks(measured, 3),
    "host h1": lambda measured: slow_ranks(measured, 2, 3),
    f"{CARD}, sending": lambda measured: slow_paths(measured.between_hosts, 4, None, 3),
    f"{CARD}, receiving": lambda measured: slow_paths(measured.between_hosts, None, 4, 3),
    f"{CARD}, both directions": slow_card,
    "links in host h5": lambda m: [slow_paths(m.in_hosts, *ends, 2) for ends in ((10, 11), (11, 10))],
    "path from rank 0 on host h0 to rank 6 on host h3": lambda m: slow_paths(m.between_hosts, 0, 6, 3),
    # A rank with a slow processor also has slow paths, but only the rank is reported.
    "rank 4 on host h2": lambda m: (slow_ranks(m, 4), slow_card(m, 1.9, latency=30)),
}


@pytest.mark.parametrize("expected", FAULTS)
def test_each_fault_is_reported_once_by_its_name(expected: str) -> None:
    for seed in range(5):
        measured = cluster(hosts=8, seed=seed)
        FAULTS[expected](measured)
        assert names(measured) == [expected]
        assert find_leaves(measured) == ([()] * 8, "unknown")


@pytest.mark.parametrize("hosts", range(3, 9))
def test_exactly_the_slow_ends_are_named_in_any_combination(hosts: int) -> None:
    """Up to three ends, or two among three hosts, have different limits. The slower end limits a path."""
    rng = np.random.default_rng(hosts)
    for seed in range(20):
        measured, slowdown_N = cluster(hosts, 1, seed), np.ones(2 * hosts)
        slow = rng.choice(2 * hosts, seed % min(4, hosts), replace=False)
        slowdown_N[slow] = rng.uniform(2, 5, len(slow))
        paths = measured.between_hosts
        assert paths
        paths.seconds_per_byte_TE[:] *= np.maximum(slowdown_N[paths.source_E], slowdown_N[hosts + paths.target_E])
        ways = {(True, False): "sending", (False, True): "receiving", (True, True): "both directions"}
        ends = ((host, ways.get((host in slow, hosts + host in slow))) for host in range(hosts))
        assert sorted(names(measured)) == [f"network link of host h{host}, card v0, {way}" for host, way in ends if way]


@pytest.mark.parametrize("hosts", range(4, 9))
def test_a_slow_path_is_named_beside_a_slow_receiver_and_slow_latency(hosts: int) -> None:
    """Host h2 receives slowly, which does not explain a slow path from this host."""
    for seed in range(5):
        measured = cluster(hosts, 1, seed)
        paths = measured.between_hosts
        assert paths
        paths.latency_TE[:, (paths.source_E == 1) | (paths.target_E == 1)] += 1e-4
        slow_paths(paths, None, 2, 4)
        slow_paths(paths, 2, 0, 3)
        links = [f"network link of host {end}" for end in ("h1, card v0, both directions", "h2, card v0, receiving")]
        assert sorted(names(measured)) == [*links, "path from rank 2 on host h2 to rank 0 on host h0"]


def test_the_step_share_of_a_slow_link_equals_a_calculation_by_hand() -> None:
    measured = cluster(hosts=8)
    slow_paths(measured.between_hosts, 4, None, 3)
    [link] = find_outliers(measured, [()] * 8)
    compute, update = 56 * 0.5e12 / (2 * 512**3 / 5e-3), 30 * 336.2e6 / (2 * 2**25 / 4e-3)
    reduce = 2 * 7 / 8 * 4 * 336.2e6 * 1e-9
    assert link.step_share == pytest.approx(2 * reduce / (compute + update + reduce), rel=0.1)
    assert cluster(hosts=1, size=8).step["bandwidth"] == pytest.approx(2 * 7 / 8 * 4 * 336.2e6 * 1e-10, rel=0.05)
    assert link.sentence.startswith("SLOW  network link of host h2, card v0, sending: bandwidth, time ")


def test_switches_come_from_slurm_or_from_measured_bandwidth_or_latency() -> None:
    measured = cluster(hosts=4)
    told = replace(measured, facts=[facts(host, ("top", f"leaf{host % 2}")) for host in measured.host_of])
    assert find_leaves(told) == ([("top", "leaf0"), ("top", "leaf1")] * 2, "slurm")
    for quantity, (hosts, size) in product(("seconds_per_byte_TE", "latency_TE"), ((4, 2), (12, 3), (64, 8))):
        measured = cluster(hosts, 1)
        assert measured.between_hosts
        far = measured.between_hosts.source_E // size != measured.between_hosts.target_E // size
        getattr(measured.between_hosts, quantity)[:, far] *= 1.5
        leaves = [(f"leaf {host // size}",) for host in range(hosts)]
        assert (find_leaves(measured), names(measured)) == ((leaves, "measured"), [])


def in_sites(*sizes: int, slower: float = 50, one_way: float = 1, seed: int = 0, stated: bool = False) -> Measurements:
    """Return measurements of hosts whose paths between sites are slow, by ``one_way`` more in one direction."""
    measured, of = cluster(sum(sizes), seed=seed), np.repeat(np.arange(len(sizes)), sizes)
    paths = measured.between_hosts
    assert paths
    source, target = (of[np.array(measured.host_of)[ends]] for ends in (paths.source_E, paths.target_E))
    paths.seconds_per_byte_TE[:, source != target] *= slower
    paths.seconds_per_byte_TE[:, source < target] *= one_way
    paths.latency_TE[:, source != target] *= 100
    if not stated:
        return measured
    facts = zip(measured.facts, measured.host_of, strict=True)
    return replace(measured, facts=[replace(each, host=replace(each.host, site=f"s{of[h]}")) for each, h in facts])


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2, 3), (8, 8)])
def test_groups_of_hosts_joined_by_slow_paths_are_sites_and_not_outliers(sizes: tuple[int, ...]) -> None:
    expected = [f"site{site}" for site, size in enumerate(sizes) for _ in range(size)]
    for seed in range(5):
        measured = in_sites(*sizes, seed=seed)
        assert (measured.sites, names(measured)) == (expected, [])
        assert find_leaves(measured) == ([()] * sum(sizes), "unknown"), "sites are not found again as leaves"


@pytest.mark.parametrize("sizes", [(1, 1), (1, 1, 1), (3, 1), (2, 2, 1)])
def test_a_single_distant_host_is_not_a_site(sizes: tuple[int, ...]) -> None:
    measured = in_sites(*sizes)
    assert {*measured.sites} == {""}
    slow = ["network link of host h3, card v0, both directions"] if sizes == (3, 1) else []
    assert names(measured) == slow


def test_slightly_slower_or_inconsistent_paths_make_no_sites() -> None:
    assert {*in_sites(4, 4, slower=3).sites} == {""}
    for one, other in ((1, 2), (2, 1)):  # the fast paths join all hosts, but other paths are slow
        measured = in_sites(2, 2)
        paths = measured.between_hosts
        assert paths
        paths.seconds_per_byte_TE[:, (paths.source_E == 2 * one) & (paths.target_E == 2 * other)] /= 50
        paths.seconds_per_byte_TE[:, (paths.source_E == 2 * other) & (paths.target_E == 2 * one)] /= 50
        assert {*measured.sites} == {""}


@pytest.mark.parametrize("sizes", [(1, 1), (3, 1), (1, 1, 2), (4, 2, 3)])
def test_stated_sites_are_used_and_paths_of_different_sites_are_not_compared(sizes: tuple[int, ...]) -> None:
    expected = [f"s{site}" for site, size in enumerate(sizes) for _ in range(size)]
    for slower in (1, 50):
        measured = in_sites(*sizes, slower=slower, one_way=3, stated=True)
        assert (measured.sites, names(measured)) == (expected, [])


def test_a_slow_link_in_a_site_is_reported() -> None:
    for stated in (False, True):
        measured = in_sites(4, 4, stated=stated)
        slow_card(measured, 3)
        assert names(measured) == ["network link of host h2, card v0, both directions"]
        assert len({*measured.sites}) == 2
