import json
import math
import os
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compliance.doctor import examination as doctor
from compliance.doctor import vitals
from compliance.doctor.diagnosis import Diagnosis
from compliance.doctor.examination import examine, read_safetensors_header
from compliance.doctor.host import ExaminedHost, Output
from compliance.doctor.layout import IntendedRun, RunLayout, layout_of
from compliance.doctor.system_file import write
from compliance.doctor.system_truth import compare
from tests.compliance import command
from tests.compliance.doctor import fake_host as fake
from tests.compliance.doctor.fake_host import FakeHost, describe, expect, fake_host
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
IN_MEMORY = DISK.replace("ext4 /dev/vda", "tmpfs tmpfs")

Answers = dict[str, str | Output]


@pytest.fixture(autouse=True)
def brief_look_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "CLOCK_WATCHED_S", 0.01)


def recipe(**sections: dict[str, Any]) -> str:
    return json.dumps(
        {name: value | sections.get(name, {}) if isinstance(value, dict) else value for name, value in CONFIG.items()}
    )


def host(root: Path, answers: Answers | None = None, mounts: str = DISK) -> FakeHost:
    """A machine on which all is well."""
    well: Answers = {
        RECIPES: recipe(),
        "--dry-run": READY,
        "dataloading verify": "data/w/train: whole, 10 samples of 89.3 tokens in 1 shard(s)\n",
        "git status": "",
        "git rev-parse": "1234abc\n",
    }
    files = {"/proc/self/mountinfo": mounts, "/proc/sys/vm/drop_caches": ""}
    return fake_host(root, files, (answers or {}) | {name: well[name] for name in well if name not in (answers or {})})


def look(
    root: Path, recipe: str = "h100_1x8", answers: Answers | None = None, mounts: str = DISK, **request: Any
) -> list[Diagnosis]:
    """Return what is said before that run on a machine where all is well but for `answers`; `data` is a folder of `root`."""
    if "data" in request:
        request["data"] = root / request["data"]
        for name in ("train", "evaluation") if recipe else ("",):
            (request["data"] / name).mkdir(parents=True, exist_ok=True)
    return list(examine(IntendedRun(recipe, **{"quick": True, **request}), host(root, answers, mounts)))


def test_an_installed_package_looks_for_data_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> str:
        return next(one.found for one in look(tmp_path / "host") if one.subject == "data" and "train" in one.found)

    monkeypatch.chdir(REPOSITORY)
    assert found().startswith("data/w/train: ")
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setattr("compliance.doctor.host.REPOSITORY", tmp_path / "site-packages")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert found().startswith("data/w/train: ")


# The plan


@pytest.mark.parametrize(
    ("name", "nodes", "environment", "expected"),
    [
        ("h100_8x8", None, {}, (8, 8)),
        ("h100_8x8", 4, {}, (4, 8)),
        ("h100_8x8", None, {"SLURM_JOB_NUM_NODES": "16"}, (16, 8)),
        ("h100_8x8", None, {"NNODES": "2", "SLURM_JOB_NUM_NODES": "16"}, (2, 8)),
        ("h100_8x8", 4, {"NNODES": "2", "NPROC": "4"}, (4, 4)),
        ("h100_8x8", None, {"NNODES": "many", "NPROC": "0"}, (8, 8)),
        ("h100_384x8", None, {}, (384, 8)),
        ("h100_one", None, {}, (1, 3)),
        ("x8x8", None, {}, (1, 3)),
    ],
)
def test_nodes_and_ranks(
    tmp_path: Path, name: str, nodes: int | None, environment: dict[str, str], expected: tuple[int, int]
) -> None:
    machine = fake_host(tmp_path, answers={RECIPES: recipe()}, environment=environment)
    plan = layout_of(IntendedRun(name, nodes=nodes), machine, gpus_here=3)
    assert (plan.nodes, plan.ranks, plan.world_size) == (*expected, expected[0] * expected[1])
    assert plan.on_gpus
    assert plan.is_closed


def test_the_recipes_of_this_repository_can_be_asked_for() -> None:
    plan = layout_of(IntendedRun("dgxa100_8x8"), ExaminedHost(), 0)
    assert (plan.setting("training", "global_batch_size"), plan.setting("log", "division")) == (3072, "closed")
    assert layout_of(IntendedRun("tiny_cpu"), ExaminedHost(), 0).ranks in (1, 2)
    with pytest.raises(
        ValueError, match=r"unknown recipe 'nope': expected one of bert_3_9b_8x8, dgxa100_128x8, .*tiny_cpu"
    ):
        layout_of(IntendedRun("nope"), ExaminedHost(), 0)


