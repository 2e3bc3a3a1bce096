import dataclasses
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from compliance.doctor import gpus, vitals
from compliance.doctor.diagnosis import Diagnosis
from compliance.doctor.host import Host, Output
from compliance.doctor.plan import Plan
from compliance.doctor.vitals import ClockReading
from tests.compliance.doctor import fake_host as fake
from tests.compliance.doctor.fake_host import fake_host

GPU_PLAN = Plan("h100_1x8", {"training": {"device": "cuda"}, "log": {"division": "closed"}}, 1, 8)
TWO_NODES = dataclasses.replace(GPU_PLAN, nodes=2)
CPU_PLAN = Plan("tiny_cpu", {"training": {"device": "cpu"}, "log": {"division": "open"}}, 1, 2)
PYTORCH: dict[str, Any] = {
    "PyTorch": "2.13.0+cu130",
    "CUDA": "13.0",
    "cuDNN": "9.14.0",
    "NCCL": "2.28.9",
    "gpus": 8,
    "architectures": ["sm_80", "sm_90", "sm_100", "compute_120"],
    "capability": [9, 0],
}
NOW = 1_800_000_000.0
STEADY = ClockReading(NOW, 0.0, True, 0.012)
MEMINFO = (
    "MemTotal: 2113462180 kB\nMemFree: 1 kB\nMemAvailable: 2000000000 kB\nSwapTotal: 8388604 kB\nSwapFree: 8388604 kB\n"
)


def only(diagnoses: Iterable[Diagnosis]) -> Diagnosis:
    (one,) = diagnoses
    return one


def bad(diagnoses: Iterable[Diagnosis]) -> list[tuple[str, str]]:
    """(state, subject) of what is not ok; each of those must say what to do, and each that is ok must not."""
    found = list(diagnoses)
    assert found
    assert all(bool(one.remedy) == (one.state != "ok") for one in found), found
    return [(one.state, one.subject) for one in found if one.state != "ok"]


def look_at_gpus(host: Host, plan: Plan = GPU_PLAN, pytorch: dict[str, Any] | None = None) -> list[Diagnosis]:
    return list(vitals.accelerators(host, plan, gpus.query(host), PYTORCH if pytorch is None else pytorch))


def gpu_host(root: Path, rows: str | None = None, **more: str | Output) -> Host:
    answers: dict[str, str | Output] = {word.replace("_", "-"): answer for word, answer in more.items()}
    answers |= {"nvidia-smi --query-gpu": rows or fake.smi(), "nvidia-smi topo": fake.topology()}
    return fake_host(root, answers=answers)


# The clock


def test_a_clock_that_the_kernel_calls_synchronised(tmp_path: Path) -> None:
    one = only(vitals.clock(fake_host(tmp_path), GPU_PLAN, STEADY, NOW - 1))
    assert (one.state, one.found) == ("ok", "kept right, at most 12 ms off")


@pytest.mark.parametrize(
    ("reading", "state", "words"),
    [
        (ClockReading(5.0, 0.0, True, 0.0), "fail", "1970-01-01 00:00 UTC, which cannot be"),
        (ClockReading(-5.0, 0.0, True, 0.0), "fail", "which cannot be"),
        (ClockReading(NOW - 100, 0.0, True, 0.0), "fail", "which cannot be"),
        (ClockReading(5e9, 0.0, True, 0.0), "fail", "2128-"),
        (ClockReading(NOW, 0.4, True, 0.0), "fail", "+400 ms against the monotonic clock"),
        (ClockReading(NOW, -0.05, True, 0.0), "fail", "-50 ms against the monotonic clock"),
        (ClockReading(NOW, 0.001, True, 0.0), "ok", "kept right"),
        (ClockReading(NOW, 0.0, True, 7.0), "warn", "perhaps 7 s off"),
        (ClockReading(NOW, 0.0, False, 16.0), "warn", "nobody keeps the clock right"),
        (ClockReading(NOW, 0.0, None, 0.0), "warn", "cannot be told"),
    ],
)
def test_clocks(tmp_path: Path, reading: ClockReading, state: str, words: str) -> None:
    one = only(vitals.clock(fake_host(tmp_path), GPU_PLAN, reading, NOW - 1))
    assert one.state == state
    assert words in one.found


