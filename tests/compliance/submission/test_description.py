"""System descriptions: their fields, field types, and agreement with the logs' records and headers."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from compliance.log.logged_run import LoggedRun
from compliance.log.rules import SYSTEM_FIELDS
from compliance.submission.description import against_logs, description_findings, read_description
from tests.compliance.command import run
from tests.compliance.log.test_logged_run import run_of
from tests.compliance.result_folders import SYSTEM, write_description

FIELDS: list[dict[str, Any]] = [
    *({"host_processors_per_node": value} for value in ("8x", "٨", 8.5, True, " 8 ")),
    *({"host_processors_per_node": value} for value in ("0", "1", "64", "65")),
    *({"number_of_nodes": value} for value in ("0", "1", "100000", "100001", "9" * 30)),
    *({"accelerators_per_node": value} for value in ("0", "1024", "1025", 8)),
    *(dict.fromkeys(SYSTEM_FIELDS[-count:]) for count in (1, 5, 6)),  # the last 1, 5 or 6 fields are missing
    *({"status": value} for value in ("onprem", "Preview")),
]
FILES = [b"", b"{", b"[]", b"\xff{}", b'{"a": ' * 100_000, b"1" * 10_000]


def test_each_fault_of_a_description_gets_the_recorded_findings(tmp_path: Path) -> None:
    path, said = tmp_path / "systems" / f"{SYSTEM}.json", ""
    for change in (*FIELDS, *FILES):
        write_description(tmp_path, **(change if isinstance(change, dict) else {}))
        if isinstance(change, bytes):
            path.write_bytes(change)
        found = "; ".join(map(str, description_findings(read_description(path), "5.0.0"))).replace(str(path), "PATH")
        # Leave out Python's own messages.
        found = re.sub(r"(JSON \(|maximum|Exceeds).*?, expected", r"\1..., expected", found)
        said += f"{change if isinstance(change, dict) else change[:9]} => {found}\n"
    assert said == Path(__file__).with_name("descriptions.txt").read_text()
    assert [*description_findings(read_description(write_description(tmp_path, status="onprem")), "3.1.0")] == []


HEAD = {"accelerator": "NVIDIA H100 80GB HBM3", "cpu": "Intel(R) Xeon(R) Platinum 8480C, 224 logical cores"}
HEAD |= {"torch": "2.13.0+cu130", "processes": "16 x 14 threads, data 16"}
MACHINE = {"number_of_nodes": "2", "accelerators_per_node": "8", "accelerator_model_name": "NVIDIA H100-SXM5-80GB"}
MACHINE |= {"host_processor_model_name": "Intel Xeon 8480C", "framework": "PyTorch 2.13.0"}
ERRORS = ("accelerators_per_node", "accelerator_model_name")


@pytest.mark.parametrize(
    ("field", "written", "head", "agrees"),
    [
        ("accelerator_model_name", "NVIDIA A100-SXM4-80GB", {}, False),
        ("accelerator_model_name", "N/A", {}, False),
        ("accelerator_model_name", "NVIDIA H100", {"accelerator": "none"}, False),
        ("accelerator_model_name", " - ", {"accelerator": "none", "processes": "1"}, True),
        ("number_of_nodes", "1", {}, False),
        ("number_of_nodes", "2", {"processes": "many"}, False),
        ("number_of_nodes", "999999", {"processes": "7999992"}, True),
        ("number_of_nodes", "1000000", {"processes": "1"}, True),  # ignored, because it has too many digits
        ("host_processor_model_name", "EPYC 7742", {}, False),
        ("host_processor_model_name", "Xeon 8480", {}, True),
        ("host_processor_model_name", "Xeon 8480C+", {}, True),
        ("host_processor_model_name", "EPYC 9654 64-Core", {"cpu": "AMD EPYC 7742 64-Core Processor, 8 cores"}, False),
        ("host_processor_model_name", "Graviton 3", {"cpu": "AWS Graviton, 64 cores"}, True),
        ("host_processor_model_name", "Altra 3", {"cpu": "AWS Graviton, 64 cores"}, False),
        ("host_processor_model_name", "Altra 3", {"cpu": "CPU, 64 cores"}, True),
        ("framework", "", {}, True),
        ("framework", "pytorch 2.13", {}, True),
        ("framework", "PyTorch", {}, True),
        ("framework", "PyTorch 2.11.0", {}, False),
        ("framework", "PyTorch 2.1", {}, False),
        ("framework", "NVIDIA PyTorch 2.13.0", {}, False),
    ],
)
def test_a_description_must_agree_with_the_headers_of_most_logs(
    tmp_path: Path, field: str, written: str, head: dict[str, str], agrees: bool
) -> None:
    description = read_description(write_description(tmp_path, **(MACHINE | {field: written})))
    runs = [LoggedRun(dict.fromkeys(HEAD, "x")), *[LoggedRun(HEAD | head)] * 2]
    found = [(finding.key, finding.severity, finding.line) for finding in against_logs(description, runs)]
    name = {"number_of_nodes": "accelerators_per_node"}.get(field, field)
    wrong = [(name, "error" if name in ERRORS else "warning", description.lines[name])]
    assert found == ([] if agrees else wrong)


def test_a_description_gets_findings_if_it_differs_from_the_logs(tmp_path: Path) -> None:
    said: dict[str, Any] = {
        "submission_org": "Example, Inc.",
        "submission_platform": "two machines",
        "submission_status": "cloud",
    }
    # One accelerator with 10,000.01 sequences/s is too fast.
    logged = run_of(1_000_001, submission_division="open", eval_interval_samples=1_000_000, **said)
    assert [*against_logs(read_description(write_description(tmp_path, "two-machines-8")), [logged])]
    changes = {"accelerators_per_node": "1", "submitter": "example inc", "status": "Available cloud"}
    description = read_description(write_description(tmp_path, "machine", **changes))
    assert [str(finding) for finding in against_logs(description, [logged])] == [
        "error: line 3: division: value 'closed', expected what the logs say, submission_division 'open' "
        "[SR System description; TR 4]; correct division, or the setting that is logged as submission_division",
        "error: line 20: accelerators_per_node: 1 accelerator with 10,000 sequences a second each by the logs, "
        "expected at most 10,000: published accelerators stay below a fifth of this [SR System description]; "
        "describe the system that ran, and check train_samples and the times in the logs",
    ]
    as_fast = [
        LoggedRun(dict.fromkeys(HEAD, "")),
        run_of(1_000_000, submission_division="closed", **said),
        run_of(150_080),
        LoggedRun(),
    ]
    assert [*against_logs(description, as_fast)] == []
    runs = [LoggedRun(HEAD | {"processes": "1"})] * 2
    found = [*against_logs(read_description(write_description(tmp_path, **MACHINE)), runs)]
    assert [str(finding) for finding in found] == [
        "error: line 20: accelerators_per_node: number_of_nodes x accelerators_per_node '16', expected what the headers of "
        "the logs say, '1' [SR System description]; `python -m compliance system --out FILE --set "
        "accelerators_per_node=...`, or take the logs of this system"
    ]


def test_the_remedy_for_missing_fields_repairs_the_description(tmp_path: Path) -> None:
    path = write_description(tmp_path / "a folder", cooling=None, sw_notes=None)
    [finding] = description_findings(read_description(path), "5.0.0")
    command = shlex.split(finding.remedy.split("`")[1])
    assert command[:3] == ["python", "-m", "compliance"]
    assert run(*command[3:])[0] == 0
    assert [*description_findings(read_description(path), "5.0.0")] == []
