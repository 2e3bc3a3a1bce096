"""A machine's description file: the command keeps users' fields and does not touch files of another kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compliance.doctor.system import write
from compliance.log.rules import SYSTEM_FIELDS
from tests.compliance import command
from tests.compliance.doctor.fake_host import describe

GIVEN = {"submitter": "Example", "status": "Preview", "number_of_nodes": "8", "cooling": "water", "hw_notes": "é"}


def written(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def system(path: Path, *options: str) -> tuple[int, str]:
    return command.run("system", "--out", path, *options)


def test_what_was_given_stays_and_what_is_measured_is_renewed(tmp_path: Path) -> None:
    path = tmp_path / "vm.json"
    assert system(path) == (0, f"{path}\n")
    measured = written(path)
    assert measured["system_name"] == "vm"
    old = GIVEN | {"division": "closed", "system_name": "node one", "host_memory_capacity": "7 GiB", "rack": "B4"}
    write(path, measured | old)
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


def test_setting_a_field_changes_no_other(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    # The file describes another machine, with a number instead of a text, an invalid division and reordered fields.
    before = {"host_processor_model_name": "EPYC 9654", "accelerators_per_node": 8, "rack": "B4", "division": "Closed"}
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


@pytest.mark.parametrize(
    "content", ["my notes\n", "", "[1, 2]", '{"name": "x", "version": "1", "framework": "y", "a": 1}', "pipe"]
)
def test_a_file_that_is_no_description_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "vm.json"
    if content == "pipe":
        os.mkfifo(path)
    else:
        path.write_text(content)
    before = path.lstat()
    status, text = system(path, "--set", "cooling=air")
    assert (status, text.count("\n")) == (2, 1)
    assert f"{path} is no system description" in text
    assert (path.lstat().st_mtime_ns, [*tmp_path.iterdir()]) == (before.st_mtime_ns, [path])


@pytest.mark.parametrize("ruleset", ["2.1.0", "5.0.0"])
def test_the_official_checker_accepts_the_file(tmp_path: Path, ruleset: str) -> None:
    path = tmp_path / "systems" / "vm.json"
    write(path, describe("closed", {"submitter": "Exämple", "system_name": "vm"}))
    assert written(path)["submitter"] == "Exämple"
    command = [sys.executable, "-m", "mlperf_logging.system_desc_checker", str(path), "training", ruleset]
    run = subprocess.run([*command, "--log_output", str(tmp_path / "log")], capture_output=True, text=True, check=False)
    assert "passed" in run.stderr
    assert "failed" not in run.stderr
