"""Packages of ten logs: the submission's tree, the official tools on it, their figures, the archive.

The official tools take seconds each, so each tree that they are asked about carries several questions.
"""

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable
from dataclasses import fields, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from bert.configuration.config import Config, flattened
from bert.configuration.recipes import RECIPES
from bert.train import parse
from compliance.doctor import system_file
from compliance.log.rules import SYSTEM_FIELDS
from compliance.official.tools import Summary, _complaint, _complaints, _package_checker, ask_all, output_folder
from compliance.package.archive import write_archive
from compliance.package.assembly import make_package
from compliance.package.command import _comparison, run
from compliance.package.source import SourceTree
from compliance.package.tree import Package, PackageRequest, _script
from tests.compliance.command import run as command
from tests.compliance.doctor.fake_host import describe
from tests.compliance.log_edits import delete, in_turn, metadata, value
from tests.compliance.run_logs import without_chain, write_run
from tests.compliance.run_series import write_series
from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_files")]

SCALED = [16, 15, 16, 15, 16, 15, 16, 16, 15, 16]
PASSING = [17, 16, 18, 17, 16, 17, 18, 16, 17, 17]
DESCRIPTION = dict.fromkeys(SYSTEM_FIELDS, "as bought") | {
    "division": "closed",
    "status": "Available on-premise",
    "system_name": "one node of 8",
    "number_of_nodes": "1",
    "host_processors_per_node": "2",
    "accelerators_per_node": "8",
}


def description(folder: Path, **changes: object) -> Path:
    path = folder / "systems" / "node.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: value for name, value in (DESCRIPTION | changes).items() if value is not None}))
    return path


def request(folder: Path, runs: Path | None = None, *, out: Path | None = None, **changes: Any) -> PackageRequest:
    return PackageRequest("Example", description(folder, **changes), runs or folder / "runs", (out or folder) / "out")


def tool_rows(said: str) -> dict[str, str]:
    """Verdict of each row of the table."""
    return dict(re.findall(r"^(\S.{27}) (pass|FAIL) ", said, re.MULTILINE))


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Twelve runs, of which the median window is scaled, packaged and packed by the command; and what that printed."""
    folder = tmp_path_factory.mktemp("scaled")
    header = {"recipe": "tiny_cpu", "commit": "none", "config.training.precision": "bf16"}
    write_series(folder / "runs", [*SCALED, 20, 21], header=header)
    (folder / "password").write_text("correct horse battery staple\n")
    places = ["--system", description(folder), "--runs", folder / "runs", "--out", folder / "out"]
    secret = ["--archive", folder / "example.tgz.enc", "--password-file", folder / "password"]
    status, said = command("package", "--org", "Example", *places, *secret)
    assert status == 0, said
    return folder, said


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep of the source only what is indispensable: the rest takes a second to be written."""
    names = ("Dockerfile", "LICENSE", "README.md", "run_and_time.sh")
    few = SourceTree(REPOSITORY, names, left_out=(), commit="0123", modified=())
    monkeypatch.setattr("compliance.package.assembly.tracked_source", lambda: few)


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ten")
    write_series(folder / "runs", PASSING)
    return folder


@pytest.mark.slow
def test_all_official_tools_accept_it_and_their_figures_are_ours(scaled) -> None:
    folder, said = scaled
    rows = {name.strip(): verdict for name, verdict in tool_rows(said).items()}
    assert rows == dict.fromkeys(
        [
            "package checker",
            "repository checker",
            "system description checker",
            "convergence (RCP) checker",
            "result summarizer",
            "check of this repository",
            "score, scaling, samples",
        ],
        "pass",
    )
    assert "submitted is window 2, the median (TR 12.1)" in said
    assert "the set passes and its score is multiplied by 1." in said
    kept = output_folder(folder / "out/Example")
    assert "FOUND NO ERRORS" in (kept / "package_checker.txt").read_text()
    assert "Traceback" not in "".join(path.read_text() for path in kept.iterdir())


