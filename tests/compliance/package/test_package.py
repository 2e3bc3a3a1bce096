"""Packages of ten logs: the submission's file tree, and the official tools' verdicts on it."""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compliance.artefact import MAX_FILE_BYTES
from compliance.package.command import _differences, make_package
from compliance.package.tree import PackageRequest, tracked_source
from tests.compliance.command import run as command
from tests.compliance.log_edits import Edit, delete, epoch_nums, metadata
from tests.compliance.result_folders import describe_system, write_description, write_series
from tests.compliance.run_logs import without_chain, write_run
from tests.conftest import REPOSITORY
from tests.programs import git

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="the source is what git tracks"),
]

SCALED = [16, 15, 16, 15, 16, 15, 16, 16, 15, 16]
PASSING = [17, 16, 18, 17, 16, 17, 18, 16, 17, 17]
TOOLS = (
    "package checker",
    "repository checker",
    "system description checker",
    "result summarizer",
    "check of this repository",
    "score, scaling, samples equal",
)


def description(folder: Path, **changes: object) -> Path:
    return write_description(folder, "node", **{"framework": "PyTorch", **changes})


def request(folder: Path, runs: Path | None = None, *, out: Path | None = None, **changes: Any) -> PackageRequest:
    return PackageRequest("Example", description(folder, **changes), runs or folder / "runs", (out or folder) / "out")


