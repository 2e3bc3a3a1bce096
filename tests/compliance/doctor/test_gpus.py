"""Checks of GPUs, and the conversion of NVML's answers to facts."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from compliance.doctor.gpus import ACROSS_NODES, NVLINK, PCIE, Gpu, Gpus, check_gpus, read_gpus
from compliance.doctor.intended_run import ExaminedRun, IntendedRun
from tests.compliance.doctor.fake_host import CPU, GPU, GPUS, NODE, lines_about, lines_by_case

PYTORCH: dict[str, Any] = {"PyTorch": "2.13.0+cu130", "CUDA": "13.0", "cuDNN": "9.14.0", "NCCL": "2.28.9", "gpus": 8}
ONE_RANK = replace(NODE, intended=IntendedRun("h100_1x1"), ranks=1)


def gpus(count: int, **changes: Any) -> Gpus:
    """Return `count` GPUs with changes to the last one."""
    last = replace(GPU, index=count - 1, **changes)
    return replace(GPUS, gpus=(*(replace(GPU, index=index) for index in range(count - 1)), last))


def linked(connections: dict[str, int]) -> Gpus:
    return replace(GPUS, connections=Counter(connections))


CASES: dict[str, tuple[ExaminedRun, Gpus]] = {
    "well": (NODE, GPUS),
    "no driver": (NODE, Gpus()),
    "a driver in trouble": (NODE, Gpus(trouble="Driver Not Loaded")),
    **{f"{count} GPUs": (NODE, gpus(count)) for count in (4, 16)},
    "two kinds": (NODE, gpus(8, name="T400")),
    "another kind": (ONE_RANK, gpus(1, name="NVIDIA A100-SXM4-80GB")),
    "one divided": (ONE_RANK, gpus(1, is_divided=True)),
    "one of eight divided": (NODE, gpus(8, is_divided=True)),
    "errors": (NODE, gpus(8, uncorrected_errors=1, remapping_failed=True, remapping_pending=True)),
    "throttled": (NODE, gpus(8, throttled_by=("hardware slowdown", "hardware power brake"))),
    "less power": (NODE, gpus(8, power_limit_w=500.0)),
    "fewer lanes": (NODE, gpus(8, pcie_width=8)),
    **{f"{len(names)} programs": (NODE, gpus(8, processes=tuple(names))) for names in ("a", "abc", "abcd")},
    **{f"{mib} MiB in use": (NODE, gpus(8, used_bytes=mib << 20)) for mib in (1024, 1025)},
    "no links": (NODE, linked({})),
    "links across nodes": (NODE, linked({ACROSS_NODES: 28})),
    "one link missing": (NODE, linked({NVLINK: 27, PCIE: 1})),
    "PCIe": (NODE, linked({PCIE: 28})),
    "one GPU without links": (ONE_RANK, replace(gpus(1), connections=Counter())),
}
ANSWERS: dict[str, dict[str, Any]] = {
    "no PyTorch": {},
    **{f"PyTorch sees {seen}": PYTORCH | {"gpus": seen} for seen in (7, 8, None)},
    "PyTorch in trouble": PYTORCH | {"gpus": 0, "trouble": "driver on your system is too old"},
}


def test_checks_of_gpus_yield_the_recorded_diagnoses() -> None:
    cases = {name: check_gpus(run, found, PYTORCH | {"gpus": run.ranks}) for name, (run, found) in CASES.items()}
    said = lines_by_case(cases | {name: check_gpus(NODE, GPUS, answer) for name, answer in ANSWERS.items()})
    assert said == Path(__file__).with_name("gpus.txt").read_text()
    versions = "ok PyTorch: PyTorch 2.13.0+cu130, CUDA 13.0, cuDNN 9.14.0, NCCL 2.28.9, driver 580.65.06\n"
    assert lines_about(check_gpus(NODE, GPUS, PYTORCH), "PyTorch") == versions
    for found, words in ((GPUS, "8 here, none used by tiny_cpu"), (Gpus(), "none here and none needed")):
        assert lines_about(check_gpus(CPU, found, PYTORCH), "GPUs") == f"ok GPUs: {words}\n"


class NVMLError(Exception):
    """Stand-in for pynvml's exception."""


class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801, N818
    """Stand-in for pynvml's exception."""


SPEEDS = [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=26562))]


