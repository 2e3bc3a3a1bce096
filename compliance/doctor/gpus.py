"""Read the GPUs of this machine through NVML: their properties, health, processes and links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

_THROTTLED = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""Bits of NVML's clocks event reasons for slowdowns beyond normal power management."""

NVLINK, PCIE, ACROSS_NODES = "NVLink", "PCIe", "PCIe across NUMA nodes"


@dataclass(frozen=True)
class Gpu:
    """A GPU. A number that NVML does not report is 0.

    Attributes:
        links, link_gb_s: number of active NVLinks, and their total GB/s in one direction.
        pcie_width, pcie_full_width: lanes in use, and lanes that the card has.
        is_divided: whether MIG is enabled.
        processes: name and process number of each program that computes on the GPU.
    """

    index: int
    name: str
    memory_bytes: int = 0
    used_bytes: int = 0
    clock_mhz: int = 0
    links: int = 0
    link_gb_s: float = 0.0
    pcie_generation: int = 0
    pcie_width: int = 0
    pcie_full_width: int = 0
    power_limit_w: float = 0.0
    full_power_w: float = 0.0
    uncorrected_errors: int = 0
    remapping_failed: bool = False
    remapping_pending: bool = False
    is_divided: bool = False
    throttled_by: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a machine.

    Attributes:
        trouble: why NVIDIA's driver lists no GPUs; "" on a machine without the driver.
        ways: number of GPU pairs by the way in which they are connected.
    """

    gpus: tuple[Gpu, ...] = ()
    trouble: str = ""
    driver: str = ""
    ways: Counter[str] = field(default_factory=Counter)

    @property
    def topology(self) -> str:
        """Describe how the GPUs are connected; "" for a single GPU."""
        if len(self.ways) == 1:
            return f"every GPU to every other: {next(iter(self.ways))}"
        return ", ".join(f"{count} of {self.ways.total()} pairs: {way}" for way, count in self.ways.most_common())


def read_gpus(nvml: Any = None) -> Gpus:
    """Query NVIDIA's driver, through `pynvml` or a module with the same functions."""
    if nvml is None:
        import pynvml as nvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return Gpus()
    except nvml.NVMLError as error:
        return Gpus(trouble=str(error))
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(_read_gpu(nvml, index, handle) for index, handle in enumerate(handles))
        trouble = "" if gpus else "the driver lists no GPU"
        return Gpus(gpus, trouble, str(nvml.nvmlSystemGetDriverVersion()), Counter(_ways(nvml, handles)))
    except nvml.NVMLError as error:
        return Gpus(trouble=str(error))
    finally:
        nvml.nvmlShutdown()


def _read_gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    def ask(name: str, *arguments: Any, otherwise: Any = 0) -> Any:
        # GPUs and drivers differ in which properties they support.
        with suppress(nvml.NVMLError):
            return getattr(nvml, name)(handle, *arguments)
        return otherwise

    memory = ask("nvmlDeviceGetMemoryInfo", nvml.nvmlMemory_v2) or ask("nvmlDeviceGetMemoryInfo")
    _, _, pending, failed = ask("nvmlDeviceGetRemappedRows", otherwise=(0, 0, 0, 0))
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons") or ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    active = [link for link in range(nvml.NVML_NVLINK_MAX_LINKS) if ask("nvmlDeviceGetNvLinkState", link) == 1]
    speeds = (
        ask("nvmlDeviceGetFieldValues", [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON], otherwise=()) if active else ()
    )
    speed = next((each.value.uiVal for each in speeds if each.nvmlReturn == nvml.NVML_SUCCESS), 0)
    errors = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return Gpu(
        index=index,
        name=str(ask("nvmlDeviceGetName", otherwise="unknown GPU")),
        memory_bytes=memory.total if memory else 0,
        used_bytes=memory.used if memory else 0,
        clock_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        links=len(active),
        link_gb_s=len(active) * speed / 1000,
        pcie_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_full_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        power_limit_w=ask("nvmlDeviceGetPowerManagementLimit") / 1000,
        full_power_w=ask("nvmlDeviceGetPowerManagementDefaultLimit") / 1000,
        uncorrected_errors=ask("nvmlDeviceGetTotalEccErrors", *errors),
        remapping_failed=bool(failed),
        remapping_pending=bool(pending),
        is_divided=ask("nvmlDeviceGetMigMode", otherwise=(0, 0))[0] == 1,
        throttled_by=tuple(name for bit, name in _THROTTLED.items() if reasons & bit),
        processes=tuple(_named(each.pid) for each in ask("nvmlDeviceGetComputeRunningProcesses", otherwise=())),
    )


def _named(pid: int) -> str:
    import psutil

    name = "a program"
    with suppress(psutil.Error):
        name = psutil.Process(pid).name()
    return f"{name} (pid {pid})"


def _ways(nvml: Any, handles: Sequence[Any]) -> Iterator[str]:
    for one, other in combinations(handles, 2):
        with suppress(nvml.NVMLError):
            if nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
                yield NVLINK
                continue
        with suppress(nvml.NVMLError):
            level = nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
            yield ACROSS_NODES if level >= nvml.NVML_TOPOLOGY_SYSTEM else PCIE
