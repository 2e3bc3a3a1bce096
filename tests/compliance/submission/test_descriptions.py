"""System descriptions: their fields, field types, and agreement with the logs' headers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from compliance.log.run import LoggedRun
from compliance.submission.description import against_logs, description_findings, read_description
from tests.compliance.command import run
from tests.compliance.submission.submission_trees import describe_system, write_description


@pytest.mark.parametrize(
    ("ruleset", "keys"), [("3.1.0", []), ("4.0.0", ["status"]), ("4.1.0", ["status"]), ("5.0.0", ["status"])]
)
def test_the_status_words_hold_from_4_0_0_on(tmp_path: Path, ruleset: str, keys: list[str]) -> None:
    description = read_description(write_description(tmp_path, status="onprem"))
    assert [finding.key for finding in description_findings(description, ruleset)] == keys


@pytest.mark.parametrize("value", ["8x", "", "-1", "8.0", "٨", 8.5, None, [], True])
def test_counts_that_the_summarizer_cannot_compute_with(tmp_path: Path, value: object) -> None:
    path = write_description(tmp_path)
    path.write_text(json.dumps(describe_system() | {"host_processors_per_node": value}))
    found = [*description_findings(read_description(path), "5.0.0")]
    assert [(finding.key, finding.severity) for finding in found] == [("host_processors_per_node", "error")]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff{}", b'{"a": ' * 100_000, b"null", b"1" * 10_000])
def test_what_is_no_description_is_said_once(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "system.json"
    path.write_bytes(content)
    [finding] = description_findings(read_description(path), "5.0.0")
    assert "expected a JSON object with the 33 fields" in finding.found


def test_every_field_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "system.json"
    for name in describe_system():
        path.write_text(json.dumps({key: value for key, value in describe_system().items() if key != name}))
        [finding] = description_findings(read_description(path), "5.0.0")
        assert (finding.key, finding.line) == (name, None)


HEAD = {"accelerator": "NVIDIA H100 80GB HBM3", "cpu": "Intel(R) Xeon(R) Platinum 8480C, 224 logical cores"}
HEAD |= {"torch": "2.13.0+cu130", "processes": "16 x 14 threads, data 16"}
MACHINE = {"number_of_nodes": "2", "accelerators_per_node": "8", "accelerator_model_name": "NVIDIA H100-SXM5-80GB"}
MACHINE |= {"host_processor_model_name": "Intel Xeon 8480C", "framework": "PyTorch 2.13.0"}


@pytest.mark.parametrize(
    ("head", "described", "expected"),
    [
        ({}, {}, []),
        ({}, {"accelerator_model_name": "NVIDIA A100-SXM4-80GB"}, [("accelerator_model_name", "error")]),
        ({}, {"accelerator_model_name": "N/A"}, [("accelerator_model_name", "error")]),
        ({}, {"number_of_nodes": "1"}, [("accelerators_per_node", "error")]),
        ({}, {"number_of_nodes": "9" * 5000}, []),
        ({}, {"host_processor_model_name": "EPYC 7742"}, [("host_processor_model_name", "warning")]),
        ({}, {"framework": "PyTorch 2.11.0"}, [("framework", "warning")]),
        ({}, {"framework": ""}, []),
        ({"accelerator": "none"}, {}, [("accelerator_model_name", "error")]),
        ({"accelerator": "none"}, {"accelerator_model_name": "N/A", "accelerators_per_node": "0"}, []),
        (dict.fromkeys(HEAD, ""), {"accelerator_model_name": "TPU"}, []),
        ({"processes": "many"}, {}, [("accelerators_per_node", "error")]),
    ],
)
def test_a_description_is_held_against_the_heads_of_the_logs(
    tmp_path: Path, head: dict[str, str], described: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    description = read_description(write_description(tmp_path, **(MACHINE | described)))
    found = [*against_logs(description, [LoggedRun(HEAD | head)] * 3)]
    assert [(finding.key, finding.severity) for finding in found] == expected


def test_the_remedy_for_missing_fields_repairs_the_description(tmp_path: Path) -> None:
    path = write_description(tmp_path / "a folder", cooling=None, sw_notes=None)
    [finding] = description_findings(read_description(path), "5.0.0")
    command = shlex.split(finding.remedy.split("`")[1])
    assert command[:3] == ["python", "-m", "compliance"]
    assert run(*command[3:])[0] == 0
    assert [*description_findings(read_description(path), "5.0.0")] == []