def test_the_tree(scaled) -> None:
    folder, _ = scaled
    tree = folder / "out" / "Example"
    results = tree / "results/node/bert"
    assert sorted(path.name for path in results.iterdir()) == sorted(
        [*(f"result_{n}.txt" for n in range(10)), "scaling.json"]
    )
    for number in range(10):  # window 2: runs 1 to 10
        assert (results / f"result_{number}.txt").read_bytes() == (
            folder / f"runs/result_{number + 1}.txt"
        ).read_bytes()
    benchmark = tree / "benchmarks/bert"
    implementation = benchmark / "implementations/mlperf-bert"
    for name in ("README.md", "Dockerfile", "run_and_time.sh", "bert/train.py", "launch/slurm.sub", "docs/training.md"):
        assert (implementation / name).read_bytes() == (REPOSITORY / name).read_bytes()
    assert os.access(implementation / "run_and_time.sh", os.X_OK)
    assert not (implementation / "results").exists()
    configuration = json.loads((benchmark / "node/node_mlperf-bert.json").read_text())
    assert configuration["configuration"] == {"training.precision": "bf16"}
    assert configuration["logged"]["global_batch_size"] == 448
    page = (benchmark / "node/README.md").read_text()
    assert "| result_0.txt | result_1.txt | 1001 |" in page
    assert "12 runs were made" in page
    assert (tree / "LICENSE.md").read_bytes() == (REPOSITORY / "LICENSE").read_bytes()
    assert "Not an MLPerf result" in (tree / "README.md").read_text()
    assert json.loads((tree / "systems/node.json").read_text()) == DESCRIPTION
    assert not [path for path in tree.rglob("*") if path.is_symlink() or path.name.startswith(".") or " " in path.name]


def test_the_archive(scaled) -> None:
    folder, said = scaled
    digest = subprocess.run(["sha1sum", "-c", "example.tgz.enc.sha1"], cwd=folder, capture_output=True, check=False)
    assert digest.returncode == 0
    assert (folder / "example.tgz.enc.sha1").read_text().split()[0] in said
    decrypt = [
        "openssl",
        "aes-256-cbc",
        "-d",
        "-pass",
        f"file:{folder}/password",
        "-in",
        str(folder / "example.tgz.enc"),
    ]
    content = subprocess.run(decrypt, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(content)) as tar:
        members = tar.getmembers()
    files = {member.name for member in members if member.isfile()}
    tree = folder / "out/Example"
    assert files == {path.relative_to(tree.parent).as_posix() for path in tree.rglob("*") if path.is_file()}
    assert {(member.uid, member.uname) for member in members} == {(0, "")}
    assert [path.name for path in folder.iterdir() if "partial" in path.name] == []


