"""Binding of processes to the cores nearest to their GPUs, on folders like /sys that describe made-up machines."""

import os
import re
from collections.abc import Collection
from pathlib import Path

import pytest

from bert.launch.binding import Binding, binding, main
from tests.bert.launch.started import Started
from tests.sysfs import Machine


def cpus(machine: Machine, ranks: int, allowed: Collection[int], visible: str = "") -> list[set[int]]:
    """Return the CPUs of each process."""
    return [set(binding(rank, ranks, allowed, machine.sys, visible).cpus) for rank in range(ranks)]


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


def test_processes_get_the_cores_of_their_gpus_node(machine: Machine) -> None:
    assert cpus(machine, 4, range(16)) == [{4, 5, 12, 13}, {6, 7, 14, 15}, {0, 1, 8, 9}, {2, 3, 10, 11}]
    assert binding(0, 4, range(16), machine.sys) == Binding(frozenset({4, 5, 12, 13}), 2, "0000:01:00.0")


def test_gpus_that_sit_unevenly_share_their_own_nodes_cores(machine: Machine) -> None:
    machine.gpu("pci0000:80/0000:80:03.0/0000:04:01.0", numa=1)
    assert cpus(machine, 5, range(16)) == [{4, 12}, {5, 13}, {6, 7, 14, 15}, {0, 1, 8, 9}, {2, 3, 10, 11}]


def test_visible_gpus_decide(machine: Machine) -> None:
    def seeing(visible: str) -> list[set[int]]:
        return cpus(machine, 2, range(16), visible)

    first, second = {0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}
    assert seeing("3,0") == [first, second]
    assert seeing("0,1") == [{4, 5, 12, 13}, {6, 7, 14, 15}]
    evenly = [first, second]  # the GPUs' nodes are not considered
    assert seeing("GPU-8f2b3c,GPU-1d2e3f") == seeing("0,") == seeing("7,8") == evenly
    # If GPUs differ, CUDA numbers them by speed and not by address.
    machine.write("devices/pci0000:80/0000:80:01.0/0000:01:00.0/device", "0x1fb0")
    machine.write("devices/pci0000:80/0000:80:02.0/0000:02:00.0/device", "0x2330")
    assert seeing("") == evenly
    assert binding(0, 2, range(16), machine.sys).gpu == ""


def test_processes_stay_on_the_cores_they_were_given(machine: Machine) -> None:
    assert cpus(machine, 4, range(5))[:2] == [{4}, {4}]
    # No core of GPUs 0 and 1's node is allowed, so all processes split the allowed cores.
    assert cpus(machine, 4, range(4)) == [{0}, {1}, {2}, {3}]


@pytest.mark.parametrize("ranks", [1, 2, 4, 10])
def test_without_gpus_the_allowed_cores_are_split(tmp_path: Path, ranks: int) -> None:
    machine = Machine(tmp_path)
    shares = cpus(machine, ranks, [*range(2, 10), 12])
    assert set.union(*shares) == {*range(2, 10), 12}
    if ranks <= 9:
        assert sum(map(len, shares)) == 9
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("node", ["-1", "7", ""])
def test_a_gpu_whose_node_is_unknown_or_has_no_cores_is_not_counted_to_any(machine: Machine, node: str) -> None:
    machine.write("devices/pci0000:80/0000:80:01.0/0000:01:00.0/numa_node", node)
    assert cpus(machine, 4, range(16)) == [
        {0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}
    ]  # fmt: skip


SHOWS = 'grep Cpus_allowed_list /proc/self/status; echo "$OMP_NUM_THREADS" "${@:3}"; exit 7'
"""Program in place of `bert.train` that shows its cores and its arguments."""


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
MPIRUN = {f"OMPI_COMM_WORLD_{name}": value for name, value in
          {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()}  # fmt: skip
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1", "MASTER_ADDR": "h0"}  # fmt: skip


@pytest.mark.parametrize(
    ("program", "variables"),
    [
        ("bert.launch.binding tiny_cpu --log.run 3", TORCHRUN),
        ("bert.launch tiny_cpu 1 -- --log.run 3", MPIRUN),
        ("bert.launch tiny_cpu 1 -- --log.run 3", SRUN),
    ],
)
def test_a_rank_of_another_launcher_is_bound_and_becomes_the_training(
    tmp_path: Path, program: str, variables: dict[str, str]
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    done = Started(tmp_path, program, train=SHOWS, **variables).end()
    shown = re.fullmatch(r"Cpus_allowed_list:\t(.*)\n(\d+) tiny_cpu --log.run 3\n", done.stdout)
    assert shown, done.stdout + done.stderr
    assert done.returncode == 7
    if len(cores) > 1:  # otherwise all processes share the only core
        assert shown[1] != listed(cores)
    assert 1 <= int(shown[2]) <= len(cores)


@pytest.mark.parametrize(
    "changes", [{"BIND": "off"}, {"LOCAL_WORLD_SIZE": "0"}, {"LOCAL_RANK": "2"}, {"LOCAL_RANK": "-1"}]
)
def test_without_a_place_a_rank_runs_as_it_is(tmp_path: Path, changes: dict[str, str]) -> None:
    done = Started(tmp_path, "bert.launch.binding --log.run 3", train=SHOWS, **TORCHRUN | changes).end()
    assert done.stdout == f"Cpus_allowed_list:\t{listed(sorted(os.sched_getaffinity(0)))}\n --log.run 3\n", done.stderr


def listed(cores: list[int]) -> str:
    """Return the kernel's form of a list of cores, such as 0-3,8."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def test_the_binding_of_a_node_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NPROC", "2")
    assert main([]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["process 0", "process 1"]
    monkeypatch.setenv("NPROC", "two")
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("error: NPROC is 'two', expected a whole number")
