"""The mesh of ranks: launchers' environment variables, hosts, groups, and device settings."""

import os
import random
import re
import resource
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bert.configuration.sections import ParallelConfig
from bert.parallel import environment, rendezvous
from bert.parallel.environment import Launch
from bert.parallel.master_port import free_port, master_port, require_free_port
from bert.parallel.mesh import TIMEOUT, Mesh, join_mesh, require_gpus, require_whole_copies
from bert.parallel.reduction.gradients import Communicators
from bert.parallel.rendezvous import Identity, allow_descriptors, group_by_host

pytestmark = pytest.mark.oldest_torch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
MPIRUN = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "6832", strict=True)
}
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "7",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "3",
    "SLURM_NNODES": "2",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0, 0)),
        (TORCHRUN, (5, 8, 1, 4)),
        (MPIRUN, (6, 8, 3, 2)),
        (SRUN, (7, 8, 3, 4)),
        (SRUN | MPIRUN, (6, 8, 3, 2)),
        (SRUN | MPIRUN | TORCHRUN, (5, 8, 1, 4)),
        ({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}, (0, 1, 0, 0)),
        (SRUN | {"SLURM_NNODES": "3"}, (7, 8, 3, 0)),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "4", "SLURM_NTASKS": "?"}, (7, 16, 3, 4)),
    ],
)
def test_a_launcher_is_read(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: tuple[int, ...]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    launch = Launch.from_environment()
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_size) == expected


@pytest.mark.parametrize("has_terminal", [True, False])
def test_a_shell_of_slurms_starts_a_single_process(monkeypatch: pytest.MonkeyPatch, has_terminal: bool) -> None:
    """Tasks of a step without a terminal, which was started from such a shell, are no single processes."""
    monkeypatch.setattr(environment, "_has_terminal", lambda: has_terminal)
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    assert Launch.from_environment().world_size == 8
    monkeypatch.setenv("SLURM_PTY_PORT", "34889")
    assert Launch.from_environment().world_size == (1 if has_terminal else 8)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    assert Launch.from_environment().world_size == 8
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.setenv("SLURM_STEP_ID", "4294967290")
    assert Launch.from_environment() == Launch()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_address_that_cannot_be_resolved_is_named(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """A resolver that fails for a moment is asked again, but not for a name that no host can have."""
    environment = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "a..b", "MASTER_PORT": free_port()}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match=r"MASTER_ADDR is 'a\.\.b', .*\(.*label empty"):
        join_mesh("cpu")
    failures = [socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")] * 3

    def resolve(*_: object, **__: object) -> list[str]:
        if failures:
            raise failures.pop()
        return ["an address"]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    rendezvous._require_resolvable("node0")
    assert not failures
    failures += [socket.gaierror(socket.EAI_NONAME, "Name or service not known")]
    monkeypatch.setattr(rendezvous, "_RESOLUTION_S", -1)
    monkeypatch.setenv("MASTER_ADDR", "nowhere")
    with pytest.raises(ValueError, match=r"MASTER_ADDR is 'nowhere', .*\(Name or service not known\): set it to"):
        join_mesh("cpu")


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 with WORLD_SIZE=4"),
        (SRUN | {"SLURM_PROCID": "8"}, "SLURM_PROCID=8 with SLURM_NTASKS=8"),
        *(
            ({"RANK": text}, f"RANK='{text}' in the environment: expected a whole number")
            for text in ("two", "\N{SUPERSCRIPT TWO}", "--3", "9" * 5000)
        ),
        (SRUN, "MASTER_ADDR is not set"),
        ({"MLPERF_BERT_SITE": "a b"}, "MLPERF_BERT_SITE is 'a b': expected up to 32 letters"),
        ({"MLPERF_BERT_SITE": "x" * 33}, f"MLPERF_BERT_SITE is '{'x' * 33}'"),
        (MPIRUN | {"MASTER_ADDR": "localhost"}, "MASTER_PORT is not set"),
    ],
)
def test_a_wrong_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], complaint: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=complaint.replace("(", r"\(")):
        join_mesh("cpu")


