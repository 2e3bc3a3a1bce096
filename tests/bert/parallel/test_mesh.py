"""The mesh of ranks: launchers' environment variables, hosts, groups, and device settings."""

import inspect
import os
import re
import resource
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from bert.checkpoints.training_state import Allocation, changes
from bert.configuration.recipes import tiny_cpu
from bert.configuration.sections import ParallelConfig
from bert.parallel import rendezvous
from bert.parallel.environment import Launch
from bert.parallel.mesh import (
    TIMEOUT,
    Mesh,
    agreed_integer,
    agreed_text,
    all_reduce_,
    barrier,
    broadcast_,
    join_mesh,
    process_group,
    require_gpus,
    require_whole_copies,
)
from bert.parallel.reduction.gradients import Communicators
from bert.parallel.rendezvous import Identity, group_by_host
from tests.bert.parallel.forked import on_ranks

pytestmark = pytest.mark.oldest_torch

CPU = torch.device("cpu")


def test_stages_of_a_copy_share_hosts_and_data_groups_follow_rails() -> None:
    """Four hosts have four ranks each, in cyclic order. Rank 10 is on the third host, with ranks 2, 6 and 14."""
    nodes = tuple(tuple(range(host, 16, 4)) for host in range(4))
    all_ranks, rails = tuple(range(16)), (8, 9, 10, 11)
    for (tensor, pipeline), groups, place, shown in (
        ((1, 1), ((10,), (10,), all_ranks, (2, 6, 10, 14), rails), (10, 10, True), "data 16 x tensor 1"),
        ((4, 1), ((2, 6, 10, 14), (10,), rails, (10,), rails), (2, 10, False), "data 4 x tensor 4"),
        (
            (1, 2),
            ((10,), (10, 14), (0, 1, 2, 3, *rails), (2, 10), rails),
            (6, 6, False),
            "data 8 x pipeline 2 x tensor 1",
        ),
        ((2, 2), ((10, 14), (2, 10), rails, (10,), rails), (2, 4, True), "data 4 x pipeline 2 x tensor 2"),
        # A copy of the model takes two hosts, or all four.
        ((2, 4), ((10, 14), (2, 10, 3, 11), (8, 10), (10,), (8, 10)), (1, 2, False), "data 2 x pipeline 4 x tensor 2"),
        ((4, 4), ((2, 6, 10, 14), rails, (10,), (10,), (10,)), (0, 2, False), "data 1 x pipeline 4 x tensor 4"),
    ):
        mesh = Mesh(10, 16, 0, CPU, nodes, tensor, pipeline)
        found = mesh.tensor_ranks, mesh.pipeline_ranks, mesh.data_ranks, mesh.node_data_ranks, mesh.rail_ranks
        assert found == groups, shown
        assert (mesh.data_rank, mesh.dropout_stream, mesh.counts_losses) == place
        assert (str(mesh), mesh.tensor_ranks[mesh.tensor_rank], mesh.pipeline_ranks[mesh.pipeline_rank]) == (
            shown,
            10,
            10,
        )


def test_the_hosts_of_ranks_determine_their_groups_names_and_sites() -> None:
    """Two sites have two hosts each. The hosts of a site have ranks in cyclic order: 0 and 2, 1 and 3."""
    nodes, sites = ((0, 2), (1, 3), (4, 6), (5, 7)), ("east",) * 4 + ("west",) * 4
    mesh = Mesh(6, 8, 1, CPU, nodes, 1, 2, ("h",) * 8, sites)
    stages = [
        f"rank {rank} on host h (site {sites[rank]}, data {rank % 2 + rank // 4 * 2}, pipeline {rank % 4 // 2}, tensor 0)"
        for rank in range(8)
    ]
    assert mesh.names() == stages
    assert (mesh.is_main, mesh.node_ranks, mesh.rail_ranks, mesh.data_rank) == (False, (4, 6), (2, 3, 6, 7), 2)
    assert mesh.own_site.nodes == ((4, 6), (5, 7))
    assert (mesh.own_site.data_ranks, mesh.own_site.rail_ranks, mesh.own_site.data_size) == ((6, 7), (6, 7), 2)
    assert mesh.by_site((1, 3, 5)) == ((1, 3), (5,))
    alone = Mesh(0, 4, 0, CPU, ((0, 1, 2, 3),), tensor=2, hosts=("h",) * 4)
    assert alone.names() == [f"rank {rank} on host h (data {rank // 2}, tensor {rank % 2})" for rank in range(4)]
    assert (alone.is_main, alone.own_site is alone, alone.rail_ranks) == (True, True, (0,))
    assert (alone.by_site((1, 3)), alone.node_ranks) == (((1, 3),), (0, 1, 2, 3))
    names = ["rank 0 on host g", "rank 1 on host h"]
    assert Mesh(0, 2, 0, CPU, ((0,), (1,)), hosts=("g", "h")).names() == names
    assert Mesh(0, 2, 0, CPU, ((0,), (1,)), hosts=("g", "h"), sites=("a", "b")).names() == [
        f"{names[0]} (site a)",
        f"{names[1]} (site b)",
    ]
    before, now = (Allocation.of(["h0", "h1"], tiny_cpu(), sites=names) for names in (("a", "b"), ("a", "c")))
    assert changes(before, now) == ["host h1 is at site c; before b"]


