"""Query the GPUs of a machine through NVML, and check their number, health, links, software and other programs on them."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from compliance.doctor.diagnosis import Diagnosis, fail, fail_or_warn, ok, warn
from compliance.doctor.intended_run import ExaminedRun, shape_in_name
from console.text import counted

_THROTTLED = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""Meaning of each bit in NVML's mask of reasons for reduced clocks. Bits of normal power management are left out."""

NVLINK, PCIE, ACROSS_NODES = "NVLink", "PCIe", "PCIe across NUMA nodes"


@dataclass(frozen=True)
class Gpu:
    """Properties and state of one GPU. A number is 0 if NVML does not report it.

    Attributes:
        links, link_gb_s: number of active NVLinks, and their total GB/s in one direction.
        pcie_width, pcie_full_width: PCIe lanes in use, and PCIe lanes that the card has.
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
    """The GPUs of a machine, and how pairs of them are connected.

    `trouble` says why NVIDIA's driver lists no GPUs; it is "" on a machine without the driver. `connections` has the number
    of pairs of GPUs for each kind of connection: `NVLINK`, `PCIE` or `ACROSS_NODES`.
    """

    gpus: tuple[Gpu, ...] = ()
    trouble: str = ""
    driver: str = ""
    connections: Counter[str] = field(default_factory=Counter)

    @property
    def topology(self) -> str:
        """How the GPUs are connected, in words; "" for a single GPU."""
        if len(self.connections) == 1:
            return f"every GPU to every other: {next(iter(self.connections))}"
        pairs = self.connections.total()
        return ", ".join(f"{count} of {pairs} pairs: {kind}" for kind, count in self.connections.most_common())


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
        return Gpus(gpus, trouble, str(nvml.nvmlSystemGetDriverVersion()), Counter(_connections(nvml, handles)))
    except nvml.NVMLError as error:
        return Gpus(trouble=str(error))
    finally:
        nvml.nvmlShutdown()


def _read_gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    def ask(name: str, *arguments: Any, otherwise: Any = 0) -> Any:
        # Some GPUs or drivers lack a property. NVML then raises an error, and the answer is `otherwise`.
        with suppress(nvml.NVMLError):
            return getattr(nvml, name)(handle, *arguments)
        return otherwise

    memory = ask("nvmlDeviceGetMemoryInfo", nvml.nvmlMemory_v2) or ask("nvmlDeviceGetMemoryInfo")
    *_, pending, failed = ask("nvmlDeviceGetRemappedRows", otherwise=(0, 0))
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
        is_divided=ask("nvmlDeviceGetMigMode", otherwise=(0,))[0] == 1,
        throttled_by=tuple(name for bit, name in _THROTTLED.items() if reasons & bit),
        processes=tuple(_named(each.pid) for each in ask("nvmlDeviceGetComputeRunningProcesses", otherwise=())),
    )


def _named(pid: int) -> str:
    import psutil

    name = "a program"
    with suppress(psutil.Error):
        name = psutil.Process(pid).name()
    return f"{name} (pid {pid})"


def _connections(nvml: Any, handles: Sequence[Any]) -> Iterator[str]:
    for one, other in combinations(handles, 2):
        with suppress(nvml.NVMLError):
            if nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
                yield NVLINK
                continue
        with suppress(nvml.NVMLError):
            level = nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
            yield ACROSS_NODES if level >= nvml.NVML_TOPOLOGY_SYSTEM else PCIE


IDLE_MEMORY_BYTES = 2**30
"""Maximum memory in use on an idle GPU. The driver alone uses some hundred MiB."""


def check_gpus(run: ExaminedRun, found: Gpus, pytorch: Mapping[str, Any]) -> Iterator[Diagnosis]:
    """Check all GPUs. `pytorch` is the answer of `compliance.doctor.system.ask_pytorch`."""
    if not run.on_gpus:
        note = f"{len(found.gpus)} here, none used by {run.recipe or 'a run without a recipe'}"
        yield ok("GPUs", note if found.gpus else "none here and none needed")
        return
    if not found.gpus:
        remedy = "load the driver (modprobe nvidia), and start the container with --gpus all; dmesg may tell more"
        yield fail("GPUs", found.trouble or "no NVIDIA driver here", remedy)
        return
    yield from _number_and_kind(run, found)
    for gpu in found.gpus:
        yield from _health(gpu, run)
    yield _other_programs(found)
    if len(found.gpus) > 1:
        yield _links(found)
    yield _pytorch(run, found, pytorch)


def _number_and_kind(run: ExaminedRun, found: Gpus) -> Iterator[Diagnosis]:
    kinds = Counter(gpu.name for gpu in found.gpus)
    named = ", ".join(f"{count}x {name}" for name, count in kinds.items())
    if len(kinds) > 1:
        yield fail("GPUs", f"GPUs of several kinds: {named}", "select GPUs of one kind with CUDA_VISIBLE_DEVICES")
    elif len(found.gpus) < run.ranks:
        remedy = "use a recipe for this machine, or make the other GPUs visible (CUDA_VISIBLE_DEVICES, --gpus)"
        yield fail("GPUs", f"{named}, but {run.recipe} needs {run.ranks} per node", remedy)
    elif len(found.gpus) > run.ranks:
        yield warn("GPUs", f"{named}, of which {run.ranks} would be used", "set NPROC, or choose another recipe")
    else:
        yield ok("GPUs", f"{named}, driver {found.driver}")
    # A recipe is made for a GPU model only if its name has nodes x GPUs, such as dgxa100_8x8. Ignore digits in other names.
    intended = re.search(r"[abhv]\d{3}", run.recipe)
    model = intended[0].upper() if intended and shape_in_name(run.recipe) else ""
    if model and not re.search(rf"\b{model}", named):
        remedy = "use a recipe for this GPU: its memory and speed determine the batch size of a rank"
        yield warn("GPU kind", f"{run.recipe} was made for {model}, found {named}", remedy)


def _health(gpu: Gpu, run: ExaminedRun) -> Iterator[Diagnosis]:
    subject = f"GPU {gpu.index}"
    if gpu.uncorrected_errors > 0:
        remedy = "drain the node; reset the GPU, and have it replaced if the errors come back"
        found = f"{counted(gpu.uncorrected_errors, 'uncorrected memory error')} since the driver was loaded"
        yield fail(subject, found, remedy)
    if gpu.remapping_failed:
        yield fail(subject, "rows of its memory could not be remapped", "have the GPU replaced")
    if gpu.remapping_pending:
        yield warn(subject, "faulty memory will be remapped at the next reset", "reset the GPU before the run")
    if gpu.is_divided:
        remedy = "turn MIG off for this run (nvidia-smi -mig 0, root), or ask for whole GPUs"
        # A single rank needs no NCCL, so for it MIG is only a warning.
        yield fail_or_warn(
            subject, run.world_size > 1, "it is divided by MIG, and ranks on its partitions cannot use NCCL", remedy
        )
    if gpu.throttled_by:
        remedy = "check the cooling and the power supply"
        yield warn(subject, f"its clocks are reduced: {', '.join(gpu.throttled_by)}", remedy)
    if gpu.power_limit_w < gpu.full_power_w:
        found = f"power limit {gpu.power_limit_w:.0f} W of {gpu.full_power_w:.0f} W"
        yield warn(subject, found, f"raise it: nvidia-smi -pl {gpu.full_power_w:.0f} (root)")
    if gpu.pcie_width < gpu.pcie_full_width:
        found = f"PCIe x{gpu.pcie_width} of x{gpu.pcie_full_width}"
        yield warn(subject, found, "reseat the card, or check the riser and the BIOS settings")


def _other_programs(found: Gpus) -> Diagnosis:
    names = [f"{name} on GPU {gpu.index}" for gpu in found.gpus for name in gpu.processes]
    full = [f"GPU {gpu.index} {gpu.used_bytes >> 20} MiB" for gpu in found.gpus if gpu.used_bytes > IDLE_MEMORY_BYTES]
    remedy = "end the other program, or wait for it: programs that share a GPU distort each other's times"
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return fail("GPU use", f"in use: {', '.join(names[:3])}{more}", remedy)
    # Check memory too. A container cannot see other containers' programs, but it sees how much GPU memory is in use.
    if full:
        return fail("GPU use", f"memory is held by programs that this container cannot see: {', '.join(full)}", remedy)
    return ok("GPU use", "no other program is on the GPUs")


def _links(found: Gpus) -> Diagnosis:
    if not found.connections:
        return warn("GPU links", "the driver reports no topology", "check the output of nvidia-smi topo -m")
    if NVLINK in found.connections and len(found.connections) > 1:
        remedy = "run nvidia-smi nvlink --status; the fabric manager must run on machines with NVSwitch"
        return warn("GPU links", f"some pairs lack NVLink: {found.topology}", remedy)
    if ACROSS_NODES in found.connections:
        return warn(
            "GPU links",
            f"some pairs connect across sockets: {found.topology}",
            "expect slow reductions, or train on the GPUs of one socket",
        )
    return ok("GPU links", found.topology)


def _pytorch(run: ExaminedRun, found: Gpus, pytorch: Mapping[str, Any]) -> Diagnosis:
    if not pytorch:
        remedy = "try `python -c 'import torch'`; install the packages again: rm -r .venv, and run run_and_time.sh"
        return fail("PyTorch", "it cannot be imported, or it does not answer", remedy)
    named, seen = f"PyTorch {pytorch.get('PyTorch')}", pytorch.get("gpus") or 0
    # PyTorch's own message names the cause, such as an outdated driver or a build without CUDA.
    if trouble := pytorch.get("trouble"):
        remedy = "install a PyTorch for this GPU and driver (rm -r .venv, see README), or a newer driver"
        return fail("PyTorch", f"{named} cannot compute on the GPU: {trouble}", remedy)
    if seen < run.ranks:
        remedy = "check CUDA_VISIBLE_DEVICES, /dev/nvidia* and, with NVSwitch, nvidia-fabricmanager"
        return fail(
            "PyTorch", f"{named} sees {seen} of {counted(len(found.gpus), 'GPU')}, expected {run.ranks}", remedy
        )
    parts = [f"{name} {pytorch[name]}" for name in ("CUDA", "cuDNN", "NCCL") if pytorch.get(name)]
    return ok("PyTorch", ", ".join([named, *parts, f"driver {found.driver}"]))
