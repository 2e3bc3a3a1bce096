import dataclasses
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from compliance.doctor import examination as doctor
from compliance.doctor.diagnosis import Diagnosis
from compliance.doctor.examination import examine, read_safetensors_header
from compliance.doctor.host import Host, Output
from compliance.doctor.plan import IntendedRun, Plan, make_plan, shape_in_name
from compliance.doctor.system import describe
from compliance.doctor.system_file import write
from compliance.doctor.system_truth import compare
from tests.compliance.doctor import fake_host as fake
from tests.compliance.doctor.fake_host import FakeHost, fake_host
from tests.conftest import REPOSITORY

CONFIG: dict[str, Any] = {
    "recipe": "h100_1x8",
    "data": {"train": "data/w/train", "evaluation": "data/w/evaluation", "initial_checkpoint": "data/w/p.safetensors"},
    "model": {"vocab_size": 30522, "hidden_size": 1024},
    "training": {"device": "cuda", "global_batch_size": 768, "gradient_accumulation_steps": 1},
    "log": {"division": "closed", "results": "results", "system": "h100_1x8", "run": None},
    "parallel": {"tensor": 1},
}
RECIPES = "bert.configuration.recipes"
"""In the command that asks for a recipe."""
READY = "h100_1x8: ready, results would go to results/h100_1x8/bert/result_0.txt\n"
DISK = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n28 27 0:1 / /dev/shm rw - tmpfs tmpfs rw\n"


def recipe(**sections: dict[str, Any]) -> str:
    return json.dumps(
        {name: value | sections.get(name, {}) if isinstance(value, dict) else value for name, value in CONFIG.items()}
    )


def host(root: Path, files: dict[str, str] | None = None) -> FakeHost:
    """A machine on which all is well."""
    answers: dict[str, str | Output] = {
        RECIPES: recipe(),
        "--dry-run": READY,
        "dataloading verify": "data/w/train: whole, 10 samples of 89.3 tokens in 1 shard(s)\n",
        "git status": "",
        "git rev-parse": "1234abc\n",
    }
    return fake_host(root, {"/proc/self/mountinfo": DISK, "/proc/sys/vm/drop_caches": "", **(files or {})}, answers)


def about(subject: str, found: Iterable[Diagnosis]) -> list[Diagnosis]:
    return [one for one in found if one.subject == subject]


def one_about(subject: str, found: Iterable[Diagnosis]) -> Diagnosis:
    (one,) = about(subject, found)
    return one


# The plan


@pytest.mark.parametrize(
    ("name", "shape"),
    [("dgxa100_8x8", (8, 8)), ("h100_384x8", (384, 8)), ("tiny_cpu", None), ("x8x8", None), ("", None)],
)
def test_the_shape_in_a_name(name: str, shape: tuple[int, int] | None) -> None:
    assert shape_in_name(name) == shape


@pytest.mark.parametrize(
    ("name", "nodes", "environment", "expected"),
    [
        ("h100_8x8", None, {}, (8, 8)),
        ("h100_8x8", 4, {}, (4, 8)),
        ("h100_8x8", None, {"SLURM_JOB_NUM_NODES": "16"}, (16, 8)),
        ("h100_8x8", None, {"NNODES": "2", "SLURM_JOB_NUM_NODES": "16"}, (2, 8)),
        ("h100_8x8", 4, {"NNODES": "2", "NPROC": "4"}, (4, 4)),
        ("h100_8x8", None, {"NNODES": "many", "NPROC": "0"}, (8, 8)),
        ("h100_one", None, {}, (1, 3)),
    ],
)
def test_nodes_and_ranks(
    tmp_path: Path, name: str, nodes: int | None, environment: dict[str, str], expected: tuple[int, int]
) -> None:
    machine = fake_host(tmp_path, answers={RECIPES: recipe()}, environment=environment)
    plan = make_plan(IntendedRun(name, nodes=nodes), machine, gpus_here=3)
    assert (plan.nodes, plan.ranks) == expected
    assert plan.world_size == expected[0] * expected[1]
    assert plan.on_gpus
    assert plan.is_closed


