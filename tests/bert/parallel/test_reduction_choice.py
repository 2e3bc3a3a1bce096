"""Candidates among ways to reduce: what is asked for, what hosts and ranks there are, and in-network reduction."""

import operator
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from bert.configuration.recipes import tiny_cpu
from bert.configuration.sections import InNetwork
from bert.parallel.mesh import Mesh
from bert.parallel.reduction.choice import ReductionChoice, candidates, choose
from bert.parallel.reduction.gradients import Communicators, Way, _in_network_options

pytestmark = pytest.mark.oldest_torch

GROUP = cast(dist.ProcessGroup, object())
NODES = ((0, 1), (2, 3))
FLAT, HIERARCHICAL, SWITCHES = Way("flat"), Way("hierarchical"), Way("hierarchical", in_network=True)


def groups(node: bool = True, rail: bool = True, switches: bool = False) -> Communicators:
    world = GROUP if node or rail else None
    return Communicators(world, GROUP if node else None, GROUP if rail else None, 4, GROUP if switches else None, "why")


@pytest.mark.parametrize(
    ("reduction", "in_network", "found", "expected"),
    [
        ("auto", "auto", groups(node=False, rail=False), [FLAT]),
        ("sharded", "auto", groups(node=False, rail=False), [FLAT]),
        ("auto", "auto", groups(rail=False), [FLAT]),
        ("auto", "auto", groups(node=False), [FLAT]),
        ("auto", "auto", groups(), [FLAT, HIERARCHICAL]),
        ("auto", "auto", groups(switches=True), [FLAT, HIERARCHICAL, SWITCHES]),
        ("auto", "on", groups(switches=True), [FLAT, SWITCHES]),
        ("auto", "auto", groups(node=False, switches=True), [FLAT, HIERARCHICAL, SWITCHES]),
        ("flat", "auto", groups(switches=True), [FLAT]),
        ("sharded_world", "auto", groups(switches=True), [Way("sharded_world")]),
        ("hierarchical", "auto", groups(), [HIERARCHICAL]),
        ("hierarchical", "auto", groups(switches=True), [HIERARCHICAL, SWITCHES]),
        ("hierarchical", "on", groups(switches=True), [SWITCHES]),
        ("sharded", "auto", groups(switches=True), [Way("sharded"), Way("sharded", in_network=True)]),
        ("sharded", "on", groups(rail=False), [Way("sharded")]),
    ],
)
def test_what_is_asked_for_and_possible_is_measured(
    reduction: Any, in_network: Any, found: Communicators, expected: list[Way]
) -> None:
    training = replace(tiny_cpu().training, device="cuda", reduction=reduction, in_network=in_network)
    assert candidates(training, found) == expected


@pytest.mark.parametrize(
    ("reduction", "found", "line"),
    [
        ("hierarchical", groups(), "hierarchical (as set; in-network: why)"),
        ("sharded", groups(node=False), "sharded (as set; in-network: why)"),
        ("hierarchical", groups(rail=False), "hierarchical (as set)"),
        ("sharded_world", groups(), "sharded_world (as set)"),
        ("auto", groups(node=False), "flat (one rank a host)"),
        ("auto", groups(rail=False), "flat (one host)"),
    ],
)
def test_where_there_is_one_way_the_line_says_why_and_why_no_switches_add(
    reduction: Any, found: Communicators, line: str
) -> None:
    training = replace(tiny_cpu().training, reduction=reduction)
    unused: Any = None
    assert str(choose(training, unused, found)) == f"reduction: {line}"


def test_a_way_is_named_as_it_is_shown() -> None:
    assert str(ReductionChoice(SWITCHES, "as set")) == "reduction: hierarchical in-network (as set)"


def mesh(device: str, nodes: tuple[tuple[int, ...], ...] = NODES) -> Mesh:
    return Mesh(0, 4, 0, torch.device(device), nodes)


