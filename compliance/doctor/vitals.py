"""Check what `doctor` looks at in the machine: clock, memory, processors, network, limits.

Each check takes an `ExaminedHost` and the `RunLayout` of the run and yields `Diagnosis`
after `Diagnosis`; none raises for what is missing.
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
from collections.abc import Iterator
from dataclasses import dataclass

from compliance.doctor.diagnosis import Diagnosis, fail, fail_or_warn, ok, warn
from compliance.doctor.host import ExaminedHost
from compliance.doctor.layout import RunLayout
from compliance.doctor.system import adapter_ports

GIB = 2**30

CLOCK_WATCHED_S = 0.2
MAX_DRIFT_S = 0.01
MAX_CLOCK_ERROR_S = 1.0


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
    # Longer than the structure is on any Linux, which is all that the call asks for.
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
        # Of the two looks at the monotonic clock the mean is the moment at which the other one was read.
        begin, wall, end = time.monotonic(), time.time(), time.monotonic()
        looks.append((end - begin, wall - (begin + end) / 2))
    return min(looks)[1]


def clock(host: ExaminedHost, layout: RunLayout, reading: ClockReading, not_before: float) -> Iterator[Diagnosis]:
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
    across = "; logs of several nodes then tell different times" if layout.nodes > 1 else ""
    yield warn("clock", found + across, remedy)


def _time_keeper(host: ExaminedHost) -> str:
    """Name who says that the clock is synchronised, "" when nobody does."""
    if host.run("timedatectl", "show", "--property=NTPSynchronized", "--value", timeout_s=5).answer.strip() == "yes":
        return "the system's time service"
    tracking = host.run("chronyc", "-c", "tracking", timeout_s=5).answer.strip().split(",")
    # Fields by commas, of which the last is "Normal" while the clock is kept.
    if tracking[-1] == "Normal" and len(tracking) > 4:
        return f"chrony ({tracking[1]})"
    return "systemd-timesyncd" if host.path("/run/systemd/timesync/synchronized").exists() else ""


def memory(host: ExaminedHost, layout: RunLayout) -> Iterator[Diagnosis]:
    """Memory that processes may still take, the shared memory that NCCL and PyTorch want, and swapping."""
    table = dict(re.findall(r"^(\w+):\s+(\d+) kB", host.read("/proc/meminfo"), re.MULTILINE))
    available = int(table.get("MemAvailable", 0)) * 1024
    # /proc/meminfo is the host's, and knows nothing of a container's limit.
    limit = _cgroup_limit(host)
    free = min(available, limit) if limit else available
    needed = layout.ranks * (4 * GIB if layout.on_gpus else GIB // 2)
    of = " of this container" if limit and limit < available else ""
    if not available:
        yield warn("memory", "how much is free cannot be told", "look at free -g")
    elif free < needed:
        found = f"{free / GIB:.1f} GiB free{of}, {layout.ranks} rank(s) want about {needed / GIB:.0f} GiB"
        yield warn("memory", found, "end other programs, or raise the container's limit")
    else:
        yield ok("memory", f"{free / GIB:.0f} GiB free{of}")
    swapped = (int(table.get("SwapTotal", 0)) - int(table.get("SwapFree", 0))) * 1024
    if swapped > GIB // 4:
        remedy = "swapoff -a (root), or find out who fills memory"
        yield warn("swap", f"{swapped / GIB:.1f} GiB are swapped out", remedy)
    yield from _shared_memory(host, layout)


def _cgroup_limit(host: ExaminedHost) -> int | None:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = host.read(name)
        if text.isdecimal() and int(text) < 2**60:  # cgroup v1 has nearly 2**63 for no limit
            return int(text)
    return None


def _shared_memory(host: ExaminedHost, layout: RunLayout) -> Iterator[Diagnosis]:
    try:
        status = os.statvfs(host.path("/dev/shm"))
    except OSError:
        yield fail_or_warn(
            "shared memory", layout.ranks > 1, "no /dev/shm", "mount a tmpfs there (docker run --ipc=host)"
        )
        return
    # f_bavail: what root alone may take is no use to a rank.
    free, needed = status.f_bavail * status.f_frsize, layout.ranks * GIB // 8
    if free < needed and layout.world_size > 1:
        found = f"{free / 2**20:.0f} MiB free in /dev/shm, {layout.ranks} ranks want {needed / 2**20:.0f} MiB"
        yield fail_or_warn("shared memory", layout.on_gpus, found, "docker run --ipc=host or --shm-size=8g")
    else:
        yield ok("shared memory", f"{free / GIB:.1f} GiB free in /dev/shm")


def processors(host: ExaminedHost, layout: RunLayout) -> Iterator[Diagnosis]:
    """Cores for every rank, at full clock, and nobody else on them."""
    cores = _cores(host)
    if cores < layout.ranks:
        remedy = "fewer ranks (NPROC), or ask the scheduler for more cores (--cpus-per-task)"
        yield fail("cores", f"{cores:g} for {layout.ranks} rank(s)", remedy)
    elif layout.on_gpus and cores < 4 * layout.ranks:
        remedy = "ask the scheduler for more (--cpus-per-task): loading and launching need about four a rank"
        yield warn("cores", f"{cores:g} for {layout.ranks} rank(s)", remedy)
    else:
        yield ok("cores", f"{cores:g} for {layout.ranks} rank(s)")
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


def _cores(host: ExaminedHost) -> float:
    """Cores that this process may use: by affinity, and by the time that its container is given."""
    cores = float(len(os.sched_getaffinity(0)))
    # cgroup v2: "max" in place of a quota is no limit.
    quota = host.read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdecimal() and quota[1].isdecimal() and int(quota[1]):
        cores = min(cores, int(quota[0]) / int(quota[1]))
    return cores


def _numa(host: ExaminedHost) -> Iterator[Diagnosis]:
    nodes = [name for name in host.names("/sys/devices/system/node") if re.fullmatch(r"node\d+", name)]
    if len(nodes) > 1 and host.read("/proc/sys/kernel/numa_balancing") == "1":
        remedy = "echo 0 > /proc/sys/kernel/numa_balancing (root): ranks are bound to their node already"
        yield warn("NUMA", f"{len(nodes)} nodes, and the kernel moves pages between them while it runs", remedy)
    # The value in brackets holds, and never is the last of the list.
    if host.read("/sys/kernel/mm/transparent_hugepage/enabled").endswith("[never]"):
        remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (root)"
        yield warn("huge pages", "transparent huge pages are off: more misses in address translation", remedy)


def limits(host: ExaminedHost, layout: RunLayout) -> Iterator[Diagnosis]:
    """Limits of a process: pinned memory for network cards, and open files."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Only where there are adapters: TCP locks no memory.
    if layout.nodes > 1 and adapter_ports(host) and locked != resource.RLIM_INFINITY and locked < 4 * GIB:
        remedy = "ulimit -l unlimited (limits.conf, LimitMEMLOCK=infinity of slurmd, docker --ulimit memlock=-1)"
        yield fail("limits", f"a process may lock {locked >> 10} KiB, and RDMA locks what it sends", remedy)
    if files < 1024:
        yield warn("limits", f"{files} open files a process, at most {most}", "ulimit -n 65536")
    else:
        yield ok("limits", f"{files} open files a process")