@pytest.mark.parametrize("address", ["127.0.0.1", "::", "0.0.0.0"])
def test_rank_0_refuses_a_port_that_another_program_has(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with socket.create_server((address, 0), family=family) as other:
        port = other.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(ValueError, match=rf"MASTER_PORT is {port}, .*\(Address already in use\): set it to a port"):
            join_mesh("cpu")
    require_free_port(port)
    monkeypatch.setenv("MASTER_PORT", "65536")
    with pytest.raises(ValueError, match="MASTER_PORT is '65536', expected a whole number"):
        master_port()


def any_order(seed: int) -> list[Identity]:
    """Assign ranks to four hosts of eight at random, keeping each host's local ranks in order."""
    dealt = [host for host in range(4) for _ in range(8)]
    random.Random(seed).shuffle(dealt)
    return [Identity(f"n{host}", "boot", dealt[:rank].count(host), 8) for rank, host in enumerate(dealt)]


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (4, 1), (1, 2), (2, 4), (2, 8), (8, 4), (1, 32)])
def test_stages_of_a_copy_are_near_and_data_groups_on_their_rails(tensor: int, pipeline: int) -> None:
    identities = any_order(tensor + pipeline)
    nodes = group_by_host(identities)
    meshes = [Mesh(rank, 32, 0, CPU, nodes, tensor, pipeline) for rank in range(32)]
    size = tensor * pipeline
    for mesh in meshes:
        stages = f" x pipeline {pipeline}" if pipeline > 1 else ""
        assert str(mesh) == f"data {32 // size}{stages} x tensor {tensor}"
        assert mesh.pipeline_ranks[mesh.pipeline_rank] == mesh.tensor_ranks[mesh.tensor_rank] == mesh.rank
        assert mesh.data_ranks[mesh.data_rank] == mesh.rank
        assert set(mesh.tensor_ranks) <= set(mesh.node_ranks), "shards of a stage stay on a host"
        copy = mesh.copies[mesh.data_rank]
        assert len({identities[rank].host for rank in copy}) == max(1, size // 8), "a copy is on as few hosts as can be"
        assert {identities[rank].local_rank % size for rank in mesh.data_ranks} == {
            identities[mesh.rank].local_rank % size
        }
        assert set(mesh.rail_ranks) | set(mesh.node_data_ranks) <= set(mesh.data_ranks)
        assert len(mesh.rail_ranks) * len(mesh.node_data_ranks) == mesh.data_size
        for other in mesh.rail_ranks:  # ranks with the same optimizer shard
            assert meshes[other].node_data_ranks.index(other) == mesh.node_data_ranks.index(mesh.rank)
        if pipeline > 1:
            place = f" (data {mesh.data_rank}, pipeline {mesh.pipeline_rank}, tensor {mesh.tensor_rank})"
            assert mesh.places()[mesh.rank] == place
    assert sum(mesh.counts_losses for mesh in meshes) == meshes[0].data_size
    streams = {(mesh.data_rank, mesh.tensor_rank): mesh.dropout_stream for mesh in meshes}
    assert sorted(streams.values()) == list(range(32 // pipeline))


def test_ranks_that_do_not_divide_into_copies_are_refused_with_the_nearest() -> None:
    for tensor, stages, hosts in ((2, 1, 4), (2, 2, 4), (2, 4, 4), (2, 8, 4), (2, 16, 4), (4, 1, 2)):
        require_whole_copies(ParallelConfig(tensor, stages), hosts, 8)
    for tensor, stages, hosts, ranks, said in (
        (2, 3, 4, 8, "is 3, but with parallel.tensor 2, 4 hosts .*: set it to 2 or 4$"),
        (2, 5, 4, 8, "is 5, but .*: set it to 2 or 4$"),
        (2, 17, 4, 8, "is 17, but .*: set it to 8 or 16$"),
        (1, 4, 2, 6, "is 4, but 2 hosts of 6 ranks do not divide"),  # copies would span hosts unevenly
        (4, 1, 2, 6, r"parallel.tensor is 4, but .* 6 ranks .*: set it to 2, or start a multiple of 4"),
    ):
        with pytest.raises(ValueError, match=said):
            require_whole_copies(ParallelConfig(tensor, stages), hosts, ranks)
    with pytest.raises(ValueError, match=r"parallel\.tensor is 2, but 1 host of 1 rank"):
        join_mesh("cpu", parallel=ParallelConfig(2))


IDENTITIES: list[tuple[list[tuple[object, ...]], object]] = [
    ([("a", "", 0, 2), ("a", "", 1, 2), ("b", "", 0, 2), ("b", "", 1, 2)], ((0, 1), (2, 3))),  # in block order
    ([("a", "", 0, 2), ("b", "", 0, 2), ("a", "", 1, 2), ("b", "", 1, 2)], ((0, 2), (1, 3))),  # in cyclic order
    ([("localhost", "1", 0, 1), ("localhost", "2", 0, 1)], ((0,), (1,))),
    ([("a", "", 1, 2), ("a", "", 0, 2)], "host a runs ranks 0, 1 with local ranks 1, 0"),
    ([("a", "", 0, 0), ("a", "", 1, 0), ("b", "", 0, 0)], "different numbers of ranks (a 2, b 1)"),
    ([("pod0", "", 0, 2), ("pod1", "", 1, 2)], "announces 2 a host"),  # two containers on one host
    ([("pod", "", 0, 0), ("pod", "", 1, 4)], "announces 4 a host"),  # one rank announces no local world size
    ([("a", "", 0, 1), ("a", "", 0, 1)], "start one launcher a host"),
    *(
        (
            [("a", "", count - rank, 0) for rank in range(count)],
            f"13, 14, 15{more} with local ranks {count}, {count - 1}, ",
        )
        for count, more in ((16, ""), (17, ", ..."))
    ),
]


@pytest.mark.parametrize(("identities", "expected"), IDENTITIES)
def test_ranks_of_a_host_are_found_by_name_and_boot(identities: list[tuple[Any, ...]], expected: object) -> None:
    ranks = [Identity(*identity) for identity in identities]
    if isinstance(expected, tuple):
        assert group_by_host(ranks) == expected
        return
    with pytest.raises(ValueError, match=re.escape(str(expected))):
        group_by_host(ranks)


def test_sites_divide_the_ranks_and_their_hosts() -> None:
    sites = ("east", "east", "west", "west", "east", "east")
    mesh = Mesh(4, 6, 0, CPU, ((0, 1), (4, 5), (2, 3)), hosts=("a",) * 6, sites=sites)
    assert mesh.by_site((1, 3, 5)) == ((1, 5), (3,))
    assert (mesh.own_site.nodes, mesh.own_site.data_ranks) == (((0, 1), (4, 5)), (0, 1, 4, 5))
    assert Mesh(0, 6, 0, CPU).by_site((1, 3)) == ((1, 3),)
    assert mesh.places() == [f" (site {site})" for site in sites]


def test_every_process_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_gpus(2)
    with pytest.raises(ValueError, match="3 processes on this host, but PyTorch sees 2 GPUs: start at most one"):
        require_gpus(3)


def test_two_launchers_on_a_host_may_share_cpus() -> None:
    assert group_by_host([Identity("a", "boot", 0, 1)] * 2, one_launcher=False) == ((0, 1),)


@pytest.fixture
def descriptors() -> Iterator[int]:
    """Set a low soft limit on open files, as shells do, and yield the unchanged hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_rank_may_open_as_many_files_as_its_connections_take(descriptors: int) -> None:
    for world_size, expected in ((8, 1048), (1024, 4096), (100_000, 301_024)):
        allow_descriptors(Launch(1, world_size))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == (expected if descriptors == resource.RLIM_INFINITY else min(expected, descriptors))
        assert hard == descriptors


def test_a_limit_that_cannot_do_is_refused_on_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(ValueError, match=r"may open 4096 files, but serves 4096 ranks .* to 13312 \(ulimit -Hn"):
        allow_descriptors(Launch(0, 4096))


@pytest.mark.parametrize(
    ("local_size", "chosen", "expected"), [(4, None, "0"), (4, "1", "1"), (8, None, None), (0, None, "0")]
)
def test_ranks_on_several_hosts_do_not_register_buffers_of_captured_collectives(
    monkeypatch: pytest.MonkeyPatch, local_size: int, chosen: str | None, expected: str | None
) -> None:
    class MetError(Exception):
        """Raised in place of the rendezvous, so that the test ends before communicators are created."""

    def meet(*_: object, **__: object) -> Iterator[object]:
        raise MetError

    for name, value in {"MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", chosen or "")  # so that monkeypatch restores it
    if chosen is None:
        monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    monkeypatch.setattr(rendezvous, "rendezvous", meet)
    with pytest.raises(MetError):
        rendezvous.join_group(Launch(5, 8, 1, local_size), torch.device("cuda"), TIMEOUT, TIMEOUT)
    assert os.environ.get("NCCL_GRAPH_REGISTER") == expected


def options_with(**config: int) -> Any:
    """Return a fake of NCCL's options, with or without the field for reductions in network switches."""
    return lambda: SimpleNamespace(config=SimpleNamespace(**config))


def test_only_rails_ask_for_sums_in_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[tuple[int, ...], Any] = {}

    def new_group(ranks: list[int], pg_options: Any = None, **_: object) -> dist.ProcessGroup:
        asked[tuple(ranks)] = pg_options
        return dist.ProcessGroup(0, 1)  # type: ignore[reportCallIssue]

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(
        dist, "ProcessGroupNCCL", SimpleNamespace(Options=options_with(collnet_enable=-1)), raising=False
    )
    mesh = Mesh(2, 4, 0, torch.device("cuda", 0), nodes=((0, 1), (2, 3)))
    Communicators.create(mesh, in_network=True)
    assert {ranks: options and options.config.collnet_enable for ranks, options in asked.items()} == {
        (0, 1, 2, 3): None,
        (2, 3): None,
        (0, 2): 1,
    }
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options_with()))
    with pytest.raises(ValueError, match=r"training\.sharp"):
        Communicators.create(mesh, in_network=True)


def test_a_device_is_set_up_with_sums_in_fp32() -> None:
    """The device's setup overrides whatever precision was set before."""
    products, word = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    reduced = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"
    before = [getattr(products, name) for name in reduced]
    for name in reduced:
        setattr(products, name, True)
    torch.set_float32_matmul_precision("high")
    try:
        assert join_mesh("cpu").device == CPU
        assert [getattr(products, name) for name in (*reduced, "allow_tf32")] == [False] * 3
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        for name, value in zip(reduced, before, strict=True):
            setattr(products, name, value)
        torch.set_float32_matmul_precision(word)
