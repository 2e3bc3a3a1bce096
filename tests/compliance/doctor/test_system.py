import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from compliance.doctor import system
from compliance.doctor.gpus import Gpus
from compliance.doctor.host import ExaminedHost, Output
from compliance.log.rules import SYSTEM_FIELDS
from tests.compliance.doctor import fake_host as fake
from tests.compliance.doctor.fake_host import describe, fake_host
from tests.programs import PATIENCE_S

GPU_NODE: dict[str, str | Output] = {
    "lscpu": fake.LSCPU_XEON,
    "dmidecode": fake.DMIDECODE,
    "lsblk": fake.LSBLK,
    "nvidia-smi nvlink": fake.NVLINK,
    "nvidia-smi topo": fake.topology(),
    "nvidia-smi --query-gpu": fake.smi(),
    "python -c": '{"PyTorch": "2.13.0+cu130", "CUDA": "13.0", "cuDNN": "9.14.0", "NCCL": "2.28.9", "gpus": 8}',
}


def test_every_field_is_there_and_is_text() -> None:
    fields = describe("open")
    assert tuple(fields) == SYSTEM_FIELDS
    assert all(isinstance(value, str) for value in fields.values())
    assert fields["status"] == "Research, Development, or Internal (RDI)"
    assert fields["framework"].startswith("PyTorch")
    assert int(fields["host_processor_vcpu_count"]) > 0
    assert fields["host_memory_capacity"].endswith(" GiB")


def test_a_gpu_node_is_described(tmp_path: Path) -> None:
    files = fake.infiniband() | {
        "/proc/meminfo": "MemTotal:       2113462180 kB\nMemFree: 1 kB\n",
        "/etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.2 LTS"\n',
        "/sys/class/net/ens1/device/vendor": "0x15b3",
        "/sys/class/net/ens1/speed": "100000\n",
        "/sys/class/net/down0/device/vendor": "0x15b3",
        "/sys/class/net/down0/speed": "-1\n",
        "/sys/class/net/ib0/device/vendor": "0x15b3",
        "/sys/class/net/lo/mtu": "65536",
        "/.dockerenv": "",
    }
    environment = {"NVIDIA_PRODUCT_NAME": "PyTorch", "NVIDIA_PYTORCH_VERSION": "25.10"}
    host = fake_host(tmp_path, files, GPU_NODE, environment)
    fields = describe("closed", {"number_of_nodes": "8"}, host)
    expected = {
        "number_of_nodes": "8",
        "host_processors_per_node": "2",
        "host_processor_model_name": "Intel(R) Xeon(R) Platinum 8480CL",
        "host_processor_core_count": "56",
        "host_processor_vcpu_count": "224",
        "host_processor_frequency": "3.80 GHz",
        "host_processor_interconnect": "UPI",
        "host_processor_caches": "L1d cache: 5.3 MiB (112 instances), L2 cache: 224 MiB (112 instances)",
        "host_memory_capacity": "2016 GiB",
        "host_memory_configuration": "2x 64 GB DDR5 4800 MT/s",
        "host_storage_type": "HDD, NVMe SSD, SSD",
        "host_storage_capacity": "2x 3.84 TB, 1x 480 GB, 1x 8.00 TB",
        "host_networking": "1x Ethernet, 1x Ethernet 100 Gb/s, 8x InfiniBand 400 Gb/s",
        "accelerators_per_node": "8",
        "accelerator_model_name": "NVIDIA H100 80GB HBM3",
        "accelerator_memory_capacity": "81559 MiB",
        "accelerator_memory_configuration": "HBM3",
        "accelerator_frequency": "1980 MHz",
        "accelerator_host_interconnect": "PCIe Gen5 x16",
        "accelerator_interconnect": "18 NVLinks, 478 GB/s a direction",
        "accelerator_interconnect_topology": "every GPU to every other: 18 NVLinks",
        "framework": "PyTorch 2.13.0+cu130 (NVIDIA Release 25.10)",
        "operating_system": "Ubuntu 24.04.2 LTS",
        "cooling": "",
        "hw_notes": "",
    }
    assert {name: fields[name] for name in expected} == expected
    stack = fields["other_software_stack"].split(", ")
    assert stack[:4] == ["CUDA 13.0", "cuDNN 9.14.0", "NCCL 2.28.9", "NVIDIA driver 580.65.06"]
    assert stack[-2:] == ["Docker container", "image NVIDIA PyTorch 25.10"]