class Nvml:
    """Fake pynvml on a machine with two H100 GPUs. It raises an error if an answer is an exception or missing."""

    NVMLError, NVMLError_LibraryNotFound = NVMLError, NVMLError_LibraryNotFound
    NVML_NVLINK_MAX_LINKS, NVML_SUCCESS = 18, 0

    def __init__(self, **answers: Any) -> None:
        memory = SimpleNamespace(total=81559 << 20, used=1 << 20)
        self.answers: dict[str, Any] = {
            "Init": None, "Shutdown": None, "SystemGetDriverVersion": "580.65.06",
            "DeviceGetCount": 2, "DeviceGetHandleByIndex": lambda index: index, "DeviceGetName": "NVIDIA H100 80GB HBM3",
            "DeviceGetMemoryInfo": memory, "DeviceGetMaxClockInfo": 1980, "DeviceGetCurrentClocksEventReasons": 0x1,
            "DeviceGetNvLinkState": 1, "DeviceGetFieldValues": SPEEDS, "DeviceGetP2PStatus": 0,
            "DeviceGetMaxPcieLinkGeneration": 5, "DeviceGetCurrPcieLinkWidth": 16, "DeviceGetMaxPcieLinkWidth": 16,
            "DeviceGetPowerManagementLimit": 700_000, "DeviceGetPowerManagementDefaultLimit": 700_000,
        } | answers  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name == "NVML_TOPOLOGY_SYSTEM":
            return 50
        if not name.startswith("nvml") or name[4:5].islower() or "_" in name:
            return 0  # value of all other constants
        answer = self.answers.get(name.removeprefix("nvml"), NVMLError("Not Supported"))

        def call(*arguments: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer(*arguments) if isinstance(answer, Callable) else answer

        return call


def test_answers_of_nvml_are_converted_to_facts() -> None:
    found = read_gpus(Nvml())
    assert found.gpus == (replace(GPU, used_bytes=1 << 20), replace(GPU, index=1, used_bytes=1 << 20))
    assert (found.driver, found.trouble, found.connections) == ("580.65.06", "", {NVLINK: 1})
    assert found.topology == "every GPU to every other: NVLink"
    broken = Nvml(
        DeviceGetTotalEccErrors=3,
        DeviceGetRemappedRows=(0, 1, 1, 1),
        DeviceGetMigMode=[1, 1],
        DeviceGetCurrentClocksEventReasons=0x48,
        DeviceGetComputeRunningProcesses=[SimpleNamespace(pid=2**22 + 1)],
        DeviceGetNvLinkState=lambda _, link: int(link < 4),
        DeviceGetFieldValues=[SimpleNamespace(nvmlReturn=1), *SPEEDS],
        DeviceGetP2PStatus=6,
        DeviceGetTopologyCommonAncestor=50,
    )
    faults = {"uncorrected_errors": 3, "remapping_failed": True, "remapping_pending": True, "is_divided": True}
    throttled_by, processes = ("hardware slowdown", "hardware thermal slowdown"), (f"a program (pid {2**22 + 1})",)
    faults |= {"links": 4, "link_gb_s": 4 * 26.562, "throttled_by": throttled_by, "processes": processes}
    expected = replace(GPU, index=1, used_bytes=1 << 20, **faults)
    assert read_gpus(broken).gpus[1] == expected
    assert read_gpus(broken).connections == {ACROSS_NODES: 1}
    odd = Nvml(
        DeviceGetRemappedRows=(1, 1, 1, 0),
        DeviceGetMigMode=[0, 1],  # MIG is off now, and on after the next reset
        DeviceGetP2PStatus=6,
        DeviceGetTopologyCommonAncestor=49,
    )
    assert read_gpus(odd).gpus[0] == replace(GPU, used_bytes=1 << 20, remapping_pending=True)
    assert read_gpus(odd).connections == {PCIE: 1}


def test_a_property_is_0_if_nvml_does_not_support_it() -> None:
    nothing = {name: NVMLError("Not Supported") for name in Nvml().answers if name.startswith("DeviceGet")}
    kept = {name: Nvml().answers[name] for name in ("DeviceGetCount", "DeviceGetHandleByIndex")}
    found = read_gpus(Nvml(**nothing | kept))
    assert found.gpus == (Gpu(0, "unknown GPU"), Gpu(1, "unknown GPU"))
    assert "warn GPU links: the driver reports no topology" in lines_about(
        check_gpus(replace(NODE, ranks=2), found, PYTORCH)
    )


def test_nvml_errors_are_stored_as_trouble_unless_the_library_is_missing() -> None:
    assert read_gpus(Nvml(Init=NVMLError_LibraryNotFound())) == Gpus()
    assert read_gpus(Nvml(Init=NVMLError("Driver Not Loaded"))).trouble == "Driver Not Loaded"
    assert read_gpus(Nvml(DeviceGetHandleByIndex=NVMLError("GPU is lost"))).trouble == "GPU is lost"
    assert read_gpus(Nvml(DeviceGetCount=0)).trouble
