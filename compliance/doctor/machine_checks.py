"""Check a machine against what a run needs: memory, processors, network, limits."""

from __future__ import annotations

from collections.abc import Iterator

from compliance.doctor.diagnosis import Diagnosis, fail, fail_or_warn, ok, warn
from compliance.doctor.machine import Machine
from compliance.doctor.run import ExaminedRun

GIB = 2**30
MIN_LOCKABLE_BYTES = 4 * GIB


def memory(machine: Machine, run: ExaminedRun) -> Iterator[Diagnosis]:
    """Check memory, and the shared memory that NCCL and PyTorch need."""
    needed = run.ranks * (4 * GIB if run.on_gpus else GIB // 2)
    if machine.free_bytes < needed:
        found = f"{machine.free_bytes / GIB:.1f} GiB free, {run.ranks} rank(s) need about {needed / GIB:.0f} GiB"
        yield warn("memory", found, "end other programs, or raise the container's limit")
    else:
        yield ok("memory", f"{machine.free_bytes / GIB:.0f} GiB free")
    shared, needed = machine.shared_bytes, run.ranks * GIB // 8
    if shared is None:
        yield fail_or_warn("shared memory", run.ranks > 1, "no /dev/shm", "docker run --ipc=host")
    elif shared < needed and run.world_size > 1:
        found = f"{shared / 2**20:.0f} MiB free in /dev/shm, {run.ranks} ranks need {needed / 2**20:.0f} MiB"
        yield fail_or_warn("shared memory", run.on_gpus, found, "docker run --ipc=host or --shm-size=8g")
    else:
        yield ok("shared memory", f"{shared / GIB:.1f} GiB free in /dev/shm")


def processors(machine: Machine, run: ExaminedRun) -> Iterator[Diagnosis]:
    """Check that every rank has cores that run at full clock and that no other program uses."""
    found = f"{machine.cores:g} for {run.ranks} rank(s)"
    if machine.cores < run.ranks:
        yield fail("cores", found, "start fewer ranks (NPROC), or ask the scheduler for more cores (--cpus-per-task)")
    elif run.on_gpus and machine.cores < 4 * run.ranks:
        remedy = "ask the scheduler for more (--cpus-per-task): loading and launching need about four per rank"
        yield warn("cores", found, remedy)
    else:
        yield ok("cores", found)
    if machine.load > max(1.0, machine.cores / 4):
        found = f"{machine.load:.1f} over the last minute on {machine.cores:g} cores"
        yield warn("load", found, "find the programs that compute here (top)")
    if slow := machine.governors - {"performance"}:
        found = f"frequency governor {', '.join(sorted(slow))}"
        yield warn("cores", found, "cpupower frequency-set --governor performance (root)")


def network(machine: Machine, run: ExaminedRun) -> Iterator[Diagnosis]:
    """Check the RDMA ports, what they require, and whether other nodes can reach this host's name."""
    ports, several = machine.ports, run.nodes > 1
    down = [f"{port.name} {port.state}" for port in ports if port.state != "ACTIVE"]
    if ports and len(down) == len(ports):
        remedy = "look at cables and the subnet manager (ibstat, ibdiagnet)"
        yield fail_or_warn("network", several, f"no port with RDMA is up: {', '.join(down)}", remedy)
    elif down:
        remedy = "look at the cable and the switch, or leave the port out with NCCL_IB_HCA"
        yield warn(
            "network", f"{len(ports) - len(down)} of {len(ports)} ports are up, but not {', '.join(down)}", remedy
        )
    elif ports:
        yield ok("network", f"{len(ports)} ports with RDMA, {ports[0].rate}")
    elif several and run.on_gpus:
        remedy = "load the driver of the adapters (mlx5_ib), and give the container /dev/infiniband"
        yield warn("network", "no adapter with RDMA: ranks of different nodes would use TCP", remedy)
    else:
        yield ok("network", "TCP" if several else "no adapter with RDMA, and one node needs none")
    if several and ports and not machine.has_rdma_devices:
        remedy = "start the container with --device=/dev/infiniband, or privileged"
        yield fail("network", "the adapters are here, but not /dev/infiniband", remedy)
    locked = machine.lockable_bytes
    if several and ports and locked is not None and locked < MIN_LOCKABLE_BYTES:
        remedy = "ulimit -l unlimited (limits.conf, LimitMEMLOCK=infinity of slurmd, docker --ulimit memlock=-1)"
        yield fail("limits", f"a process may lock {locked >> 10} KiB, and RDMA locks the memory that it sends", remedy)
    if several and (not machine.address or machine.address.startswith("127.")):
        found = f"this host's name stands for {machine.address or 'no address'}, which other nodes cannot reach"
        yield warn("host name", found, "set MASTER_ADDR to an address of the first node, or correct /etc/hosts")
