"""What a process reads before it joins the other ranks: launchers' variables, its host, the meeting point and limits."""

import os
import platform
import re
import resource
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from bert.parallel import environment, rendezvous
from bert.parallel.environment import (
    Launch,
    host_of,
    is_rank,
    job,
    lost_launcher,
    may_start_again,
    processor_name,
    restarts,
)
from bert.parallel.master_port import free_port, master_port, require_free_port
from bert.parallel.mesh import join_mesh
from bert.parallel.rendezvous import allow_descriptors
from tests.programs import write_script

pytestmark = pytest.mark.oldest_torch

Patch = pytest.MonkeyPatch


def set_all(patch: Patch, variables: dict[str, Any]) -> None:
    for name, value in variables.items():
        patch.setenv(name, str(value))


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
MPIRUN = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "6832", strict=True)
}
TASK = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "7"}
SRUN = TASK | {"SLURM_NTASKS": "8", "SLURM_LOCALID": "3", "SLURM_NNODES": "2"}
SHELL = {"SLURM_STEP_ID": "4294967290"}
"""Slurm's number for the step in which salloc runs the user's shell."""


@pytest.mark.parametrize(
    ("variables", "expected", "started_as_rank"),
    [
        ({}, (0, 1, 0, 0), False),
        (TORCHRUN, (5, 8, 1, 4), True),
        ({"RANK": "0"}, (0, 1, 0, 0), True),
        ({"WORLD_SIZE": "2"}, (0, 2, 0, 0), True),
        (MPIRUN, (6, 8, 3, 2), True),
        (SRUN, (7, 8, 3, 4), True),
        (SRUN | {"NNODES": "2"}, (7, 8, 3, 4), False),
        (SRUN | MPIRUN, (6, 8, 3, 2), True),
        (SRUN | MPIRUN | TORCHRUN, (5, 8, 1, 4), True),
        ({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}, (0, 1, 0, 0), False),
        ({name: value for name, value in SRUN.items() if name != "SLURM_PROCID"}, (0, 1, 0, 0), False),
        (SRUN | {"SLURM_NNODES": "3"}, (7, 8, 3, 0), True),
        (SRUN | {"SLURM_NNODES": "0"}, (7, 8, 3, 0), True),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "4", "SLURM_NTASKS": "?"}, (7, 16, 3, 4), True),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, (0, 1, 0, 1), False),  # the only task of a step is no rank
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "MASTER_ADDR": "h0"}, (0, 1, 0, 1), True),
        (SRUN | SHELL, (0, 1, 0, 0), False),
        (SRUN | SHELL | {"MASTER_ADDR": "h0"}, (7, 8, 3, 4), True),
    ],
)
def test_ranks_and_sizes_are_read_from_the_launchers_variables(
    monkeypatch: Patch, variables: dict[str, str], expected: tuple[int, ...], started_as_rank: bool
) -> None:
    set_all(monkeypatch, variables)
    launch = Launch.from_environment()
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_size) == expected
    assert is_rank() == started_as_rank


@pytest.mark.parametrize("variable", ["SLURM_PTY_PORT", "SLURM_PTY_WIN_COL"])
def test_a_slurm_task_with_a_terminal_is_a_single_process_unless_master_addr_is_set(
    monkeypatch: Patch, variable: str
) -> None:
    """Tasks that inherit the shell's variables but have no terminal are ranks, not single processes."""
    set_all(monkeypatch, SRUN | {variable: "34889"})
    for has_terminal, world_size in ((True, 1), (False, 8)):
        monkeypatch.setattr(environment, "_has_terminal", lambda found=has_terminal: found)
        assert Launch.from_environment().world_size == world_size
    monkeypatch.setattr(environment, "_has_terminal", lambda: True)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    assert Launch.from_environment().world_size == 8


