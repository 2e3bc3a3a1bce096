"""System descriptions: measured fields, and a command that overwrites neither users' fields nor other files."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compliance.doctor.gpus import Gpu, Gpus
from compliance.log.rules import SYSTEM_FIELDS
from compliance.official.package import Answer, ask
from console.processes import Output
from tests.compliance import command
from tests.compliance.doctor.fake_host import BARE, LSCPU, MACHINE, PORTS, describe, fake_host
from tests.conftest import REPOSITORY

ANSWERS: dict[str, str | Output] = {
    "lscpu": LSCPU,
    "python -c": '{"PyTorch": "2.13.0+cu130", "CUDA": "13.0", "cuDNN": "9.14.0", "NCCL": "2.28.9", "gpus": 8}',
}


def test_a_gpu_node_gets_the_recorded_system_description(tmp_path: Path) -> None:
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
    expected = json.loads(Path(__file__).with_name("h100_node.json").read_text())
    assert {name: fields[name] for name in expected} == expected
    stack = fields["other_software_stack"].split(", ")
    assert stack[:4] == ["CUDA 13.0", "cuDNN 9.14.0", "NCCL 2.28.9", "NVIDIA driver 580.65.06"]


@pytest.mark.parametrize("answer", ["", Output(trouble="python gave no answer within 90 s")])
def test_a_system_description_has_fallbacks_for_missing_tools(tmp_path: Path, answer: str | Output) -> None:
    disk = os.statvfs(REPOSITORY)
    unknown = replace(BARE, frequency_mhz=0.0, gpus=Gpus((Gpu(0, "T4"),)))
    for machine, cores, gpus in ((MACHINE, "112", "8"), (BARE, "2", "0"), (unknown, "2", "1")):
        fields = describe("open", host=fake_host(tmp_path, answers={"python -c": answer}), machine=machine)
        assert "CUDA" not in fields["other_software_stack"]
        assert fields["framework"].startswith("PyTorch")
        assert (fields["host_processors_per_node"], fields["host_processor_core_count"]) == ("1", cores)
        assert fields["accelerators_per_node"] == gpus
        assert fields["host_processor_model_name"]
        # GB are 10^9 bytes.
        assert fields["host_storage_capacity"] == f"{disk.f_blocks * disk.f_frsize / 10**9:.0f} GB"
        known = [name for name in fields if name.startswith(("accelerator_", "host_processor_f")) and fields[name]]
        assert machine is not unknown or known == ["accelerator_model_name"]


GIVEN = {"submitter": "Example", "status": "Preview", "number_of_nodes": "8", "cooling": "water", "hw_notes": "é"}


def written(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def system(path: Path, *options: str) -> tuple[int, str]:
    return command.run("system", "--out", path, *options)


def test_the_option_measure_keeps_given_fields_and_replaces_measured_fields(tmp_path: Path) -> None:
    path = tmp_path / "vm.json"
    assert system(path) == (0, f"{path}\n")
    measured = written(path)
    assert (tuple(measured), measured["system_name"], measured["division"]) == (SYSTEM_FIELDS, "vm", "open")
    assert measured["framework"].startswith("PyTorch")
    assert int(measured["host_processor_vcpu_count"]) > 0
    assert measured["host_memory_capacity"].endswith(" GiB")
    old = GIVEN | {"division": "closed", "system_name": "node one", "host_memory_capacity": "7 GiB", "rack": ""}
    path.write_text(json.dumps(measured | old))
    assert system(path, "--measure") == (0, f"{path}\n")
    renewed = written(path)
    kept = {name: value for name, value in old.items() if name != "host_memory_capacity"}
    assert {name: renewed[name] for name in kept} == kept
    assert renewed["host_memory_capacity"] == measured["host_memory_capacity"] != "7 GiB"
    assert tuple(renewed) == (*SYSTEM_FIELDS, "rack")
    given = ("--measure", "--division", "open", "--set", "submitter=A=B", "cooling=", "host_memory_capacity=2 TiB")
    assert system(path, *given) == (0, f"{path}\n")
    renewed = written(path)
    assert (renewed["submitter"], renewed["cooling"], renewed["division"]) == ("A=B", "", "open")
    assert (renewed["status"], renewed["host_memory_capacity"]) == ("Preview", "2 TiB")
    assert ask("system", path, "2.1.0") == Answer("pass")


def test_the_option_set_changes_only_the_given_fields(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    # Another machine's file, with a number in place of a text, an invalid division and fields in another order.
    before = {"host_processor_model_name": "EPYC 9654", "accelerators_per_node": 8, "rack": "B4", "division": "Closed"}
    before |= {"row": 7, "room": "C"}  # only half of these fields belong to a description, which is enough
    path.write_text(json.dumps(before))
    assert system(path, "--set", "submitter=A=B", "cooling=") == (0, f"{path}\n")
    assert list(written(path).items()) == [*before.items(), ("submitter", "A=B"), ("cooling", "")]
    unchanged = path.read_bytes()
    for wrong in ("submitter", "colour=red", "status=new", "number_of_nodes=eight", "accelerators_per_node="):
        status, text = system(path, "--set", wrong)
        assert (status, text.count("\n"), path.read_bytes()) == (2, 1, unchanged)
        assert wrong.partition("=")[0] in text
        assert "expected" in text
    for options, words in (((), "exists: --set KEY=VALUE"), (("--measure",), "division: value 'Closed'")):
        status, text = system(path, *options)
        assert (status, words in text, path.read_bytes()) == (2, True, unchanged)
    assert system(path, "--measure", "--division", "closed") == (0, f"{path}\n")
    assert (written(path)["division"], written(path)["accelerators_per_node"]) == ("closed", "0")
    path.write_text('{"division": "open"}')
    assert system(path, "--set", "cooling=air") == (0, f"{path}\n")


@pytest.mark.parametrize(
    "content",
    ["my notes\n", "", "{}", "[1, 2]", '{"name": "x", "version": "1", "framework": "y", "status": "", "a": 1}', "pipe"],
)
def test_the_system_command_does_not_overwrite_other_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "vm.json"
    if content == "pipe":
        os.mkfifo(path)
    else:
        path.write_text(content)
    before = path.lstat()
    status, text = system(path, "--set", "cooling=air")
    assert (status, text.count("\n")) == (2, 1)
    assert f"{path} is not a system description" in text
    assert (path.lstat().st_mtime_ns, [*tmp_path.iterdir()]) == (before.st_mtime_ns, [path])