def test_a_tree_or_an_archive_that_is_there_is_not_overwritten(scaled, tmp_path: Path) -> None:
    folder, _ = scaled
    again = request(folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(ValueError, match="Example is there already: choose another --out, or give --replace"):
        make_package(again)
    elsewhere = PackageRequest("Example", again.system, again.runs, tmp_path / "out")
    for existing in ("example.tgz.enc", "example.tgz.enc.sha1"):
        target = folder / existing.removesuffix(".sha1")
        with pytest.raises(ValueError, match=r"example\.tgz\.enc(\.sha1)? is there already"):
            run(elsewhere, target, folder / "password")
    assert sorted(folder.rglob("*")) == before
    assert not (tmp_path / "out").exists()


def test_a_figure_that_differs_is_an_error(scaled, tmp_path: Path) -> None:
    folder, _ = scaled
    made = make_package(request(folder, out=tmp_path))
    same = Summary(made.minutes, made.scaling, made.outlook.mean)
    assert _comparison(made, same).passed
    assert made.outlook.mean
    nearly = 1 + 3e-9
    for theirs in (
        replace(same, minutes=made.minutes * nearly),
        replace(same, scaling=made.scaling * nearly),
        replace(same, samples=made.outlook.mean * nearly),
        replace(same, minutes=None),
    ):
        assert len(_comparison(made, theirs).findings) == 1
    (made.results / "scaling.json").write_text('{"scaling_factor": 1.5}')
    assert "the scaling of scaling.json is 1." in _comparison(made, same).findings[0].found
    assert not _comparison(made, None).passed


def test_one_aborted_run_is_the_slowest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_series(tmp_path / "runs", PASSING, failed={3})
    assert run(request(tmp_path), None, None) == 0
    said = capsys.readouterr().out
    assert set(tool_rows(said).values()) == {"pass"}
    assert "1 of them not converged and dropped as the slowest" in said
    assert "one log fails the compliance checker and is dropped as the slowest run" in said
    assert not (tmp_path / "out/Example/results/node/bert/scaling.json").exists()
    page = (tmp_path / "out/Example/benchmarks/bert/node/README.md").read_text()
    assert "| result_3.txt | result_3.txt | 1003 | no valid result |  |" in page
    assert not (tmp_path / "out/Example/benchmarks/bert/node/run_and_time.sh").exists()  # no recipe in the logs


def test_runs_that_converge_too_fast_fail_and_are_not_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_series(tmp_path / "runs", [15, 14, 15, 14, 15, 14, 15, 14, 15, 14])
    (tmp_path / "password").write_text("correct horse battery staple")
    assert run(request(tmp_path), tmp_path / "a.enc", tmp_path / "password") == 1
    said = capsys.readouterr().out
    failed = {name.strip() for name, verdict in tool_rows(said).items() if verdict == "FAIL"}
    assert failed == {"package checker", "convergence (RCP) checker", "check of this repository"}
    assert "below the minimum of 2,274,732" in said
    assert "RCP found" in said
    assert "a.enc: not written, because a check fails" in said
    assert not (tmp_path / "a.enc").exists()


def test_open_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(10):
        write_run(tmp_path / f"runs/result_{number}.txt", "open", header={"run": number}, step_ms=10 + number)
    assert run(request(tmp_path, division="open", cooling="", sw_notes=""), None, None) == 0
    said = capsys.readouterr().out
    assert set(tool_rows(said).values()) == {"pass"}
    assert "not asked: no reference in the open division" in said
    assert "the system description leaves cooling empty" in said


def test_what_the_official_tools_object_to_is_passed_on(ten: Path, tmp_path: Path) -> None:
    made = make_package(request(ten, out=tmp_path))
    (made.results / "result_9.txt").unlink()
    no_beta = in_turn(delete("opt_lamb_beta_1"), value("seed", 1000))
    for number, change in ((1, no_beta), (2, no_beta), (4, delete("seed"))):
        log = made.results / f"result_{number}.txt"
        log.write_text(change(without_chain(log.read_text())))
    (made.tree / "a name.txt").write_text("")
    (made.tree / "link.txt").symlink_to("README.md")
    made.tree.joinpath("systems/node.json").write_text(json.dumps(DESCRIPTION | {"status": "onprem"}))
    reports, _ = ask_all(made.tree, "node", "5.0.0", "closed")
    assert {report.tool: report.passed for report in reports} == {
        "package checker": False,
        "repository checker": False,
        "system description checker": False,
        "convergence (RCP) checker": True,
        "result summarizer": False,
    }
    said = {report.tool: [finding.found for finding in report.findings] for report in reports}
    package = "\n".join(said["package checker"])
    for words in (
        "expected 10",
        "2 files do not comply",
        "result_4.txt logs no seed",
        "Field status contains a non valid",
    ):
        assert words in package
    assert re.search(r"result_1\.txt logs seed 1000 on \S+:\d+", package)
    repository = "\n".join(said["repository checker"])
    assert ("a name.txt" in repository, "link.txt" in repository) == (True, True)
    assert "non-converging" in said["result summarizer"][0]


def test_a_silent_skip_is_no_success(ten: Path, tmp_path: Path) -> None:
    """In a folder of another name the package checker reports success without reading a log."""
    made = make_package(request(ten, out=tmp_path))
    made.results.rename(made.results.with_name("BERT"))
    package = _package_checker(tmp_path, made.tree, "5.0.0", "closed")
    assert not package.passed
    skipped, blind = package.findings
    assert "BERT" in skipped.found
    assert "success without 'Run 10/10', 'Running Seed Checker', 'Running RCP Checker'" in blind.found


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("INFO - Running git-unfriendly file name checks.", None),
        ("FileNotFoundError: no such file: 'x.json'", "FileNotFoundError: no such file: 'x.json'"),
        ("json.decoder.JSONDecodeError: Expecting value", "json.decoder.JSONDecodeError: Expecting value"),
        ("ERROR - something that nobody knows \x1b[2J", "something that nobody knows \\x1b[2J"),
        ("ERROR - Seed checker failed", None),
        ("ERROR - Please remove or reduce the size of these files.", None),
    ],
)
def test_one_line_of_a_tool(line: str, said: str | None) -> None:
    found = _complaint("tool", line)
    assert (found.found if found else None) == said
    assert len(list(_complaints("tool", f"{line}\n{line}\n"))) == (said is not None)