def test_recipes_that_cannot_be_read(tmp_path: Path) -> None:
    broken = Output("", "python failed with status 1", errors="Traceback\nModuleNotFoundError: No module named 'x'\n")
    with pytest.raises(ValueError, match="the recipes cannot be read: ModuleNotFoundError: No module named 'x'"):
        look(tmp_path, answers={RECIPES: broken})


@pytest.mark.parametrize(
    "request_", [IntendedRun(nodes=0), IntendedRun(data=Path("/is/not/there")), IntendedRun(system=Path("/no"))]
)
def test_requests_that_make_no_sense(tmp_path: Path, request_: IntendedRun) -> None:
    with pytest.raises(ValueError, match=r"expected at least 1|no such file or folder"):
        list(examine(request_, fake_host(tmp_path)))


@pytest.mark.parametrize(
    ("training", "parallel", "expected"),
    [
        ({}, {}, "ok recipe: a batch of 768 over 1 node(s) x 8 rank(s) x 1 micro-batch(es) of 96 sequence(s)"),
        ({"gradient_accumulation_steps": 4}, {}, "ok recipe: 4 micro-batch(es) of 24"),
        ({"global_batch_size": 770}, {}, "fail recipe: a batch of 770 cannot be divided over 1 node(s) x 8 rank(s)"),
        ({"gradient_accumulation_steps": 5}, {}, "fail recipe: cannot be divided"),
        ({}, {"tensor": 4}, "ok recipe: 1 micro-batch(es), 4 ranks to a copy of the model, of 384 sequence(s)"),
        ({}, {"tensor": 3}, "fail recipe: 8 rank(s) of a node cannot share copies of the model by 3"),
        (
            {"gradient_accumulation_steps": 2},
            {"tensor": 2, "pipeline": 2},
            "ok recipe: 2 micro-batch(es), 4 ranks to a copy of the model, of 192 sequence(s)",
        ),
        ({"gradient_accumulation_steps": 3}, {"pipeline": 3}, "fail recipe: 3 stages of 1 rank(s) do not divide"),
    ],
)
def test_the_batch(tmp_path: Path, training: dict[str, Any], parallel: dict[str, Any], expected: str) -> None:
    answer = recipe(training=training, parallel=parallel)
    expect(look(tmp_path, answers={RECIPES: answer}), expected, about="recipe")


# Caches, data


@pytest.mark.parametrize(("name", "state"), [("", "warn"), ("h100_1x8", "fail")])
def test_caches(tmp_path: Path, name: str, state: str) -> None:
    sudo: Answers = {"sudo -n -l sysctl -q vm.drop_caches=3": "/usr/sbin/sysctl -q vm.drop_caches=3\n"}
    expect(look(tmp_path, name), "ok caches: may be dropped before the run", about="caches")
    switch = tmp_path / "proc/sys/vm/drop_caches"
    assert switch.read_text() == ""  # it was not done
    blocked = fake_host(tmp_path / "blocked", {"/proc/sys/vm/drop_caches/x": ""}, {RECIPES: recipe()})
    expect(examine(IntendedRun(name, quick=True), blocked), f"{state} caches: Is a directory", about="caches")
    blocked.answers.update(sudo)
    expect(examine(IntendedRun(name, quick=True), blocked), "ok caches: by way of sudo", about="caches")


DAMAGED = Output("", "python failed with status 1", errors="x\nerror: part_0.hdf5: digest differs\n")
SILENT = Output("", "python gave no answer within 3600 s")
PLACE, WHOLE = "ok data: lies on a disk (ext4 at /)", "ok data: whole, 10 samples"


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("h100_1x8", {"data": "data", "quick": False}, [PLACE, PLACE, WHOLE, WHOLE]),
        ("h100_1x8", {}, ["fail data: data/w/train: no such folder", "fail data: data/w/evaluation: no such folder"]),
        ("", {"data": "one"}, [PLACE, "warn data: was not read through"]),
        ("", {"data": "one", "quick": False, "answers": {"dataloading verify": DAMAGED}}, [PLACE, "fail data: part_0"]),
        ("", {"data": "one", "quick": False, "answers": {"dataloading verify": SILENT}}, [PLACE, "fail data: 3600 s"]),
        ("", {"data": "one", "mounts": IN_MEMORY}, ["warn data: lies in memory", "warn data: "]),
        ("h100_1x8", {"data": "one", "mounts": IN_MEMORY}, ["fail data: in memory"] * 2 + ["warn data: "] * 2),
    ],
)
def test_data(tmp_path: Path, name: str, changes: dict[str, Any], expected: list[str]) -> None:
    expect(look(tmp_path, name, **changes), *expected, about="data")