def test_the_recipes_of_this_repository_can_be_asked_for() -> None:
    plan = make_plan(IntendedRun("dgxa100_8x8"), Host(), 0)
    assert plan.setting("training", "global_batch_size") == 3072
    assert plan.setting("log", "division") == "closed"
    assert make_plan(IntendedRun("tiny_cpu"), Host(), 0).ranks in (1, 2)
    with pytest.raises(ValueError, match=r"unknown recipe 'nope': expected one of dgxa100_128x8, .*tiny_cpu"):
        make_plan(IntendedRun("nope"), Host(), 0)


def test_recipes_that_cannot_be_read(tmp_path: Path) -> None:
    broken = Output("", "python failed with status 1", errors="Traceback\nModuleNotFoundError: No module named 'x'\n")
    with pytest.raises(ValueError, match="the recipes cannot be read: ModuleNotFoundError: No module named 'x'"):
        make_plan(IntendedRun("h100_1x8"), fake_host(tmp_path, answers={RECIPES: broken}), 0)


@pytest.mark.parametrize(
    "request_", [IntendedRun(nodes=0), IntendedRun(data=Path("/is/not/there")), IntendedRun(system=Path("/no"))]
)
def test_requests_that_make_no_sense(tmp_path: Path, request_: IntendedRun) -> None:
    with pytest.raises(ValueError, match=r"expected at least 1|no such file or folder"):
        list(examine(request_, fake_host(tmp_path)))


@pytest.mark.parametrize(
    ("training", "parallel", "state", "words"),
    [
        ({}, {}, "ok", "a batch of 768 over 1 node(s) x 8 rank(s) x 1 micro-batch(es) of 96 sequence(s)"),
        ({"gradient_accumulation_steps": 4}, {}, "ok", "4 micro-batch(es) of 24"),
        ({"global_batch_size": 770}, {}, "fail", "a batch of 770 cannot be divided over 1 node(s) x 8 rank(s)"),
        ({"gradient_accumulation_steps": 5}, {}, "fail", "cannot be divided"),
        ({}, {"tensor": 4}, "ok", "1 micro-batch(es), 4 ranks to a copy of the model, of 384 sequence(s)"),
        ({}, {"tensor": 3}, "fail", "8 rank(s) of a node cannot share copies of the model by 3"),
        (
            {"gradient_accumulation_steps": 2},
            {"tensor": 2, "pipeline": 2},
            "ok",
            "2 micro-batch(es), 4 ranks to a copy of the model, of 192 sequence(s)",
        ),
        ({"gradient_accumulation_steps": 3}, {"pipeline": 3}, "fail", "3 stages of 1 rank(s) do not divide"),
    ],
)
def test_the_batch(tmp_path: Path, training: dict[str, Any], parallel: dict[str, Any], state: str, words: str) -> None:
    machine = host(tmp_path)
    answer = recipe(training=training, parallel=parallel)
    machine = dataclasses.replace(machine, answers={**machine.answers, RECIPES: answer})
    one = one_about("recipe", examine(IntendedRun("h100_1x8", quick=True), machine))
    assert one.state == state
    assert words in one.found


# Caches


def test_caches_that_may_be_dropped(tmp_path: Path) -> None:
    machine = host(tmp_path)
    assert one_about("caches", examine(IntendedRun(), machine)).state == "ok"
    assert (tmp_path / "proc/sys/vm/drop_caches").read_text() == ""  # it was not done


@pytest.mark.parametrize(("name", "state"), [("", "warn"), ("h100_1x8", "fail")])
def test_caches_that_may_not_be_dropped(tmp_path: Path, name: str, state: str) -> None:
    machine = host(tmp_path)
    switch = tmp_path / "proc/sys/vm/drop_caches"
    switch.unlink()
    switch.mkdir()  # opening it for writing fails for root too
    one = one_about("caches", examine(IntendedRun(name, quick=True), machine))
    assert one.state == state
    assert "Is a directory" in one.found
    answers = {**machine.answers, "sudo -n -l sysctl -q vm.drop_caches=3": "/usr/sbin/sysctl -q vm.drop_caches=3\n"}
    machine = dataclasses.replace(machine, answers=answers)
    one = one_about("caches", examine(IntendedRun(name, quick=True), machine))
    assert (one.state, "sudo" in one.found) == ("ok", True)


# Data and checkpoint


