"""Binding of processes to the cores nearest to their GPUs, on simulated machines that folders like /sys describe."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bert.launch.binding import Binding, binding, main
from tests.bert.launch.started import Started
from tests.sysfs import Machine

FIRST, SECOND = {0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}
"""CPUs of NUMA nodes 0 and 1."""
HALVES = [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]


def cpus(machine: Machine, ranks: int, allowed: Sequence[int] = range(16), visible: str = "") -> list[set[int]]:
    """Return the CPUs of each process."""
    found = [binding(rank, ranks, allowed, machine.sys, visible) for rank in range(ranks)]
    assert all(each.cores == len({cpu % 8 for cpu in each.cpus}) for each in found)
    return [set(each.cpus) for each in found]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Make a machine with two NUMA nodes, each with four cores of two hardware threads and two GPUs.

    GPUs 0 and 1 are on node 1, and GPUs 2 and 3 are on node 0.
    """
    machine = Machine(tmp_path)
    machine.write("devices/system/node/node0/cpulist", "0-3,8-11")
    machine.write("devices/system/node/node1/cpulist", "4-7,12-15")
    for cpu in range(16):
        machine.write(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 8},{cpu % 8 + 8}")
    machine.gpu("pci0000:80/0000:80:01.0/0000:01:00.0", numa=1)
    machine.gpu("pci0000:80/0000:80:02.0/0000:02:00.0", numa=1)
    machine.gpu("pci0000:00/0000:00:01.0/0000:81:00.0", numa=0)
    machine.gpu("pci0000:00/0000:00:02.0/0000:82:00.0", numa=0)
    machine.pci("pci0000:00/0000:00:1f.0", "0x1a03", "0x030000", 0)  # a display adapter, not an accelerator
    return machine


