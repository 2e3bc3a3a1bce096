from dataclasses import replace
from pathlib import Path

import pytest

from compliance.doctor.host import ExaminedHost
from compliance.doctor.machine import read_machine
from compliance.log.rules import SYSTEM_FIELDS
from console.processes import Output
from tests.compliance.doctor.fake_host import BARE, LSCPU, MACHINE, PORTS, describe, fake_host

ANSWERS: dict[str, str | Output] = {
    "lscpu": LSCPU,
    "python -c": '{"PyTorch": "2.13.0+cu130", "CUDA": "13.0", "cuDNN": "9.14.0", "NCCL": "2.28.9", "gpus": 8}',
}


def test_every_field_of_this_machine_is_text() -> None:
    host = ExaminedHost()
    fields = describe("open", host=host, machine=read_machine(host))
    assert tuple(fields) == SYSTEM_FIELDS
    assert all(isinstance(value, str) for value in fields.values())
    assert fields["status"] == "Research, Development, or Internal (RDI)"
    assert fields["framework"].startswith("PyTorch")
    assert int(fields["host_processor_vcpu_count"]) > 0
    assert fields["host_memory_capacity"].endswith(" GiB")


def test_a_gpu_node_is_described(tmp_path: Path) -> None:
    files = {
        "/etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.2 LTS"\n',
        "/sys/class/net/ens1/device/vendor": "0x15b3",
        "/sys/class/net/ens1/speed": "100000\n",
        "/sys/class/net/down0/device/vendor": "0x15b3",
        "/sys/class/net/down0/speed": "-1\n",
        "/sys/class/net/ib0/device/vendor": "0x15b3",
        "/sys/class/net/lo/mtu": "65536",
    }
    environment = {"NVIDIA_PYTORCH_VERSION": "25.10"}
    host = fake_host(tmp_path, files, ANSWERS, environment)
    machine = replace(MACHINE, ports=(*PORTS[1:], replace(PORTS[0], rate="200 Gb/sec (4X HDR)", link_layer="Ethernet")))
    fields = describe("closed", {"number_of_nodes": "8"}, host, machine)
    expected = {
        "number_of_nodes": "8",
        "host_processors_per_node": "2",
        "host_processor_model_name": "Intel(R) Xeon(R) Platinum 8480CL",
        "host_processor_core_count": "56",
        "host_processor_vcpu_count": "224",
        "host_processor_frequency": "3.80 GHz",
        "host_processor_caches": "L1d cache: 5.3 MiB (112 instances), L2 cache: 224 MiB (112 instances)",
        "host_memory_capacity": "2016 GiB",
        "host_networking": "1x Ethernet, 1x Ethernet 100 Gb/s, 7x InfiniBand 400 Gb/s, 1x RoCE 200 Gb/s",
        "accelerators_per_node": "8",
        "accelerator_model_name": "NVIDIA H100 80GB HBM3",
        "accelerator_memory_capacity": "81559 MiB",
        "accelerator_frequency": "1980 MHz",
        "accelerator_host_interconnect": "PCIe Gen5 x16",
        "accelerator_interconnect": "18 NVLinks, 478 GB/s per direction",
        "accelerator_interconnect_topology": "every GPU to every other: NVLink",
        "framework": "PyTorch 2.13.0+cu130 (NVIDIA Release 25.10)",
        "operating_system": "Ubuntu 24.04.2 LTS",
        "cooling": "",
        "hw_notes": "",
    }
    assert {name: fields[name] for name in expected} == expected
    stack = fields["other_software_stack"].split(", ")
    assert stack[:4] == ["CUDA 13.0", "cuDNN 9.14.0", "NCCL 2.28.9", "NVIDIA driver 580.65.06"]


@pytest.mark.parametrize("answer", ["", Output(trouble="python gave no answer within 90 s")])
def test_a_machine_without_tools_is_described_too(tmp_path: Path, answer: str | Output) -> None:
    for machine in (MACHINE, BARE):
        fields = describe("open", host=fake_host(tmp_path, answers={"python -c": answer}), machine=machine)
        assert "CUDA" not in fields["other_software_stack"]
        assert fields["framework"].startswith("PyTorch")
        assert fields["accelerators_per_node"] == str(len(machine.gpus.gpus))
        assert fields["host_processor_model_name"]
        assert fields["host_storage_capacity"].endswith(" GB")