def test_data_are_verified_and_their_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "data" / "train").mkdir(parents=True)
    (tmp_path / "data" / "evaluation").mkdir()
    found = list(examine(IntendedRun("h100_1x8", data=tmp_path / "data"), host(tmp_path)))
    words = [one.found for one in about("data", found)]
    assert [one.state for one in about("data", found)] == ["ok"] * 4
    assert "lies on a disk (ext4 at /)" in words[0]
    assert "whole, 10 samples" in words[2]


def test_quick_leaves_the_data_unread(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    machine = host(tmp_path)
    found = about("data", examine(IntendedRun(data=tmp_path / "one", quick=True), machine))
    assert [one.state for one in found] == ["ok", "warn"]
    assert "was not read through" in found[1].found


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (
            Output("", "python failed with status 2", errors="error: part_0.hdf5: digest differs\n"),
            "part_0.hdf5: digest differs",
        ),
        (Output("", "python gave no answer within 3600 s"), "gave no answer within 3600 s"),
    ],
)
def test_data_that_are_damaged(tmp_path: Path, output: Output, words: str) -> None:
    (tmp_path / "one").mkdir()
    machine = fake_host(tmp_path, {"/proc/self/mountinfo": DISK}, {"dataloading verify": output})
    one = about("data", examine(IntendedRun(data=tmp_path / "one"), machine))[-1]
    assert (one.state, words in one.found) == ("fail", True)


def test_data_that_are_not_there(tmp_path: Path) -> None:
    found = about("data", examine(IntendedRun("h100_1x8"), host(tmp_path)))
    assert [(one.state, one.remedy) for one in found] == [("fail", "make the data: docs/data.md")] * 2


@pytest.mark.parametrize(("name", "state"), [("", "warn"), ("h100_1x8", "fail")])
def test_data_in_memory(tmp_path: Path, name: str, state: str) -> None:
    (tmp_path / "data" / "train").mkdir(parents=True)
    machine = host(tmp_path, {"/proc/self/mountinfo": DISK.replace("ext4 /dev/vda", "tmpfs tmpfs")})
    one = about("data", examine(IntendedRun(name, data=tmp_path / "data", quick=True), machine))[0]
    assert (one.state, "lies in memory" in one.found) == (state, True)


def test_shards_that_are_linked_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "train").mkdir(parents=True)
    (tmp_path / "data" / "evaluation").mkdir()
    monkeypatch.setattr(doctor, "linked_elsewhere", lambda folder: [Path("/dev/shm")] * (folder.name == "train"))
    found = about("data", examine(IntendedRun("h100_1x8", data=tmp_path / "data", quick=True), host(tmp_path)))
    assert [one.state for one in found[:3]] == ["ok", "fail", "ok"]
    assert found[1].found == "/dev/shm lies in memory (tmpfs at /dev/shm)"


def tensors(path: Path, shapes: dict[str, list[int]], cut: int = 0, **header: Any) -> Path:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        size = 4
        for number in shape:
            size *= number
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps(entries | header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + begin - cut)
    return path


def test_a_checkpoint_of_this_repository() -> None:
    path = REPOSITORY / "bert/artifacts/tiny_cpu/phase1.safetensors"
    shapes, parameters = read_safetensors_header(path)
    assert len(shapes) == 38
    assert 500_000 < parameters < 700_000


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a safetensors file"),
        (b"12345678", "not a safetensors file"),
        (struct.pack("<Q", 2**63) + b"{}", "not a safetensors file"),
        (struct.pack("<Q", 2) + b"{}", ""),
        (struct.pack("<Q", 2) + b"[]", "damaged"),
        (struct.pack("<Q", 9) + b'{"a": 12}', "damaged"),
        (struct.pack("<Q", 10) + b'{"a": {}}}', "damaged"),
        (struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc", "damaged"),
        (b"PK\x03\x04" + b"\x00" * 100, "not a safetensors file"),
    ],
)
def test_files_that_are_no_checkpoints(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    if words:
        with pytest.raises(ValueError, match=words):
            read_safetensors_header(path)
    else:
        assert read_safetensors_header(path) == ({}, 0)


def test_a_pipe_in_the_place_of_a_checkpoint_holds_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="not a regular file"):
        read_safetensors_header(tmp_path / "x.safetensors")


