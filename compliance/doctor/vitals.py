"""Check what `doctor` looks at in the machine: clock, GPUs, memory, processors, network, limits.

Each check takes a `Host` and the `Plan` of the run and yields at least one `Diagnosis`; none raises for what is missing.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from compliance.doctor import gpus as nvidia
from compliance.doctor.diagnosis import Diagnosis, complain, fail, ok, warn
from compliance.doctor.gpus import Gpu, Gpus
from compliance.doctor.host import Host
from compliance.doctor.plan import Plan, shape_in_name
from compliance.doctor.system import adapter_ports

GIB = 2**30
DRIVER_FOR_CUDA = {11: 450, 12: 525, 13: 580}
"""Oldest branch of NVIDIA's driver that runs a major version of CUDA (CUDA's release notes, minor version compatibility)."""

CLOCK_WATCHED_S = 0.2
MAX_DRIFT_S = 0.01
MAX_CLOCK_ERROR_S = 1.0
IDLE_MEMORY_MIB = 1024
"""More than this in use on a GPU that should be idle belongs to somebody; the driver itself takes some hundred."""


@dataclass(frozen=True)
class ClockReading:
    """The system's clock.

    Attributes:
        now: seconds since the Unix epoch.
        drift_s: what the wall clock gained on the monotonic one while it was watched: it is being set.
        is_synchronised: what the kernel was told by whoever keeps the time; None when it cannot be asked.
        max_error_s: the most that it may be off, by the same.
    """

    now: float
    drift_s: float
    is_synchronised: bool | None
    max_error_s: float


def read_clock() -> ClockReading:
    """Watch the clock for a moment and ask the kernel, by adjtimex(2), whether it is kept right."""
    before = _wall_minus_monotonic()
    time.sleep(CLOCK_WATCHED_S)
    drift = _wall_minus_monotonic() - before
    timex = ctypes.create_string_buffer(512)  # struct timex, of which modes = 0 changes nothing
    try:
        state = ctypes.CDLL(None).adjtimex(timex)
    except (OSError, AttributeError):
        state = -1
    # It begins with modes, offset, freq and maxerror; 5 is TIME_ERROR, a clock that is not synchronized.
    max_error_us = struct.unpack_from("@Illl", timex.raw)[3]
    return ClockReading(time.time(), drift, None if state < 0 else state != 5, max_error_us / 1e6)


def _wall_minus_monotonic() -> float:
    """Seconds between the two clocks, from the look at both that was interrupted the least."""
    looks: list[tuple[float, float]] = []
    for _ in range(20):
        begin, wall, end = time.monotonic(), time.time(), time.monotonic()
        looks.append((end - begin, wall - (begin + end) / 2))
    return min(looks)[1]


def clock(host: Host, plan: Plan, reading: ClockReading, not_before: float) -> Iterator[Diagnosis]:
    """Check that the time is right, runs evenly, and is kept so. Records of a log may not go back in time (TR 11).

    Args:
        not_before: a time that has passed for sure, such as that of the last commit.
    """
    year = time.gmtime(max(0.0, reading.now)).tm_year
    if reading.now < not_before or year > 2100:
        today = time.strftime("%Y-%m-%d %H:%M", time.gmtime(max(0.0, reading.now)))
        yield fail("clock", f"it says {today} UTC, which cannot be", "set the time: chronyc makestep, or timedatectl")
        return
    if abs(reading.drift_s) > MAX_DRIFT_S:
        found = f"it moved by {1000 * reading.drift_s:+.0f} ms against the monotonic clock in {CLOCK_WATCHED_S:g} s"
        yield fail("clock", f"{found}: it is being set", "wait until the time service has set it, and look again")
        return
    keeper = _time_keeper(host)
    if reading.is_synchronised or keeper:
        error = f", at most {1000 * reading.max_error_s:.0f} ms off" if reading.is_synchronised else ""
        if reading.is_synchronised and reading.max_error_s > MAX_CLOCK_ERROR_S:
            yield warn("clock", f"kept right, but perhaps {reading.max_error_s:.0f} s off", "see chronyc tracking")
        else:
            yield ok("clock", f"kept right{f' by {keeper}' if keeper else ''}{error}")
        return
    found = "nobody keeps the clock right" if reading.is_synchronised is False else "who keeps the clock cannot be told"
    remedy = "start chronyd or systemd-timesyncd on the host"
    across = "; logs of several nodes then tell different times" if plan.nodes > 1 else ""
    yield warn("clock", found + across, remedy)


def _time_keeper(host: Host) -> str:
    """Name who says that the clock is synchronised, "" when nobody does."""
    if host.run("timedatectl", "show", "--property=NTPSynchronized", "--value", timeout_s=5).answer.strip() == "yes":
        return "the system's time service"
    tracking = host.run("chronyc", "-c", "tracking", timeout_s=5).answer.strip().split(",")
    if tracking[-1] == "Normal" and len(tracking) > 4:
        return f"chrony ({tracking[1]})"
    return "systemd-timesyncd" if host.path("/run/systemd/timesync/synchronized").exists() else ""


def accelerators(host: Host, plan: Plan, found: Gpus, pytorch: Mapping[str, Any]) -> Iterator[Diagnosis]:
    """The GPUs of this machine against what the recipe expects: number, kind, health, who else is there, software."""
    if not plan.on_gpus:
        note = f"{len(found.gpus)} here, none used by {plan.recipe or 'a run without a recipe'}"
        yield ok("GPUs", note if found.gpus else "none here and none needed")
        return
    if not found.gpus:
        remedy = "load the driver (modprobe nvidia), and start the container with --gpus all; dmesg may tell more"
        yield fail("GPUs", found.trouble or "no nvidia-smi here, so no NVIDIA driver", remedy)
        return
    yield from _number_and_kind(plan, found)
    for gpu in found.gpus:
        yield from _health(gpu, plan)
    yield from _company(host, found)
    yield from _links(host, found)
    yield from _gpu_software(plan, found, pytorch)


def _number_and_kind(plan: Plan, found: Gpus) -> Iterator[Diagnosis]:
    kinds = Counter(gpu.text("name") for gpu in found.gpus)
    named = ", ".join(f"{count}x {name}" for name, count in kinds.items())
    if len(kinds) > 1:
        yield fail("GPUs", f"of several kinds: {named}", "use those of one kind: CUDA_VISIBLE_DEVICES")
    elif len(found.gpus) < plan.ranks:
        remedy = "use a recipe for this machine, or make the others visible (CUDA_VISIBLE_DEVICES, --gpus, dmesg)"
        yield fail("GPUs", f"{named}, but {plan.recipe} needs {plan.ranks} a node", remedy)
    elif len(found.gpus) > plan.ranks:
        yield warn("GPUs", f"{named}, of which {plan.ranks} would be used", "set NPROC, or take another recipe")
    else:
        yield ok("GPUs", f"{named}, driver {found.driver}")
    family = re.search(r"[abhv]\d{3}", plan.recipe)
    if shape_in_name(plan.recipe) and family and not any(family[0] in name.lower() for name in kinds):
        remedy = "look for a recipe of this GPU; memory and speed decide the batch of a rank"
        yield warn("GPU kind", f"{plan.recipe} was made for {family[0].upper()}, here is {named}", remedy)


def _health(gpu: Gpu, plan: Plan) -> Iterator[Diagnosis]:
    subject = gpu.label
    if (errors := gpu.number("ecc.errors.uncorrected.volatile.total")) and errors > 0:
        remedy = "drain the node; reset the GPU, and have it replaced if they come back"
        yield fail(subject, f"{errors:.0f} uncorrected memory errors since the driver was loaded", remedy)
    if gpu.text("remapped_rows.failure") == "Yes":
        yield fail(subject, "rows of its memory could not be remapped", "have the GPU replaced")
    if "Yes" in (gpu.text("remapped_rows.pending"), gpu.text("retired_pages.pending")):
        yield warn(subject, "faulty memory is to be taken out at the next reset", "reset the GPU before the run")
    if gpu.text("mig.mode.current") == "Enabled":
        remedy = "turn MIG off for this run (nvidia-smi -mig 0, root), or ask for whole GPUs"
        yield complain(subject, plan.world_size > 1, "divided by MIG: ranks on its parts cannot use NCCL", remedy)
    if gpu.text("compute_mode") == "Prohibited":
        yield fail(subject, "compute mode is Prohibited", "nvidia-smi -c DEFAULT (root)")
    if gpu.text("persistence_mode") == "Disabled":
        remedy = "nvidia-smi -pm 1 (root), or start nvidia-persistenced"
        yield warn(subject, "persistence mode is off: each start of a process first wakes the driver", remedy)
    if gpu.text("ecc.mode.current") == "Disabled":
        yield warn(subject, "ECC is off: say so in hw_notes of the system description", "nvidia-smi -e 1 (root), reset")
    if reasons := gpu.slowed_by:
        remedy = "look at cooling and power supply; nvidia-smi -rac (root) resets application clocks"
        yield warn(subject, f"its clocks are held down: {', '.join(reasons)}", remedy)
    limit, default = gpu.number("power.limit"), gpu.number("power.default_limit")
    if limit and default and limit < default:
        yield warn(subject, f"power limit {limit:.0f} W of {default:.0f} W", f"nvidia-smi -pl {default:.0f} (root)")
    width, full = gpu.number("pcie.link.width.current"), gpu.number("pcie.link.width.max")
    if width and full and width < full:
        yield warn(subject, f"PCIe x{width:.0f} of x{full:.0f}", "reseat the card, or look at the riser and the BIOS")


def _company(host: Host, found: Gpus) -> Iterator[Diagnosis]:
    query = "--query-compute-apps=pid,gpu_uuid,process_name"
    others = nvidia.parse_processes(host.run("nvidia-smi", query, "--format=csv,noheader").answer)
    index = {gpu.text("uuid"): gpu.label for gpu in found.gpus}
    names = [f"{other.name[:60]} (pid {other.pid}) on {index.get(other.uuid, other.uuid)}" for other in others]
    full = [gpu for gpu in found.gpus if (gpu.number("memory.used") or 0) > IDLE_MEMORY_MIB]
    remedy = "end it, or wait; two programs on one GPU make both times wrong"
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield fail("GPU use", f"in use: {', '.join(names[:3])}{more}", remedy)
    elif full:
        held = ", ".join(f"{gpu.label} {gpu.text('memory.used')}" for gpu in full)
        yield fail("GPU use", f"memory is held by processes that this container cannot see: {held}", remedy)
    else:
        yield ok("GPU use", "nobody else is on the GPUs")


def _links(host: Host, found: Gpus) -> Iterator[Diagnosis]:
    if len(found.gpus) == 1:
        return
    kinds = nvidia.parse_topology(host.run("nvidia-smi", "topo", "-m").answer)
    described = nvidia.describe_topology(kinds)
    if not kinds:
        yield warn("GPU links", "nvidia-smi tells no topology", "nvidia-smi topo -m by hand")
    elif any(kind.startswith("NV") for kind in kinds) and len(kinds) > 1:
        remedy = "nvidia-smi nvlink --status; fabric manager must run on machines with NVSwitch"
        yield warn("GPU links", f"some pairs lack NVLink: {described}", remedy)
    elif "SYS" in kinds:
        remedy = "expect slow reductions, or train on the GPUs of one socket"
        yield warn("GPU links", described, remedy)
    else:
        yield ok("GPU links", described)


def _gpu_software(plan: Plan, found: Gpus, pytorch: Mapping[str, Any]) -> Iterator[Diagnosis]:
    if not pytorch:
        remedy = "run `python -c 'import torch'` by hand, and install the packages again (rm -r .venv)"
        yield fail("PyTorch", "it cannot be imported, or gives no answer", remedy)
        return
    cuda, named = pytorch.get("CUDA"), f"PyTorch {pytorch.get('PyTorch')}"
    branch = int(found.driver.partition(".")[0]) if re.match(r"\d+\.", found.driver) else None
    needed = DRIVER_FOR_CUDA.get(int(cuda.partition(".")[0])) if cuda else None
    if not cuda:
        yield fail("PyTorch", f"{named} is built without CUDA", "install the build for CUDA (rm -r .venv, see README)")
    elif branch and needed and branch < needed and not pytorch.get("gpus"):
        remedy = f"update the driver to {needed} or newer, or use a PyTorch for an older CUDA"
        yield fail("PyTorch", f"{named} needs CUDA {cuda}, too new for driver {found.driver}", remedy)
    elif not pytorch.get("gpus"):
        remedy = "look at CUDA_VISIBLE_DEVICES, /dev/nvidia* and, with NVSwitch, nvidia-fabricmanager"
        yield fail("PyTorch", f"{named} sees no GPU, though nvidia-smi lists {len(found.gpus)}", remedy)
    elif pytorch["gpus"] < plan.ranks:
        seen = f"{named} sees {pytorch['gpus']} of {len(found.gpus)} GPUs, and {plan.ranks} are needed"
        yield fail("PyTorch", seen, "look at CUDA_VISIBLE_DEVICES")
    elif not _has_code_for(pytorch):
        remedy = "install a PyTorch that was built for this GPU"
        capability = ".".join(map(str, pytorch["capability"]))
        yield fail("PyTorch", f"{named} has no code for compute capability {capability}", remedy)
    else:
        parts = [f"{name} {pytorch[name]}" for name in ("CUDA", "cuDNN", "NCCL") if pytorch.get(name)]
        yield ok("PyTorch", ", ".join([named, *parts, f"driver {found.driver}"]))


def _has_code_for(pytorch: Mapping[str, Any]) -> bool:
    """Binary code of the same major version and no later minor one, or PTX of an earlier version."""
    capability, architectures = pytorch.get("capability"), pytorch.get("architectures")
    if not capability or not architectures:
        return True
    major, minor = capability
    for kind, version in re.findall(r"(sm|compute)_(\d+)", " ".join(architectures)):
        built = (int(version[:-1]), int(version[-1]))
        if built <= (major, minor) and (kind == "compute" or built[0] == major):
            return True
    return False


def memory(host: Host, plan: Plan) -> Iterator[Diagnosis]:
    """Memory that processes may still take, the shared memory that NCCL and PyTorch want, and swapping."""
    table = dict(re.findall(r"^(\w+):\s+(\d+) kB", host.read("/proc/meminfo"), re.MULTILINE))
    available = int(table.get("MemAvailable", 0)) * 1024
    limit = _cgroup_limit(host)
    free = min(available, limit) if limit else available
    needed = plan.ranks * (4 * GIB if plan.on_gpus else GIB // 2)
    of = " of this container" if limit and limit < available else ""
    if not available:
        yield warn("memory", "how much is free cannot be told", "look at free -g")
    elif free < needed:
        found = f"{free / GIB:.1f} GiB free{of}, {plan.ranks} rank(s) want about {needed / GIB:.0f} GiB"
        yield warn("memory", found, "end other programs, or raise the container's limit")
    else:
        yield ok("memory", f"{free / GIB:.0f} GiB free{of}")
    swapped = (int(table.get("SwapTotal", 0)) - int(table.get("SwapFree", 0))) * 1024
    if swapped > GIB // 4:
        remedy = "swapoff -a (root), or find out who fills memory"
        yield warn("swap", f"{swapped / GIB:.1f} GiB are swapped out", remedy)
    yield from _shared_memory(host, plan)


def _cgroup_limit(host: Host) -> int | None:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = host.read(name)
        if text.isdecimal() and int(text) < 2**60:  # cgroup v1 has nearly 2**63 for no limit
            return int(text)
    return None


def _shared_memory(host: Host, plan: Plan) -> Iterator[Diagnosis]:
    try:
        status = os.statvfs(host.path("/dev/shm"))
    except OSError:
        yield complain("shared memory", plan.ranks > 1, "no /dev/shm", "mount a tmpfs there (docker run --ipc=host)")
        return
    free, needed = status.f_bavail * status.f_frsize, plan.ranks * GIB // 8
    if free < needed and plan.world_size > 1:
        found = f"{free / 2**20:.0f} MiB free in /dev/shm, {plan.ranks} ranks want {needed / 2**20:.0f} MiB"
        yield complain("shared memory", plan.on_gpus, found, "docker run --ipc=host or --shm-size=8g")
    else:
        yield ok("shared memory", f"{free / GIB:.1f} GiB free in /dev/shm")


def processors(host: Host, plan: Plan) -> Iterator[Diagnosis]:
    """Cores for every rank, at full clock, and nobody else on them."""
    cores = _cores(host)
    if cores < plan.ranks:
        remedy = "fewer ranks (NPROC), or ask the scheduler for more cores (--cpus-per-task)"
        yield fail("cores", f"{cores:g} for {plan.ranks} rank(s)", remedy)
    elif plan.on_gpus and cores < 4 * plan.ranks:
        remedy = "ask the scheduler for more (--cpus-per-task): loading and launching need about four a rank"
        yield warn("cores", f"{cores:g} for {plan.ranks} rank(s)", remedy)
    else:
        yield ok("cores", f"{cores:g} for {plan.ranks} rank(s)")
    load = host.read("/proc/loadavg").split(" ")[0]
    if re.fullmatch(r"[\d.]+", load) and float(load) > max(1.0, cores / 4):
        yield warn("load", f"{load} over the last minute on {cores:g} cores", "find out who computes here (top)")
    governors = {
        governor
        for name in host.names("/sys/devices/system/cpu")
        if re.fullmatch(r"cpu\d+", name)
        and (governor := host.read(f"/sys/devices/system/cpu/{name}/cpufreq/scaling_governor"))
    }
    if governors - {"performance"}:
        found = f"frequency governor {', '.join(sorted(governors))}"
        yield warn("cores", found, "cpupower frequency-set --governor performance (root)")
    yield from _numa(host)


def _cores(host: Host) -> float:
    """Cores that this process may use: by affinity, and by the time that its container is given."""
    cores = float(len(os.sched_getaffinity(0)))
    quota = host.read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdecimal() and quota[1].isdecimal() and int(quota[1]):
        cores = min(cores, int(quota[0]) / int(quota[1]))
    return cores


def _numa(host: Host) -> Iterator[Diagnosis]:
    nodes = [name for name in host.names("/sys/devices/system/node") if re.fullmatch(r"node\d+", name)]
    if len(nodes) > 1 and host.read("/proc/sys/kernel/numa_balancing") == "1":
        remedy = "echo 0 > /proc/sys/kernel/numa_balancing (root): ranks are bound to their node already"
        yield warn("NUMA", f"{len(nodes)} nodes, and the kernel moves pages between them while it runs", remedy)
    if host.read("/sys/kernel/mm/transparent_hugepage/enabled").endswith("[never]"):
        remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (root)"
        yield warn("huge pages", "transparent huge pages are off: more misses in address translation", remedy)


def limits(host: Host, plan: Plan) -> Iterator[Diagnosis]:
    """Limits of a process: pinned memory for network cards, and open files."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if plan.nodes > 1 and adapter_ports(host) and locked != resource.RLIM_INFINITY and locked < 4 * GIB:
        remedy = "ulimit -l unlimited (limits.conf, LimitMEMLOCK=infinity of slurmd, docker --ulimit memlock=-1)"
        yield fail("limits", f"a process may lock {locked >> 10} KiB, and RDMA locks what it sends", remedy)
    if files < 1024:
        yield warn("limits", f"{files} open files a process, at most {most}", "ulimit -n 65536")
    else:
        yield ok("limits", f"{files} open files a process")


