"""Order of hosts: exact where few, close to exact where many, never worse than given."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import placement
from cluster.placement import Placing, climb, cost, place
from cluster.view import Contention, Host, Rank, View, write_view
from tests.cluster.conftest import Command

PATHS = st.builds(lambda pod, leaf: (f"pod {pod}", f"leaf {pod}.{leaf}"), st.integers(0, 1), st.integers(0, 2))


def placings(hosts: int) -> st.SearchStrategy[Placing]:
    return st.builds(
        lambda group, groups, apart: Placing(min(group * groups, hosts // group * group) or group, group, apart),
        st.integers(1, 3),
        st.integers(1, hosts),
        st.booleans(),
    )


@settings(max_examples=40)
@given(st.lists(PATHS, min_size=3, max_size=5).flatmap(lambda paths: st.tuples(st.just(paths), placings(len(paths)))))
def test_few_hosts_are_placed_as_well_as_can_be(case: tuple[list[tuple[str, str]], Placing]) -> None:
    paths, placing = case
    if placing.apart and placing.group > len(set(paths)):
        with pytest.raises(ValueError, match="--group is"):
            place(paths, placing)
        return
    order = place(paths, placing)
    least = min(
        cost([paths[host] for host in other], placing)
        for other in itertools.permutations(range(len(paths)), placing.nodes)
    )
    assert len(set(order)) == placing.nodes
    assert cost([paths[host] for host in order], placing) == least


def test_without_the_search_few_orders_are_dearer(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(0)
    dearer = 0
    for _ in range(100):
        paths = [(f"pod {generator.randrange(2)}", f"leaf {generator.randrange(2)}") for _ in range(7)]
        paths = [(pod, f"{leaf} of {pod}") for pod, leaf in paths]
        placing = Placing(6, generator.choice((1, 2, 3)))
        found = []
        for up_to in (8, 0):
            monkeypatch.setattr(placement, "EXACT_UP_TO", up_to)
            found.append(cost([paths[host] for host in place(paths, placing)], placing))
        assert found[0] <= found[1]
        dearer += found[0] < found[1]
    assert dearer < 35


def test_a_ring_leaves_each_leaf_and_each_pod_once() -> None:
    hosts = [(f"pod {pod}", f"leaf {pod}.{leaf}") for pod in range(4) for leaf in range(8) for _ in range(16)]
    random.Random(1).shuffle(hosts)
    order = [hosts[host] for host in place(hosts, Placing(len(hosts)))]
    assert sorted(order) == sorted(hosts)
    assert cost(order, Placing(len(hosts))) == 32 + 4


def test_a_part_of_the_hosts_comes_from_as_few_leaves_as_can_be() -> None:
    leaves = {"a": 3, "b": 8, "c": 5, "d": 2}
    paths = [("top", leaf) for leaf, hosts in leaves.items() for _ in range(hosts)]
    assert {paths[host] for host in place(paths, Placing(8))} == {("top", "b")}
    assert {paths[host] for host in place(paths, Placing(10))} == {("top", "b"), ("top", "d")}


def test_a_part_stays_in_the_smallest_subtree_that_has_enough() -> None:
    paths = [("pod 1", "leaf 1")] * 9 + [("pod 2", "leaf 2")] * 6 + [("pod 2", "leaf 3")] * 6
    assert {paths[host][0] for host in place(paths, Placing(12))} == {"pod 2"}


def test_groups_stay_in_a_leaf_or_spread_over_leaves() -> None:
    paths = [("top", f"leaf {leaf}") for leaf in range(6) for _ in range(6)]
    random.Random(2).shuffle(paths)
    together = place(paths, Placing(36, group=4))
    groups = [[paths[host] for host in together[start : start + 4]] for start in range(0, 36, 4)]
    assert sum(len(set(group)) == 1 for group in groups) == 6
    apart = place(paths, Placing(36, group=4, apart=True))
    assert all(len({paths[host] for host in apart[start : start + 4]}) == 4 for start in range(0, 36, 4))


def test_levels_are_counted_from_where_two_paths_part() -> None:
    assert climb(("pod 1", "leaf 1"), ("pod 1", "leaf 1")) == 0
    assert climb(("pod 1", "leaf 1"), ("pod 1", "leaf 2")) == 1
    assert climb(("pod 1", "leaf 1"), ("pod 2", "leaf 3")) == 2
    assert climb((), ()) == 0


@pytest.mark.parametrize(
    ("nodes", "group", "apart", "message"),
    [
        (9, 1, False, "--nodes is 9, and the cluster has 8 hosts"),
        (8, 3, True, "--nodes is 8 and --group 3: expected a multiple"),
        (0, 1, False, "--nodes is 0"),
        (6, 3, True, "--group is 3, and there are 2 leaves"),
    ],
)
def test_what_cannot_be_placed_is_said(nodes: int, group: int, apart: bool, message: str) -> None:
    paths = [("top", f"leaf {host % 2}") for host in range(8)]
    with pytest.raises(ValueError, match=message):
        place(paths, Placing(nodes, group, apart))


def write_hosts(path: Path, *hosts: tuple[str, tuple[str, ...]], known: bool = True) -> None:
    found = tuple(Host(name, 1, 1, 2, 1 << 30, (), switches) for name, switches in hosts)
    source = "slurm" if known else "unknown"
    ranks = tuple(Rank(place, 0, "cpu", 1 << 30, -1, "", "", ()) for place in range(len(hosts)))
    alone = Contention(2, 1, 1.0, 1.0, 1.0, 1.0)
    view = View("2026-01-01T00:00:00", "c", "2.13.0", "gloo", 1.0, source, found, ranks, (), (), (), alone, ())
    write_view(view, path)


def test_the_command_writes_a_line_for_each_task(tmp_path: Path, cluster: Command) -> None:
    view, out = tmp_path / "cluster.json", tmp_path / "hosts.txt"
    write_hosts(view, ("n1", ("top", "a")), ("n2", ("top", "b")), ("n3", ("top", "a")), ("n4", ("top", "b")))
    done = cluster("place", view, "--tasks-per-node", 2, "--out", out)
    assert done.status == 0
    assert out.read_text().split() == ["n1", "n1", "n3", "n3", "n2", "n2", "n4", "n4"]
    assert "levels that traffic climbs: 2, in the order of" in done.out
    assert cluster("place", view, "--group", 2, "--apart", "--out", out).status == 0
    assert [{"n1": "a", "n3": "a"}.get(name, "b") for name in out.read_text().split()] in (list("abba"), list("baab"))


def test_without_switches_the_order_stays(tmp_path: Path, cluster: Command) -> None:
    write_hosts(tmp_path / "c.json", ("b", ()), ("a", ()), known=False)
    assert "says nothing of switches" in cluster("place", tmp_path / "c.json", "--out", tmp_path / "hosts").out
    assert (tmp_path / "hosts").read_text() == "b\na\n"


def test_no_hosts_are_not_all_hosts(tmp_path: Path, refused: Callable[..., str]) -> None:
    write_hosts(tmp_path / "c.json", ("a", ("top", "a")), ("b", ("top", "a")))
    assert "--nodes is 0" in refused("place", tmp_path / "c.json", "--nodes", 0)


@pytest.mark.parametrize("name", ["n1\nn2", "-n", "n 1", "n1,n2", ""])
def test_a_name_that_would_steer_srun_is_refused(tmp_path: Path, cluster: Command, name: str) -> None:
    write_hosts(tmp_path / "c.json", (name, ("top", "a")), ("n9", ("top", "a")))
    done = cluster("place", tmp_path / "c.json", "--out", tmp_path / "hosts")
    assert done.status == 2
    assert not (tmp_path / "hosts").exists()
    [line] = done.err.splitlines()
    assert "is called" in line