def test_a_checkpoint_that_is_cut_off(tmp_path: Path) -> None:
    path = tensors(tmp_path / "x.safetensors", {"a": [10, 10]}, cut=1)
    with pytest.raises(ValueError, match="cut off or damaged"):
        read_safetensors_header(path)
    with pytest.raises(ValueError, match="No such file"):
        read_safetensors_header(tmp_path / "none")


@pytest.mark.parametrize(
    ("shapes", "state"),
    [
        ({"word_embeddings": [30522, 1024], "bias": [30522]}, "ok"),
        ({"word_embeddings": [30528, 1024]}, "ok"),  # rounded up
        ({"word_embeddings": [30522, 768]}, "fail"),
        ({"word_embeddings": [21128, 1024]}, "fail"),
        ({}, "fail"),
    ],
)
def test_the_checkpoint_is_the_recipes(tmp_path: Path, shapes: dict[str, list[int]], state: str) -> None:
    path = tensors(tmp_path / "x.safetensors", shapes)
    one = one_about("checkpoint", examine(IntendedRun("h100_1x8", checkpoint=path, quick=True), host(tmp_path)))
    assert one.state == state


# Results, source, packages, the trainer's own checks


def test_results_of_earlier_runs(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "h100_1x8" / "bert"
    folder.mkdir(parents=True)
    request = IntendedRun("h100_1x8", results=tmp_path / "results", quick=True)
    assert len(about("results", examine(request, host(tmp_path)))) == 1
    (folder / "result_1.txt").write_text("")
    found = about("results", examine(request, host(tmp_path)))
    assert found[1].found.endswith("already; their numbers have gaps, and the next run fills the first")
    for number in range(10):
        (folder / f"result_{number}.txt").write_text("")
    found = about("results", examine(request, host(tmp_path)))
    assert (found[1].state, "10 logs in" in found[1].found) == ("warn", True)
    machine = dataclasses.replace(
        host(tmp_path),
        answers={RECIPES: recipe(log={"run": 3}), "--dry-run": READY},
    )
    found = about("results", examine(request, machine))
    assert (found[1].state, "result_3.txt is there already" in found[1].found) == ("fail", True)


@pytest.mark.parametrize(
    ("mounts", "free_mib", "state"),
    [
        (DISK, 10_000, "ok"),
        (DISK, 500, "warn"),
        (DISK, 10, "fail"),
        (DISK.replace("rw,relatime", "ro,relatime"), 10_000, "fail"),
        (DISK.replace("ext4 /dev/vda", "tmpfs tmpfs"), 10_000, "warn"),
    ],
)
def test_where_results_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: str, free_mib: int, state: str
) -> None:
    usage = type("Usage", (), {"free": free_mib << 20, "total": 1 << 40})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    request = IntendedRun("h100_1x8", results=tmp_path / "not" / "there" / "yet", quick=True)
    found = about("results", examine(request, host(tmp_path, {"/proc/self/mountinfo": mounts})))
    assert found[0].state == state


@pytest.mark.parametrize(
    ("answers", "environment", "state", "words"),
    [
        ({"git status": "", "git rev-parse": "1234abc\n"}, {}, "ok", "commit 1234abc, without changes"),
        ({"git status": " M bert/step.py\n?? new.py\n", "git rev-parse": "1"}, {}, "warn", "2 file(s) differ"),
        ({}, {}, "warn", "cannot be told"),
        ({}, {"MLPERF_BERT_COMMIT": "unknown"}, "warn", "cannot be told"),
        ({}, {"MLPERF_BERT_COMMIT": "abcdef0123456789"}, "ok", "an image made from commit abcdef012345"),
        ({"git status": Output("", "git failed with status 128")}, {}, "warn", "cannot be told"),
    ],
)
def test_the_source(
    tmp_path: Path, answers: dict[str, str | Output], environment: dict[str, str], state: str, words: str
) -> None:
    machine = fake_host(tmp_path, answers=answers, environment=environment)
    one = one_about("source", examine(IntendedRun(), machine))
    assert (one.state, words in one.found) == (state, True)


@pytest.mark.parametrize(
    ("installed", "has_rules", "state"),
    [("4.1.68", True, "ok"), ("4.1.69", True, "warn"), ("9.0", False, "fail"), ("", False, "fail")],
)
def test_the_official_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str, has_rules: bool, state: str
) -> None:
    monkeypatch.setattr(doctor, "version", lambda _: installed)
    if not has_rules:
        monkeypatch.setattr(doctor, "_has_bert_rules", lambda: False)
    assert one_about("mlperf-logging", examine(IntendedRun(), fake_host(tmp_path))).state == state