def network(host: Host, plan: Plan) -> Iterator[Diagnosis]:
    """Ports with RDMA, this host's name, and the port on which ranks meet."""
    ports = adapter_ports(host)
    active = [port for port in ports if port.state == "ACTIVE"]
    down = [f"{port.name} {port.state or 'unknown'}" for port in ports if port.state != "ACTIVE"]
    rates = Counter(port.rate for port in active)
    several = plan.nodes > 1
    if ports and not active:
        remedy = "look at cables and the subnet manager (ibstat, ibdiagnet)"
        yield complain("network", several, f"no port with RDMA is up: {', '.join(down)}", remedy)
    elif down:
        remedy = "look at the cable and the switch, or leave it out with NCCL_IB_HCA"
        yield warn("network", f"{len(active)} of {len(ports)} ports are up, but not {', '.join(down)}", remedy)
    elif len(rates) > 1:
        found = ", ".join(f"{count}x {rate}" for rate, count in rates.items())
        yield warn("network", f"ports of different rates: {found}", "name those of one rate in NCCL_IB_HCA")
    elif ports:
        yield ok("network", f"{len(ports)} ports with RDMA, {ports[0].rate}")
    elif several and plan.on_gpus:
        remedy = "load the driver of the adapters (mlx5_ib), and give the container /dev/infiniband"
        yield warn("network", "no adapter with RDMA: ranks of different nodes would talk over TCP", remedy)
    else:
        yield ok("network", "no adapter with RDMA, and one node needs none" if not several else "TCP")
    if ports and not host.names("/dev/infiniband"):
        remedy = "start the container with --device=/dev/infiniband, or privileged"
        yield complain("network", several, "the adapters are here, but not /dev/infiniband", remedy)
    if several:
        yield from _meeting(host)


def _meeting(host: Host) -> Iterator[Diagnosis]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    if not address or address.startswith("127."):
        found = f"this host's name, {name}, stands for {address or 'no address'}, and other nodes cannot reach that"
        yield warn("host name", found, "set MASTER_ADDR to an address of the first node, or correct /etc/hosts")
    port = host.environment.get("MASTER_PORT", "29500")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        yield fail("port", f"MASTER_PORT is {port!r}", "expected a number from 1 to 65535")
        return
    with socket.socket() as probe:
        # Connections of an earlier run that have not been forgotten yet do not keep the port from being listened on.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            remedy = "end what listens there (ss -ltnp), or set MASTER_PORT to a free one on all nodes"
            yield fail("port", f"{port}, where ranks would meet, is not free: {error.strerror}", remedy)
        else:
            yield ok("port", f"{port} is free; it matters on the first node only")