@pytest.mark.parametrize(
    ("lscpu", "expected"),
    [
        (fake.LSCPU_EPYC, ["2", "AMD EPYC 7742 64-Core Processor", "64", "256", "2.25 GHz", "Infinity Fabric (xGMI)"]),
        (fake.LSCPU_XEON, ["2", "Intel(R) Xeon(R) Platinum 8480CL", "56", "224", "3.80 GHz", "UPI"]),
        (fake.LSCPU_GRACE, ["1", "Neoverse-V2", "144", "144", "3.46 GHz", ""]),
    ],
)
def test_processors_of_several_makers(tmp_path: Path, lscpu: str, expected: list[str]) -> None:
    fields = system.processors(lscpu, fake_host(tmp_path))
    names = ["_model_name", "_core_count", "_vcpu_count", "_frequency", "_interconnect"]
    assert [fields[f"host_processor{name}"] for name in ["s_per_node", *names]] == expected


def test_processors_without_lscpu_come_from_cpuinfo(tmp_path: Path) -> None:
    cpuinfo = "processor\t: 0\nmodel name\t: Some Processor\ncpu MHz\t\t: 2100.000\n\nprocessor\t: 1\n"
    fields = system.processors("", fake_host(tmp_path, {"/proc/cpuinfo": cpuinfo}))
    assert fields["host_processor_model_name"] == "Some Processor"
    assert fields["host_processor_frequency"] == "2.10 GHz"
    assert int(fields["host_processor_core_count"]) >= 1


@pytest.mark.parametrize(
    ("lsblk", "kind", "capacity"),
    [
        (fake.LSBLK_OLD, "HDD", "1x 960 GB"),
        ('{"blockdevices": [{"name": "vda", "type": "disk", "size": 1}]}', "virtual disk", "1x 0 GB"),
        ('{"blockdevices": [{"name": "zram0", "type": "disk", "size": 4096}]}', "", ""),
        ("", "", ""),
        ("[1]", "", ""),
        ('{"blockdevices": [7, null]}', "", ""),
        ("[" * 100_000, "", ""),
    ],
)
def test_disks_of_any_shape(lsblk: str, kind: str, capacity: str) -> None:
    assert system.storage(lsblk) == {"host_storage_type": kind, "host_storage_capacity": capacity}


def test_what_tools_that_are_missing_leave_out(tmp_path: Path) -> None:
    assert system.memory("MemTotal: 1048576 kB\n", "") == {
        "host_memory_capacity": "1 GiB",
        "host_memory_configuration": "",
    }
    assert system.accelerators(Gpus(), fake_host(tmp_path)) == {
        "accelerators_per_node": "0",
        "accelerator_model_name": "N/A",
    }
    port = "/sys/class/infiniband/mlx5_0/ports/1"
    files = {f"{port}/rate": "200 Gb/sec (4X HDR)", f"{port}/link_layer": "Ethernet", f"{port}/state": "4: ACTIVE"}
    assert system.networking(fake_host(tmp_path, files)) == "1x RoCE 200 Gb/s"