def test_the_error_for_an_indivisible_number_of_ranks_names_the_nearest_valid_sizes() -> None:
    for tensor, stages, hosts in ((2, 1, 4), (2, 2, 4), (2, 4, 4), (2, 8, 4), (2, 16, 4), (4, 1, 2)):
        require_whole_copies(ParallelConfig(tensor, stages), hosts, 8)
    copies = "do not divide into copies of the model: set it to"
    for tensor, stages, hosts, ranks, said in (
        (2, 3, 4, 8, f"parallel.pipeline is 3, but with parallel.tensor 2, 4 hosts of 8 ranks {copies} 2 or 4"),
        (2, 5, 4, 8, f"parallel.pipeline is 5, but with parallel.tensor 2, 4 hosts of 8 ranks {copies} 2 or 4"),
        (2, 17, 4, 8, f"parallel.pipeline is 17, but with parallel.tensor 2, 4 hosts of 8 ranks {copies} 8 or 16"),
        (1, 4, 2, 6, f"parallel.pipeline is 4, but 2 hosts of 6 ranks {copies} 2 or 3"),  # 6 is no multiple of 4
        (1, 9, 1, 1, f"parallel.pipeline is 9, but 1 host of 1 rank {copies} 1"),
        (4, 1, 2, 6, "parallel.tensor is 4, but 2 hosts of 6 ranks do not divide into groups of that size: set it to 2, or "
         "start a multiple of 4 ranks on each host"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            require_whole_copies(ParallelConfig(tensor, stages), hosts, ranks)
    with pytest.raises(ValueError, match=r"parallel\.tensor is 2, but 1 host of 1 rank"):
        join_mesh("cpu", parallel=ParallelConfig(2))


IDENTITIES: list[tuple[list[tuple[object, ...]], object]] = [
    ([("a", "", 0, 2), ("a", "", 1, 2), ("b", "", 0, 2), ("b", "", 1, 2)], ((0, 1), (2, 3))),  # in block order
    ([("a", "", 0, 2), ("b", "", 0, 2), ("a", "", 1, 2), ("b", "", 1, 2)], ((0, 2), (1, 3))),  # in cyclic order
    ([("localhost", "1", 0, 1), ("localhost", "2", 0, 1)], ((0,), (1,))),
    ([(f"h{rank}", "", 0, 1, site) for rank, site in enumerate("abab")], ((0,), (2,), (1,), (3,))),  # site after site
    ([("a", "", 0, 1)] * 2, "host a runs ranks 0, 1 with local ranks 0, 0: start one launcher per host"),
    (
        [("a", "", 1, 2), ("a", "", 0, 2)],
        "host a runs ranks 0, 1 with local ranks 1, 0: on each host, a higher rank must",
    ),
    ([("a", "", 0, 0), ("a", "", 1, 0), ("b", "", 0, 0)], "hosts have different numbers of ranks (a 2, b 1): start"),
    ([("pod0", "", 0, 2), ("pod1", "", 1, 2)], "host pod0 runs 1 rank (0), but its launcher announces 2 per host: "),
    ([("pod", "", 0, 0), ("pod", "", 1, 4)], "host pod runs 2 ranks (0, 1), but its launcher announces 4 per host"),
    ([("h0", "", rank, 2, site) for rank, site in enumerate("ab")], "host h0 states several sites ('a', 'b'): set one"),
    ([("h0", "", 0, 1, "a"), ("h1", "", 0, 1)], "host h1 states no site, but other hosts do: set MLPERF_BERT_SITE on"),
    *(
        (
            [("a", "", count - rank, 0) for rank in range(count)],
            f"13, 14, 15{more} with local ranks {count}, {count - 1}, ",
        )
        for count, more in ((16, ""), (17, ", ..."))
    ),
]


@pytest.mark.parametrize(("identities", "expected"), IDENTITIES)
def test_ranks_are_grouped_by_host_name_and_boot_id(identities: list[tuple[Any, ...]], expected: object) -> None:
    ranks = [Identity(*identity) for identity in identities]
    if isinstance(expected, tuple):
        assert group_by_host(ranks) == expected
        return
    with pytest.raises(ValueError, match=re.escape(str(expected))):
        group_by_host(ranks)


def test_ranks_join_and_their_collectives_agree(tmp_path: Path) -> None:
    """Ranks 0 and 2 are on one host and site, ranks 1 and 3 on another. Host names are cut to 128 characters."""

    def agree(mesh: Mesh) -> list[Any]:
        rank, done = mesh.rank, Path(os.environ["DONE"])
        assert (mesh.nodes, mesh.sites) == (((0, 2), (1, 3)), ("a" * 32, "b" * 32) * 2)
        assert mesh.hosts == ("h" * 128, "g" * 128) * 2
        if rank == 3:
            time.sleep(0.2)
            done.touch()
        barrier()
        assert done.exists()
        # PyTorch 2.11 always sorts a group's ranks. Later versions have the option ``sort_ranks``.
        order = (3, 1) if "sort_ranks" in inspect.signature(dist.new_group).parameters else (1, 3)
        pair = process_group(order if rank % 2 else (0, 2))
        assert pair is not None
        assert (pair.rank(), process_group((rank,))) == ([*order, 0, 2].index(rank) % 2, None)
        found = [agreed_integer(10**10 + rank, mesh), agreed_text(f"é{'rank' * rank}", mesh)]
        found += [all_reduce_(torch.tensor([rank, -rank]), way).tolist() for way in ("sum", "min", "max")]
        found += [broadcast_(torch.tensor(5 + rank)).item(), os.environ["GLOO_SOCKET_IFNAME"]]
        found.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        return [*found, all_reduce_(torch.tensor(rank), group=pair).item()]

    hosts, sites = ("h" * 200, "g" * 200) * 2, ("a" * 32, "b" * 32) * 2
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        ranks = on_ranks(4, agree, hosts, sites, DONE=tmp_path / "done")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    same = [10**10, "é", [6, -6], [0, -3], [3, 0], 5, "lo", 3 * 4 + 1024]
    assert ranks == [[*same, 2], [*same, 4], [*same, 2], [*same, 4]]


def test_every_process_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_gpus(2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="3 processes on this host, but PyTorch sees 2 GPUs: start at most one"):
        join_mesh("cuda")


@pytest.mark.parametrize(
    ("local_size", "chosen", "expected"), [(4, None, "0"), (4, "1", "1"), (8, None, None), (0, None, "0")]
)
def test_ranks_on_several_hosts_do_not_register_buffers_of_captured_collectives(
    monkeypatch: pytest.MonkeyPatch, local_size: int, chosen: str | None, expected: str | None
) -> None:
    for name, value in {"MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", chosen or "")  # so that monkeypatch restores it
    if chosen is None:
        monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    monkeypatch.setattr(
        rendezvous, "rendezvous", Mock(side_effect=InterruptedError)
    )  # stop before communicators are created
    with pytest.raises(InterruptedError):
        rendezvous.join_group(Launch(5, 8, 1, local_size), torch.device("cuda"), TIMEOUT, TIMEOUT)
    assert os.environ.get("NCCL_GRAPH_REGISTER") == expected
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_only_rail_groups_request_sums_in_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[tuple[int, ...], Any] = {}

    def new_group(ranks: list[int], pg_options: Any = None, **_: object) -> dist.ProcessGroup:
        asked[tuple(ranks)] = pg_options
        return dist.ProcessGroup(0, 1)  # type: ignore[reportCallIssue]

    monkeypatch.setattr(dist, "new_group", new_group)
    config = SimpleNamespace(collnet_enable=-1)
    nccl = SimpleNamespace(Options=lambda: SimpleNamespace(config=config))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    mesh = Mesh(2, 4, 0, torch.device("cuda", 0), nodes=((0, 1), (2, 3)))
    Communicators.create(mesh, in_network=True)
    found = {ranks: options and options.config.collnet_enable for ranks, options in asked.items()}
    assert found == {(0, 1, 2, 3): None, (2, 3): None, (0, 2): 1}
    del config.collnet_enable  # as in releases without this option
    with pytest.raises(ValueError, match=r"training\.sharp"):
        Communicators.create(mesh, in_network=True)


def test_joining_makes_matrix_products_accumulate_in_fp32() -> None:
    """The device's setup overrides whatever precision was set before."""
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = True
    torch.set_float32_matmul_precision("high")
    mesh = join_mesh("cpu")
    assert (mesh, agreed_text("é", mesh)) == (Mesh(0, 1, 0, CPU, hosts=(socket.gethostname(),)), "é")
    reduced = products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction
    assert (*reduced, products.allow_tf32) == (False, False, False)
    assert torch.get_float32_matmul_precision() == "highest"
