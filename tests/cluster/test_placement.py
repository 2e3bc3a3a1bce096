"""Order of hosts: a ring enters every switch's subtree once, and groups stay below one leaf switch if they fit."""

import itertools
import random
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
def test_no_order_of_all_hosts_makes_a_cheaper_ring(paths: list[tuple[str, str]]) -> None:
    order = place(paths, len(paths))
    assert sorted(order) == list(range(len(paths)))
    least = min(cost(other) for other in itertools.permutations(paths))
    assert cost([paths[host] for host in order]) == least


def test_a_ring_leaves_each_leaf_and_each_pod_once() -> None:
    hosts = [(f"pod {pod}", f"leaf {pod}.{leaf}") for pod in range(4) for leaf in range(8) for _ in range(16)]
    random.Random(1).shuffle(hosts)
    order = [hosts[host] for host in place(hosts, len(hosts))]
    assert sorted(order) == sorted(hosts)
    assert cost(order) == 32 + 4
    assert [cost([("top", leaf) for leaf in leaves]) for leaves in ("a", "ab", "abc")] == [0, 1, 3]


def test_a_part_of_the_hosts_comes_from_the_smallest_subtree_and_few_leaves() -> None:
    leaves = {"a": 3, "b": 8, "c": 5, "d": 2}
    paths = [("top", leaf) for leaf, hosts in leaves.items() for _ in range(hosts)]
    assert {paths[host] for host in place(paths, 8)} == {("top", "b")}
    assert {paths[host] for host in place(paths, 10)} == {("top", "b"), ("top", "d")}
    paths = [("pod 1", "leaf 1")] * 9 + [("pod 2", "leaf 2")] * 6 + [("pod 2", "leaf 3")] * 6
    assert {paths[host][0] for host in place(paths, 12)} == {"pod 2"}


@pytest.mark.parametrize(
    ("nodes", "group", "leaves", "levels"),
    [
        (9, 1, "aabbbccdd", 6),
        (9, 3, "bbb ccd aad", 15),
        (4, 2, "cc dd", 2),
        (6, 2, "aa bb cc", 5),
        (8, 4, "aabb bccd", 18),
        (5, 1, "aabbb", 2),
        (3, 1, "bbb", 0),
        (2, 1, "aa", 0),
    ],
)
def test_groups_stay_in_a_leaf_or_else_in_a_pod(nodes: int, group: int, leaves: str, levels: int) -> None:
    """Leaves a (two hosts) and b (three) are in one pod, and c and d (two each) in another, two levels up from each host."""
    paths = [("top", "pod 0" if leaf in "ab" else "pod 1", leaf) for leaf in "acbcadbdb"]
    order = [paths[host] for host in place(paths, nodes, group)]
    assert ("".join(leaf for *_, leaf in order), cost(order, group)) == (leaves.replace(" ", ""), levels)


@pytest.mark.parametrize(("nodes", "group"), [(9, 1), (8, 3), (0, 1), (6, 0)])
def test_impossible_numbers_of_hosts_are_refused(nodes: int, group: int) -> None:
    with pytest.raises(ValueError, match=f"--nodes is {nodes}"):
        place([("top", f"leaf {host % 2}") for host in range(8)], nodes, group)


def write_hosts(path: Path, hosts: dict[str, tuple[str, ...]]) -> Path:
    view, known = made_up(len(hosts), 1), any(hosts.values())
    found = tuple(Host(name, 64, 1 << 38, (), switches) for name, switches in hosts.items())
    write_view(replace(view, hosts=found, switches_from="slurm" if known else "unknown", outliers=()), path)
    return path


def test_the_command_writes_a_line_for_each_task(tmp_path: Path, cluster: Command) -> None:
    out, switches = tmp_path / "hosts", {"n1": ("top", "a"), "n2": ("top", "b"), "n3": ("top", "a"), "n4": ("top", "b")}
    done = cluster("place", write_hosts(tmp_path / "c.json", switches), "--tasks-per-node", 2, "--out", out)
    assert (done.returncode, out.read_text().split()) == (0, ["n1", "n1", "n3", "n3", "n2", "n2", "n4", "n4"])
    assert "levels that traffic climbs: 2, in the order of" in done.stdout
    unknown = write_hosts(tmp_path / "c.json", {"b": (), "a": ()})
    assert "does not know the switches" in cluster("place", unknown, "--out", out).stdout
    assert out.read_text() == "b\na\n"


@pytest.mark.parametrize("name", ["n1\nn2", "-n", "n1,n2"])
def test_a_name_that_would_steer_srun_is_refused(tmp_path: Path, cluster: Command, name: str) -> None:
    view = write_hosts(tmp_path / "c.json", {name: ("top", "a"), "n9": ("top", "a")})
    done = cluster("place", view, "--out", tmp_path / "hosts")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is called" in done.stderr
    assert not (tmp_path / "hosts").exists()
