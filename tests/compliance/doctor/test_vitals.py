import dataclasses
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compliance.doctor import gpus, vitals
from compliance.doctor.accelerators import accelerators
from compliance.doctor.diagnosis import Diagnosis
from compliance.doctor.host import ExaminedHost, Output
from compliance.doctor.layout import RunLayout
from compliance.doctor.vitals import ClockReading, limits, memory, network, processors
from tests.compliance.doctor import fake_host as fake
from tests.compliance.doctor.fake_host import expect, fake_host

NODE = RunLayout("h100_1x8", {"training": {"device": "cuda"}, "log": {"division": "closed"}}, 1, 8)
NODES = dataclasses.replace(NODE, nodes=2)
CPU = RunLayout("tiny_cpu", {"training": {"device": "cpu"}, "log": {"division": "open"}}, 1, 2)
PYTORCH: dict[str, Any] = {
    "PyTorch": "2.13.0+cu130",
    "CUDA": "13.0",
    "cuDNN": "9.14.0",
    "NCCL": "2.28.9",
    "gpus": 8,
    "architectures": ["sm_80", "sm_90", "sm_100", "compute_120"],
    "capability": [9, 0],
}

# The clock

NOW = 1_800_000_000.0
CHRONY = "A29FC87B,time.example.org,3,1795229404.1,0.000012,0.0001,0.0002,-12.1,0.001,0.05,0.01,0.001,64.2,{}\n"
UNKEPT = ClockReading(NOW, 0.0, False, 16.0)


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        (ClockReading(NOW, 0.0, True, 0.012), "ok clock: kept right, at most 12 ms off"),
        (ClockReading(5.0, 0.0, True, 0.0), "fail clock: it says 1970-01-01 00:00 UTC, which cannot be"),
        (ClockReading(-5.0, 0.0, True, 0.0), "fail clock: which cannot be"),
        (ClockReading(NOW - 100, 0.0, True, 0.0), "fail clock: which cannot be"),
        (ClockReading(5e9, 0.0, True, 0.0), "fail clock: 2128-"),
        (ClockReading(NOW, 0.4, True, 0.0), "fail clock: +400 ms against the monotonic clock"),
        (ClockReading(NOW, -0.05, True, 0.0), "fail clock: -50 ms against the monotonic clock"),
        (ClockReading(NOW, 0.001, True, 0.0), "ok clock: kept right"),
        (ClockReading(NOW, 0.0, True, 7.0), "warn clock: perhaps 7 s off"),
        (UNKEPT, "warn clock: nobody keeps the clock right; logs of several nodes"),
        (ClockReading(NOW, 0.0, None, 0.0), "warn clock: cannot be told"),
    ],
)
def test_clocks(tmp_path: Path, reading: ClockReading, expected: str) -> None:
    expect(vitals.clock(fake_host(tmp_path), NODES, reading, NOW - 1), expected, about="clock")


@pytest.mark.parametrize(
    ("files", "answers", "expected"),
    [
        ({}, {"timedatectl": "yes\n"}, "ok clock: kept right by the system's time service"),
        ({}, {"timedatectl": "no\n", "chronyc": CHRONY.format("Normal")}, "ok clock: by chrony (time.example.org)"),
        ({}, {"chronyc": CHRONY.format("Not synchronised")}, "warn clock: "),
        ({}, {"chronyc": Output(trouble="chronyc gave no answer within 5 s")}, "warn clock: "),
        ({"/run/systemd/timesync/synchronized": ""}, {}, "ok clock: kept right by systemd-timesyncd"),
        ({}, {"timedatectl": Output("yes", "timedatectl failed with status 1")}, "warn clock: "),
    ],
)
def test_who_keeps_the_clock(
    tmp_path: Path, files: dict[str, str], answers: dict[str, str | Output], expected: str
) -> None:
    expect(vitals.clock(fake_host(tmp_path, files, answers), NODE, UNKEPT, NOW - 1), expected, about="clock")


def test_this_machines_clock_can_be_read() -> None:
    reading = vitals.read_clock()
    assert abs(reading.drift_s) < 1
    assert reading.now > 1.7e9
    assert reading.is_synchronised in (True, False, None)


