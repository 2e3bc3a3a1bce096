"""A machine that is not there: its files under a folder, and what its commands print, for the tests beside this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from compliance.doctor.diagnosis import Diagnosis
from compliance.doctor.gpus import FIELDS
from compliance.doctor.host import ExaminedHost, Output
from compliance.doctor.system import complete, measure

MISSING = Output(trouble="no command here", missing=True)


@dataclass(frozen=True)
class FakeHost(ExaminedHost):
    """Answers commands from `answers`: the first entry of which all words stand in the command."""

    answers: dict[str, str | Output] = field(default_factory=dict)

    def run(self, *command: str, **_: object) -> Output:
        line = " ".join(command)
        for words, answer in self.answers.items():
            if all(word in line for word in words.split()):
                return Output(answer) if isinstance(answer, str) else answer
        return MISSING

    def python(self, *arguments: str, **more: object) -> Output:
        return self.run("python", *arguments, **more)


def fake_host(
    root: Path,
    files: Mapping[str, str] | None = None,
    answers: dict[str, str | Output] | None = None,
    environment: Mapping[str, str] | None = None,
) -> FakeHost:
    """A machine with these files (names from the root) and no others."""
    for name, text in (files or {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return FakeHost(root, environment or {}, answers or {})


def expect(found: Iterable[Diagnosis], *expected: str, about: str = "") -> None:
    """Compare all that is not ok, or all about one subject, with "STATE SUBJECT: words of what was found"."""
    said = list(found)
    assert said
    assert all(one.subject and one.found and bool(one.remedy) == (one.state != "ok") for one in said), said
    meant = [one for one in said if (one.subject == about if about else one.state != "ok")]
    lines = [f"{one.state} {one.subject}: {one.found}" for one in meant]
    assert len(lines) == len(expected), lines
    for line, wanted in zip(lines, expected, strict=True):
        subject, _, words = wanted.partition(": ")
        assert line.startswith(f"{subject}: "), lines
        assert words in line, lines


LSCPU_EPYC = """Architecture:                       x86_64
CPU(s):                             256
On-line CPU(s) list:                0-255
Vendor ID:                          AuthenticAMD
Model name:                         AMD EPYC 7742 64-Core Processor
Thread(s) per core:                 2
Core(s) per socket:                 64
Socket(s):                          2
CPU max MHz:                        2250.0000
NUMA node(s):                       8
NUMA node0 CPU(s):                  0-15,128-143
"""
LSCPU_XEON = """Architecture:            x86_64
CPU(s):                  224
  On-line CPU(s) list:   0-223
Vendor ID:               GenuineIntel
  Model name:            Intel(R) Xeon(R) Platinum 8480CL
    Thread(s) per core:  2
    Core(s) per socket:  56
    Socket(s):           2
    CPU max MHz:         3800.0000
    Flags:               fpu avx2 avx512f
Caches (sum of all):
  L1d:                   5.3 MiB (112 instances)
  L2:                    224 MiB (112 instances)
"""
LSCPU_GRACE = """Architecture:             aarch64
CPU(s):                   144
Vendor ID:                ARM
  Model name:             Neoverse-V2
    Core(s) per cluster:  144
    Socket(s):            -
    Cluster(s):           1
    CPU max MHz:          3456.0000
"""

DMIDECODE = """# dmidecode 3.3
Handle 0x1000, DMI type 16, 23 bytes
Physical Memory Array
\tMaximum Capacity: 4 TB

Handle 0x1100, DMI type 17, 92 bytes
Memory Device
\tSize: 64 GB
\tType: DDR5
\tSpeed: 5600 MT/s
\tConfigured Memory Speed: 4800 MT/s

Handle 0x1101, DMI type 17, 92 bytes
Memory Device
\tSize: 64 GB
\tType: DDR5
\tConfigured Memory Speed: 4800 MT/s