def test_missing_data_and_checkpoint_name_the_command_that_makes_them(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.safetensors"
    damaged.touch()
    found = look(tmp_path, "h100_1x8", checkpoint=damaged)
    remedies = {one.subject: one.remedy for one in found if one.state == "fail"}
    for subject in ("data", "checkpoint"):
        assert "python -m dataloading wikipedia" in remedies[subject]


def test_shards_that_are_linked_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "linked_elsewhere", lambda folder: [Path("/dev/shm")] * (folder.name == "train"))
    unread = ["warn data: was not read through"] * 2
    linked = "fail data: /dev/shm lies in memory (tmpfs at /dev/shm)"
    expect(look(tmp_path, data="data"), PLACE, linked, PLACE, *unread, about="data")


# Checkpoint


def tensors(path: Path, shapes: dict[str, list[int]], cut: int = 0) -> Path:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + begin - cut)
    return path


def test_a_checkpoint_of_this_repository() -> None:
    shapes, parameters = read_safetensors_header(REPOSITORY / "bert/artifacts/tiny_cpu/phase1.safetensors")
    assert len(shapes) == 38
    assert 500_000 < parameters < 700_000


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a safetensors file"),
        (b"12345678", "not a safetensors file"),
        (struct.pack("<Q", 2**63) + b"{}", "not a safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "damaged"),
        (struct.pack("<Q", 9) + b'{"a": 12}', "damaged"),
        (struct.pack("<Q", 10) + b'{"a": {}}}', "damaged"),
        (struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc", "damaged"),
        (b"PK\x03\x04" + b"\x00" * 100, "not a safetensors file"),
        (lambda path: tensors(path, {"a": [10, 10]}, cut=1), "cut off or damaged"),
        (os.mkfifo, "expected a file"),  # nor does it hold the reader up
        (lambda _: None, "No such file"),
    ],
)
def test_files_that_are_no_checkpoints(tmp_path: Path, content: bytes | Callable[[Path], object], words: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    with pytest.raises(ValueError, match=words):
        read_safetensors_header(path)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (
            {"word_embeddings": [30522, 1024], "bias": [30522]},
            "ok checkpoint: whole, 2 tensors, 31.3 million parameters",
        ),
        ({"word_embeddings": [30528, 1024]}, "ok checkpoint: 1 tensors"),  # rounded up
        ({"word_embeddings": [30522, 768]}, "fail checkpoint: no word embeddings of 30522 x 1024"),
        ({"word_embeddings": [21128, 1024]}, "fail checkpoint: "),
        ({}, "fail checkpoint: "),
    ],
)
def test_the_checkpoint_is_the_recipes(tmp_path: Path, shapes: dict[str, list[int]], expected: str) -> None:
    path = tensors(tmp_path / "x.safetensors", shapes)
    expect(look(tmp_path, checkpoint=path), expected, about="checkpoint")


# Results, source, packages, the trainer's own checks


def test_results_of_earlier_runs(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "h100_1x8" / "bert"
    folder.mkdir(parents=True)

    def said(*expected: str, **answers: str) -> None:
        expect(look(tmp_path, answers={**answers}, results=tmp_path / "results"), *expected, about="results")

    room = "ok results: GiB are free"
    said(room)
    (folder / "result_1.txt").write_text("")
    said(room, "ok results: 1 log(s) in")
    for number in range(10):
        (folder / f"result_{number}.txt").write_text("")
    said(room, "warn results: 10 logs in")
    said(room, "fail results: result_3.txt is there already", **{RECIPES: recipe(log={"run": 3})})
    for number in range(1, 9):
        (folder / f"result_{number}.txt").unlink()
    said(room, "ok results: already; their numbers have gaps, and the next run fills the first")


@pytest.mark.parametrize(
    ("mounts", "free_mib", "state"),
    [
        (DISK, 10_000, "ok"),
        (DISK, 500, "warn"),
        (DISK, 10, "fail"),
        (DISK.replace("rw,relatime", "ro,relatime"), 10_000, "fail"),
        (IN_MEMORY, 10_000, "warn"),
    ],
)
def test_where_results_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: str, free_mib: int, state: str
) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=free_mib << 20))
    results = tmp_path / "not" / "there" / "yet"
    expect(look(tmp_path, mounts=mounts, results=results), f"{state} results: {results}", about="results")


