"""Fake machines whose facts, files and command outputs are given."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from compliance.doctor.diagnosis import Diagnosis
from compliance.doctor.gpus import NVLINK, Gpu, Gpus
from compliance.doctor.host import ExaminedHost
from compliance.doctor.intended_run import ExaminedRun, IntendedRun
from compliance.doctor.machine import AdapterPort, Machine
from compliance.doctor.system import complete, measure
from console.processes import Output

NODE = ExaminedRun(IntendedRun("h100_1x8"), {"training.device": "cuda", "log.division": "closed"}, 1, 8)
NODES = replace(NODE, nodes=2)
CPU = ExaminedRun(IntendedRun("tiny_cpu"), {"training.device": "cpu", "log.division": "open"}, 1, 2)

GPU = Gpu(
    0, "NVIDIA H100 80GB HBM3", memory_bytes=81559 << 20, clock_mhz=1980, links=18, link_gb_s=478.116,
    pcie_generation=5, pcie_width=16, pcie_full_width=16, power_limit_w=700.0, full_power_w=700.0,
)  # fmt: skip
GPUS = Gpus(
    tuple(replace(GPU, index=index) for index in range(8)), driver="580.65.06", connections=Counter({NVLINK: 28})
)
PORTS = tuple(AdapterPort(f"mlx5_{n} port 1", "ACTIVE", "400 Gb/sec (4X NDR)") for n in range(8))

MACHINE = Machine(
    cores=112.0, threads=224, physical_cores=112, frequency_mhz=3800.0, memory_bytes=2016 << 30, free_bytes=1900 << 30,
    shared_bytes=1 << 40, lockable_bytes=None, load=0.1, ports=PORTS, has_rdma_devices=True, address="10.1.2.3", gpus=GPUS,
)  # fmt: skip
"""A healthy node with eight H100 GPUs."""
BARE = replace(MACHINE, cores=2, threads=2, physical_cores=2, ports=(), has_rdma_devices=False, gpus=Gpus())

LSCPU = """Architecture:            x86_64
CPU(s):                  224
Vendor ID:               GenuineIntel
  Model name:            Intel(R) Xeon(R) Platinum 8480CL
    Socket(s):           2
Caches (sum of all):
  L1d:                   5.3 MiB (112 instances)
  L2:                    224 MiB (112 instances)
"""


@dataclass(frozen=True)
class FakeHost(ExaminedHost):
    """Host that answers a command with the first of `answers` whose key's words all occur in the command."""

    answers: dict[str, str | Output] = field(default_factory=dict)
    asked: list[tuple[tuple[str, ...], object]] = field(default_factory=list)
    """Each command with the environment variables that it was given."""

    def run(self, *command: str, environment: object = None, **_: object) -> Output:
        self.asked.append((command, environment))
        line = " ".join(command)
        for words, answer in self.answers.items():
            if all(word in line for word in words.split()):
                return Output(answer) if isinstance(answer, str) else answer
        return Output(trouble="no command here")


def fake_host(
    root: Path,
    files: Mapping[str, str] | None = None,
    answers: dict[str, str | Output] | None = None,
    environment: Mapping[str, str] | None = None,
) -> FakeHost:
    """Create a machine that has only the given files. File names are relative to the root."""
    for name, text in (files or {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return FakeHost(root, environment or {}, answers or {})


def describe(
    division: str, given: Mapping[str, str] | None = None, host: ExaminedHost | None = None, machine: Machine = BARE
) -> dict[str, str]:
    """Return the system description of a machine."""
    return complete(measure(host or ExaminedHost(), machine), {"division": division, **(given or {})}, {})


def lines_about(found: Iterable[Diagnosis], about: str = "") -> str:
    """Return a line for each diagnosis of the subject `about`, by default for each diagnosis that is not ok."""
    meant = [one for one in found if (one.subject == about if about else one.state != "ok")]
    return "".join(f"{one.state} {one.subject}: {one.found}{one.remedy and f'; {one.remedy}'}\n" for one in meant)


def lines_by_case(cases: Mapping[str, Iterable[Diagnosis]], about: str = "") -> str:
    """Return the lines of `lines_about` for each case, each line after the name of its case."""
    return "".join(
        f"{name} => {line}\n" for name, found in cases.items() for line in lines_about(found, about).splitlines()
    )