Handle 0x1102, DMI type 17, 92 bytes
Memory Device
\tSize: No Module Installed
\tType: Unknown
"""

LSBLK = """{"blockdevices": [
 {"name":"loop0","type":"loop","size":58363904,"rota":false,"model":null,"tran":null},
 {"name":"sda","type":"disk","size":480103981056,"rota":false,"model":"MICRON_5300","tran":"sata",
  "children":[{"name":"sda1","type":"part","size":536870912,"rota":false,"model":null,"tran":null}]},
 {"name":"sdb","type":"disk","size":8001563222016,"rota":true,"model":"ST8000","tran":"sas"},
 {"name":"nvme0n1","type":"disk","size":3840755982336,"rota":false,"model":"KCM6DRUL3T84","tran":"nvme"},
 {"name":"nvme1n1","type":"disk","size":3840755982336,"rota":false,"model":"KCM6DRUL3T84","tran":"nvme"}]}
"""
LSBLK_OLD = '{"blockdevices": [{"name": "sda", "type": "disk", "size": "960197124096", "rota": "1", "tran": null}]}'


SMI_ROW = (
    "0, GPU-0, NVIDIA H100 80GB HBM3, 580.65.06, 81559 MiB, 1 MiB, 1980 MHz, 5, 16, 16, Enabled, Default, Disabled, "
    "Enabled, 0, [N/A], No, No, 0x0000000000000001, [N/A], 700.00 W, 700.00 W"
)
"""What nvidia-smi says of a healthy H100 under `FIELDS`."""


def describe(division: str, given: Mapping[str, str] | None = None, host: ExaminedHost | None = None) -> dict[str, str]:
    """The system description of a machine, by default the one this runs on."""
    return complete(measure(host or ExaminedHost()), {"division": division, **(given or {})})


def smi_row(index: int, changes: Mapping[str, str] | None = None) -> str:
    """A row of nvidia-smi for one H100; `changes` by field."""
    fields: dict[str, str] = dict(zip(FIELDS, SMI_ROW.split(", "), strict=True))
    changes = {"index": str(index), "uuid": f"GPU-{index}", **(changes or {})}
    assert changes.keys() <= fields.keys()
    return ", ".join((fields | changes).values())


def smi(count: int = 8, changes: Mapping[str, str] | None = None) -> str:
    """The rows of `count` GPUs that are alike."""
    return "".join(smi_row(index, changes) + "\n" for index in range(count))


NVLINK = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)\n" + "".join(f"\t Link {n}: 26.562 GB/s\n" for n in range(18))
NVLINK_OFF = "GPU 0: NVIDIA A100 (UUID: GPU-0)\n" + "".join(f"\t Link {n}: <inactive>\n" for n in range(12))


def topology(count: int = 8, between: str = "NV18", adapters: int = 2) -> str:
    """The matrix of nvidia-smi topo -m, with the escapes and uneven tabs of the real one."""
    names = [f"GPU{n}" for n in range(count)] + [f"NIC{n}" for n in range(adapters)]
    tail = "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
    lines = ["\t\x1b[4m" + "\t".join(names) + tail + "\x1b[0m"]
    for row in names:
        cells = [" X " if row == column else between if row[0] == column[0] == "G" else "PXB" for column in names]
        lines.append(row + "\t" + "\t".join(cells) + ("\t0-55,112-167\t0\t\tN/A" if row[0] == "G" else "\t\t\t\t"))
    lines += ["", "Legend:", "", "  X    = Self", "  NV#  = Connection traversing a bonded set of # NVLinks", ""]
    lines += ["NIC Legend:", ""] + [f"  NIC{n}: mlx5_{n}" for n in range(adapters)]
    return "\n".join(lines) + "\n"


def infiniband(adapters: int = 8, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)") -> dict[str, str]:
    """The files of so many adapters with one port each."""
    files: dict[str, str] = {}
    for number in range(adapters):
        port = f"/sys/class/infiniband/mlx5_{number}/ports/1"
        files |= {f"{port}/state": state + "\n", f"{port}/rate": rate + "\n", f"{port}/link_layer": "InfiniBand\n"}
    return files
