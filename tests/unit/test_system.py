import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compliance import artefact, system
from compliance.rules import SYSTEM_FIELDS

LSCPU = """Architecture:          x86_64
CPU(s):                256
Model name:            AMD EPYC 7742 64-Core Processor
Core(s) per socket:    64
Socket(s):             2
CPU max MHz:           2250.0000
L2 cache:              64 MiB (128 instances)
"""
GPUS = "\n".join(["NVIDIA A100-SXM4-80GB, 81920 MiB, 1410 MHz, 4, 16"] * 8) + "\n"
NVLINK = "GPU 0: NVIDIA A100\n" + "".join(f"\t Link {n}: 25 GB/s\n" for n in range(12))


@pytest.fixture
def gpu_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose lscpu and nvidia-smi print what a node with eight GPUs does."""
    answers = {"lscpu": LSCPU, "nvidia-smi": ""}
    for name, text in answers.items():
        script = tmp_path / name
        (tmp_path / "text").write_text(text)
        body = f"cat <<'END'\n{text}END\n"
        if name == "nvidia-smi":
            body = (
                f"case \"$*\" in *name,memory*) cat <<'END'\n{GPUS}END\n;; *nvlink*) cat <<'END'\n{NVLINK}END\n;; "
                "*driver*) echo 550.54.15;; esac\n"
            )
        script.write_text("#!/bin/sh\n" + body)
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_every_field_is_there_and_is_text() -> None:
    fields = system.describe("open")
    assert tuple(fields) == SYSTEM_FIELDS
    assert all(isinstance(value, str) for value in fields.values())
    assert fields["status"] == "Research, Development, or Internal (RDI)"
    assert fields["framework"].startswith("PyTorch")
    assert int(fields["host_processor_vcpu_count"]) > 0
    assert fields["host_memory_capacity"].endswith(" GiB")


@pytest.mark.usefixtures("gpu_node")
def test_processors_and_gpus_are_read_from_the_tools_output() -> None:
    fields = system.describe("closed", {"number_of_nodes": "8"})
    assert fields["host_processors_per_node"] == "2"
    assert fields["host_processor_core_count"] == "64"
    assert fields["host_processor_vcpu_count"] == "256"
    assert fields["host_processor_frequency"] == "2.25 GHz"
    assert fields["host_processor_caches"] == "L2 cache: 64 MiB (128 instances)"
    assert fields["accelerators_per_node"] == "8"
    assert fields["accelerator_model_name"] == "NVIDIA A100-SXM4-80GB"
    assert fields["accelerator_memory_capacity"] == "81920 MiB"
    assert fields["accelerator_host_interconnect"] == "PCIe Gen4 x16"
    assert fields["accelerator_interconnect"] == "12 NVLinks"
    assert "NVIDIA driver 550.54.15" in fields["other_software_stack"]
    assert fields["number_of_nodes"] == "8"


def test_machine_without_tools_is_described_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    fields = system.describe("open")
    assert fields["accelerators_per_node"] == "0"
    assert fields["host_processor_model_name"]


def test_tool_that_fails_is_no_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed, 1, 2, 3, 4'\nexit 9\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert system.describe("open")["accelerators_per_node"] == "0"


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
def test_wrong_fields_are_refused(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        system.describe("open", overrides)


@pytest.mark.parametrize("ruleset", ["2.1.0", "5.0.0"])
def test_official_checker_accepts_the_file(tmp_path: Path, ruleset: str) -> None:
    path = tmp_path / "systems" / "vm.json"
    system.write(path, system.describe("closed", {"submitter": "Exämple", "system_name": "vm"}))
    assert json.loads(path.read_text(encoding="utf-8"))["submitter"] == "Exämple"
    command = [sys.executable, "-m", "mlperf_logging.system_desc_checker", str(path), "training", ruleset]
    run = subprocess.run([*command, "--log_output", str(tmp_path / "log")], capture_output=True, text=True, check=False)
    assert "passed" in run.stderr
    assert "failed" not in run.stderr


def test_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "vm.json"
    system.write(path, {"a": "old"})

    def full_disk(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artefact.os, "fsync", full_disk)
    with pytest.raises(ValueError, match="No space left on device; choose another folder"):
        system.write(path, {"a": "new"})
    assert json.loads(path.read_text()) == {"a": "old"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["vm.json"]


def test_command_line_sets_fields(tmp_path: Path) -> None:
    path = tmp_path / "vm.json"
    command = [sys.executable, "-m", "compliance", "system", "--out", str(path), "--division", "closed"]
    run = subprocess.run([*command, "--set", "submitter=A=B", "cooling="], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    fields = json.loads(path.read_text())
    assert (fields["submitter"], fields["cooling"], fields["division"]) == ("A=B", "", "closed")
    assert fields["system_name"] == "vm"
    run = subprocess.run([*command, "--set", "submitter"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (
        2,
        "error: --set submitter: expected KEY=VALUE, such as number_of_nodes=8\n",
    )
