"""Ask nvidia-smi about the GPUs: properties, health, who uses them, how they are linked.

Parsers are pure functions of the text. Drivers know different fields, and one unknown field makes nvidia-smi refuse the
whole query, so `query` leaves out what the driver names as unknown and asks again.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from compliance.doctor.host import ExaminedHost

FIELDS = (
    "index",
    "uuid",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "clocks.max.sm",
    "pcie.link.gen.max",
    "pcie.link.width.max",
    "pcie.link.width.current",
    "persistence_mode",
    "compute_mode",
    "mig.mode.current",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "clocks_event_reasons.active",
    "clocks_throttle_reasons.active",  # its name before driver 535
    "power.limit",
    "power.default_limit",
)
# Drivers differ in what they write where they know no value.
_NO_VALUE = ("", "n/a", "[n/a]", "[not supported]", "not supported", "[unknown error]", "[not found]", "[gpu is lost]")

_THROTTLED = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""Bits of the active reasons that slow a GPU beyond its own power management (NVML, nvmlClocksThrottleReason...)."""
_APPLICATION_CLOCKS = 0x02


@dataclass(frozen=True)
class Gpu:
    """A GPU: what nvidia-smi says under the names in `FIELDS`; what it does not know is absent."""

    properties: dict[str, str]

    def text(self, name: str) -> str:
        """A property, "" when it is not known."""
        return self.properties.get(name, "")

    def number(self, name: str) -> float | None:
        """A property that is a number, without its unit."""
        match = re.match(r"-?\d+(\.\d+)?", self.text(name))
        return float(match[0]) if match else None

    @property
    def label(self) -> str:
        """Name for messages."""
        return f"GPU {self.text('index')}"

    @property
    def slowed_by(self) -> list[str]:
        """Return what holds its clocks down."""
        try:
            active = int(self.text("clocks_event_reasons.active") or self.text("clocks_throttle_reasons.active"), 16)
        except ValueError:
            return []
        reasons = [name for bit, name in _THROTTLED.items() if active & bit]
        return reasons + (["application clocks are set"] if active & _APPLICATION_CLOCKS else [])


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a machine; `trouble` says why none are known, "" where there is simply no nvidia-smi."""

    gpus: tuple[Gpu, ...] = ()
    trouble: str = ""
    driver: str = ""


def query(host: ExaminedHost) -> Gpus:
    """Ask nvidia-smi for all fields that its driver knows."""
    fields: list[str] = list(FIELDS)
    # Each refusal names one field, so that this ends.
    for _ in FIELDS:
        output = host.run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
        unknown = re.search(r'[Ff]ield "([\w.]+)" is not a valid field', output.text + output.errors)
        if output.missing:
            return Gpus()
        if not (unknown and unknown[1] in fields):
            break
        fields.remove(unknown[1])
    if output.trouble:
        said = (output.text.strip() or output.errors.strip()).partition("\n")[0]
        return Gpus(trouble=output.trouble + (f": {said[:200]}" if said else ""))
    gpus = parse_query(output.text, fields)
    if not gpus:
        return Gpus(trouble="nvidia-smi lists no GPU")
    return Gpus(gpus, driver=gpus[0].text("driver_version"))


def parse_query(text: str, fields: Sequence[str]) -> tuple[Gpu, ...]:
    """The GPUs of `nvidia-smi --query-gpu=FIELDS --format=csv,noheader`; lines that are no rows are left out."""
    gpus: list[Gpu] = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):  # nvidia-smi separates by a comma and a space
        if len(row) == len(fields):
            cells = (cell.strip() for cell in row)
            known = {name: cell for name, cell in zip(fields, cells, strict=True) if cell.lower() not in _NO_VALUE}
            gpus.append(Gpu(known))
    return tuple(gpus)


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: str
    name: str
    uuid: str


def parse_processes(text: str) -> tuple[GpuProcess, ...]:
    """The rows of `nvidia-smi --query-compute-apps=pid,gpu_uuid,process_name --format=csv,noheader`."""
    # In two steps at most, so that commas in a name stay in it.
    rows = (line.split(", ", 2) for line in text.splitlines())
    return tuple(GpuProcess(pid, name, uuid) for pid, uuid, name in (row for row in rows if len(row) == 3))


def parse_links(text: str) -> tuple[int, float]:
    """Number of active links and GB/s a direction over all of them, from `nvidia-smi nvlink --status --id=0`."""
    rates = [float(rate) for rate in re.findall(r"Link \d+: ([\d.]+) GB/s", text)]
    return len(rates), sum(rates)


_WAYS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "PCIe host bridge",
    "NODE": "PCIe within a NUMA node",
    "SYS": "PCIe across NUMA nodes",
}


def parse_topology(text: str) -> Counter[str]:
    """The kinds of connection between two GPUs, such as "NV18" or "SYS", each with its number of pairs.

    Args:
        text: the matrix of `nvidia-smi topo -m`, whose header is underlined and whose tabs are uneven past the devices.
    """
    # The header is underlined by escape sequences, which would become part of its names.
    rows = [[cell.strip() for cell in re.sub(r"\x1b\[[\d;]*m", "", line).split("\t")] for line in text.splitlines()]
    header = next((row for row in rows if "GPU0" in row[1:]), [])
    column = {name: position for position, name in enumerate(header) if re.fullmatch(r"GPU\d+", name)}
    # Rows of network cards, and those that are cut off, are left out.
    links = {row[0]: row for row in rows if row[0] in column and len(row) > max(column.values())}
    pairs = combinations(column, 2)
    return Counter(links[one][column[other]] for one, other in pairs if one in links)


def describe_topology(between_gpus: Counter[str]) -> str:
    """Describe in words how the GPUs reach each other, for the system description; "" for a single one."""
    total = sum(between_gpus.values())
    kinds = between_gpus.most_common()
    if len(kinds) == 1:
        return f"every GPU to every other: {_way(kinds[0][0])}"
    return ", ".join(f"{count} of {total} pairs: {_way(kind)}" for kind, count in kinds)


def _way(kind: str) -> str:
    name = kind.rstrip("0123456789")
    return f"{kind[len(name) :]} NVLinks" if name == "NV" else _WAYS.get(name, kind)