@pytest.mark.parametrize(("state", "is_synchronised"), [(0, True), (1, True), (5, False), (-1, None)])
def test_what_the_kernel_says_of_its_clock(
    monkeypatch: pytest.MonkeyPatch, state: int, is_synchronised: bool | None
) -> None:
    class Library:
        def adjtimex(self, timex: Any) -> int:
            assert timex.raw[:4] == bytes(4)  # modes: nothing is set
            struct.pack_into("@Illlli", timex, 0, 0, 111, 222, 33_000, 444, 0)
            return state

    monkeypatch.setattr(vitals.ctypes, "CDLL", lambda _: Library())
    reading = vitals.read_clock()
    assert (reading.is_synchronised, reading.max_error_s) == (is_synchronised, 0.033)


# GPUs


EIGHT, LINKED = fake.smi(), fake.topology()


def look_at_gpus(
    root: Path,
    rows: str | Output = EIGHT,
    plan: RunLayout = NODE,
    pytorch: dict[str, Any] = PYTORCH,
    topology: str = LINKED,
    processes: str = "",
) -> list[Diagnosis]:
    """Return what is said of GPUs with these rows of nvidia-smi, one that fails being an `Output`."""
    answers = {"--query-gpu": rows, "topo": topology, "--query-compute-apps": processes}
    host = fake_host(root, answers=answers)
    return list(accelerators(host, plan, gpus.query(host), pytorch))


def test_a_healthy_node(tmp_path: Path) -> None:
    found = look_at_gpus(tmp_path)
    expect(found)
    assert found[0].found == "8x NVIDIA H100 80GB HBM3, driver 580.65.06"
    assert found[-1].found == "PyTorch 2.13.0+cu130, CUDA 13.0, cuDNN 9.14.0, NCCL 2.28.9, driver 580.65.06"


ONE_RANK = dataclasses.replace(NODE, recipe="h100_1x1", ranks=1)
FAILED = Output("NVIDIA-SMI has failed: driver not running\n", "nvidia-smi failed with status 9")
HALF_LINKED = LINKED.replace("NV18\tNV18\tPXB", "NV18\tSYS\tPXB")


