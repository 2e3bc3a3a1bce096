"""Sites that hosts state or that measured paths show. Measurements are synthetic, with 3 % noise."""

from dataclasses import replace

import numpy as np
import pytest

from cluster.probe.findings import Measured, find_leaves
from tests.cluster.probe.test_findings import cluster, names, slow_card


def in_sites(*sizes: int, slower: float = 50, one_way: float = 1, seed: int = 0, stated: bool = False) -> Measured:
    """Return measurements of hosts whose paths between sites are slow, and even slower one way."""
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
def test_groups_of_hosts_that_slow_paths_join_are_sites_and_no_outliers(sizes: tuple[int, ...]) -> None:
    expected = [f"site{site}" for site, size in enumerate(sizes) for _ in range(size)]
    for seed in range(5):
        measured = in_sites(*sizes, seed=seed)
        assert (measured.sites, names(measured)) == (expected, [])
        assert find_leaves(measured) == ([()] * sum(sizes), "unknown"), "sites are not found again as leaves"


@pytest.mark.parametrize("sizes", [(1, 1), (1, 1, 1), (3, 1), (2, 2, 1)])
def test_a_host_alone_is_no_site(sizes: tuple[int, ...]) -> None:
    measured = in_sites(*sizes)
    assert {*measured.sites} == {""}
    slow = ["network link of host h3, card v0, both directions"] if sizes == (3, 1) else []
    assert names(measured) == slow


def test_paths_that_are_a_little_slower_or_do_not_divide_the_hosts_make_no_sites() -> None:
    assert {*in_sites(4, 4, slower=3).sites} == {""}
    for one, other in ((1, 2), (2, 1)):  # the fast paths join all hosts, but other paths are slow
        measured = in_sites(2, 2)
        paths = measured.between_hosts
        assert paths
        paths.seconds_per_byte_TE[:, (paths.source_E == 2 * one) & (paths.target_E == 2 * other)] /= 50
        paths.seconds_per_byte_TE[:, (paths.source_E == 2 * other) & (paths.target_E == 2 * one)] /= 50
        assert {*measured.sites} == {""}


@pytest.mark.parametrize("sizes", [(1, 1), (3, 1), (1, 1, 2), (4, 2, 3)])
def test_stated_sites_are_taken_and_their_paths_compared_only_with_each_other(sizes: tuple[int, ...]) -> None:
    expected = [f"s{site}" for site, size in enumerate(sizes) for _ in range(size)]
    for slower in (1, 50):
        measured = in_sites(*sizes, slower=slower, one_way=3, stated=True)
        assert (measured.sites, names(measured)) == (expected, [])


def test_a_slow_link_in_a_site_is_named() -> None:
    for stated in (False, True):
        measured = in_sites(4, 4, stated=stated)
        slow_card(measured, 3)
        assert names(measured) == ["network link of host h2, card v0, both directions"]
        assert len({*measured.sites}) == 2