def test_the_dry_run_is_given_what_was_asked_for(tmp_path: Path) -> None:
    seen: list[tuple[str, ...]] = []

    class Listening(FakeHost):
        def run(self, *command: str, **more: Any) -> Output:
            seen.append(command)
            if "--dry-run" in command:
                assert more["environment"] == {"WORLD_SIZE": "8"}
            return super().run(*command, **more)

    (tmp_path / "d" / "train").mkdir(parents=True)
    (tmp_path / "d" / "evaluation").mkdir()
    path = tensors(tmp_path / "x.safetensors", {"word_embeddings": [30522, 1024]})
    machine = Listening(tmp_path, {}, host(tmp_path).answers)
    request = IntendedRun("h100_1x8", tmp_path / "d", path, results=tmp_path / "r", quick=True)
    assert one_about("dry run", examine(request, machine)).found == READY.strip()
    (command,) = [command for command in seen if "--dry-run" in command]
    for option in (
        ("--data.train", str(tmp_path / "d/train")),
        ("--data.evaluation", str(tmp_path / "d/evaluation")),
        ("--data.initial-checkpoint", str(path)),
        ("--log.results", str(tmp_path / "r")),
    ):
        assert option in list(pairwise(command))


def test_what_the_trainer_refuses_is_passed_on(tmp_path: Path) -> None:
    refused = Output("", "python failed with status 2", errors="error: data.vocab has 7 entries\n")
    machine = fake_host(tmp_path, answers={RECIPES: recipe(), "--dry-run": refused})
    one = one_about("dry run", examine(IntendedRun("h100_1x8", quick=True), machine))
    assert (one.state, one.found) == ("fail", "data.vocab has 7 entries")


# The system description

H100_NODE: dict[str, str | Output] = {"lscpu": fake.LSCPU_XEON, "nvidia-smi --query-gpu": fake.smi()}
H100_FILES = {"/proc/meminfo": "MemTotal: 2113462180 kB\n", "/etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.2 LTS"\n'}
PLAN = Plan("h100_1x8", {"log": {"division": "closed"}}, 1, 8)
FULL = {"submitter": "A", "cooling": "air", "host_networking": "x"}


def described(root: Path, changes: dict[str, Any], plan: Plan = PLAN) -> list[Diagnosis]:
    machine = fake_host(root, H100_FILES, H100_NODE)
    fields: dict[str, Any] = describe("closed", FULL, machine) | changes
    write(root / "vm.json", {name: value for name, value in fields.items() if value is not None})
    return list(compare(root / "vm.json", plan, machine))


def test_a_description_that_is_complete_and_true(tmp_path: Path) -> None:
    (one,) = described(tmp_path, {})
    assert (one.state, one.found.endswith("vm.json: complete, and true of this machine")) == ("ok", True)


@pytest.mark.parametrize(
    "changes",
    [
        {"accelerator_model_name": "NVIDIA H100-SXM5-80GB"},
        {"host_processor_model_name": "Intel Xeon Platinum 8480C"},
        {"host_memory_capacity": "2 TB"},
        {"accelerator_memory_capacity": "80 GB"},
        {"accelerator_memory_capacity": "as sold"},
        {"operating_system": "Ubuntu 24.04"},
        {"other_software_stack": {"cuda": "13.0"}},
        {"hw_notes": "anything"},
    ],
)
def test_other_words_for_the_same(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert [one.state for one in described(tmp_path, changes)] == ["ok"]


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        ({"cooling": None, "sw_notes": None}, "fail", "there is no cooling, sw_notes"),
        ({"number_of_nodes": 1}, "warn", "number_of_nodes: value 1 is a number"),
        ({"accelerator_model_name": 1}, "fail", "accelerator_model_name: value 1, expected text"),
        ({"accelerators_per_node": "eight"}, "fail", "accelerators_per_node: value 'eight'"),
        ({"status": "available"}, "fail", "status: value 'available'"),
        ({"division": "Closed"}, "fail", "division: value 'Closed'"),
        ({"division": ["closed"]}, "fail", "division: value ['closed']"),
        ({"division": "open"}, "fail", "division is 'open'"),
        ({"submitter": "", "cooling": ""}, "warn", "empty: submitter, cooling"),
        ({"number_of_nodes": "8"}, "warn", "number_of_nodes is '8', but the run takes 1"),
        ({"accelerators_per_node": "4"}, "fail", "accelerators_per_node is '4', but here it is '8'"),
        ({"accelerator_model_name": "NVIDIA A100-SXM4-80GB"}, "fail", "A100"),
        ({"host_processor_model_name": "AMD EPYC 7742 64-Core Processor"}, "warn", "EPYC 7742"),
        ({"host_processor_core_count": "64"}, "warn", "core_count is '64', but here it is '56'"),
        ({"host_memory_capacity": "1 TB"}, "warn", "host_memory_capacity"),
        ({"operating_system": "Ubuntu 22.04"}, "warn", "Ubuntu 22.04"),
        ({"operating_system": "Debian 24.04"}, "warn", "Debian"),
        ({"framework": "PyTorch 1.9"}, "warn", "PyTorch 1.9"),
        ({"framework": "MXNet"}, "warn", "MXNet"),
    ],
)
def test_a_description_that_is_not(tmp_path: Path, changes: dict[str, Any], state: str, words: str) -> None:
    (one,) = described(tmp_path, changes)
    assert (one.subject, one.state) == ("system file", state)
    assert words in one.found
    assert one.remedy


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '"x"', "[" * 100_000])
def test_a_description_that_is_no_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "vm.json").write_text(content)
    (one,) = compare(tmp_path / "vm.json", PLAN, fake_host(tmp_path))
    assert one.state == "fail"