CHRONY = "A29FC87B,time.example.org,3,1795229404.1,0.000012,0.0001,0.0002,-12.1,0.001,0.05,0.01,0.001,64.2,{}\n"


@pytest.mark.parametrize(
    ("files", "answers", "keeper"),
    [
        ({}, {"timedatectl": "yes\n"}, "the system's time service"),
        ({}, {"timedatectl": "no\n", "chronyc": CHRONY.format("Normal")}, "chrony (time.example.org)"),
        ({}, {"chronyc": CHRONY.format("Not synchronised")}, None),
        ({}, {"chronyc": Output(trouble="chronyc gave no answer within 5 s")}, None),
        ({"/run/systemd/timesync/synchronized": ""}, {}, "systemd-timesyncd"),
        ({}, {"timedatectl": Output("yes", "timedatectl failed with status 1")}, None),
    ],
)
def test_who_keeps_the_clock(
    tmp_path: Path, files: dict[str, str], answers: dict[str, str | Output], keeper: str | None
) -> None:
    host = fake_host(tmp_path, files, answers)
    one = only(vitals.clock(host, TWO_NODES, ClockReading(NOW, 0.0, False, 16.0), NOW - 1))
    assert one.found == (f"kept right by {keeper}" if keeper else one.found)
    assert (one.state == "ok") == (keeper is not None)
    assert keeper or "several nodes" in one.found


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
    assert reading.is_synchronised is is_synchronised
    assert reading.max_error_s == 0.033


# GPUs


def test_a_healthy_node(tmp_path: Path) -> None:
    found = look_at_gpus(gpu_host(tmp_path))
    assert bad(found) == []
    assert found[0].found == "8x NVIDIA H100 80GB HBM3, driver 580.65.06"
    assert found[-1].found == "PyTorch 2.13.0+cu130, CUDA 13.0, cuDNN 9.14.0, NCCL 2.28.9, driver 580.65.06"


def test_no_gpu_is_needed_on_a_cpu(tmp_path: Path) -> None:
    assert bad(look_at_gpus(fake_host(tmp_path), CPU_PLAN)) == []
    assert bad(look_at_gpus(gpu_host(tmp_path), CPU_PLAN)) == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (fake.MISSING, "no nvidia-smi here"),
        (
            Output("NVIDIA-SMI has failed: driver not running\n", "nvidia-smi failed with status 9"),
            "driver not running",
        ),
        (Output(trouble="nvidia-smi gave no answer within 20 s"), "no answer within 20 s"),
    ],
)
def test_no_gpu_where_one_is_needed(tmp_path: Path, answer: Output, words: str) -> None:
    one = only(look_at_gpus(fake_host(tmp_path, answers={"nvidia-smi": answer})))
    assert one.state == "fail"
    assert words in one.found


@pytest.mark.parametrize(
    ("change", "state", "words"),
    [
        ({"ecc_errors": "3"}, "fail", "3 uncorrected memory errors"),
        ({"remap_failure": "Yes"}, "fail", "could not be remapped"),
        ({"remap_pending": "Yes"}, "warn", "at the next reset"),
        ({"retired_pending": "Yes"}, "warn", "at the next reset"),
        ({"mig": "Enabled"}, "fail", "divided by MIG"),
        ({"compute_mode": "Prohibited"}, "fail", "compute mode is Prohibited"),
        ({"persistence": "Disabled"}, "warn", "persistence mode is off"),
        ({"ecc": "Disabled"}, "warn", "ECC is off"),
        ({"slowed": "0x0000000000000048"}, "warn", "hardware slowdown, hardware thermal slowdown"),
        ({"power_limit": "500.00 W"}, "warn", "power limit 500 W of 700 W"),
        ({"pcie_width_now": "8"}, "warn", "PCIe x8 of x16"),
    ],
)
def test_one_sick_gpu_is_named(tmp_path: Path, change: dict[str, str], state: str, words: str) -> None:
    rows = "".join(fake.smi_row(index, **(change if index == 5 else {})) + "\n" for index in range(8))
    one = only(one for one in look_at_gpus(gpu_host(tmp_path, rows)) if one.state != "ok")
    assert (one.state, one.subject) == (state, "GPU 5")
    assert words in one.found