def package(folder: Path, **changes: Any) -> tuple[int, str, dict[str, str]]:
    """Run the package command; return its exit status, its output and each tool's verdict."""
    places = ["--system", description(folder, **changes), "--runs", folder / "runs", "--out", folder / "out"]
    status, said = command("package", "--org", "Example", *places)
    return status, said, {name.strip(): verdict for name, verdict in re.findall(r"^(.{30}) (pass|FAIL)$", said, re.M)}


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Package 14 runs, of which two have no run_stop. Return the folder and the output of the command.

    The command chooses ten runs and scales their score."""
    folder = tmp_path_factory.mktemp("scaled")
    header = {"recipe": "tiny_cpu", "commit": "0123 \x1b[2J", "config.training.precision": "bf16"}
    write_series(folder / "runs", [*SCALED, 20, 21, 5, 5], header=header)
    for number in (12, 13):
        edit_log(folder / f"runs/result_{number}.txt", delete("run_stop"))
    status, said, verdicts = package(folder)
    assert (status, verdicts) == (0, dict.fromkeys(TOOLS, "pass")), said
    return folder, said


def edit_log(path: Path, edit: Edit) -> None:
    path.write_text(edit(without_chain(path.read_text())))


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ten")
    write_series(folder / "runs", PASSING)
    return folder


def test_a_package_contains_the_chosen_logs_the_source_and_the_recorded_texts(scaled: tuple[Path, str]) -> None:
    folder, said = scaled
    tree = folder / "out" / "Example"
    results = tree / "results/node/bert"
    logs = [f"result_{n}.txt" for n in range(10)]
    assert sorted(path.name for path in results.iterdir()) == sorted([*logs, "scaling.json"])
    for number, name in enumerate(logs):  # the chosen runs start with run 1
        assert (results / name).read_bytes() == (folder / f"runs/result_{number + 1}.txt").read_bytes()
    implementation = tree / "benchmarks/bert/implementations/mlperf-bert"
    for name in ("README.md", "Dockerfile", "run_and_time.sh", "bert/train.py", "launch/slurm.sub", "docs/training.md"):
        assert (implementation / name).read_bytes() == (REPOSITORY / name).read_bytes()
    assert os.access(implementation / "run_and_time.sh", os.X_OK)
    assert not (implementation / "results").exists()
    printed = [line for line in said.splitlines(keepends=True) if "differs from its commit" not in line]
    texts = [tree / name for name in ("README.md", "benchmarks/bert/node/node_mlperf-bert.json")]
    shown = "".join([*printed, *(path.read_text() for path in texts)]).replace(str(folder), "FOLDER")
    assert re.sub(r"at '\w{40}'", "at 'HEAD'", shown) == Path(__file__).with_name("package.txt").read_text()
    assert (tree / "LICENSE.md").read_bytes() == (REPOSITORY / "LICENSE").read_bytes()
    assert json.loads((tree / "systems/node.json").read_text()) == describe_system(
        framework="PyTorch", system_name="node"
    )
    assert not [path for path in tree.rglob("*") if path.is_symlink() or path.name.startswith(".") or " " in path.name]
    before = sorted(folder.rglob("*"))
    with pytest.raises(ValueError, match="Example exists already"):
        make_package(request(folder))
    assert sorted(folder.rglob("*")) == before


@dataclass(frozen=True)
class Series:
    """Runs to package, with changes, and the expected output. `failing` names the tools that fail."""

    evaluations: list[int]
    words: str
    edit: Edit | None = None
    failed: frozenset[int] = frozenset()
    header: tuple[tuple[str, str], ...] = ()
    description: tuple[tuple[str, str], ...] = ()
    failing: tuple[str, ...] = ()


CHECK = "check of this repository"
SERIES = {
    "one aborted": Series(PASSING, "1 of them not converged and dropped as the slowest", failed=frozenset({3})),
    "too fast": Series([15, 14] * 5, "minimum 2,274,732", failing=("package checker", CHECK)),
    "placeholders": Series(
        [17] * 10, "train_samples counts the sequences of 10 logs", epoch_nums(*[1] * 17)
    ),
    "too fast behind placeholders": Series(
        [11] * 10, "converges faster", epoch_nums(*[156_725_653] * 11), failing=("package checker", CHECK)
    ),
    "another system": Series(
        PASSING, "value 'NVIDIA A100', expected what the headers of the logs say, 'NVIDIA H100 80GB HBM3'",
        header=(("accelerator", "NVIDIA H100 80GB HBM3"), ("processes", "8 x 14 threads"), ("torch", "2.13.0+cu130")),
        description=(("division", "Closed"), ("accelerator_model_name", "NVIDIA A100"), ("framework", "PyTorch 2.11")),
        failing=(CHECK, "score, scaling, samples equal"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SERIES)
def test_the_official_tools_and_the_check_judge_each_package(tmp_path: Path, name: str) -> None:
    series = SERIES[name]
    for path in write_series(tmp_path / "runs", series.evaluations, failed=series.failed, header=dict(series.header)):
        if series.edit:
            edit_log(path, series.edit)
    status, said, verdicts = package(tmp_path, **dict(series.description))
    assert verdicts == {tool: "FAIL" if tool in series.failing else "pass" for tool in TOOLS}, said
    assert status == bool(series.failing)
    assert series.words in said
    tree = tmp_path / "out/Example"
    assert not (tree / "results/node/bert/scaling.json").exists()
    row = "| result_3.txt | result_3.txt | 1051 | no valid result |  |"
    assert (row in (tree / "README.md").read_text()) == bool(series.failed)
    if name == "another system":
        assert re.search(r"^error: .*node\.json: value 'Closed'", said, re.MULTILINE)
        assert re.search(r"^warning: .*node\.json: value 'PyTorch 2\.11'", said, re.MULTILINE)


def test_open_runs_can_be_packaged(tmp_path: Path) -> None:
    for number in range(10):
        write_run(tmp_path / f"runs/result_{number}.txt", "open", header={"run": number}, step_ms=10 + number)
    status, said, verdicts = package(tmp_path, division="open", sw_notes="")
    assert (status, verdicts) == (0, dict.fromkeys(TOOLS, "pass")), said


def test_each_difference_from_the_result_summarizers_figures_is_a_finding(ten: Path, tmp_path: Path) -> None:
    package = make_package(request(tmp_path, ten / "runs"))
    score = {"minutes": package.minutes, "scaling": 1.0, "samples": package.outlook.mean}
    assert [*_differences(package, score)] == []
    titles = {"minutes": "score in minutes", "scaling": "scaling", "samples": "mean samples to the target"}
    for name, title in titles.items():
        for other in (None, 1.001 * (score[name] or 0)):
            [finding] = _differences(package, score | {name: other})
            assert finding.found == f"the {title} is {score[name]} by this program and {other} by the official tools"
    assert "(it crashed)" in next(_differences(package, {"crash": "it crashed"})).found


# Runs that cannot be submitted


@pytest.mark.parametrize(
    ("edited", "edit", "match"),
    [
        ([9], delete("run_stop"), r"9 complete logs, expected 10"),
        ([2, 5], metadata("run_stop", "status", "aborted"), r"2 runs .*result_2\.txt.*aborted.*result_5\.txt"),
        (
            range(10),
            delete("seed"),
            r"10 runs are not valid results, .* one \(TR 12\): result_0.txt: .*seed: no record",
        ),
    ],
)
def test_package_rejects_too_few_valid_runs(
    ten: Path, tmp_path: Path, edited: list[int], edit: Edit, match: str
) -> None:
    shutil.copytree(ten / "runs", tmp_path / "runs")
    for number in edited:
        edit_log(tmp_path / f"runs/result_{number}.txt", edit)
    with pytest.raises(ValueError, match=match):
        make_package(request(tmp_path))
    assert not (tmp_path / "out").exists()


def test_copied_and_resumed_runs_fail_the_package(ten: Path, tmp_path: Path) -> None:
    runs = shutil.copytree(ten / "runs", tmp_path / "runs")
    edit_log(runs / "result_9.txt", lambda text: f"# resumed from: checkpoints/step_100\n{text}")
    shutil.copy(runs / "result_3.txt", runs / "result_7.txt")
    status, said, verdicts = package(tmp_path)
    assert (status, verdicts["check of this repository"]) == (1, "FAIL")
    # The copy follows its original, because packages number runs by their start.
    assert "result_4.txt is a copy of result_3.txt" in said
    assert "'checkpoints/step_100'" in said


def test_the_package_command_rejects_inconsistent_or_invalid_names(ten: Path, tmp_path: Path) -> None:
    other = shutil.copytree(ten / "runs", tmp_path / "results/old_node/bert")
    with pytest.raises(ValueError, match=r"old_node/bert .*'old_node'.*node\.json .*'node'"):
        make_package(request(tmp_path, other))
    assert not (tmp_path / "out").exists()
    for name in ("submitter", "framework"):
        changes: dict[str, Any] = {name: " "}
        with pytest.raises(ValueError, match=f"{name} is empty, expected text: `python -m compliance system"):
            make_package(request(tmp_path, ten / "runs", **changes))
    for name in ("../up", "with a space", ".hidden", ""):
        with pytest.raises(ValueError, match=r"org: .*expected a letter or digit"):
            PackageRequest(name, Path("node.json"), Path("runs"), Path("out"))


def test_an_unwritable_output_folder_is_left_empty(ten: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o555)
    (tmp_path / "file").touch()
    for place in (tmp_path / "out", tmp_path / "file"):
        if os.geteuid() != 0 or place.is_file():  # the root user may write everywhere
            with pytest.raises(ValueError, match=r"cannot be written: .*; choose another --out"):
                make_package(PackageRequest("Example", description(ten), ten / "runs", place))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]
    assert not [*(tmp_path / "out").iterdir()]


# The source code


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    wanted = ["Dockerfile", "LICENSE", "README.md", "bert/train.py", "run_and_time.sh", "größe.py"]
    for name in [*wanted, "results/x/bert/result_0.txt", ".ci/run", "a name.py", "a\u202eb.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link.py").symlink_to("bert/train.py")
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    return tmp_path


def test_the_packaged_source_has_only_tracked_files_that_a_submission_may_contain(checkout: Path) -> None:
    with pytest.raises(ValueError, match="not a checkout that git can read"):
        tracked_source(checkout)
    git(checkout, "init", "--quiet")
    git(checkout, "add", "--force", ".")
    git(checkout, "commit", "--quiet", "-m", "all")
    (checkout / "bert/untracked.py").write_text("")
    (checkout / "run_and_time.sh").write_text("changed")
    found = tracked_source(checkout)
    assert set(found.files) == {"Dockerfile", "LICENSE", "README.md", "bert/train.py", "größe.py", "run_and_time.sh"}
    assert found.commit == git(checkout, "rev-parse", "HEAD")
    assert found.modified == ("run_and_time.sh",)
    (checkout / "bert/train.py").unlink()
    assert "bert/train.py" not in tracked_source(checkout).files
    (checkout / "LICENSE").unlink()
    with pytest.raises(ValueError, match="holds no LICENSE"):
        tracked_source(checkout)