def test_processes_split_the_allowed_cores_of_their_gpus_numa_node(machine: Machine) -> None:
    """If the order of the GPUs is unknown or a GPU is missing, all processes split the allowed cores."""
    for ranks, allowed, visible, expected in (
        (4, range(16), "", [*HALVES[2:], *HALVES[:2]]),
        (2, range(16), "3,0", [FIRST, SECOND]),
        (2, range(16), "0,1", HALVES[2:]),
        (2, range(16), "GPU-8f2b3c,GPU-1d2e3f", [FIRST, SECOND]),
        (2, range(16), "0,", [FIRST, SECOND]),
        (2, range(16), "7,8", [FIRST, SECOND]),
        (5, range(16), "", [{0, 8}, {1, 2, 9, 10}, {3, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]),
        (4, range(5), "", [{4}, {4}, {0, 1}, {2, 3}]),  # processes may share a core
        (4, range(4), "", [{0}, {1}, {2}, {3}]),  # no allowed core is near GPUs 0 and 1, so GPUs are ignored
    ):
        assert cpus(machine, ranks, allowed, visible) == expected, (ranks, allowed, visible)
    assert binding(0, 4, range(16), machine.sys) == Binding(frozenset({4, 5, 12, 13}), 2, "0000:01:00.0")
    assert [binding(rank, 2, range(16), machine.sys, "3,9").gpu for rank in (0, 1)] == ["0000:82:00.0", ""]
    machine.gpu("pci0000:80/0000:80:03.0/0000:04:01.0", numa=1)
    assert cpus(machine, 5) == [{4, 12}, {5, 13}, {6, 7, 14, 15}, *HALVES[:2]], "three GPUs are on one node"
    # CUDA numbers GPUs of different models by speed, so their addresses do not tell their order.
    machine.write("devices/pci0000:80/0000:80:01.0/0000:01:00.0/device", "0x1fb0")
    assert (cpus(machine, 2), binding(0, 2, range(16), machine.sys).gpu) == ([FIRST, SECOND], "")


@pytest.mark.parametrize("node", ["-1", "7", ""])
def test_processes_split_all_cores_if_a_gpus_numa_node_is_unknown_or_has_no_cores(machine: Machine, node: str) -> None:
    machine.write("devices/pci0000:80/0000:80:01.0/0000:01:00.0/numa_node", node)
    assert cpus(machine, 4) == HALVES


def test_without_gpus_the_allowed_cores_are_split(tmp_path: Path) -> None:
    allowed = [2, 3, 4, 5, 6, 7, 8, 9, 12]
    for ranks, sizes in ((1, [9]), (2, [4, 5]), (4, [2, 2, 2, 3]), (10, [1] * 10)):
        found = [binding(rank, ranks, allowed, tmp_path) for rank in range(ranks)]
        assert [(len(each.cpus), each.cores, each.gpu) for each in found] == [(size, size, "") for size in sizes]
        assert set().union(*(each.cpus for each in found)) == set(allowed)


SHOWS = f"{sys.executable} -c 'import os; print(sorted(os.sched_getaffinity(0)))'"
SHOWS += '; echo "$CUDA_DEVICE_ORDER/$OMP_NUM_THREADS" "${@:3}"; exit 7'
"""Program in place of `bert.train` that shows its CPUs, the order of GPUs, its threads and its arguments."""
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
MPIRUN = {f"OMPI_COMM_WORLD_{name}": value for name, value in
          {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()}  # fmt: skip
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1", "MASTER_ADDR": "h0"}  # fmt: skip


def bound(rank: int) -> Binding:
    return binding(rank, 2, os.sched_getaffinity(0), Path("/sys"), os.environ.get("CUDA_VISIBLE_DEVICES", ""))


@pytest.mark.parametrize(
    ("program", "variables", "rank"),
    [
        ("bert.launch.binding tiny_cpu", TORCHRUN, 0),
        ("bert.launch.binding tiny_cpu", TORCHRUN | {"OMP_NUM_THREADS": "9"}, 0),
        ("bert.launch tiny_cpu 1 --", MPIRUN, 1),
        ("bert.launch tiny_cpu 1 --", SRUN, 1),
        # With BIND=off or an invalid local rank, a rank runs unbound.
        *(
            ("bert.launch.binding tiny_cpu", TORCHRUN | changes, None)
            for changes in ({"BIND": "off"}, {"LOCAL_WORLD_SIZE": "0"}, {"LOCAL_RANK": "2"}, {"LOCAL_RANK": "-1"})
        ),
    ],
)
def test_a_rank_is_bound_to_its_cores_and_then_runs_bert_train(
    tmp_path: Path, program: str, variables: dict[str, str], rank: int | None
) -> None:
    done = Started(tmp_path, f"{program} --log.run 3", train=SHOWS, **variables).end()
    own, threads = (os.sched_getaffinity(0), "") if rank is None else (bound(rank).cpus, bound(rank).cores)
    order = "PCI_BUS_ID" if rank is not None and bound(rank).gpu else os.environ.get("CUDA_DEVICE_ORDER", "")
    shown = f"{sorted(own)}\n{order}/{variables.get('OMP_NUM_THREADS', threads)} tiny_cpu --log.run 3\n"
    assert (done.returncode, done.stdout) == (7, shown), done.stderr


def test_the_binding_of_each_process_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NPROC", "2")
    assert main([]) == 0
    for rank, line in enumerate(capsys.readouterr().out.splitlines()):
        found = bound(rank)
        cores, numbers = f"{found.cores} core{'s' * (found.cores > 1)}", ",".join(map(str, sorted(found.cpus)))
        assert line == f"process {rank}: GPU {found.gpu or 'none'}, {cores}, CPUs {numbers}"
    for name, variables in (("NPROC", {}), ("OMP_NUM_THREADS", TORCHRUN), ("RANK", {})):
        with monkeypatch.context() as patch:
            for each, value in (variables | {name: "two"}).items():
                patch.setenv(each, value)
            assert main([]) == 2
        assert capsys.readouterr().err.startswith(f"error: {name}")