@pytest.mark.parametrize(
    ("answers", "commit", "expected"),
    [
        ({"git status": "", "git rev-parse": "1234abc\n"}, "", "ok source: commit 1234abc, without changes"),
        ({"git status": " M bert/step.py\n?? new.py\n", "git rev-parse": "1"}, "", "warn source: 2 file(s) differ"),
        ({}, "", "warn source: cannot be told"),
        ({}, "unknown", "warn source: cannot be told"),
        ({}, "abcdef0123456789", "ok source: an image made from commit abcdef012345"),
        ({"git status": Output("", "git failed with status 128")}, "", "warn source: cannot be told"),
    ],
)
def test_the_source(tmp_path: Path, answers: Answers, commit: str, expected: str) -> None:
    environment = {"MLPERF_BERT_COMMIT": commit} if commit else {}
    machine = fake_host(tmp_path, answers=answers, environment=environment)
    expect(examine(IntendedRun(), machine), expected, about="source")


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
    expect(look(tmp_path, ""), f"{state} mlperf-logging: {installed}", about="mlperf-logging")


def test_the_dry_run_is_given_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []
    run = FakeHost.run

    def listen(machine: FakeHost, *command: str, **more: Any) -> Output:
        if "--dry-run" in command:
            seen.append(command)
            assert more["environment"] == {"WORLD_SIZE": "8"}
        return run(machine, *command, **more)

    monkeypatch.setattr(FakeHost, "run", listen)
    path = tensors(tmp_path / "x.safetensors", {"word_embeddings": [30522, 1024]})
    found = look(tmp_path, data="d", checkpoint=path, results=tmp_path / "r")
    expect(found, f"ok dry run: {READY.strip()}", about="dry run")
    (command,) = seen
    places = {"data.train": "d/train", "data.evaluation": "d/evaluation", "data.initial-checkpoint": path.name}
    for option, place in (places | {"log.results": "r"}).items():
        assert (f"--{option}", str(tmp_path / place)) in list(pairwise(command))


def test_what_the_trainer_refuses_is_passed_on_and_steers_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Output("", "python failed with status 2", errors="error: data.vocab \x1b[2J[red]x\n")
    found = look(tmp_path, answers={"--dry-run": refused})
    expect(found, "fail dry run: data.vocab \x1b[2J[red]x", about="dry run")
    monkeypatch.setattr(doctor, "examine", lambda _: found)
    status, text = command.run("doctor")
    assert (status, text.splitlines()[0][:21]) == (1, "ok   recipe          ")
    assert "fail dry run         data.vocab \\x1b[2J[red]x\n" in text


# The system description

