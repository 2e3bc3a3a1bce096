"""Binding of the processes of a node to the cores nearest to their GPUs: ``python -m bert.launch.binding``.

Process i uses GPU i. GPUs are NVIDIA display devices in the order of PCI addresses, or as CUDA_VISIBLE_DEVICES lists them.
Processes whose GPUs are at one NUMA node split the cores of this node. All processes split all allowed cores if there are
not enough GPUs, if the GPUs are of several kinds, or if the NUMA node of a GPU is unknown or has no allowed core. The
hardware threads of a core always go to the same process. Memory needs no binding, because Linux allocates it on the NUMA
node of the process that touches it first. Network cards need none either, because NCCL chooses them.
"""

import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from bert.launch.layout import has_gpus, visible_gpus, whole_number
from bert.parallel.environment import Launch, is_rank
from bert.train import refused
from console.program import say
from console.text import counted


@dataclass(frozen=True)
class Binding:
    """CPUs (hardware threads) of one process, the number of their cores, and the process's GPU ("" if unknown)."""

    cpus: frozenset[int]
    cores: int
    gpu: str


def binding(rank: int, ranks: int, allowed: Collection[int], sysfs: Path, visible: str = "") -> Binding:
    """Return the binding of local rank ``rank`` of ``ranks``.

    ``allowed`` are the CPUs that the process may use, ``sysfs`` is /sys, and ``visible`` is CUDA_VISIBLE_DEVICES.
    """
    gpus = _gpus(sysfs, visible)
    near = [_cpus_near(sysfs, gpu).intersection(allowed) for gpu in gpus[:ranks]]
    if len(near) < ranks or not all(near):
        near = [frozenset(allowed)] * ranks
    cpus = near[rank]
    position, sharers = near[:rank].count(cpus), near.count(cpus)
    # Distribute whole cores, so that the hardware threads of a core stay together.
    topology = sysfs / "devices/system/cpu"
    threads = ({cpu} | _cpu_list(topology / f"cpu{cpu}/topology/thread_siblings_list") & cpus for cpu in sorted(cpus))
    cores = list(dict.fromkeys(map(frozenset, threads)))
    mine = cores[position * len(cores) // sharers : (position + 1) * len(cores) // sharers]
    mine = mine or [cores[position % len(cores)]]  # with fewer cores than processes, processes share cores
    return Binding(frozenset().union(*mine), len(mine), gpus[rank] if rank < len(gpus) else "")


def torchrun(reports: Path, options: Mapping[str, object]) -> list[str]:
    """Return a torchrun command line up to the arguments of the ranks. On GPUs, each rank first binds itself to cores.

    torchrun's reports go to the folder ``reports``.
    """
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    module = "bert.launch.binding" if has_gpus() else "bert.train"
    return [sys.executable, "-m", "bert.launch.agent", str(reports), *words, "-m", module]


def torchrun_environment() -> dict[str, str]:
    """Return this process's environment without PET_* variables, because they could turn on torchrun's elastic agents."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PET_")}


def become_rank(arguments: Sequence[str]) -> NoReturn:
    """Replace this process, which a launcher has started as a rank, with `bert.train`.

    Unless BIND=off, first bind the process to its cores and, if OMP_NUM_THREADS is not set, set it to their number.
    Raises ``ValueError`` if the launcher's variables are wrong.
    """
    launch = Launch.from_environment()
    whole_number("OMP_NUM_THREADS", 1, 1)
    if os.environ.get("BIND") != "off" and 0 <= launch.local_rank < launch.local_size:
        found = _binding_here(launch.local_rank, launch.local_size)
        with suppress(OSError):  # a container may not permit it
            os.sched_setaffinity(0, found.cpus)
        os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(found.cores)
        if found.gpu:
            os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # makes CUDA number the GPUs as `binding` does
    os.execv(sys.executable, [sys.executable, "-m", "bert.train", *arguments])


def _binding_here(rank: int, ranks: int) -> Binding:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return binding(rank, ranks, os.sched_getaffinity(0), Path("/sys"), visible)


def _gpus(sysfs: Path, visible: str) -> list[str]:
    """Return the PCI addresses of the visible GPUs ("" for a GPU that is missing), or [] if their order is unknown."""
    devices = sorted((sysfs / "bus/pci/devices").glob("*"))
    displays = [device for device in devices if _content(device / "class").startswith("0x03")]
    gpus = [device for device in displays if _content(device / "vendor") == "0x10de"]
    # If GPUs differ, CUDA numbers the fastest one 0, so the order of PCI addresses is not CUDA's order.
    if len({_content(gpu / "device") for gpu in gpus}) > 1:
        return []
    names = [gpu.name for gpu in gpus]
    if not visible:
        return names
    if not re.fullmatch(r"[0-9]{1,3}(,[0-9]{1,3})*", visible):
        return []
    return [dict(enumerate(names)).get(int(number), "") for number in visible.split(",")]


def _cpus_near(sysfs: Path, gpu: str) -> frozenset[int]:
    node = _content(sysfs / f"bus/pci/devices/{gpu}/numa_node")  # -1 if the firmware does not state the node
    return _cpu_list(sysfs / f"devices/system/node/node{node}/cpulist")


def _content(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii").strip()
    return ""


def _cpu_list(path: Path) -> frozenset[int]:
    """Return the CPU numbers in a file with a list such as "0-3,8", or an empty set if there is no such file."""
    ranges = (part.partition("-") for part in _content(path).split(",") if part)
    return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))


def main(arguments: Sequence[str]) -> int:
    """Become a rank if a launcher has started this process. Otherwise, print the binding of NPROC processes."""
    try:
        if is_rank():
            become_rank(arguments)
        ranks = whole_number("NPROC", visible_gpus(), 1)
        for rank in range(ranks):
            found = _binding_here(rank, ranks)
            cpus = ",".join(map(str, sorted(found.cpus)))
            say(f"process {rank}: GPU {found.gpu or 'none'}, {counted(found.cores, 'core')}, CPUs {cpus}")
        return 0
    except (ValueError, OSError) as error:
        return refused(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
