"""Write the system description of a submission, a JSON file of 33 fields. Most values are measured on this machine.

Every field is a string, because the official tools crash on numbers. A field that the machine does not provide stays
empty, which the tools accept. A description of a cluster must override the fields that differ from this one node.
"""

import json
import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from compliance.artefact import write_whole
from compliance.doctor.gpus import Gpus
from compliance.doctor.host import ExaminedHost, run_root
from compliance.doctor.machine import Machine, read_machine
from compliance.log.rules import NEWEST_RULESET, SYSTEM_FIELDS, SYSTEM_STATUSES
from compliance.submission.description import Description, description_findings, read_description

PYTORCH_TIMEOUT_S = 90.0

_ASK_PYTORCH = """
import json, torch
cudnn = torch.backends.cudnn.version()
nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else None
trouble = ""
try:
    torch.ones(1, device="cuda").add(1).item()
except (RuntimeError, AssertionError) as error:
    trouble = str(error).partition(chr(10))[0]
print(json.dumps({
    "PyTorch": torch.__version__,
    "CUDA": torch.version.cuda,
    "cuDNN": cudnn and f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
    "NCCL": nccl and ".".join(map(str, nccl)),
    "gpus": torch.cuda.device_count(),
    "trouble": trouble,
}))
"""


def renew(path: Path, given: Mapping[str, str], *, measure_again: bool = False) -> None:
    """Write the description of this machine to `path`, or change the given fields of an existing description.

    Fields in `given` take precedence over the file and the machine. With `measure_again`, the machine is
    measured again, and its values replace those of an existing description. Raises ``ValueError`` if the file is not a
    system description or cannot be written, a field or value is unknown, or there is nothing to change.
    """
    before = _read(path)
    if not before or measure_again:
        host = ExaminedHost()
        named = {"system_name": before.get("system_name") or path.stem}
        fields = complete(measure(host, read_machine(host)), given, before | named)
    elif given:
        _check_values(given)
        fields = before | dict(given)
    else:
        ways = "--set KEY=VALUE changes its fields, --measure measures this machine again"
        raise ValueError(f"{path} exists: {ways}")
    write_whole(path, json.dumps(fields, indent=2, ensure_ascii=False) + "\n")


def _read(path: Path) -> dict[str, Any]:
    """Return the fields of an existing description; empty if there is no file."""
    if not os.path.lexists(path):
        return {}
    description = read_description(path)
    known = [name for name in description.fields if name in SYSTEM_FIELDS]
    # A JSON file of another kind may have a field such as "status" too, so at least half of the names must be known.
    if description.fault or len(known) < max(1, len(description.fields) / 2):
        fault = description.fault or f"{len(known)} of its {len(description.fields)} names are fields of a description"
        raise ValueError(f"{path} is not a system description: {fault}; choose another --out, or move the file away")
    return description.fields


def measure(host: ExaminedHost, machine: Machine) -> dict[str, str]:
    """Return the description's fields as measured on this machine. Fields that cannot be measured are empty."""
    fields = _processors(host, machine) | _accelerators(machine.gpus)
    fields["host_memory_capacity"] = f"{machine.memory_bytes / 2**30:.0f} GiB"
    # Capacity of the file system on which runs start, in GB of 10^9 bytes, the unit of disk vendors.
    fields["host_storage_capacity"] = f"{shutil.disk_usage(run_root()).total / 1e9:.0f} GB"
    fields["host_networking"] = _networking(host, machine)
    return fields | _software(ask_pytorch(host) if machine.gpus.gpus else {}, machine.gpus.driver, host)