class Options:
    """Options of a PyTorch that can ask NCCL for in-network reduction."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(collnet_enable=-1)


class OldOptions:
    """Options of one that cannot."""

    def __init__(self) -> None:
        self.config = SimpleNamespace()


def test_switches_are_asked_for_between_gpus_of_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    options, why_not = _in_network_options(mesh("cuda"))
    assert (options.config.collnet_enable, why_not) == (1, "")
    assert _in_network_options(mesh("cuda", ((0, 1, 2, 3),))) == (None, "one host")
    assert _in_network_options(mesh("cpu")) == (None, "gloo has none")
    assert _in_network_options(mesh("cuda"), "bf16") == (None, "switches would add in bf16")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=OldOptions))
    assert _in_network_options(mesh("cuda")) == (None, "this PyTorch cannot ask NCCL for it")
    with pytest.raises(ValueError, match="in_network is on, but switches would add in bf16: set it to auto"):
        Communicators.create(mesh("cuda"), "on", "bf16")
    with pytest.raises(ValueError, match="in_network is on, but this PyTorch cannot ask NCCL for it: set it to auto"):
        Communicators.create(mesh("cuda"), "on")


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this PyTorch is built without NCCL")
def test_the_real_options_take_it() -> None:
    options, why_not = _in_network_options(mesh("cuda"))
    assert options is None or isinstance(options, dist.ProcessGroupNCCL.Options)
    assert options is None or operator.attrgetter("collnet_enable")(options.config) == 1, why_not


def test_groups_are_made_of_the_asked_for_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more rail with the options, and none of the other groups has any."""
    made = []

    def group(ranks: tuple[int, ...], options: object = None) -> object:
        made.append((ranks, options))
        return None if len(ranks) == 1 else object()

    monkeypatch.setattr("bert.parallel.reduction.gradients.process_group", group)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    asked: tuple[InNetwork, ...] = ("auto", "on")
    for in_network in asked:
        made.clear()
        found = Communicators.create(mesh("cuda"), in_network)
        assert [ranks for ranks, _ in made] == [(0, 1, 2, 3), (0, 1), (0, 2), (0, 2)]
        assert [options is not None for _, options in made] == [False, False, False, True]
        assert found.in_network_rail not in (None, found.rail)
        assert found.along(SWITCHES).rail is found.in_network_rail
        assert found.along(HIERARCHICAL).rail is found.rail
    one_host = mesh("cuda", ((0, 1, 2, 3),))
    none: tuple[tuple[Mesh, InNetwork], ...] = ((mesh("cuda"), "off"), (mesh("cpu"), "auto"), (one_host, "on"))
    for place, in_network in none:
        found = Communicators.create(place, in_network)
        assert found.in_network_rail is None
    assert Communicators.create(mesh("cuda"), "off").why_not_in_network == "as set"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"device": "cpu"}, "in_network is on, but training.device is cpu"),
        ({"reduction": "flat"}, "in_network is on, but training.reduction is flat"),
        ({"reduction": "sharded_world"}, "in_network is on, but training.reduction is sharded_world"),
        ({"reduce_dtype": "bf16"}, "in_network is on, but training.reduce_dtype is bf16"),
    ],
)
def test_asking_for_switches_where_none_could_add_is_refused(changes: dict[str, Any], complaint: str) -> None:
    on = replace(tiny_cpu().training, device="cuda", in_network="on")
    assert on.in_network == "on"
    with pytest.raises(ValueError, match=complaint):
        replace(on, **changes)


def test_the_rail_that_is_not_taken_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = []
    monkeypatch.setattr(dist, "destroy_process_group", gone.append)
    rail, switches = (cast(dist.ProcessGroup, object()) for _ in range(2))
    found = replace(groups(switches=True), rail=rail, in_network_rail=switches)
    for way, kept, given_back in ((FLAT, rail, switches), (HIERARCHICAL, rail, switches), (SWITCHES, switches, rail)):
        settled = found.settle(way)
        assert settled.rail is kept
        assert settled.in_network_rail is None
        assert gone == [given_back]
        gone.clear()
    assert groups().settle(HIERARCHICAL) == groups()
    assert gone == []


def new_group_of_2_11(made: list[tuple[int, ...]]) -> Callable[..., dist.ProcessGroup]:
    """Stand in for ``new_group`` of PyTorch 2.11, by its parameters, which sorts the ranks itself."""

    def new_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: Any = None,
        device_id: Any = None,
    ) -> dist.ProcessGroup:
        del timeout, backend, pg_options, use_local_synchronization, group_desc, device_id
        made.append(tuple(sorted(ranks)))
        return dist.ProcessGroup(0, len(ranks))  # type: ignore[reportCallIssue]  # the stubs' other overload

    return new_group


def test_a_pytorch_that_sorts_ranks_serves_hosts_whose_ranks_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(dist, "new_group", new_group_of_2_11(made))
    Communicators.create(mesh("cpu"))
    assert made == [(0, 1, 2, 3), (0, 1), (0, 2)]
    made.clear()
    # Local ranks in the order of ranks on each host, but the second rail meets a later host's lower rank first.
    Communicators.create(replace(mesh("cpu", ((0, 3), (1, 2))), rank=3))
    assert made == [(0, 1, 2, 3), (0, 3), (2, 3)]


def test_a_pytorch_that_sorts_ranks_is_refused_where_it_would_mix_up_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank, also on those whose own host is in order: nobody waits for the others."""
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(dist, "new_group", new_group_of_2_11(made))
    for rank in range(4):
        with pytest.raises(ValueError, match=r"ranks by local rank are 3, 2, and PyTorch .* install PyTorch 2\.12"):
            Communicators.create(replace(mesh("cpu", ((0, 1), (3, 2))), rank=rank))
    assert made == []