def network(host: ExaminedHost, layout: RunLayout) -> Iterator[Diagnosis]:
    """Ports with RDMA, this host's name, and the port on which ranks meet."""
    ports = adapter_ports(host)
    active = [port for port in ports if port.state == "ACTIVE"]
    down = [f"{port.name} {port.state or 'unknown'}" for port in ports if port.state != "ACTIVE"]
    rates = Counter(port.rate for port in active)
    several = layout.nodes > 1
    if ports and not active:
        remedy = "look at cables and the subnet manager (ibstat, ibdiagnet)"
        yield fail_or_warn("network", several, f"no port with RDMA is up: {', '.join(down)}", remedy)
    elif down:
        remedy = "look at the cable and the switch, or leave it out with NCCL_IB_HCA"
        yield warn("network", f"{len(active)} of {len(ports)} ports are up, but not {', '.join(down)}", remedy)
    elif len(rates) > 1:
        found = ", ".join(f"{count}x {rate}" for rate, count in rates.items())
        yield warn("network", f"ports of different rates: {found}", "name those of one rate in NCCL_IB_HCA")
    elif ports:
        yield ok("network", f"{len(ports)} ports with RDMA, {ports[0].rate}")
    elif several and layout.on_gpus:
        remedy = "load the driver of the adapters (mlx5_ib), and give the container /dev/infiniband"
        yield warn("network", "no adapter with RDMA: ranks of different nodes would talk over TCP", remedy)
    else:
        yield ok("network", "no adapter with RDMA, and one node needs none" if not several else "TCP")
    if ports and not host.names("/dev/infiniband"):
        remedy = "start the container with --device=/dev/infiniband, or privileged"
        yield fail_or_warn("network", several, "the adapters are here, but not /dev/infiniband", remedy)
    if several:
        yield from _master_address(host)


def _master_address(host: ExaminedHost) -> Iterator[Diagnosis]:
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