def complete(measured: Mapping[str, str], given: Mapping[str, str], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return all `SYSTEM_FIELDS` in order. A value in `given` comes first, then `measured`, `before` and a default.

    Fields of `before` that are not in `SYSTEM_FIELDS` follow at the end. Raises ``ValueError`` if a division, field or
    status is unknown, or if a count is not a number.
    """
    fields: dict[str, Any] = dict.fromkeys(SYSTEM_FIELDS, "")
    fields |= {"division": "open", "status": SYSTEM_STATUSES["research"], "number_of_nodes": "1"}
    # Convert numbers to text, and keep the default of a field that the file leaves empty.
    fields |= {
        name: str(value) if name in fields else value for name, value in before.items() if value or name not in fields
    }
    fields |= {name: value for name, value in measured.items() if value} | dict(given)
    _check_values({name: fields[name] for name in SYSTEM_FIELDS} | dict(given))
    return fields


def _check_values(fields: Mapping[str, str]) -> None:
    for name in fields:
        if name not in SYSTEM_FIELDS:
            raise ValueError(f"system field {name!r} does not exist, expected one of {', '.join(SYSTEM_FIELDS)}")
    for finding in description_findings(Description(Path(), dict(fields), {}), NEWEST_RULESET):
        if finding.severity == "error" and finding.key in fields:
            raise ValueError(f"{finding.key}: {finding.found}")


def _processors(host: ExaminedHost, machine: Machine) -> dict[str, str]:
    cpu: dict[str, str] = {}
    for line in host.run("lscpu").answer.splitlines():
        name, _, value = line.partition(":")
        cpu.setdefault(name.strip(), value.strip())
    sockets = int(cpu["Socket(s)"]) if cpu.get("Socket(s)", "").isdecimal() else 1
    sizes = {level: cpu.get(f"{level} cache", cpu.get(level)) for level in ("L1d", "L1i", "L2", "L3")}
    return {
        "host_processors_per_node": str(sockets),
        "host_processor_model_name": cpu.get("Model name") or platform.machine(),
        "host_processor_core_count": str(machine.physical_cores // sockets),
        "host_processor_vcpu_count": str(machine.threads),
        "host_processor_frequency": f"{machine.frequency_mhz / 1000:.2f} GHz" if machine.frequency_mhz else "",
        "host_processor_caches": ", ".join(f"{level} cache: {size}" for level, size in sizes.items() if size),
    }


def _networking(host: ExaminedHost, machine: Machine) -> str:
    kinds: Counter[str] = Counter()
    for port in machine.ports:
        # /sys states a rate as "200 Gb/sec (4X HDR)".
        speed = re.sub(r"Gb/sec.*", "Gb/s", port.rate)
        kinds[f"{'RoCE' if port.link_layer == 'Ethernet' else 'InfiniBand'} {speed}".strip()] += 1
    for name in host.names("/sys/class/net"):
        # Skip bridges and loopback, which are no hardware devices. Also skip InfiniBand, which is counted above.
        if host.path(f"/sys/class/net/{name}/device").exists() and not name.startswith("ib"):
            megabits = host.read(f"/sys/class/net/{name}/speed")
            kinds["Ethernet" + (f" {int(megabits) / 1000:g} Gb/s" if megabits.isdecimal() else "")] += 1
    return ", ".join(f"{count}x {kind}" for kind, count in sorted(kinds.items()))


def _accelerators(found: Gpus) -> dict[str, str]:
    if not found.gpus:
        return {"accelerators_per_node": "0", "accelerator_model_name": "N/A"}
    gpu = found.gpus[0]  # all GPUs are assumed to be of one kind
    pcie = f"PCIe Gen{gpu.pcie_generation} x{gpu.pcie_full_width}"
    rate = f", {gpu.link_gb_s:.0f} GB/s per direction" if gpu.link_gb_s else ""
    return {
        "accelerators_per_node": str(len(found.gpus)),
        "accelerator_model_name": gpu.name,
        "accelerator_memory_capacity": f"{gpu.memory_bytes >> 20} MiB" if gpu.memory_bytes else "",
        "accelerator_frequency": f"{gpu.clock_mhz} MHz" if gpu.clock_mhz else "",
        "accelerator_host_interconnect": pcie if gpu.pcie_generation else "",
        "accelerator_interconnect": f"{gpu.links} NVLinks{rate}" if gpu.links else "",
        "accelerator_interconnect_topology": found.topology,
    }


def ask_pytorch(host: ExaminedHost) -> dict[str, Any]:
    """Ask PyTorch, in a separate process, for its versions and the GPUs that it sees; empty if the import fails."""
    answer = host.python("-c", _ASK_PYTORCH, timeout_s=PYTORCH_TIMEOUT_S).answer
    with suppress(ValueError):
        return json.loads(answer)
    return {}


def _software(pytorch: Mapping[str, Any], driver: str, host: ExaminedHost) -> dict[str, str]:
    stack = [f"{name} {pytorch[name]}" for name in ("CUDA", "cuDNN", "NCCL") if pytorch.get(name)]
    stack += [f"NVIDIA driver {driver}"] if driver else []
    packages = ("numpy", "triton", "nvidia-dali-cuda130", "mlperf-logging")
    stack += [f"{name} {number}" for name in packages if (number := _version(name))]
    stack += [f"Python {platform.python_version()}"]
    # Values in os-release may be quoted.
    release = dict(re.findall(r'^(\w+)="?(.*?)"?$', host.read("/etc/os-release"), re.MULTILINE))
    ngc = host.environment.get("NVIDIA_PYTORCH_VERSION")
    framework = f"PyTorch {pytorch.get('PyTorch') or _version('torch')}".strip()
    return {
        "framework": framework + (f" (NVIDIA Release {ngc})" if ngc else ""),
        "other_software_stack": ", ".join(stack),
        "operating_system": release.get("PRETTY_NAME", platform.platform()),
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