def test_a_rank_reports_the_end_of_a_launcher_that_should_outlive_it(monkeypatch: Patch) -> None:
    environment._parent.cache_clear()
    Launch.from_environment()  # records the parent process
    parent = os.getppid()
    monkeypatch.setattr(os, "getppid", lambda: parent + 1)
    gone = f"its launcher, process {parent}, is gone: killed, perhaps because memory ran out"
    for variables, said in (
        (TORCHRUN, ""),  # set by hand, without a launcher
        ({"TORCHELASTIC_RUN_ID": "none"}, gone),
        (MPIRUN, gone),
        (SRUN, gone),
    ):
        with monkeypatch.context() as patch:
            set_all(patch, variables)
            assert lost_launcher() == said
            patch.setattr(os, "getppid", lambda: parent)
            assert lost_launcher() == ""


def test_the_restart_count_job_and_processor_name_are_read(monkeypatch: Patch) -> None:
    models = re.findall(r"^model name\s*:\s*(.*\S)", Path("/proc/cpuinfo").read_text(), re.M)
    assert processor_name() == (models or [platform.machine()])[0]
    assert (restarts(), may_start_again(), job()) == (0, False, "")
    set_all(monkeypatch, {"TORCHELASTIC_RESTART_COUNT": 0, "SLURM_RESTART_COUNT": 2, "TORCHELASTIC_MAX_RESTARTS": 0})
    assert (restarts(), may_start_again()) == (2, False)
    set_all(monkeypatch, {"TORCHELASTIC_RESTART_COUNT": 3, "TORCHELASTIC_MAX_RESTARTS": 1})
    assert (restarts(), may_start_again()) == (3, True)
    for name, said in (("none", ""), ("x" * 300, "x" * 256)):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        assert job() == said


def test_a_ranks_host_is_named_by_slurm_or_by_its_node_number(monkeypatch: Patch, tmp_path: Path) -> None:
    write_script(
        tmp_path / "scontrol", '#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && printf "%s0\\n%s1\\n" "$3" "$3"\n'
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    launch = Launch(0, 8, 0, 2)
    for lists, said in (
        ({"SLURM_JOB_NODELIST": "job"}, [" on host job0", " on host job1", " on the node with index 2"]),
        ({"SLURM_JOB_NODELIST": "job", "SLURM_STEP_NODELIST": "s,[1-2]"}, [" on host s,[1-2]0", " on host s,[1-2]1"]),
        ({"SLURM_JOB_NODELIST": "--help"}, [" on the node with index 0"]),
        ({"SLURM_JOB_NODELIST": "a b"}, [" on the node with index 0"]),
        ({}, [" on the node with index 0", " on the node with index 1"]),
    ):
        with monkeypatch.context() as patch:
            set_all(patch, lists)
            assert [host_of(2 * node + 1, launch) for node in range(len(said))] == said
    assert host_of(3, Launch(0, 8, 0, 0)) == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unresolvable_master_addr_is_refused(monkeypatch: Patch, rank: int) -> None:
    """A temporary failure of the resolver is retried. A name that no host can have is refused at once."""
    set_all(monkeypatch, {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "a..b", "MASTER_PORT": free_port()})
    with pytest.raises(ValueError, match=r"MASTER_ADDR is 'a\.\.b', .*\(.*label empty"):
        join_mesh("cpu")
    failures = [socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")] * 3
    monkeypatch.setattr(socket, "getaddrinfo", resolve := Mock(side_effect=[*failures, ["an address"]]))
    rendezvous._require_resolvable("node0")
    assert resolve.call_count == 4
    resolve.side_effect = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    monkeypatch.setattr(rendezvous, "_RESOLUTION_S", -1)
    monkeypatch.setenv("MASTER_ADDR", "nowhere")
    with pytest.raises(ValueError, match=r"MASTER_ADDR is 'nowhere', .*\(Name or service not known\): set it to"):
        join_mesh("cpu")


WHOLE = "in the environment: set it to a whole number, or unset it"
SITE_NAME = "set it to up to 32 letters, digits, and characters of '_.-', or unset it"


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 with WORLD_SIZE=4: start the run with torchrun, srun or mpirun"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK=-1 with WORLD_SIZE=4"),
        (MPIRUN | {"OMPI_COMM_WORLD_RANK": "8"}, "OMPI_COMM_WORLD_RANK=8 with OMPI_COMM_WORLD_SIZE=8"),
        (SRUN | {"SLURM_PROCID": "8"}, "SLURM_PROCID=8 with SLURM_NTASKS=8"),
        *(
            ({"RANK": text}, f"RANK={text!r} {WHOLE}")
            for text in ("two", "\N{SUPERSCRIPT TWO}", "--3", "9" * 10, "9" * 5000)
        ),
        (SRUN, "SLURM_NTASKS=8, but MASTER_ADDR is not set"),
        (MPIRUN | {"MASTER_ADDR": "localhost"}, "OMPI_COMM_WORLD_SIZE=8, but MASTER_PORT is not set"),
        *(
            ({"MLPERF_BERT_SITE": name}, f"MLPERF_BERT_SITE is {name[:64]!r}: {SITE_NAME}")
            for name in ("x" * 33, "x" * 65, "a b", "../up", "-x", "\x1b[31m", "ünï")
        ),
        *(
            (TORCHRUN | {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, f"MASTER_PORT is {port!r}")
            for port in ("0", "65536", "-1", "\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT TWO}")
        ),
    ],
)
def test_invalid_environment_variables_are_refused(
    monkeypatch: Patch, variables: dict[str, str], complaint: str
) -> None:
    set_all(monkeypatch, variables)
    with pytest.raises(ValueError, match=re.escape(complaint)) as refused:
        join_mesh("cpu")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("address", ["127.0.0.1", "::", "0.0.0.0"])