def test_mig_is_a_warning_for_one_rank(tmp_path: Path) -> None:
    plan = dataclasses.replace(GPU_PLAN, recipe="h100_1x1", ranks=1)
    host = gpu_host(tmp_path, fake.smi(1, mig="Enabled"))
    assert bad(look_at_gpus(host, plan, PYTORCH | {"gpus": 1})) == [("warn", "GPU 0")]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (fake.smi(4), [("fail", "GPUs"), ("fail", "PyTorch")]),
        (fake.smi(7) + fake.smi_row(7, name="NVIDIA T400"), [("fail", "GPUs")]),
        (fake.smi(16), [("warn", "GPUs")]),
        (fake.smi(8, name="NVIDIA A100-SXM4-80GB"), [("warn", "GPU kind")]),
    ],
)
def test_numbers_and_kinds(tmp_path: Path, rows: str, expected: list[tuple[str, str]]) -> None:
    seen = PYTORCH | {"gpus": min(8, rows.count("NVIDIA"))}
    assert bad(look_at_gpus(gpu_host(tmp_path, rows), pytorch=seen)) == expected


def test_a_gpu_that_somebody_uses(tmp_path: Path) -> None:
    process = "4711, GPU-00000003-1111-2222-3333-444444444444, /usr/bin/python3\n"
    found = look_at_gpus(gpu_host(tmp_path, nvidia_smi_XX="", **{"nvidia-smi --query-compute-apps": process}))
    one = only(one for one in found if one.subject == "GPU use")
    assert (one.state, one.found) == ("fail", "in use: /usr/bin/python3 (pid 4711) on GPU 3")


def test_memory_that_somebody_outside_the_container_holds(tmp_path: Path) -> None:
    rows = fake.smi(7) + fake.smi_row(7, memory_used="40000 MiB")
    one = only(one for one in look_at_gpus(gpu_host(tmp_path, rows)) if one.subject == "GPU use")
    assert one.state == "fail"
    assert "GPU 7 40000 MiB" in one.found


@pytest.mark.parametrize(
    ("matrix", "state", "words"),
    [
        (fake.topology(), "ok", "every GPU to every other: 18 NVLinks"),
        (fake.topology(between="SYS"), "warn", "PCIe across NUMA nodes"),
        (fake.topology(between="PHB"), "ok", "PCIe host bridge"),
        (fake.topology().replace("NV18\tNV18\tPXB", "NV18\tSYS\tPXB"), "warn", "some pairs lack NVLink"),
        ("", "warn", "no topology"),
    ],
)
def test_links_between_gpus(tmp_path: Path, matrix: str, state: str, words: str) -> None:
    host = fake_host(tmp_path, answers={"--query-gpu": fake.smi(), "topo": matrix})
    one = only(one for one in look_at_gpus(host) if one.subject == "GPU links")
    assert one.state == state
    assert words in one.found


@pytest.mark.parametrize(
    ("pytorch", "driver", "state", "words"),
    [
        ({}, "580.65.06", "fail", "cannot be imported"),
        ({"CUDA": None}, "580.65.06", "fail", "built without CUDA"),
        ({"gpus": 0}, "550.54.15", "fail", "needs CUDA 13.0, too new for driver 550.54.15"),
        ({"gpus": 0}, "580.65.06", "fail", "sees no GPU, though nvidia-smi lists 8"),
        ({"gpus": 8}, "550.54.15", "ok", "driver 550.54.15"),  # NVIDIA's forward compatibility package
        ({"gpus": 4}, "580.65.06", "fail", "sees 4 of 8 GPUs, and 8 are needed"),
        ({"architectures": ["sm_80", "sm_86"]}, "580.65.06", "fail", "no code for compute capability 9.0"),
        ({"architectures": ["sm_80", "compute_80"]}, "580.65.06", "ok", "PyTorch 2.13.0"),
        ({"architectures": ["sm_90a"]}, "580.65.06", "ok", "PyTorch 2.13.0"),
        ({"architectures": ["sm_100", "compute_120"]}, "580.65.06", "fail", "no code"),
        ({"architectures": [], "capability": None}, "580.65.06", "ok", "PyTorch 2.13.0"),
    ],
)
def test_pytorch_and_driver(tmp_path: Path, pytorch: dict[str, Any], driver: str, state: str, words: str) -> None:
    host = gpu_host(tmp_path, fake.smi(driver=driver))
    found = look_at_gpus(host, pytorch=PYTORCH | pytorch if pytorch else {})
    one = only(one for one in found if one.subject == "PyTorch")
    assert one.state == state
    assert words in one.found


