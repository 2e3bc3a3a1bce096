"""The description of a machine, written a second time: what people gave stays, what is no description is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compliance.doctor import system_file
from compliance.log.rules import SYSTEM_FIELDS
from console import files
from tests.compliance import command
from tests.compliance.doctor.fake_host import describe
from tests.hostile import NAME, assert_harmless

GIVEN = {"submitter": "Example", "status": "Preview", "number_of_nodes": "8", "cooling": "water", "hw_notes": "é"}


def written(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def system(path: Path, *options: str) -> tuple[int, str]:
    return command.run("system", "--out", path, *options)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A description of this machine as the command writes it first."""
    path = tmp_path_factory.mktemp("first") / "vm.json"
    assert system(path) == (0, f"{path}\n")
    return path


def test_what_was_given_stays_and_what_is_measured_is_renewed(first: Path, tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    measured = written(first)
    old = GIVEN | {"division": "closed", "system_name": "node one", "host_memory_capacity": "7 GiB", "rack": "B4"}
    path.write_text(json.dumps(measured | old), encoding="utf-8")
    status, text = system(path, "--measure")
    renewed = written(path)
    kept = {name: value for name, value in old.items() if name != "host_memory_capacity"}
    assert {name: renewed[name] for name in kept} == kept
    assert renewed["host_memory_capacity"] == measured["host_memory_capacity"] != "7 GiB"
    assert tuple(renewed) == (*SYSTEM_FIELDS, "rack")
    assert status == 0
    assert f"host_memory_capacity was '7 GiB', measured is {measured['host_memory_capacity']!r}" in text.splitlines()
    assert not any(name in text for name in kept)


def test_setting_a_field_changes_no_other(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    # Another machine than this one, with a number in place of a text, a wrong division and the fields in another order.
    before = {"host_processor_model_name": "EPYC 9654", "accelerators_per_node": 8, "rack": "B4", "division": "Closed"}
    path.write_text(json.dumps(before))
    assert system(path, "--set", "submitter=A=B", "cooling=") == (0, f"{path}\n")
    assert list(written(path).items()) == [*before.items(), ("submitter", "A=B"), ("cooling", "")]
    assert system(path, "--division", "closed") == (0, f"{path}\n")
    assert written(path)["division"] == "closed"
    before_errors = path.read_bytes()
    for wrong in (("--set", "submitter"), ("--set", "colour=red"), ("--set", "status=new"), ()):
        status, text = system(path, *wrong)
        assert (status, text.count("\n"), path.read_bytes()) == (2, 1, before_errors)
    assert "--measure" in text


def test_what_is_given_now_counts_most(first: Path, tmp_path: Path) -> None:
    path = tmp_path / "vm.json"
    path.write_text(json.dumps(written(first) | GIVEN), encoding="utf-8")
    given = ("--measure", "--division", "closed", "--set", "submitter=A=B", "cooling=", "host_memory_capacity=2 TiB")
    assert system(path, *given) == (0, f"{path}\n")
    renewed = written(path)
    assert (renewed["submitter"], renewed["cooling"], renewed["division"]) == ("A=B", "", "closed")
    assert (renewed["status"], renewed["host_memory_capacity"]) == ("Preview", "2 TiB")


def test_a_description_that_was_begun_by_hand_is_completed(tmp_path: Path) -> None:
    path = tmp_path / "vm.json"
    path.write_text('{"submitter": "Example", "number_of_nodes": 4}')
    assert system(path, "--measure") == (0, f"{path}\n")
    renewed = written(path)
    assert (renewed["submitter"], renewed["number_of_nodes"], renewed["system_name"]) == ("Example", "4", "vm")


FOREIGN = {
    "text": "my notes\n",
    "empty": "",
    "no object": "[1, 2]",
    "other JSON": '{"name": "x", "version": "1", "framework": "y", "a": 1}',
    "nothing in it": "{}",
    "a field that is no text": '{"submitter": "x", "division": ["open"]}',
    "not UTF-8": b"\xff\xfe{}",
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_file_that_is_no_description_is_left_alone(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "vm.json"
    before = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(before)
    status, text = system(path, "--set", "cooling=air")
    assert status == 2
    assert text.startswith(f"error: {path}: is no system description: ")
    assert text.endswith("choose another --out, or give --replace to write it anew\n")
    assert (path.read_bytes(), [*tmp_path.iterdir()]) == (before, [path])


def test_a_file_is_written_anew_when_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "vm.json"
    for content in ("my notes", json.dumps({"submitter": "Example", "cooling": "water"})):
        path.write_text(content)
        assert system(path, "--replace")[0] == 0
        assert (written(path)["submitter"], written(path)["cooling"]) == ("", "")


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_never_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "vm.json"
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    before = path.lstat().st_mode
    status, text = system(path, "--replace")
    assert (status, text.count("\n"), path.lstat().st_mode) == (2, 1, before)
    assert "expected a file" in text


def test_a_value_that_was_given_and_is_wrong_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vm.json"
    path.write_text('{"submitter": "x", "division": "Closed"}')
    status, text = system(path, "--measure")
    assert status == 2
    assert "division is 'Closed', expected 'closed' or 'open' in lower case" in text
    assert system(path, "--measure", "--division", "closed")[0] == 0


def test_what_is_said_of_a_replaced_value_forges_nothing(tmp_path: Path) -> None:
    path = tmp_path / "vm.json"
    path.write_text(json.dumps({"submitter": NAME, "operating_system": NAME, "cooling": "air"}))
    status, text = system(path, "--measure")
    assert status == 0
    assert_harmless(text)
    assert text.count("\n") == 2


@pytest.mark.parametrize("ruleset", ["2.1.0", "5.0.0"])
def test_official_checker_accepts_the_file(tmp_path: Path, ruleset: str) -> None:
    path = tmp_path / "systems" / "vm.json"
    system_file.write(path, describe("closed", {"submitter": "Exämple", "system_name": "vm"}))
    assert written(path)["submitter"] == "Exämple"
    command = [sys.executable, "-m", "mlperf_logging.system_desc_checker", str(path), "training", ruleset]
    run = subprocess.run([*command, "--log_output", str(tmp_path / "log")], capture_output=True, text=True, check=False)
    assert "passed" in run.stderr
    assert "failed" not in run.stderr


def test_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "vm.json"
    system_file.write(path, {"a": "old"})

    def full_disk(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(ValueError, match="No space left on device; choose another folder"):
        system_file.write(path, {"a": "new"})
    assert written(path) == {"a": "old"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["vm.json"]