@pytest.mark.parametrize(
    ("about", "changes", "expected"),
    [
        ("", {"rows": fake.smi(8, {"ecc.errors.uncorrected.volatile.total": "[N/A]"})}, []),
        ("", {"plan": CPU}, []),
        ("", {"plan": CPU, "rows": fake.MISSING}, []),
        ("", {"rows": fake.MISSING}, ["fail GPUs: no nvidia-smi here"]),
        ("", {"rows": FAILED}, ["fail GPUs: driver not running"]),
        ("", {"rows": Output(trouble="no answer within 20 s")}, ["fail GPUs: no answer within 20 s"]),
        ("", {"rows": fake.smi(4), "pytorch": PYTORCH | {"gpus": 4}}, ["fail GPUs: 4x", "fail PyTorch: sees 4 of 4"]),
        ("", {"rows": fake.smi(7) + fake.smi_row(7, {"name": "T400"})}, ["fail GPUs: of several kinds: 7x"]),
        ("", {"rows": fake.smi(16)}, ["warn GPUs: 16x"]),
        ("", {"rows": fake.smi(8, {"name": "NVIDIA A100-SXM4-80GB"})}, ["warn GPU kind: made for H100"]),
        (
            "",
            {"plan": ONE_RANK, "rows": fake.smi(1, {"mig.mode.current": "Enabled"}), "pytorch": PYTORCH | {"gpus": 1}},
            ["warn GPU 0: divided by MIG"],
        ),
        (
            "",
            {"processes": "4711, GPU-3, /usr/bin/python3\n"},
            ["fail GPU use: in use: /usr/bin/python3 (pid 4711) on GPU 3"],
        ),
        (
            "",
            {"rows": fake.smi(7) + fake.smi_row(7, {"memory.used": "40000 MiB"})},
            ["fail GPU use: that this container cannot see: GPU 7 40000 MiB"],
        ),
        ("GPU links", {}, ["ok GPU links: every GPU to every other: 18 NVLinks"]),
        ("GPU links", {"topology": fake.topology(between="SYS")}, ["warn GPU links: PCIe across NUMA nodes"]),
        ("GPU links", {"topology": fake.topology(between="PHB")}, ["ok GPU links: PCIe host bridge"]),
        ("GPU links", {"topology": HALF_LINKED}, ["warn GPU links: some pairs lack NVLink"]),
        ("GPU links", {"topology": ""}, ["warn GPU links: no topology"]),
    ],
)
def test_gpus_of_a_node(tmp_path: Path, about: str, changes: dict[str, Any], expected: list[str]) -> None:
    expect(look_at_gpus(tmp_path, **changes), *expected, about=about)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ecc.errors.uncorrected.volatile.total", "3", "fail GPU 5: 3 uncorrected memory errors"),
        ("remapped_rows.failure", "Yes", "fail GPU 5: could not be remapped"),
        ("remapped_rows.pending", "Yes", "warn GPU 5: at the next reset"),
        ("retired_pages.pending", "Yes", "warn GPU 5: at the next reset"),
        ("mig.mode.current", "Enabled", "fail GPU 5: divided by MIG"),
        ("compute_mode", "Prohibited", "fail GPU 5: compute mode is Prohibited"),
        ("persistence_mode", "Disabled", "warn GPU 5: persistence mode is off"),
        ("ecc.mode.current", "Disabled", "warn GPU 5: ECC is off"),
        (
            "clocks_event_reasons.active",
            "0x0000000000000048",
            "warn GPU 5: hardware slowdown, hardware thermal slowdown",
        ),
        ("power.limit", "500.00 W", "warn GPU 5: power limit 500 W of 700 W"),
        ("pcie.link.width.current", "8", "warn GPU 5: PCIe x8 of x16"),
    ],
)
def test_one_sick_gpu_is_named(tmp_path: Path, name: str, value: str, expected: str) -> None:
    rows = "".join(fake.smi_row(index, {name: value} if index == 5 else {}) + "\n" for index in range(8))
    expect(look_at_gpus(tmp_path, rows), expected)


@pytest.mark.parametrize(
    ("pytorch", "driver", "expected"),
    [
        (None, "580.65.06", "fail PyTorch: cannot be imported"),
        ({"CUDA": None}, "580.65.06", "fail PyTorch: built without CUDA"),
        ({"gpus": 0}, "550.54.15", "fail PyTorch: driver 550.54.15 is too old for CUDA 13.0"),
        ({"gpus": 0}, "580.65.06", "fail PyTorch: sees no GPU, though nvidia-smi lists 8"),
        ({"gpus": 8}, "550.54.15", "ok PyTorch: driver 550.54.15"),  # NVIDIA's forward compatibility package
        ({"gpus": 4}, "580.65.06", "fail PyTorch: sees 4 of 8 GPUs, and 8 are needed"),
        ({"architectures": ["sm_80", "sm_86"]}, "580.65.06", "fail PyTorch: no code for compute capability 9.0"),
        ({"architectures": ["sm_80", "compute_80"]}, "580.65.06", "ok PyTorch: PyTorch 2.13.0"),
        ({"architectures": ["sm_90a"]}, "580.65.06", "ok PyTorch: PyTorch 2.13.0"),
        ({"architectures": ["sm_100", "compute_120"]}, "580.65.06", "fail PyTorch: no code"),
        ({"architectures": [], "capability": None}, "580.65.06", "ok PyTorch: PyTorch 2.13.0"),
    ],
)
def test_pytorch_and_driver(tmp_path: Path, pytorch: dict[str, Any] | None, driver: str, expected: str) -> None:
    rows = fake.smi(changes={"driver_version": driver})
    expect(
        look_at_gpus(tmp_path, rows, pytorch={} if pytorch is None else PYTORCH | pytorch), expected, about="PyTorch"
    )