# Memory, processors, limits


def test_enough_memory(tmp_path: Path) -> None:
    host = fake_host(tmp_path, {"/proc/meminfo": MEMINFO, "/dev/shm/x": ""})
    assert [one.state for one in vitals.memory(host, CPU_PLAN)] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"/proc/meminfo": MEMINFO.replace("2000000000", "2000000")}, [("warn", "memory")]),
        ({"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/memory.max": "2147483648\n"}, [("warn", "memory")]),
        ({"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/memory.max": "max\n"}, []),
        ({"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, []),
        ({"/proc/meminfo": MEMINFO.replace("SwapFree: 8388604", "SwapFree: 388604")}, [("warn", "swap")]),
        ({}, [("warn", "memory")]),
    ],
)
def test_memory(tmp_path: Path, files: dict[str, str], expected: list[tuple[str, str]]) -> None:
    host = fake_host(tmp_path, {"/dev/shm/x": "", **files})
    found = [one for one in vitals.memory(host, GPU_PLAN) if one.subject != "shared memory"]
    assert bad(found) == expected


class _Statvfs:
    f_frsize = 4096

    def __init__(self, free_mib: int) -> None:
        self.f_bavail = free_mib * 256


@pytest.mark.parametrize(
    ("free_mib", "plan", "state"),
    [
        (64, GPU_PLAN, "fail"),
        (2000, GPU_PLAN, "ok"),
        (64, CPU_PLAN, "warn"),
        (1023, GPU_PLAN, "fail"),
        (1024, GPU_PLAN, "ok"),
    ],
)
def test_shared_memory_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mib: int, plan: Plan, state: str
) -> None:
    monkeypatch.setattr(vitals.os, "statvfs", lambda _: _Statvfs(free_mib))
    found = vitals.memory(fake_host(tmp_path, {"/proc/meminfo": MEMINFO}), plan)
    assert only(one for one in found if one.subject == "shared memory").state == state


def test_no_shared_memory_at_all(tmp_path: Path) -> None:
    found = list(vitals.memory(fake_host(tmp_path, {"/proc/meminfo": MEMINFO}), GPU_PLAN))
    assert bad(found) == [("fail", "shared memory")]


@pytest.mark.parametrize(
    ("cores", "files", "plan", "expected"),
    [
        (128, {}, GPU_PLAN, []),
        (16, {}, GPU_PLAN, [("warn", "cores")]),
        (4, {}, GPU_PLAN, [("fail", "cores")]),
        (2, {}, CPU_PLAN, []),
        (128, {"/sys/fs/cgroup/cpu.max": "400000 100000"}, GPU_PLAN, [("fail", "cores")]),
        (128, {"/sys/fs/cgroup/cpu.max": "max 100000"}, GPU_PLAN, []),
        (128, {"/proc/loadavg": "97.02 3.0 2.0 1/500 4711"}, GPU_PLAN, [("warn", "load")]),
        (128, {"/proc/loadavg": "2.02 3.0 2.0 1/500 4711"}, GPU_PLAN, []),
        (
            128,
            {f"/sys/devices/system/cpu/cpu{n}/cpufreq/scaling_governor": "powersave\n" for n in range(2)},
            GPU_PLAN,
            [("warn", "cores")],
        ),
        (128, {"/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n"}, GPU_PLAN, []),
        (
            128,
            {
                "/proc/sys/kernel/numa_balancing": "1\n",
                **{f"/sys/devices/system/node/node{n}/meminfo": "" for n in (0, 1)},
            },
            GPU_PLAN,
            [("warn", "NUMA")],
        ),
        (128, {"/proc/sys/kernel/numa_balancing": "1\n", "/sys/devices/system/node/node0/meminfo": ""}, GPU_PLAN, []),
        (
            128,
            {"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"},
            GPU_PLAN,
            [("warn", "huge pages")],
        ),
        (128, {"/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n"}, GPU_PLAN, []),
    ],
)
def test_processors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    files: dict[str, str],
    plan: Plan,
    expected: list[tuple[str, str]],
) -> None:
    monkeypatch.setattr(vitals.os, "sched_getaffinity", lambda _: set(range(cores)))
    assert bad(vitals.processors(fake_host(tmp_path, files), plan)) == expected


