"""Check the GPUs of this machine against what the run wants of them: number, health, other processes, links, software.

As in `compliance.doctor.vitals`: at least one `Diagnosis`, and none raises for what is missing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from compliance.doctor import gpus as nvidia
from compliance.doctor.diagnosis import Diagnosis, fail, fail_or_warn, ok, warn
from compliance.doctor.gpus import Gpu, Gpus
from compliance.doctor.host import ExaminedHost
from compliance.doctor.layout import RunLayout, shape_in_name
from console.cuda import outdated_driver

IDLE_MEMORY_MIB = 1024
"""Maximum memory in use on an idle GPU, of which the driver takes some hundred MiB; more belongs to another process."""


def accelerators(host: ExaminedHost, layout: RunLayout, found: Gpus, pytorch: Mapping[str, Any]) -> Iterator[Diagnosis]:
    """The GPUs of this machine against what the recipe expects: number, kind, health, other processes, software."""
    if not layout.on_gpus:
        note = f"{len(found.gpus)} here, none used by {layout.recipe or 'a run without a recipe'}"
        yield ok("GPUs", note if found.gpus else "none here and none needed")
        return
    if not found.gpus:
        remedy = "load the driver (modprobe nvidia), and start the container with --gpus all; dmesg may tell more"
        yield fail("GPUs", found.trouble or "no nvidia-smi here, so no NVIDIA driver", remedy)
        return
    yield from _number_and_kind(layout, found)
    for gpu in found.gpus:
        yield from _health(gpu, layout)
    yield from _other_processes(host, found)
    yield from _links(host, found)
    yield from _gpu_software(layout, found, pytorch)


def _number_and_kind(layout: RunLayout, found: Gpus) -> Iterator[Diagnosis]:
    kinds = Counter(gpu.text("name") for gpu in found.gpus)
    named = ", ".join(f"{count}x {name}" for name, count in kinds.items())
    if len(kinds) > 1:
        yield fail("GPUs", f"of several kinds: {named}", "use those of one kind: CUDA_VISIBLE_DEVICES")
    elif len(found.gpus) < layout.ranks:
        remedy = "use a recipe for this machine, or make the others visible (CUDA_VISIBLE_DEVICES, --gpus, dmesg)"
        yield fail("GPUs", f"{named}, but {layout.recipe} needs {layout.ranks} a node", remedy)
    elif len(found.gpus) > layout.ranks:
        yield warn("GPUs", f"{named}, of which {layout.ranks} would be used", "set NPROC, or take another recipe")
    else:
        yield ok("GPUs", f"{named}, driver {found.driver}")
    # Only a name with a shape, as dgxa100_8x8, is one of a machine; others hold letters and digits by chance.
    family = re.search(r"[abhv]\d{3}", layout.recipe)
    if shape_in_name(layout.recipe) and family and not any(family[0] in name.lower() for name in kinds):
        remedy = "look for a recipe of this GPU; memory and speed decide the batch of a rank"
        yield warn("GPU kind", f"{layout.recipe} was made for {family[0].upper()}, here is {named}", remedy)


def _health(gpu: Gpu, layout: RunLayout) -> Iterator[Diagnosis]:
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
        # A single rank needs no NCCL, and may run on a part of a GPU.
        yield fail_or_warn(subject, layout.world_size > 1, "divided by MIG: ranks on its parts cannot use NCCL", remedy)
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


def _other_processes(host: ExaminedHost, found: Gpus) -> Iterator[Diagnosis]:
    # The name comes last, as it may hold commas.
    query = "--query-compute-apps=pid,gpu_uuid,process_name"
    others = nvidia.parse_processes(host.run("nvidia-smi", query, "--format=csv,noheader").answer)
    index = {gpu.text("uuid"): gpu.label for gpu in found.gpus}
    names = [f"{other.name[:60]} (pid {other.pid}) on {index.get(other.uuid, other.uuid)}" for other in others]
    # A container does not see the processes of others, but their memory is taken.
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


def _links(host: ExaminedHost, found: Gpus) -> Iterator[Diagnosis]:
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


def _gpu_software(layout: RunLayout, found: Gpus, pytorch: Mapping[str, Any]) -> Iterator[Diagnosis]:
    if not pytorch:
        remedy = "try `python -c 'import torch'`; install the packages again: rm -r .venv, and run run_and_time.sh"
        yield fail("PyTorch", "it cannot be imported, or gives no answer", remedy)
        return
    cuda, named = pytorch.get("CUDA"), f"PyTorch {pytorch.get('PyTorch')}"
    outdated = outdated_driver(found.driver, cuda) if cuda else None
    if not cuda:
        yield fail("PyTorch", f"{named} is built without CUDA", "install the build for CUDA (rm -r .venv, see README)")
    # A GPU that PyTorch sees works, whatever the table says: an image may bring CUDA's compatibility libraries.
    elif outdated and not pytorch.get("gpus"):
        yield fail("PyTorch", f"{named}: {outdated.found}", outdated.remedy)
    elif not pytorch.get("gpus"):
        remedy = "look at CUDA_VISIBLE_DEVICES, /dev/nvidia* and, with NVSwitch, nvidia-fabricmanager"
        yield fail("PyTorch", f"{named} sees no GPU, though nvidia-smi lists {len(found.gpus)}", remedy)
    elif pytorch["gpus"] < layout.ranks:
        seen = f"{named} sees {pytorch['gpus']} of {len(found.gpus)} GPUs, and {layout.ranks} are needed"
        yield fail("PyTorch", seen, "look at CUDA_VISIBLE_DEVICES")
    elif not _has_code_for(pytorch):
        remedy = "install a PyTorch that was built for this GPU"
        capability = ".".join(map(str, pytorch["capability"]))
        yield fail("PyTorch", f"{named} has no code for compute capability {capability}", remedy)
    else:
        parts = [f"{name} {pytorch[name]}" for name in ("CUDA", "cuDNN", "NCCL") if pytorch.get(name)]
        yield ok("PyTorch", ", ".join([named, *parts, f"driver {found.driver}"]))
    for lacking, remedy in pytorch.get("Triton lacks", []):
        yield fail("Triton", lacking, remedy)


def _has_code_for(pytorch: Mapping[str, Any]) -> bool:
    """Binary code of the same major version and no later minor one, or PTX of an earlier version."""
    capability, architectures = pytorch.get("capability"), pytorch.get("architectures")
    if not capability or not architectures:
        return True
    major, minor = capability
    for kind, version in re.findall(r"(sm|compute)_(\d+)", " ".join(architectures)):
        # The last digit is the minor version: sm_90 is 9.0, and sm_120 is 12.0.
        built = (int(version[:-1]), int(version[-1]))
        if built <= (major, minor) and (kind == "compute" or built[0] == major):
            return True
    return False
