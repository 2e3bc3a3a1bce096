from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from compliance.doctor import gpus
from compliance.doctor.host import Output
from tests.compliance.doctor import fake_host as fake
from tests.compliance.doctor.fake_host import FakeHost, fake_host


def one(**changes: str) -> gpus.Gpu:
    """A GPU, its fields with __ for the dot."""
    row = fake.smi_row(0, {name.replace("__", "."): value for name, value in changes.items()})
    (gpu,) = gpus.parse_query(f"Warning: infoROM is corrupted at gpu 0000:0B:00.0\n{row}\n\n", gpus.FIELDS)
    return gpu


def test_values_that_the_driver_does_not_know_are_absent() -> None:
    gpu = one(mig__mode__current="[N/A]", ecc__mode__current="[Not Supported]", power__limit="[Unknown Error]")
    assert gpu.text("mig.mode.current") == gpu.text("ecc.mode.current") == ""
    assert [gpu.number(f"power.{name}limit") for name in ("", "default_")] == [None, 700.0]
    assert (gpu.number("memory.total"), gpu.text("name")) == (81559, "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("active", "expected"),
    [
        ("0x0000000000000001", []),
        ("0x0000000000000004", []),
        ("0x0000000000000008", ["hardware slowdown"]),
        ("0x00000000000000E1", ["software thermal slowdown", "hardware thermal slowdown", "hardware power brake"]),
        ("0x0000000000000002", ["application clocks are set"]),
        ("Active", []),
        ("[N/A]", []),
    ],
)
def test_reasons_for_low_clocks(active: str, expected: list[str]) -> None:
    assert one(clocks_event_reasons__active=active).slowed_by == expected
    before_535 = one(clocks_event_reasons__active="[N/A]", clocks_throttle_reasons__active=active)
    assert before_535.slowed_by == expected


@dataclass(frozen=True)
class OldDriver(FakeHost):
    """Refuses a query that names a field it does not know, as nvidia-smi does."""

    unknown: tuple[str, ...] = ()

    def run(self, *command: str, **_: object) -> Output:
        fields = command[1].removeprefix("--query-gpu=").split(",")
        for name in self.unknown:
            if name in fields:
                return Output(f'Field "{name}" is not a valid field to query.\n\n', "nvidia-smi failed with status 2")
        row: dict[str, str] = dict(zip(gpus.FIELDS, fake.smi_row(0).split(", "), strict=True))
        return Output(", ".join(row[name] for name in fields) + "\n")


def test_fields_that_a_driver_refuses_are_left_out() -> None:
    found = gpus.query(OldDriver(unknown=("remapped_rows.pending", "remapped_rows.failure", "mig.mode.current")))
    assert (found.trouble, found.driver) == ("", "580.65.06")
    named = ("mig.mode.current", "compute_mode", "power.default_limit")
    assert [found.gpus[0].text(name) for name in named] == ["", "Default", "700.00 W"]
    assert gpus.query(OldDriver(unknown=gpus.FIELDS)).trouble


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        (fake.MISSING, ""),
        (Output("it couldn't communicate", "nvidia-smi failed with status 9"), "communicate"),
        (Output("", "nvidia-smi gave no answer within 20 s"), "no answer within 20 s"),
        ("No devices were found\n", "lists no GPU"),
        ("", "lists no GPU"),
    ],
)
def test_no_gpus_for_several_reasons(tmp_path: Path, answer: str | Output, trouble: str) -> None:
    found = gpus.query(fake_host(tmp_path, answers={"nvidia-smi": answer}))
    assert found.gpus == ()
    assert trouble in found.trouble
    assert bool(found.trouble) == bool(trouble)


def test_processes_and_links() -> None:
    text = "4711, GPU-1, python -m other, with a comma\n[Not Found]\n4712, GPU-2, [N/A]\n"
    assert gpus.parse_processes(text) == (
        gpus.GpuProcess("4711", "python -m other, with a comma", "GPU-1"),
        gpus.GpuProcess("4712", "[N/A]", "GPU-2"),
    )
    count, rate = gpus.parse_links(fake.NVLINK)
    assert (count, round(rate)) == (18, 478)
    assert gpus.parse_links(fake.NVLINK_OFF) == gpus.parse_links("") == (0, 0)


MIXED = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tmlx5_0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPIX\t0-31\t0
GPU1\tNV12\t X \tSYS\tSYS\tSYS\t0-31\t0
GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63\t1
GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63\t1
mlx5_0\tPIX\tSYS\tSYS\tSYS\t X \t\t
"""
UNEVEN = fake.topology().replace("\t\x1b[4m", "\x1b[4m\t").replace("\tNV18", "\t NV18")


@pytest.mark.parametrize(
    ("text", "kinds", "words"),
    [
        (fake.topology(8, "NV18", 2), {"NV18": 28}, "every GPU to every other: 18 NVLinks"),
        (UNEVEN, {"NV18": 28}, "every GPU to every other: 18 NVLinks"),
        (MIXED, {"SYS": 4, "NV12": 2}, "4 of 6 pairs: PCIe across NUMA nodes, 2 of 6 pairs: 12 NVLinks"),
        *((text, {}, "") for text in ("", "GPU0\n", "GPU0\tGPU1\nGPU0\n", "\x00\t")),
        ("\tGPU0\tCPU Affinity\nGPU0\t X \t0-9\n", {}, ""),
        ("\tGPU0\tGPU1\nGPU0\t X \nGPU1\tNV1\t X \n", {}, ""),
    ],
)
def test_topology(text: str, kinds: dict[str, int], words: str) -> None:
    found = gpus.parse_topology(text)
    assert (found, gpus.describe_topology(found)) == (Counter(kinds), words)