def test_a_description_that_is_not_there_yet(tmp_path: Path) -> None:
    (one,) = compare(tmp_path / "vm.json", PLAN, fake_host(tmp_path))
    assert (one.state, "the first run writes one" in one.found) == ("warn", True)


# The whole


def test_a_bare_machine_is_looked_at_without_a_crash(tmp_path: Path) -> None:
    for name in ("", "h100_1x8"):
        machine = fake_host(tmp_path, answers={RECIPES: recipe()})
        found = list(examine(IntendedRun(name), machine))
        assert len(found) > 8
        assert all(one.subject and one.found and bool(one.remedy) == (one.state != "ok") for one in found)


def test_tools_that_hang_or_fail_cost_no_more_than_their_line(tmp_path: Path) -> None:
    for trouble in ("x gave no answer within 20 s", "x failed with status 1"):
        machine = fake_host(tmp_path, answers={RECIPES: recipe(), "": Output("garbage, 1\n\x00", trouble)})
        states = [one.state for one in examine(IntendedRun("h100_1x8"), machine)]
        assert "fail" in states


def test_this_machine_in_little_time() -> None:
    begin = time.monotonic()
    found = list(examine(IntendedRun()))
    assert time.monotonic() - begin < 60
    assert {"clock", "memory", "cores", "caches", "source"} <= {one.subject for one in found}


def run_doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "compliance", "doctor", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_the_command_in_text_and_json() -> None:
    done = run_doctor("--json")
    entries = json.loads(done.stdout)
    assert {frozenset(entry) for entry in entries} == {frozenset(("subject", "state", "found", "remedy"))}
    assert done.returncode == any(entry["state"] == "fail" for entry in entries)
    done = run_doctor("--recipe", "h100_8x8", "--quick")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok   recipe          h100_8x8: a batch of 4608 over 8 node(s) x 8 rank(s)")
    assert lines[-1].split(" ")[1].rstrip(",") == "fail"
    assert done.stderr == ""


def test_the_command_refuses_what_it_does_not_know() -> None:
    done = run_doctor("--recipe", "nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown recipe 'nope'")


def test_text_of_other_programs_does_not_steer_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = Output("", "python failed", errors="error: \x1b[2J[red]x\n")
    machine = fake_host(tmp_path, answers={RECIPES: recipe(), "--dry-run": evil})
    whole = doctor.examine
    monkeypatch.setattr(doctor, "examine", lambda request: whole(request, machine))
    assert doctor.print_examination(IntendedRun("h100_1x8", quick=True), as_json=False) == 1
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\\x1b[2J[red]x" in text