# What makes no submission


def cut_off(logs: list[Path]) -> None:
    logs[9].write_text(delete("run_stop")(without_chain(logs[9].read_text())))


def other_batch_size(logs: list[Path]) -> None:
    shutil.copy(write_series(logs[0].parent / "other", [17], global_batch_size=512)[0], logs[9])


def in_gzip(logs: list[Path]) -> None:
    logs[3].write_bytes(gzip.compress(logs[3].read_bytes()))


def resumed(logs: list[Path]) -> None:
    logs[0].write_text("# resumed from: checkpoints/step_100\n" + logs[0].read_text())


def fewer_sequences(logs: list[Path]) -> None:
    logs[0].write_text(value("eval_samples", 9999)(without_chain(logs[0].read_text())))


def abort_two(logs: list[Path]) -> None:
    for number in (2, 5):
        text = without_chain(logs[number].read_text())
        logs[number].write_text(metadata("run_stop", "status", "aborted")(text))


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (cut_off, r"9 complete logs, and 1 without an end, expected 10 \(TR 12\)"),
        (abort_two, r"2 runs are no valid results, and a set of 10 may.*result_2\.txt.*aborted.*result_5\.txt"),
        (other_batch_size, r"global_batch_size differs between logs \(448 in result_0\.txt, 512 in result_9\.txt\)"),
        (resumed, "was resumed from 'checkpoints/step_100', so its clock did not run all the time"),
        (in_gzip, r"result_3\.txt: packed in gzip, which no official tool reads: unpack it with `gunzip`"),
        (lambda logs: shutil.copy(logs[3], logs[7]), r"result_7\.txt is a copy of result_3\.txt"),
        (fewer_sequences, r"result_0\.txt: .*eval_samples.*The official tools do not see it and would count the run"),
    ],
)
def test_runs_that_make_no_submission(
    ten: Path, tmp_path: Path, spoil: Callable[[list[Path]], object], match: str
) -> None:
    shutil.copytree(ten / "runs", tmp_path / "runs")
    spoil([tmp_path / f"runs/result_{number}.txt" for number in range(10)])
    with pytest.raises(ValueError, match=match):
        make_package(request(tmp_path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"cooling": None, "sw_notes": None}, "there is no cooling, sw_notes, expected all 33 fields"),
        ({"submitter": " "}, "submitter is empty: `python -m compliance system"),
        ({"division": "open"}, "division is 'open', but the logs say 'closed'"),
        ({"division": "Closed"}, "division: .*'Closed', expected closed or open in lower case"),
        ({"status": "onprem"}, "status: .*'onprem', expected one of: Available on-premise"),
        ({"accelerators_per_node": 8}, "accelerators_per_node: .* 8, expected text"),
        ({"number_of_nodes": "two"}, "number_of_nodes: .*'two', expected a whole number"),
    ],
)
def test_a_description_that_will_not_do(ten: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_package(request(ten, **changes))
    assert not (ten / "out").exists()


def test_runs_of_another_system_are_not_renamed(ten: Path, tmp_path: Path) -> None:
    other = shutil.copytree(ten / "runs", tmp_path / "results/old_node/bert")
    with pytest.raises(
        ValueError, match=r"old_node/bert holds the runs of 'old_node', but .*node\.json describes 'node'"
    ):
        make_package(request(tmp_path, other))
    assert not (tmp_path / "out").exists()
    own = shutil.copytree(other, tmp_path / "results/node/bert")
    assert make_package(request(tmp_path, own)).results.parent.name == "node"


def test_a_description_of_other_hardware_than_the_logs_name(tmp_path: Path) -> None:
    header = {"accelerator": "NVIDIA H100 80GB HBM3", "processes": "8 x 14 threads", "torch": "2.13.0+cu130"}
    write_series(tmp_path / "runs", PASSING, header=header)
    with pytest.raises(ValueError, match=r"accelerator_model_name: value 'NVIDIA A100'.*'NVIDIA H100 80GB HBM3'"):
        make_package(request(tmp_path, accelerator_model_name="NVIDIA A100"))
    assert not (tmp_path / "out").exists()
    made = make_package(request(tmp_path, accelerator_model_name="NVIDIA H100", framework="PyTorch 2.11"))
    assert "framework" in [finding.key for finding in made.findings]


def test_no_description(ten: Path) -> None:
    wanted = request(ten)
    wanted.system.write_text("{")
    with pytest.raises(ValueError, match="the file is not JSON"):
        make_package(wanted)


@pytest.mark.parametrize("name", ["../up", "with a space", ".hidden", "a/b", ""])
def test_names_that_cannot_be_folders(ten: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a folder of a submission"):
        PackageRequest(name, ten / "systems/node.json", ten / "runs", ten / "out")
    with pytest.raises(ValueError, match="cannot name a folder of a submission"):
        PackageRequest("Example", ten / "systems/node.json", ten / "runs", ten / "out", implementation=name)


def test_nothing_is_left_behind_by_a_failure(ten: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "some file")

    monkeypatch.setattr("compliance.package.tree._configuration", full)
    with pytest.raises(ValueError, match="some file cannot be written: No space left on device"):
        make_package(request(ten, out=tmp_path))
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(ValueError, match=r"out cannot be written: .*; choose another --out"):
        make_package(request(ten, out=ten / "systems/node.json"))


def test_what_is_worth_knowing(tmp_path: Path) -> None:
    logs = write_series(tmp_path / "runs", [*PASSING, 17, 18], header={"commit": "0123 \x1b[2J"})
    logs[11].write_text(delete("run_stop")(logs[11].read_text()))
    made = make_package(request(tmp_path, host_processor_core_count="", host_processor_vcpu_count=""))
    found = [finding.found for finding in made.findings]
    assert "result_11.txt has no run_stop and was counted as a failed run" in found
    assert "the system description leaves host_processor_core_count empty, expected a meaningful answer" in found
    assert all(text.isprintable() for text in found)
    assert all(finding.severity == "warning" for finding in made.findings)
    assert made.runs[0].log.path.name == "result_1.txt"


def test_replace_leaves_one_whole_tree(ten: Path, tmp_path: Path) -> None:
    first = request(ten, out=tmp_path)
    (make_package(first).tree / "old").touch()
    made = make_package(replace(first, replace=True))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["Example"]
    assert not (made.tree / "old").exists()


def test_archive_and_password_go_together(ten: Path, tmp_path: Path) -> None:
    wanted = request(ten, out=tmp_path)
    password = tmp_path / "password"
    with pytest.raises(ValueError, match="--archive and --password-file go together"):
        run(wanted, tmp_path / "a.enc", None)
    with pytest.raises(ValueError, match="no password can be read from it"):
        run(wanted, tmp_path / "a.enc", password)
    password.write_text("short\ncorrect horse battery staple")
    with pytest.raises(ValueError, match="its first line has 5 characters, expected a password of at least 16"):
        run(wanted, tmp_path / "a.enc", password)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["password"]
    password.write_text("correct horse battery staple")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/a\.enc cannot be written: (Not a directory|File exists)"):
        write_archive(ten, tmp_path / "file/a.enc", password)


def test_without_openssl(ten: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "password").write_text("correct horse battery staple")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="there is no openssl command"):
        run(request(ten, out=tmp_path), tmp_path / "a.enc", tmp_path / "password")


# The script that makes the runs again


@pytest.mark.parametrize("recipe", ["tiny_cpu", "h100_1x8", "dgxa100_8x8"])
def test_the_script_repeats_the_configuration(recipe: str, tmp_path: Path) -> None:
    told: Config = RECIPES[recipe]()
    header = {key: str(value) for key, value in flattened("", told)}
    header = {key.lstrip("."): value for key, value in header.items()}
    header |= {"training.global_batch_size": "64", "training.autotune": "False", "optimizer.epsilon": "1e-07"}
    script = tmp_path / "run_and_time.sh"
    script.write_text(_script("impl", recipe, header | {"training.seed": "7"}))  # which each run draws for itself
    place = tmp_path / "../implementations/impl"
    place.resolve().mkdir(parents=True, exist_ok=True)
    (place / "run_and_time.sh").write_text('#!/bin/sh\necho "$@"\n')
    (place / "run_and_time.sh").chmod(0o755)
    done = subprocess.run(["bash", str(script), "--log.run", "3"], capture_output=True, text=True, check=True)
    name, runs, separator, *arguments = shlex.split(done.stdout)
    assert (name, runs, separator) == (recipe, "10", "--")
    sections = {argument.partition(".")[0] for argument in arguments if argument.startswith("--")}
    assert sections == {"--optimizer", "--training", "--evaluation", "--log"}, "data and model are whose recipe it is"
    parsed = parse([recipe, *arguments])
    for section in ("optimizer", "training", "evaluation"):
        for field in fields(getattr(told, section)):
            found = getattr(getattr(parsed, section), field.name)
            assert str(found) == header[f"{section}.{field.name}"], (section, field.name)
    assert parsed.log.run == 3


def test_a_log_cannot_write_into_the_script() -> None:
    hostile = {
        "training.x; rm -rf /": "1",
        "training.precision": "bf16; rm",
        "evaluation.$(id)": "2",
        "optimizer.beta_1": "0.9",
    }
    script = _script("impl", "tiny_cpu", hostile)
    assert "rm" not in script.replace("normal", "")
    assert "$(id)" not in script
    assert "--optimizer.beta-1 0.9" in script
    assert "# To be added by hand, from the JSON file beside this: training.precision.\n" in script


def test_system_description_of_this_machine_can_be_packaged(ten: Path, tmp_path: Path) -> None:
    path = tmp_path / "systems/here.json"
    system_file.write(path, describe("closed", {"submitter": "Example", "system_name": "here"}))
    made: Package = make_package(PackageRequest("Example", path, ten / "runs", tmp_path / "out"))
    assert made.results == tmp_path / "out/Example/results/here/bert"


@pytest.mark.parametrize(
    "line",
    ["Result file " + "/" * 200_000, "Result file /x logs seed 1 on " * 10_000, "x." * 100_000],
    ids=["slashes", "beginnings", "names"],
)
def test_a_long_line_of_a_tool_takes_no_quadratic_time(line: str) -> None:
    begin = time.monotonic()
    assert list(_complaints("tool", f"{line}\nERROR - Missing RCP, please submit"))
    assert time.monotonic() - begin < 60
