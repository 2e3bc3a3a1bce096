"""Checks of a machine's facts, and the facts of the machine that runs the tests."""

import os
import re
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compliance.doctor.machine import AdapterPort, check_machine, read_machine
from tests.compliance.doctor.fake_host import CPU, MACHINE, NODE, NODES, PORTS, fake_host, lines_by_case

DOWN = tuple(replace(port, state="DOWN") for port in PORTS)
ONE_DOWN = (*PORTS[:3], replace(PORTS[3], state="INIT"), *PORTS[4:])
LAYOUTS = {"node": NODE, "nodes": NODES, "cpu": CPU, "alone": replace(CPU, ranks=1)}
FACTS: list[tuple[str, dict[str, Any]]] = [
    *((layout, {}) for layout in LAYOUTS),
    # At each limit, and one step beyond it
    *(("node", {"free_bytes": free}) for free in (32 << 30, (32 << 30) - 1)),
    *(("cpu", {"free_bytes": free}) for free in (1 << 30, (1 << 30) - 1)),
    *(("node", {"shared_bytes": mib << 20}) for mib in (1024, 1023)),
    *(("cpu", {"shared_bytes": mib << 20}) for mib in (256, 255)),
    *(("node", {"cores": cores}) for cores in (32, 31.5, 8, 7.5)),
    *(("node", {"load": load}) for load in (28.0, 28.1)),
    *(("nodes", {"lockable_bytes": kib << 10}) for kib in (4 << 20, (4 << 20) - 1)),
    *(("cpu", {"cores": 2}), ("cpu", {"load": 1.0, "cores": 3})),
    *(("alone", {"shared_bytes": 0}), ("alone", {"load": 1.1, "cores": 1})),
    *(("node", {"governors": frozenset({*slow, "performance"})}) for slow in ([], ["powersave"])),
    *((layout, {"ports": ports}) for layout in ("node", "nodes") for ports in (DOWN, ONE_DOWN, ())),
    *(("nodes", change) for change in ({"has_rdma_devices": False}, {"address": "127.0.1.1"}, {"address": ""})),
]


def test_checks_of_machines_yield_the_recorded_diagnoses() -> None:
    cases = {
        f"{number} {layout} {', '.join(facts)}": check_machine(replace(MACHINE, **facts), LAYOUTS[layout])
        for number, (layout, facts) in enumerate(FACTS)
    }
    assert lines_by_case(cases) == Path(__file__).with_name("machine.txt").read_text()


def test_facts_of_this_machine_respect_the_containers_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.getloadavg", lambda: (1.5, 2.5, 3.5))
    port, cpu = "/sys/class/infiniband/mlx5_0/ports/1", "/sys/devices/system/cpu"
    files = {
        "/sys/fs/cgroup/memory.max": "1048576\n",
        "/sys/fs/cgroup/cpu.max": "50000 100000\n",
        f"{port}/state": "4: ACTIVE\n",
        f"{port}/rate": "200 Gb/sec (4X HDR)\n",
        f"{port}/link_layer": "Ethernet\n",
        f"{cpu}/cpu0/cpufreq/scaling_governor": "powersave\n",
        f"{cpu}/cpufreq/x": "",
    }
    machine = read_machine(fake_host(tmp_path, files))
    assert (machine.free_bytes, machine.cores, machine.load) == (1 << 20, 0.5, 1.5)
    assert machine.ports == (AdapterPort("mlx5_0 port 1", "ACTIVE", "200 Gb/sec (4X HDR)", "Ethernet"),)
    assert (machine.governors, machine.shared_bytes, machine.has_rdma_devices) == ({"powersave"}, 0, False)
    free = {"/sys/fs/cgroup/memory.max": "max", "/sys/fs/cgroup/cpu.max": "max 100000", "/dev/shm/x": ""}
    machine = read_machine(fake_host(tmp_path, free | {f"{port}/state": "", "/dev/infiniband/uverbs0": ""}))
    total = re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert total is not None
    assert machine.memory_bytes == int(total[1]) * 1024
    assert 1 << 20 < machine.free_bytes < machine.memory_bytes
    disk = os.statvfs(tmp_path)
    assert 0 < machine.shared_bytes < disk.f_blocks * disk.f_frsize
    assert machine.cores == len(os.sched_getaffinity(0)) <= machine.threads
    assert (machine.ports[0].state, machine.has_rdma_devices) == ("unknown", True)


def test_a_fact_is_0_or_none_if_the_kernel_does_not_report_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise OSError

    facts: list[tuple[object, int, tuple[float, int | None]]] = [
        (None, resource.RLIM_INFINITY, (0.0, None)),
        (SimpleNamespace(max=0.0, current=2100.0), 0, (2100.0, 0)),
        (SimpleNamespace(max=3800.0, current=2100.0), 65536, (3800.0, 65536)),
    ]
    for frequency, locked, expected in facts:
        monkeypatch.setattr("psutil.cpu_freq", lambda found=frequency: found)
        monkeypatch.setattr("psutil.cpu_count", lambda **_: None)
        monkeypatch.setattr(
            "resource.getrlimit", lambda kind, soft=locked: {resource.RLIMIT_MEMLOCK: (soft, 1 << 40)}[kind]
        )
        monkeypatch.setattr("os.sched_getaffinity", lambda process: {0: range(3)}[process])
        monkeypatch.setattr("socket.gethostbyname", refuse)
        machine = read_machine(fake_host(tmp_path))
        assert (machine.frequency_mhz, machine.lockable_bytes) == expected
        assert (machine.cores, machine.threads, machine.physical_cores, machine.address) == (3, 1, 1, "")