@pytest.mark.parametrize(
    ("files", "environment", "expected"),
    [
        ({}, {}, ""),
        ({"/.dockerenv": ""}, {}, "Docker container"),
        ({"/run/.containerenv": 'engine="podman"\nimage="a.io/bert:1"\n'}, {}, "Podman container a.io/bert:1"),
        ({}, {"APPTAINER_CONTAINER": "/images/bert.sif"}, "Apptainer container bert.sif"),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes pod"),
        ({}, {"container": "enroot"}, "container"),
        ({}, {"NVIDIA_PRODUCT_NAME": "PyTorch"}, "container, image NVIDIA PyTorch"),
    ],
)
def test_containers(tmp_path: Path, files: dict[str, str], environment: dict[str, str], expected: str) -> None:
    assert system.container(fake_host(tmp_path, files, environment=environment)) == expected


@pytest.mark.parametrize("answer", ["not json", "[]", "", Output(trouble="python gave no answer within 90 s")])
def test_pytorch_that_gives_no_answer_is_left_out(tmp_path: Path, answer: str | Output) -> None:
    fields = describe("open", host=fake_host(tmp_path, answers=GPU_NODE | {"python -c": answer}))
    assert "CUDA" not in fields["other_software_stack"]
    assert fields["framework"].startswith("PyTorch")


def test_machine_without_tools_is_described_too(tmp_path: Path) -> None:
    fields = describe("open", host=fake_host(tmp_path, answers={"python -c": '{"CUDA": "13.0"}'}))
    assert "CUDA" not in fields["other_software_stack"]  # PyTorch takes seconds to ask, and here is no GPU
    assert fields["accelerators_per_node"] == "0"
    assert fields["host_processor_model_name"]
    assert fields["host_storage_capacity"].startswith("1x ")


# Commands


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], ExaminedHost]:
    """Put a shell script of a name and a body before all other programs; the machine with it."""

    def write(name: str, body: str) -> ExaminedHost:
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
        return ExaminedHost()

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return write


def test_tool_that_fails_is_no_tool(script: Callable[[str, str], ExaminedHost]) -> None:
    host = script("nvidia-smi", "echo 'NVIDIA-SMI has failed, 1, 2, 3, 4'\nexit 9")
    assert describe("open", host=host)["accelerators_per_node"] == "0"


def test_a_tool_that_hangs_is_killed_with_its_children(
    tmp_path: Path, script: Callable[[str, str], ExaminedHost]
) -> None:
    host = script("hangs", f"sleep 600 & echo $! > {tmp_path}/child; echo half an answer; wait")
    (tmp_path / "child").touch()
    begin = time.monotonic()
    for seconds in (0.5, 8, 64):  # a busy machine starts slowly
        output = host.run("hangs", timeout_s=seconds)
        if (tmp_path / "child").read_text().strip():
            break
    assert time.monotonic() - begin < 500
    assert (output.trouble, output.answer) == (f"hangs gave no answer within {seconds:g} s", "")
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}")

    def is_gone() -> bool:
        return not child.exists() or "Z" in (child / "stat").read_text().split()[2]

    deadline = time.monotonic() + PATIENCE_S
    while not is_gone() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert is_gone()


def test_trouble_of_commands_is_told_apart(tmp_path: Path, script: Callable[[str, str], ExaminedHost]) -> None:
    host = script("fails", "echo why >&2; printf '\\377\\n'; exit 3")
    output = host.run("fails")
    assert (output.trouble, output.errors, output.missing) == ("fails failed with status 3", "why\n", False)
    assert output.text == "\ufffd\n"
    assert host.run("is-not-there").missing
    (tmp_path / "no-program").write_text("")
    assert host.run("no-program").trouble


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"colour": "red"}, "'colour' does not exist, expected one of submitter, division"),
        ({"status": "available"}, "status is 'available', expected one of 'Available on-premise'"),
        ({"division": "Closed"}, "expected 'closed' or 'open' in lower case"),
        ({"number_of_nodes": "eight"}, "number_of_nodes is 'eight', expected a number"),
        ({"accelerators_per_node": ""}, "accelerators_per_node is ''"),
    ],
)
def test_wrong_fields_are_refused(tmp_path: Path, overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe("open", overrides, fake_host(tmp_path))
