"""Order of hosts: a ring enters every switch's subtree once, and groups stay below one leaf switch if they fit."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.placement import cost, place
from cluster.view import Host, write_view
from tests.cluster.conftest import Command
from tests.cluster.test_view import made_up
from tests.conftest import at_most

PATHS = st.builds(lambda pod, leaf: (f"pod {pod}", f"leaf {pod}.{leaf}"), st.integers(0, 1), st.integers(0, 2))


@at_most(40)
@given(st.lists(PATHS, min_size=3, max_size=6))
def test_no_other_order_of_all_hosts_makes_a_cheaper_ring(paths: list[tuple[str, str]]) -> None:
    order = place(paths, len(paths))
    assert sorted(order) == list(range(len(paths)))
    least = min(cost(other) for other in itertools.permutations(paths))
    assert cost([paths[host] for host in order]) == least


def test_hosts_are_chosen_from_the_smallest_subtree_and_few_leaves() -> None:
    leaves = {"a": 3, "b": 8, "c": 5, "d": 2}
    paths = [("top", leaf) for leaf, hosts in leaves.items() for _ in range(hosts)]
    assert {paths[host] for host in place(paths, 8)} == {("top", "b")}
    assert {paths[host] for host in place(paths, 10)} == {("top", "b"), ("top", "d")}
    assert place([("top", "a")], 1) == [0]
    paths = [("pod 1", "leaf 1")] * 9 + [("pod 2", "leaf 2")] * 6 + [("pod 2", "leaf 3")] * 6
    assert {paths[host][0] for host in place(paths, 12)} == {"pod 2"}


ORDERS = {
    (9, 1): ("aabbbccdd", 6),
    (9, 3): ("bbbccdaad", 15),
    (4, 2): ("ccdd", 2),
    (6, 2): ("aabbcc", 5),
    (8, 4): ("aabbbccd", 18),
    (5, 1): ("aabbb", 2),
    (3, 1): ("bbb", 0),
    (2, 1): ("aa", 0),
}
"""Leaves of the hosts in their order, and levels that traffic climbs, by the number of hosts and the size of a group."""


def test_groups_are_placed_in_one_leaf_or_else_in_one_pod() -> None:
    """Leaves a (two hosts) and b (three) are in one pod, c and d (two hosts each) in another. One switch joins the pods."""
    paths = [("top", "pod 0" if leaf in "ab" else "pod 1", leaf) for leaf in "acbcadbdb"]
    for (nodes, group), expected in ORDERS.items():
        order = [paths[host] for host in place(paths, nodes, group)]
        assert ("".join(leaf for *_, leaf in order), cost(order, group)) == expected
    assert cost([("a",), ("b",)]) == 1, "a ring of two hosts has one link"
    for nodes, group, said in (
        (10, 1, "--nodes is 10, but the cluster has only 9 hosts"),
        (8, 3, "--nodes is 8 and --group is 3; both must be at least 1, and --nodes a multiple of --group"),
        (0, 1, "--nodes is 0 and --group is 1"),
        (6, 0, "--nodes is 6 and --group is 0"),
    ):
        with pytest.raises(ValueError, match=f"^{said}"):
            place(paths, nodes, group)


def write_hosts(path: Path, hosts: dict[str, tuple[str, ...]]) -> Path:
    view, known = made_up(len(hosts), 1), any(hosts.values())
    found = tuple(Host(name, 64, 1 << 38, (), switches) for name, switches in hosts.items())
    write_view(replace(view, hosts=found, switches_from="slurm" if known else "unknown", outliers=()), path)
    return path


def test_place_writes_a_line_for_each_task(tmp_path: Path, cluster: Command) -> None:
    out, switches = tmp_path / "hosts", {"n1": ("top", "a"), "n2": ("top", "b"), "n3": ("top", "a"), "n4": ("top", "b")}
    view = write_hosts(tmp_path / "c.json", switches)
    done = cluster("place", view, "--tasks-per-node", 2, "--out", out)
    shown = ["0 n1 top / a", "1 n3 top / a", "2 n2 top / b", "3 n4 top / b", ""]
    assert [" ".join(line.split()) for line in done.stdout.splitlines()[1:]] == [
        *shown,
        f"switch levels that traffic climbs in this order: 2; in the order of {view}: 4",
        f"{out}: 8 lines; SLURM_HOSTFILE={out} sbatch --distribution=arbitrary launch/slurm.sub",
    ]
    assert out.read_text().split() == ["n1", "n1", "n3", "n3", "n2", "n2", "n4", "n4"]
    view = write_hosts(view, {"b": (), "a": ()})
    assert f"{view} states no switches, so" in cluster("place", view, "--out", out).stdout
    assert out.read_text() == "b\na\n"


def test_host_names_that_srun_would_misread_are_refused(tmp_path: Path, cluster: Command) -> None:
    for name in ("n1\nn2", "-n", "n1,n2"):
        view = write_hosts(tmp_path / "c.json", {name: ("top", "a"), "n9": ("top", "a")})
        done = cluster("place", view, "--out", tmp_path / "hosts")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"the host name {name!r} is invalid" in done.stderr.replace("\\\\", "\\")
        assert not (tmp_path / "hosts").exists()
