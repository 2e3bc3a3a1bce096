"""Checks of a machine's facts, and the facts of the machine that runs the tests."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compliance.doctor.machine import AdapterPort, check_machine, read_machine
from compliance.doctor.run import ExaminedRun
from tests.compliance.doctor.fake_host import CPU, MACHINE, NODE, NODES, PORTS, expect, fake_host

DOWN = tuple(replace(port, state="DOWN") for port in PORTS)
ALONE = replace(CPU, ranks=1)
ONE_DOWN = (*PORTS[:3], replace(PORTS[3], state="INIT"), *PORTS[4:])


@pytest.mark.parametrize(
    ("layout", "facts", "expected"),
    [
        *((layout, {}, "") for layout in (NODE, NODES, CPU)),
        # At each bound, and one byte, core or tenth beyond it
        (NODE, {"free_bytes": 32 << 30}, ""),
        (NODE, {"free_bytes": (32 << 30) - 1}, "warn memory: 32.0 GiB free, 8 ranks: about 32 GiB needed"),
        (CPU, {"free_bytes": 1 << 30}, ""),
        (CPU, {"free_bytes": (1 << 30) - 1}, "warn memory: 1.0 GiB free, 2 ranks: about 1 GiB needed"),
        (NODE, {"shared_bytes": 1024 << 20}, ""),
        (
            NODE,
            {"shared_bytes": 1023 << 20},
            "fail shared memory: 1023 MiB free in /dev/shm, 1024 MiB needed by 8 ranks",
        ),
        (CPU, {"shared_bytes": 256 << 20}, ""),
        (CPU, {"shared_bytes": 255 << 20}, "warn shared memory: 255 MiB free in /dev/shm, 256 MiB needed by 2 ranks"),
        (NODE, {"shared_bytes": 0}, "fail shared memory: 0 MiB free in /dev/shm"),
        (ALONE, {"shared_bytes": 0}, ""),
        (NODE, {"cores": 32}, ""),
        (NODE, {"cores": 31.5}, "warn cores: 31.5 for 8 ranks"),
        (NODE, {"cores": 8}, "warn cores: 8 for 8 ranks"),
        (NODE, {"cores": 7.5}, "fail cores: 7.5 for 8 ranks"),
        (CPU, {"cores": 2}, ""),
        (NODE, {"load": 28.0}, ""),
        (NODE, {"load": 28.1}, "warn load: 28.1 over the last minute on 112 cores"),
        (CPU, {"load": 1.0, "cores": 3}, ""),
        (ALONE, {"load": 1.1, "cores": 1}, "warn load: 1.1 over the last minute on 1 core"),
        (NODE, {"governors": frozenset({"powersave", "performance"})}, "warn cores: frequency governor powersave"),
        (NODE, {"governors": frozenset({"performance"})}, ""),
        (NODES, {"lockable_bytes": 4 << 30}, ""),
        (NODES, {"lockable_bytes": (4 << 30) - 1024}, "fail limits: a process may lock 4194303 KiB"),
        (NODE, {"lockable_bytes": 8 << 20}, ""),
        (NODES, {"has_rdma_devices": False}, "fail network: not /dev/infiniband"),
        (NODES, {"ports": DOWN}, "fail network: no port with RDMA is up: mlx5_0 port 1 DOWN"),
        (NODE, {"ports": DOWN}, "warn network: no port with RDMA is up"),
        (NODES, {"ports": ONE_DOWN}, "warn network: 7 of 8 ports are up, but not mlx5_3 port 1 INIT"),
        (NODES, {"ports": ()}, "warn network: no adapter with RDMA"),
        (NODE, {"ports": ()}, ""),
        (NODES, {"address": "127.0.1.1"}, "warn host name: stands for 127.0.1.1"),
        (NODES, {"address": ""}, "warn host name: stands for no address"),
    ],
)
def test_one_wrong_fact_is_named(layout: ExaminedRun, facts: dict[str, Any], expected: str) -> None:
    expect(check_machine(replace(MACHINE, **facts), layout), *filter(None, [expected]))


def test_the_facts_of_this_machine_within_a_containers_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    machine = read_machine(fake_host(tmp_path, free))
    total = re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert total is not None
    assert machine.memory_bytes == int(total[1]) * 1024
    assert 1 << 20 < machine.free_bytes < machine.memory_bytes
    assert machine.shared_bytes
    assert 1 <= machine.cores <= machine.threads