def test_what_triton_lacks_fails_before_a_run(tmp_path: Path) -> None:
    lacks = {"Triton lacks": [["no C compiler", "install gcc"], ["no libcuda.so.1", "run ldconfig"]]}
    expect(look_at_gpus(tmp_path, pytorch=PYTORCH | lacks), "fail Triton: C compiler", "fail Triton: libcuda.so.1")


# Memory, processors, limits, network

UNLIMITED = vitals.resource.RLIM_INFINITY
FREE = (
    "MemTotal: 2113462180 kB\nMemFree: 1 kB\nMemAvailable: 2000000000 kB\nSwapTotal: 8388604 kB\nSwapFree: 8388604 kB\n"
)
MEMINFO = "/proc/meminfo"
MEMORY = {MEMINFO: FREE}
CGROUP, CGROUP_1 = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"
LOAD = "/proc/loadavg"
GOVERNOR = "/sys/devices/system/cpu/cpu1/cpufreq/scaling_governor"
BALANCED = {"/proc/sys/kernel/numa_balancing": "1\n", "/sys/devices/system/node/node0/x": ""}
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
PORTS, DOWN = fake.infiniband(), fake.infiniband(state="1: DOWN")
DEVICE = {"/dev/infiniband/uverbs0": ""}
PORT = "/sys/class/infiniband/mlx5_3/ports/1"