UNLIMITED = vitals.resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("locked", "files", "plan", "with_rdma", "expected"),
    [
        (UNLIMITED, 65536, TWO_NODES, True, []),
        (8 << 20, 65536, TWO_NODES, True, [("fail", "limits")]),
        (8 << 20, 65536, TWO_NODES, False, []),
        (8 << 20, 65536, GPU_PLAN, True, []),
        (UNLIMITED, 1023, GPU_PLAN, False, [("warn", "limits")]),
        (UNLIMITED, 1024, GPU_PLAN, False, []),
    ],
)
def test_limits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    locked: int,
    files: int,
    plan: Plan,
    with_rdma: bool,
    expected: list[tuple[str, str]],
) -> None:
    given = {vitals.resource.RLIMIT_MEMLOCK: (locked, locked), vitals.resource.RLIMIT_NOFILE: (files, 1 << 20)}
    monkeypatch.setattr(vitals.resource, "getrlimit", given.__getitem__)
    host = fake_host(tmp_path, fake.infiniband() if with_rdma else {})
    assert bad(vitals.limits(host, plan)) == expected


# The network

DEVICE = {"/dev/infiniband/uverbs0": ""}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (fake.infiniband() | DEVICE, []),
        (fake.infiniband(), [("fail", "network")]),
        (fake.infiniband(state="1: DOWN") | DEVICE, [("fail", "network")]),
        (fake.infiniband() | {"/sys/class/infiniband/mlx5_3/ports/1/state": "2: INIT"} | DEVICE, [("warn", "network")]),
        (
            fake.infiniband() | {"/sys/class/infiniband/mlx5_3/ports/1/rate": "200 Gb/sec (4X HDR)"} | DEVICE,
            [("warn", "network")],
        ),
        ({}, [("warn", "network")]),
    ],
)
def test_ports_between_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(vitals.socket, "gethostbyname", lambda _: "10.1.2.3")
    host = fake_host(tmp_path, files, environment={"MASTER_PORT": str(free_port())})
    assert bad(vitals.network(host, TWO_NODES)) == expected


def test_ports_matter_less_on_one_node(tmp_path: Path) -> None:
    assert bad(vitals.network(fake_host(tmp_path, fake.infiniband(state="1: DOWN") | DEVICE), GPU_PLAN)) == [
        ("warn", "network")
    ]
    assert bad(vitals.network(fake_host(tmp_path / "none"), GPU_PLAN)) == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("address", ["127.0.1.1", None])
def test_a_name_that_other_nodes_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    def resolve(_: str) -> str:
        if address is None:
            raise socket.gaierror
        return address

    monkeypatch.setattr(vitals.socket, "gethostbyname", resolve)
    host = fake_host(tmp_path, fake.infiniband() | DEVICE, environment={"MASTER_PORT": str(free_port())})
    assert bad(vitals.network(host, TWO_NODES)) == [("warn", "host name")]


@pytest.mark.parametrize("text", ["0", "65536", "http", ""])
def test_a_port_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(vitals.socket, "gethostbyname", lambda _: "10.1.2.3")
    host = fake_host(tmp_path, fake.infiniband() | DEVICE, environment={"MASTER_PORT": text})
    assert bad(vitals.network(host, TWO_NODES)) == [("fail", "port")]


def test_a_port_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals.socket, "gethostbyname", lambda _: "10.1.2.3")
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        environment = {"MASTER_PORT": str(other.getsockname()[1])}
        host = fake_host(tmp_path, fake.infiniband() | DEVICE, environment=environment)
        found = list(vitals.network(host, TWO_NODES))
    assert bad(found) == [("fail", "port")]
    assert "is not free" in found[-1].found


def test_a_port_that_an_earlier_run_used_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals.socket, "gethostbyname", lambda _: "10.1.2.3")
    with socket.socket() as server, socket.socket() as client:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        client.connect(("127.0.0.1", port))
        server.accept()[0].close()  # the side that closes first keeps the port in TIME_WAIT
        client.recv(1)
    host = fake_host(tmp_path, fake.infiniband() | DEVICE, environment={"MASTER_PORT": str(port)})
    assert bad(vitals.network(host, TWO_NODES)) == []