def test_rank_0_refuses_a_port_that_another_program_has(monkeypatch: Patch, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with socket.create_server((address, 0), family=family) as other:
        port = other.getsockname()[1]
        set_all(monkeypatch, {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        with pytest.raises(ValueError, match=rf"MASTER_PORT is {port}, .*\(Address already in use\): set it to a port"):
            join_mesh("cpu")
    require_free_port(port)
    set_all(monkeypatch, {"RANK": 1, "MASTER_PORT": port})
    with pytest.raises(ValueError, match=rf"^rank 0 does not answer at 127.0.0.1:{port} within 0 s: check that it was"):
        join_mesh("cpu", arrival=timedelta(seconds=0.1))
    for last in (1, 65535):
        monkeypatch.setenv("MASTER_PORT", str(last))
        assert master_port() == last


def test_the_limit_of_open_files_is_raised_for_a_ranks_connections(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    """gloo connects each rank to all others. Rank 0 serves two more connections per rank, and fails if it may not."""
    no_limit = resource.RLIM_INFINITY
    for before, launch, after in (
        ((1024, 5000), Launch(1, 8), (1048, 5000)),
        ((1048, 5000), Launch(1, 8), None),
        ((1024, 4096), Launch(1, 100_000), (4096, 4096)),
        ((1024, 4096), Launch(1, 100_000, 1, 8), (4096, 4096)),
        ((1024, no_limit), Launch(0, 100_000), (301_024, no_limit)),
        ((no_limit, no_limit), Launch(0, 100_000), None),
        ((4096, 4096), Launch(0, 2048), (4096, 4096)),
    ):
        limits: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda _, found=before: found)
        monkeypatch.setattr(resource, "setrlimit", lambda _, pair, limits=limits: limits.append(pair))
        allow_descriptors(launch)
        assert limits == [after] * (after is not None), (before, launch)
        said = capsys.readouterr().err
        assert bool(said) == (after == (4096, 4096) and launch.local_rank == 0), said
        assert not said or said.endswith("raise the hard limit of open files (ulimit -Hn, LimitNOFILE)\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    said = "rank 0 may open 4096 files, but serves 2049 ranks with two connections each: raise the hard limit of open files"
    with pytest.raises(ValueError, match=rf"^{said} to 7171 \(ulimit -Hn, LimitNOFILE\)$"):
        allow_descriptors(Launch(0, 2049))
