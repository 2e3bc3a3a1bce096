"""Complete examinations of fake machines and of this machine."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bert.launch.layout import layout_of
from bert.train import parse
from compliance.doctor.diagnosis import Diagnosis
from compliance.doctor.examination import examine, print_diagnoses
from compliance.doctor.host import ExaminedHost
from compliance.doctor.intended_run import IntendedRun, lay_out
from console.processes import Output
from tests.compliance import command
from tests.compliance.doctor.fake_host import BARE, MACHINE, FakeHost, fake_host, lines_about, lines_by_case
from tests.conftest import REPOSITORY

CONFIG = """# config.data.train: data/w/train
# config.data.evaluation: data/w/evaluation
# config.training.global_batch_size: 768
# config.training.device: cuda
# config.log.system: h100_1x8
# config.log.results: results
# config.log.division: closed
"""
RECIPES = "--print-config"
"""Part of the command that reads a recipe."""
READY = "h100_1x8: ready, results would go to results/h100_1x8/bert/result_0.txt\n"
PYTORCH = '{"PyTorch": "2.13.0", "CUDA": "13.0", "gpus": 8}'

Answers = dict[str, str | Output]
MEMORY: Answers = {"df --output": "Type Mounted on\ntmpfs /\n"}


def recipe(division: str = "closed") -> str:
    return CONFIG.replace("closed", division)


def host(root: Path, answers: Answers | None = None) -> FakeHost:
    """Return a machine without problems, on which `answers` replaces the output of some commands."""
    well: Answers = {
        RECIPES: recipe(),
        "torch.cuda.nccl": PYTORCH,
        "--dry-run": READY,
        "df --output": "Type     Mounted on\next4     /\n",
        "dataloading verify": "data/w/train: whole, 10 samples of 89.3 tokens in 1 shard\n",
    }
    files = {"/proc/sys/vm/drop_caches": ""}
    return fake_host(root, files, (answers or {}) | {name: well[name] for name in well if name not in (answers or {})})


def look(root: Path, recipe: str = "h100_1x8", answers: Answers | None = None, **request: Any) -> list[Diagnosis]:
    """Examine a machine that is healthy except for `answers`. A path `data` in `request` is relative to `root`."""
    if "data" in request:
        request["data"] = root / request["data"]
        for name in ("train", "evaluation") if recipe else ("",):
            (request["data"] / name).mkdir(parents=True, exist_ok=True)
    return list(examine(IntendedRun(recipe, **{"quick": True, **request}), host(root, answers), MACHINE))


def test_the_doctor_prints_the_recorded_output_for_a_node_with_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = [replace(gpu, pcie_width=8 if gpu.index == 3 else 16) for gpu in MACHINE.gpus.gpus]
    machine = replace(MACHINE, gpus=replace(MACHINE.gpus, gpus=tuple(gpus)))
    for name in ("train", "evaluation"):
        (tmp_path / "data" / name).mkdir(parents=True)
    refused = Output("", "error: data.vocab \x1b[2J[red]x\n", "python failed with status 2")
    intended = IntendedRun("h100_1x8", tmp_path / "data", results=tmp_path / "results")
    found = examine(intended, host(tmp_path, {"--dry-run": refused}), machine)
    assert print_diagnoses((one for one in found if one.subject != "source"), as_json=False) == 1
    text = capsys.readouterr().out.replace(str(tmp_path), "FOLDER")
    assert text == Path(__file__).with_name("node_in_trouble.txt").read_text()


@pytest.mark.parametrize(
    ("name", "nodes", "gpus", "environment", "expected"),
    [
        ("h100_8x8", None, 3, {}, (8, 8)),
        ("h100_8x8", 1, 3, {}, (1, 8)),
        ("h100_8x8", None, 3, {"SLURM_JOB_NUM_NODES": "16"}, (16, 8)),
        ("h100_8x8", None, 3, {"NNODES": "2", "SLURM_JOB_NUM_NODES": "16"}, (2, 8)),
        ("h100_8x8", 4, 3, {"NNODES": "2", "NPROC": "4"}, (4, 4)),
        ("h100_8x8", None, 3, {"NNODES": "", "NPROC": ""}, (8, 8)),
        ("h100_one", None, 3, {}, (1, 3)),
        ("h100_one", None, 0, {}, (1, 1)),
    ],
)
def test_the_doctor_takes_nodes_and_ranks_from_options_environment_or_recipe(
    tmp_path: Path, name: str, nodes: int | None, gpus: int, environment: dict[str, str], expected: tuple[int, int]
) -> None:
    machine = fake_host(tmp_path, answers={RECIPES: recipe()}, environment=environment)
    plan = lay_out(IntendedRun(name, nodes=nodes), machine, gpus)
    assert (plan.nodes, plan.ranks, plan.on_gpus, plan.is_closed) == (*expected, True, True)


def test_the_doctor_counts_ranks_on_cpus_as_the_launcher_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = fake_host(tmp_path, answers={RECIPES: recipe().replace("cuda", "cpu")})
    for name, cores, ranks in (("tiny_cpu", 1, 1), ("own_text_cpu", 2, 2), ("other_cpu", 9, 1)):
        monkeypatch.setattr("os.sched_getaffinity", lambda process, cores=cores: {0: range(cores)}[process])
        assert lay_out(IntendedRun(name), machine, 3).ranks == ranks


@pytest.mark.parametrize("wrong", [{"NNODES": "many"}, {"NPROC": "0"}])
def test_the_doctor_rejects_numbers_of_nodes_and_ranks_that_the_launchers_reject(
    tmp_path: Path, wrong: dict[str, str]
) -> None:
    machine = fake_host(tmp_path, answers={RECIPES: recipe()}, environment=wrong)
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} is .*, expected a whole number of at least 1$"):
        lay_out(IntendedRun("h100_8x8"), machine, gpus_here=3)


@pytest.mark.slow
def test_the_doctor_reads_recipes_and_rejects_invalid_options() -> None:
    for recipe in ("tiny_cpu", "own_text_cpu"):
        plan = lay_out(IntendedRun(recipe), ExaminedHost(environment={}), 0)
        assert (plan.ranks, plan.is_closed) == (layout_of(parse([recipe])).processes, False)
    for intended, words in (
        (IntendedRun("nope"), r"--recipe nope: unknown recipe 'nope': expected one of tiny_cpu, .*dgxa100_128x8"),
        (IntendedRun(nodes=0), "--nodes is 0"),
        (IntendedRun(data=Path("/is/not/there")), "/is/not/there"),
        (IntendedRun(checkpoint=Path(__file__)), "--recipe"),
    ):
        with pytest.raises(ValueError, match=words):
            lay_out(intended, ExaminedHost(), 0)


def test_the_doctor_quotes_the_error_of_a_trainer_that_cannot_print_a_recipe(tmp_path: Path) -> None:
    broken = Output("", f"Traceback\nModuleNotFoundError: {'x' * 400}\n", "python failed with status 1")
    with pytest.raises(ValueError, match=f"^--recipe h100_1x8: ModuleNotFoundError: {'x' * 379}$"):
        look(tmp_path, answers={RECIPES: broken})


@pytest.mark.parametrize(("name", "state"), [("", "warn"), ("h100_1x8", "fail")])
def test_the_doctor_checks_that_caches_can_be_dropped(tmp_path: Path, name: str, state: str) -> None:
    assert lines_about(look(tmp_path, name), "caches") == "ok caches: can be dropped before the run\n"
    assert (tmp_path / "proc/sys/vm/drop_caches").read_text() == ""  # examining must not drop caches
    blocked = fake_host(tmp_path / "blocked", {"/proc/sys/vm/drop_caches/x": ""}, {RECIPES: recipe()})
    said = lines_about(examine(IntendedRun(name, quick=True), blocked, MACHINE), "caches")
    where = f"{tmp_path}/blocked/proc/sys/vm/drop_caches: Is a directory"
    assert said.startswith(f"{state} caches: cannot be dropped before the run: {where}; run as root")
    blocked.answers["sudo -n -l sysctl -q vm.drop_caches=3"] = "/usr/sbin/sysctl -q vm.drop_caches=3\n"
    said = lines_about(examine(IntendedRun(name, quick=True), blocked, MACHINE), "caches")
    assert said == "ok caches: can be dropped with sudo, as launch/slurm.sub does\n"


DAMAGED = Output("", f"x\nerror: part_0.hdf5: digest differs{'.' * 400}\n", "python failed with status 1")
LOSSY = Output("x\none: whole, 10 samples\n", "a\nwarning: 14.3 % of the tokens are [UNK]; use another vocabulary\n")
OVERLAY: Answers = {"df --output": "Type Mounted on\noverlay /\n"}
FILES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "no data": ("data", "h100_1x8", {}),  # the dry run reports missing data
    "damaged": ("data", "", {"data": "one", "quick": False, "answers": {"dataloading verify": DAMAGED}}),
    "lossy": ("data", "", {"data": "one", "quick": False, "answers": {"dataloading verify": LOSSY}}),
    "long": ("data", "", {"data": "one", "quick": False, "answers": {"dataloading verify": f"one: {'.' * 400}\n"}}),
    "overlay": ("data", "", {"data": "one", "answers": OVERLAY}),
    "memory": ("data", "", {"data": "one", "answers": MEMORY}),
    "memory in a closed run": ("data", "h100_1x8", {"data": "one", "answers": MEMORY}),
    "results": ("results", "", {"results": Path("ROOT/results")}),
    "results in memory": ("results", "", {"results": Path("ROOT/results"), "answers": MEMORY}),
    "results on an unknown disk": ("results", "", {"results": Path("ROOT/results"), "answers": {"df --output": ""}}),
}


def test_checks_of_data_and_results_yield_the_recorded_diagnoses(tmp_path: Path) -> None:
    said = ""
    for name, (subject, recipe, changes) in FILES.items():
        said += lines_by_case({name: look(tmp_path / name, recipe, **changes)}, subject).replace(
            f"{tmp_path}/{name}", "ROOT"
        )
    assert said == Path(__file__).with_name("data.txt").read_text()


def test_the_doctor_names_the_commit_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for revision, expected in (
        ("abcdef0123456789", "ok source: commit abcdef012345\n"),
        ("abcdef0123456789 with local changes", "warn source: commit abcdef0123456789 with local changes; commit all"),
        ("unknown", "warn source: the commit is unknown; run from a checkout"),
    ):
        monkeypatch.setattr("compliance.doctor.intended_run.commit", lambda revision=revision: revision)
        assert lines_about(look(tmp_path), "source").startswith(expected)


def test_the_doctor_passes_its_options_to_the_dry_run(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.touch()
    for name in ("train", "evaluation"):
        (tmp_path / "d" / name).mkdir(parents=True)
    machine = host(tmp_path)
    found = examine(IntendedRun("h100_1x8", tmp_path / "d", path, tmp_path / "r", nodes=2), machine, MACHINE)
    assert lines_about(found, "dry run") == f"ok dry run: {READY}"
    [(command, environment)] = [asked for asked in machine.asked if "--dry-run" in asked[0]]
    given = f"--log.results {tmp_path}/r --data.initial-checkpoint {path}"
    given += f" --data.train {tmp_path}/d/train --data.evaluation {tmp_path}/d/evaluation"
    assert " ".join(command[1:]) == f"-m bert.train h100_1x8 --dry-run {given}"
    assert environment == {"WORLD_SIZE": "16"}


@pytest.mark.parametrize("name", ["", "h100_1x8"])
@pytest.mark.parametrize("tools", [{}, {"": Output("garbage, 1\n\x00", trouble="x failed with status 1")}])
def test_the_doctor_diagnoses_a_bare_machine_whose_tools_fail(tmp_path: Path, name: str, tools: Answers) -> None:
    answers: Answers = {RECIPES: recipe()} | tools
    found = list(examine(IntendedRun(name), fake_host(tmp_path, answers=answers), BARE))
    assert len(found) > 6
    assert all(one.subject and one.found and bool(one.remedy) == (one.state != "ok") for one in found)
    assert "fail" in [one.state for one in found] or not name


def test_the_doctor_command_prints_diagnoses_of_this_machine_as_json() -> None:
    status, text = command.run("doctor", "--quick", "--json")
    entries = json.loads(text)
    assert {frozenset(entry) for entry in entries} == {frozenset(("subject", "state", "found", "remedy"))}
    assert {"recipe", "memory", "cores", "caches", "source"} <= {one["subject"] for one in entries}
    assert status == any(entry["state"] == "fail" for entry in entries)


def test_a_missing_path_has_the_file_system_of_its_nearest_existing_parent(tmp_path: Path) -> None:
    link = tmp_path / "data"
    link.symlink_to("/dev/shm")
    for path in (link, link / "is" / "not" / "there"):
        found = examine(IntendedRun(results=path, quick=True), ExaminedHost(), BARE)
        assert lines_about(found, "results").startswith(
            f"warn results: {path} lies on memory: tmpfs at /dev/shm; choose"
        )


def test_commands_run_in_the_checkout_or_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ("sh", "-c", "pwd; echo $LC_ALL $A $B")
    host = ExaminedHost(environment={"PATH": os.defpath, "LC_ALL": "de_DE", "A": "a", "B": "b"})
    assert host.run(*asked, environment={"B": "c"}).text == f"{REPOSITORY}\nC a c\n"
    monkeypatch.setattr("compliance.doctor.host.REPOSITORY", tmp_path / "none")
    assert host.run(*asked).text == f"{tmp_path}\nC a b\n"