@pytest.mark.parametrize(
    ("check", "plan", "files", "facts", "expected"),
    [
        (memory, CPU, MEMORY, {}, ""),
        (memory, NODE, {MEMINFO: FREE.replace("2000000000", "2000000")}, {}, "warn memory: 1.9 GiB free, 8 rank(s)"),
        (memory, NODE, MEMORY | {CGROUP: "2147483648\n"}, {}, "warn memory: 2.0 GiB free of this container"),
        (memory, NODE, MEMORY | {CGROUP: "max\n"}, {}, ""),
        (memory, NODE, MEMORY | {CGROUP_1: "9223372036854771712"}, {}, ""),
        (memory, NODE, {MEMINFO: FREE.replace("Free: 8388604", "Free: 4")}, {}, "warn swap: 8.0 GiB are swapped out"),
        (memory, NODE, {}, {}, "warn memory: cannot be told"),
        (memory, NODE, MEMORY, {"shm_mib": 1023}, "fail shared memory: 1023 MiB free in /dev/shm"),
        (memory, NODE, MEMORY, {"shm_mib": 1024}, ""),
        (memory, CPU, MEMORY, {"shm_mib": 64}, "warn shared memory: 2 ranks want 256 MiB"),
        (memory, NODE, MEMORY, {"shm_mib": None}, "fail shared memory: no /dev/shm"),
        (processors, NODE, {}, {}, ""),
        (processors, NODE, {}, {"cores": 16}, "warn cores: 16 for 8 rank(s)"),
        (processors, NODE, {}, {"cores": 4}, "fail cores: 4 for 8 rank(s)"),
        (processors, CPU, {}, {"cores": 2}, ""),
        (processors, NODE, {"/sys/fs/cgroup/cpu.max": "400000 100000"}, {}, "fail cores: 4 for 8 rank(s)"),
        (processors, NODE, {"/sys/fs/cgroup/cpu.max": "max 100000"}, {}, ""),
        (processors, NODE, {LOAD: "97.02 3.0 2.0 1/500 4711"}, {}, "warn load: 97.02"),
        (processors, NODE, {LOAD: "2.02 3.0 2.0 1/500 4711"}, {}, ""),
        (processors, NODE, {GOVERNOR: "powersave\n"}, {}, "warn cores: frequency governor powersave"),
        (processors, NODE, {GOVERNOR: "performance\n"}, {}, ""),
        (processors, NODE, BALANCED | {"/sys/devices/system/node/node1/x": ""}, {}, "warn NUMA: 2 nodes"),
        (processors, NODE, BALANCED, {}, ""),
        (processors, NODE, {HUGE_PAGES: "always madvise [never]\n"}, {}, "warn huge pages: are off"),
        (processors, NODE, {HUGE_PAGES: "always [madvise] never\n"}, {}, ""),
        (limits, NODES, PORTS, {}, ""),
        (limits, NODES, PORTS, {"locked": 8 << 20}, "fail limits: a process may lock 8192 KiB"),
        (limits, NODES, {}, {"locked": 8 << 20}, ""),
        (limits, NODE, PORTS, {"locked": 8 << 20}, ""),
        (limits, NODE, {}, {"open_files": 1023}, "warn limits: 1023 open files"),
        (limits, NODE, {}, {"open_files": 1024}, ""),
        (network, NODES, PORTS | DEVICE, {}, ""),
        (network, NODES, PORTS, {}, "fail network: but not /dev/infiniband"),
        (network, NODES, DOWN | DEVICE, {}, "fail network: no port with RDMA is up: mlx5_0 port 1 DOWN"),
        (network, NODE, DOWN | DEVICE, {}, "warn network: no port with RDMA is up"),
        (network, NODES, PORTS | DEVICE | {f"{PORT}/state": "2: INIT"}, {}, "warn network: but not mlx5_3 port 1 INIT"),
        (
            network,
            NODES,
            PORTS | DEVICE | {f"{PORT}/rate": "200 Gb/sec"},
            {},
            "warn network: 7x 400 Gb/sec (4X NDR), 1x",
        ),
        (network, NODES, {}, {}, "warn network: no adapter with RDMA"),
        (network, NODE, {}, {}, ""),
        (network, NODES, PORTS | DEVICE, {"address": "127.0.1.1"}, "warn host name: stands for 127.0.1.1"),
        (network, NODES, PORTS | DEVICE, {"address": None}, "warn host name: stands for no address"),
    ],
)
def test_the_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[[ExaminedHost, RunLayout], Iterator[Diagnosis]],
    plan: RunLayout,
    files: dict[str, str],
    facts: dict[str, Any],
    expected: str,
) -> None:
    """`facts`: what the kernel says of this process by other ways than files, where it is not what a run wants."""
    kernel = {
        "cores": 128,
        "shm_mib": 1 << 20,
        "locked": UNLIMITED,
        "open_files": 1 << 16,
        "address": "10.1.2.3",
    } | facts

    def statvfs(_: Path) -> Any:
        if kernel["shm_mib"] is None:
            raise FileNotFoundError
        return SimpleNamespace(f_frsize=4096, f_bavail=kernel["shm_mib"] * 256)

    def resolve(_: str) -> str:
        if kernel["address"] is None:
            raise socket.gaierror
        return kernel["address"]

    given = {vitals.resource.RLIMIT_MEMLOCK: kernel["locked"], vitals.resource.RLIMIT_NOFILE: kernel["open_files"]}
    monkeypatch.setattr(vitals.os, "sched_getaffinity", lambda _: set(range(kernel["cores"])))
    monkeypatch.setattr(vitals.os, "statvfs", statvfs)
    monkeypatch.setattr(vitals.resource, "getrlimit", lambda which: (given[which], 1 << 20))
    monkeypatch.setattr(vitals.socket, "gethostbyname", resolve)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    expect(check(fake_host(tmp_path, files, environment={"MASTER_PORT": port}), plan), *filter(None, [expected]))


def ports_said(root: Path, monkeypatch: pytest.MonkeyPatch, port: object) -> list[Diagnosis]:
    monkeypatch.setattr(vitals.socket, "gethostbyname", lambda _: "10.1.2.3")
    return list(vitals.network(fake_host(root, PORTS | DEVICE, environment={"MASTER_PORT": str(port)}), NODES))


@pytest.mark.parametrize("text", ["0", "65536", "http", ""])
def test_a_port_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    expect(ports_said(tmp_path, monkeypatch, text), f"fail port: MASTER_PORT is {text!r}")


def test_a_port_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        expect(ports_said(tmp_path, monkeypatch, other.getsockname()[1]), "fail port: is not free")


def test_a_port_that_an_earlier_run_used_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server, socket.socket() as client:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        client.connect(("127.0.0.1", port))
        server.accept()[0].close()  # the side that closes first keeps the port in TIME_WAIT
        client.recv(1)
    expect(ports_said(tmp_path, monkeypatch, port))
