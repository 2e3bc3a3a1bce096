"""Read the resources of a machine and their use: memory, processors, limits, network, GPUs."""

from __future__ import annotations

import os
import re
import resource
import socket
from dataclasses import dataclass, field

from compliance.doctor.gpus import Gpus, read_gpus
from compliance.doctor.host import ExaminedHost


@dataclass(frozen=True)
class AdapterPort:
    """A port of an RDMA network adapter. Examples: `state` ACTIVE or DOWN, `rate` 400 Gb/sec (4X NDR)."""

    name: str
    state: str
    rate: str
    link_layer: str = "InfiniBand"


@dataclass(frozen=True)
class Machine:
    """Facts of a machine.

    Attributes:
        cores: number of cores that this process may use, given its affinity and the container's limit.
        free_bytes: memory that programs can still allocate, within the container's limit.
        shared_bytes: free space of /dev/shm; None if it does not exist.
        lockable_bytes: memory that a process may lock; None if unlimited.
        load: load average of the last minute.
    """

    cores: float
    threads: int
    physical_cores: int
    frequency_mhz: float
    memory_bytes: int
    free_bytes: int
    shared_bytes: int | None
    lockable_bytes: int | None
    load: float
    governors: frozenset[str] = frozenset()
    ports: tuple[AdapterPort, ...] = ()
    has_rdma_devices: bool = False
    address: str = ""
    gpus: Gpus = field(default_factory=Gpus)


def read_machine(host: ExaminedHost) -> Machine:
    """Query the kernel, NVIDIA's driver and the files of /sys."""
    import psutil

    memory, frequency = psutil.virtual_memory(), psutil.cpu_freq()
    limit = host.read("/sys/fs/cgroup/memory.max")  # "max" if there is no limit
    # A quota of "max" means no limit.
    quota = re.fullmatch(r"(\d+) ([1-9]\d*)", host.read("/sys/fs/cgroup/cpu.max"))
    allowed = len(os.sched_getaffinity(0))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    try:
        shared: int | None = psutil.disk_usage(str(host.path("/dev/shm"))).free
    except OSError:
        shared = None
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = ""
    cpus = [name for name in host.names("/sys/devices/system/cpu") if re.fullmatch(r"cpu\d+", name)]
    governors = (host.read(f"/sys/devices/system/cpu/{name}/cpufreq/scaling_governor") for name in cpus)
    return Machine(
        cores=min(allowed, int(quota[1]) / int(quota[2])) if quota else allowed,
        threads=psutil.cpu_count() or 1,
        physical_cores=psutil.cpu_count(logical=False) or 1,
        frequency_mhz=(frequency.max or frequency.current) if frequency else 0.0,
        memory_bytes=memory.total,
        free_bytes=min(memory.available, int(limit)) if limit.isdecimal() else memory.available,
        shared_bytes=shared,
        lockable_bytes=None if locked == resource.RLIM_INFINITY else locked,
        load=psutil.getloadavg()[0],
        governors=frozenset(filter(None, governors)),
        ports=tuple(_ports(host)),
        has_rdma_devices=bool(host.names("/dev/infiniband")),
        address=address,
        gpus=read_gpus(),
    )


def _ports(host: ExaminedHost) -> list[AdapterPort]:
    """Return the ports of all RDMA adapters (InfiniBand and RoCE)."""
    ports, folder = [], "/sys/class/infiniband"
    for adapter in host.names(folder):
        for number in host.names(f"{folder}/{adapter}/ports"):
            told = {
                name: host.read(f"{folder}/{adapter}/ports/{number}/{name}") for name in ("state", "rate", "link_layer")
            }
            state = told["state"].partition(":")[2].strip() or "unknown"  # "4: ACTIVE" in /sys
            ports.append(AdapterPort(f"{adapter} port {number}", state, told["rate"], told["link_layer"]))
    return ports
