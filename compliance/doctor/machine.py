"""Query the resources of a machine (memory, processors, limits, network, GPUs), and check that they suffice for a run."""

import os
import re
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from compliance.doctor.diagnosis import Diagnosis, fail, fail_or_warn, ok, warn
from compliance.doctor.gpus import Gpus, read_gpus
from compliance.doctor.host import ExaminedHost
from compliance.doctor.intended_run import ExaminedRun
from console.text import counted


@dataclass(frozen=True)
class AdapterPort:
    """A port of an RDMA network adapter. For example, `state` is ACTIVE and `rate` is 400 Gb/sec (4X NDR)."""

    name: str
    state: str
    rate: str
    link_layer: str = "InfiniBand"


@dataclass(frozen=True)
class Machine:
    """Resources, load and settings of a machine.

    Attributes:
        cores: number of cores that this process may use, given its affinity and the container's limit.
        free_bytes: memory that programs can still allocate, within the container's limit.
        shared_bytes: free space of /dev/shm; 0 if it does not exist.
        lockable_bytes: memory that a process may lock; None if unlimited.
        load: load average of the last minute.
    """

    cores: float
    threads: int
    physical_cores: int
    frequency_mhz: float
    memory_bytes: int
    free_bytes: int
    shared_bytes: int
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
    limit = host.read("/sys/fs/cgroup/memory.max")  # the file contains "max" if there is no limit
    # The quota is also "max" if there is no limit. Then it does not match.
    quota = re.fullmatch(r"(\d+) ([1-9]\d*)", host.read("/sys/fs/cgroup/cpu.max"))
    allowed = len(os.sched_getaffinity(0))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    try:
        shared = psutil.disk_usage(str(host.path("/dev/shm"))).free
    except OSError:
        shared = 0
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
            place = f"{folder}/{adapter}/ports/{number}"
            state = host.read(f"{place}/state").partition(":")[2].strip() or "unknown"  # the file has "4: ACTIVE"
            rate, link_layer = host.read(f"{place}/rate"), host.read(f"{place}/link_layer")
            ports.append(AdapterPort(f"{adapter} port {number}", state, rate, link_layer))
    return ports


def check_machine(machine: Machine, run: ExaminedRun) -> Iterator[Diagnosis]:
    yield from _memory(machine, run)
    yield from _processors(machine, run)
    yield from _network(machine, run)


GIB = 2**30
MIN_LOCKABLE_BYTES = 4 * GIB


def _memory(machine: Machine, run: ExaminedRun) -> Iterator[Diagnosis]:
    needed = run.ranks * (4 * GIB if run.on_gpus else GIB // 2)
    if machine.free_bytes < needed:
        of_ranks = counted(run.ranks, "rank")
        found = f"{machine.free_bytes / GIB:.1f} GiB free, about {needed / GIB:.0f} GiB needed by {of_ranks}"
        yield warn("memory", found, "end other programs, or raise the container's limit")
    else:
        yield ok("memory", f"{machine.free_bytes / GIB:.0f} GiB free")
    # NCCL and PyTorch exchange data between ranks through shared memory.
    shared, needed = machine.shared_bytes, run.ranks * GIB // 8
    if shared < needed and run.world_size > 1:
        found = f"{shared / 2**20:.0f} MiB free in /dev/shm, {needed / 2**20:.0f} MiB needed by {counted(run.ranks, 'rank')}"
        yield fail_or_warn("shared memory", run.on_gpus, found, "start the container with --ipc=host or --shm-size=8g")
    else:
        yield ok("shared memory", f"{shared / GIB:.1f} GiB free in /dev/shm")


def _processors(machine: Machine, run: ExaminedRun) -> Iterator[Diagnosis]:
    found = f"{machine.cores:g} for {counted(run.ranks, 'rank')}"
    if machine.cores < run.ranks:
        yield fail("cores", found, "start fewer ranks (NPROC), or ask the scheduler for more cores (--cpus-per-task)")
    elif run.on_gpus and machine.cores < 4 * run.ranks:
        remedy = "ask the scheduler for more (--cpus-per-task): loading and launching need about four per rank"
        yield warn("cores", found, remedy)
    else:
        yield ok("cores", found)
    if machine.load > max(1.0, machine.cores / 4):
        found = f"{machine.load:.1f} over the last minute on {machine.cores:g} core{'' if machine.cores == 1 else 's'}"
        yield warn("load", found, "find the programs that compute here (top)")
    if slow := machine.governors - {"performance"}:
        found = f"frequency governor {', '.join(sorted(slow))}"
        yield warn("cores", found, "run cpupower frequency-set --governor performance (root)")


def _network(machine: Machine, run: ExaminedRun) -> Iterator[Diagnosis]:
    ports, several = machine.ports, run.nodes > 1
    down = [f"{port.name} {port.state}" for port in ports if port.state != "ACTIVE"]
    if ports and len(down) == len(ports):
        remedy = "check the cables and the subnet manager (ibstat, ibdiagnet)"
        yield fail_or_warn("network", several, f"no port with RDMA is up: {', '.join(down)}", remedy)
    elif down:
        remedy = "check the cable and the switch, or leave the port out with NCCL_IB_HCA"
        yield warn(
            "network",
            f"{len(ports) - len(down)} of {len(ports)} ports are up, but these are not: {', '.join(down)}",
            remedy,
        )
    elif ports:
        yield ok("network", f"{counted(len(ports), 'port')} with RDMA, {ports[0].rate}")
    elif several and run.on_gpus:
        remedy = "load the driver of the adapters (mlx5_ib), and give the container /dev/infiniband"
        yield warn("network", "no adapter with RDMA: ranks of different nodes would use TCP", remedy)
    else:
        yield ok("network", "TCP" if several else "no adapter with RDMA, and one node needs none")
    if several and ports and not machine.has_rdma_devices:
        remedy = "start the container with --device=/dev/infiniband, or privileged"
        yield fail("network", "the host has RDMA adapters, but no /dev/infiniband", remedy)
    locked = machine.lockable_bytes
    if several and ports and locked is not None and locked < MIN_LOCKABLE_BYTES:
        remedy = "set ulimit -l unlimited (limits.conf, LimitMEMLOCK=infinity of slurmd, docker --ulimit memlock=-1)"
        yield fail(
            "limits", f"a process may lock only {locked >> 10} KiB, but RDMA must lock the memory that it sends", remedy
        )
    if several and (not machine.address or machine.address.startswith("127.")):
        found = f"this host's name resolves to {machine.address or 'no address'}, which other nodes cannot reach"
        yield warn("host name", found, "set MASTER_ADDR to an address of the first node, or correct /etc/hosts")