H100_NODE: Answers = {"lscpu": fake.LSCPU_XEON, "nvidia-smi --query-gpu": fake.smi()}
H100_FILES = {"/proc/meminfo": "MemTotal: 2113462180 kB\n", "/etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.2 LTS"\n'}
PLAN = RunLayout("h100_1x8", {"log": {"division": "closed"}}, 1, 8)
FULL = {"submitter": "A", "cooling": "air", "host_networking": "x"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[FakeHost, dict[str, str]]:
    """A machine, and the description that is true of it."""
    machine = fake_host(tmp_path_factory.mktemp("h100"), H100_FILES, H100_NODE)
    return machine, describe("closed", FULL, machine)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "ok system file: vm.json: complete, and true of this machine"),
        *(
            (changes, "ok system file: ")
            for changes in (
                {"accelerator_model_name": "NVIDIA H100-SXM5-80GB"},
                {"host_processor_model_name": "Intel Xeon Platinum 8480C"},
                *({"host_memory_capacity": size} for size in ("2 TB", "2200 GB", "2164185 MB", "2164185272 kB")),
                *({"host_memory_capacity": size} for size in ("2 TiB", "2016GiB", "2063928 MiB", "2113462180 KiB")),
                {"accelerator_memory_capacity": "80 GB"},
                {"accelerator_memory_capacity": "as sold"},
                {"operating_system": "Ubuntu 24.04"},
                {"other_software_stack": {"cuda": "13.0"}},
                {"hw_notes": "anything"},
            )
        ),
        ({"cooling": None, "sw_notes": None}, "fail system file: there is no cooling, sw_notes"),
        ({"number_of_nodes": 1}, "warn system file: number_of_nodes: value 1 is a number"),
        ({"accelerator_model_name": 1}, "fail system file: accelerator_model_name: value 1, expected text"),
        ({"accelerators_per_node": "eight"}, "fail system file: accelerators_per_node: value 'eight'"),
        ({"status": "available"}, "fail system file: status: value 'available'"),
        ({"division": "Closed"}, "fail system file: division: value 'Closed'"),
        ({"division": ["closed"]}, "fail system file: division: value ['closed']"),
        ({"division": "open"}, "fail system file: division is 'open'"),
        ({"submitter": "", "cooling": ""}, "warn system file: empty: submitter, cooling"),
        ({"number_of_nodes": "8"}, "warn system file: number_of_nodes is '8', but the run takes 1"),
        ({"accelerators_per_node": "4"}, "fail system file: accelerators_per_node is '4', but here it is '8'"),
        ({"accelerator_model_name": "NVIDIA A100-SXM4-80GB"}, "fail system file: A100"),
        ({"host_processor_model_name": "AMD EPYC 7742 64-Core Processor"}, "warn system file: EPYC 7742"),
        ({"host_processor_core_count": "64"}, "warn system file: core_count is '64', but here it is '56'"),
        ({"host_memory_capacity": "1 TB"}, "warn system file: host_memory_capacity"),
        ({"operating_system": "Ubuntu 22.04"}, "warn system file: Ubuntu 22.04"),
        ({"operating_system": "Debian 24.04"}, "warn system file: Debian"),
        ({"framework": "PyTorch 1.9"}, "warn system file: PyTorch 1.9"),
        ({"framework": "MXNet"}, "warn system file: MXNet"),
    ],
)
def test_a_description_against_the_machine(
    measured: tuple[FakeHost, dict[str, str]], tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    machine, fields = measured
    write(tmp_path / "vm.json", {name: value for name, value in (fields | changes).items() if value is not None})
    expect(compare(tmp_path / "vm.json", PLAN, machine), expected, about="system file")


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '"x"', "[" * 100_000])
def test_a_description_that_is_no_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "vm.json").write_text(content)
    expect(compare(tmp_path / "vm.json", PLAN, fake_host(tmp_path)), "fail system file: ")
    expect(compare(tmp_path / "none", PLAN, fake_host(tmp_path)), "warn system file: the first run writes one")


def test_the_description_is_that_of_the_results_or_the_one_named(tmp_path: Path) -> None:
    answers: Answers = {RECIPES: recipe(log={"system": "vm"})}
    write(tmp_path / "results" / "systems" / "vm.json", FULL | {"status": "of the results"})
    write(tmp_path / "mine.json", FULL | {"status": "of the request"})
    for named, words in ((None, "of the results"), (tmp_path / "mine.json", "of the request")):
        said = look(tmp_path, answers=answers, results=tmp_path / "results", system=named)
        assert any(words in str(each) for each in said), said


# The whole


@pytest.mark.parametrize("name", ["", "h100_1x8"])
@pytest.mark.parametrize("trouble", ["", "x gave no answer within 20 s", "x failed with status 1"])
def test_a_bare_machine_and_tools_that_fail_are_no_crash(tmp_path: Path, name: str, trouble: str) -> None:
    answers: Answers = {RECIPES: recipe()} | ({"": Output("garbage, 1\n\x00", trouble)} if trouble else {})
    found = list(examine(IntendedRun(name), fake_host(tmp_path, answers=answers)))
    assert len(found) > 8
    assert all(one.subject and one.found and bool(one.remedy) == (one.state != "ok") for one in found)
    assert "fail" in [one.state for one in found] or not name


@pytest.mark.slow
@pytest.mark.slow
def test_the_command_on_this_machine() -> None:
    status, text = command.run("doctor", "--recipe", "tiny_cpu", "--quick", "--json")
    entries = json.loads(text)
    assert {frozenset(entry) for entry in entries} == {frozenset(("subject", "state", "found", "remedy"))}
    assert {"recipe", "clock", "memory", "cores", "caches", "source", "dry run"} <= {one["subject"] for one in entries}
    assert status == any(entry["state"] == "fail" for entry in entries)
    status, text = command.run("doctor", "--recipe", "nope")
    assert (status, text.partition(":")[0]) == (2, "error")
