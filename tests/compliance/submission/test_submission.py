"""Checks of folders and submissions: which files are found, which file a finding is about, and what passes."""

import os
import shutil
from pathlib import Path

import pytest
from mlperf_logging.compliance_checker import mlp_compliance

from compliance import folders
from compliance.folders import find
from compliance.log.findings import Verdict
from compliance.log.logged_run import LoggedRun
from compliance.official import process
from compliance.official.package import Answer, ask, ask_about_folder
from compliance.report.page import render
from compliance.report.results import load_results
from compliance.report.summary import as_json, as_markdown
from compliance.submission.check import check_paths
from compliance.submission.comparison import differing_settings
from tests.compliance.log.test_logged_run import run_of
from tests.compliance.log_edits import value
from tests.compliance.result_folders import SYSTEM, benchmark_folder


@pytest.fixture
def bare(root: Path) -> Path:
    """Remove everything but the logs from a submission, and return results/."""
    shutil.rmtree(root / "systems")
    shutil.rmtree(root / "benchmarks")
    return root / "results"


def names(verdicts: list[Verdict], root: Path) -> list[str]:
    return [os.path.relpath(verdict.path, root) for verdict in verdicts]


def of_folder(verdicts: list[Verdict]) -> Verdict:
    [verdict] = [verdict for verdict in verdicts if verdict.path.name == "bert"]
    return verdict


LOGS = [f"results/{SYSTEM}/bert/result_{number}.txt" for number in range(10)]


# Kinds of paths


@pytest.mark.slow
def test_the_check_of_a_submission_covers_all_parts_and_leaves_no_files(root: Path) -> None:
    before = sorted(root.rglob("*"))
    assert names(check_paths([root]), root) == [".", f"systems/{SYSTEM}.json", f"results/{SYSTEM}/bert", *LOGS]
    assert load_results(benchmark_folder(root)).description["system_name"] == SYSTEM
    assert sorted(root.rglob("*")) == before  # no scaling.json of the official checker


@pytest.mark.parametrize("name", ["bert", "BERT", "Bert_large", "logs"])
def test_a_folder_of_any_name_is_found_by_its_logs(bare: Path, name: str) -> None:
    (bare / SYSTEM / "bert").rename(bare / SYSTEM / name)
    shutil.copytree(bare / SYSTEM / name, bare / SYSTEM / "resnet")  # another benchmark
    if name != "logs":
        (bare / SYSTEM).rename(bare / "bert_node")  # a system named after the benchmark
    [system] = bare.iterdir()
    for path in (bare, system, system / name):
        [folder] = find(path).benchmarks
        assert (folder.path, len(folder.logs)) == (system / name, 10)
    findings = [finding for finding in folders.layout_findings(folder, 10) if "there is no" not in finding.found]
    assert [finding.severity for finding in findings] == ([] if name == "bert" else ["warning"])


def test_benchmark_folders_are_found_by_relative_paths(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(benchmark_folder(root))
    tree = find(Path())
    assert tree.submission == root
    assert [(folder.path, folder.system) for folder in tree.benchmarks] == [(Path(), SYSTEM)]
    assert [*folders.layout_findings(tree.benchmarks[0], 10)] == []
    monkeypatch.chdir(root.parent)
    tree = find(Path("example/results/.."))
    assert [folder.system for folder in tree.benchmarks] == [SYSTEM]


def test_links_to_folders_are_followed_only_in_bare_results(bare: Path) -> None:
    (bare / "linked").symlink_to(SYSTEM)
    (bare / "loop").symlink_to(".")
    assert len(find(bare).benchmarks) == 2
    (bare.parent / "systems").mkdir()
    assert len(find(bare).benchmarks) == 1


def test_each_file_counts_as_a_log_or_gets_the_recorded_findings(tmp_path: Path) -> None:
    """Compressed logs count as logs only outside of a submission."""
    folder, results = tmp_path / SYSTEM / "bert", tmp_path / "results"
    folder.mkdir(parents=True)
    names = "Result-0.txt result result_0.out result_0.txt.gz result_3.txt.gz results_0.txt result_2.txt result_10.txt"
    for name in (*names.split(), "result_0 (1).txt", "result_seed.txt", "result_summary.csv", "metrics_0.jsonl"):
        (folder / name).touch()
    said = ""
    for place in (folder, results):
        if place == results:
            results.mkdir()
            (tmp_path / "systems").mkdir()
            (tmp_path / SYSTEM).rename(results / SYSTEM)
        [found] = find(place).benchmarks
        said += "".join(f"{', '.join(path.name for path in paths)}\n" for paths in (found.logs, found.misnamed))
        said += "".join(f"{finding}\n" for finding in folders.layout_findings(found, 10))
    assert said == Path(__file__).with_name("names.txt").read_text()


def test_differing_settings_are_returned_with_the_value_of_every_run() -> None:
    common = {"note": "x", "config.training.seed": "1", "config.plan.a": "1", "config.optimizer": "lamb"}
    changes = {"note": "y", "config.training.seed": "2", "config.plan.a": "2"}
    one, two = common | {"processes": "1", "config.a": "1"}, common | changes | {"processes": "2", "config.a": "2"}
    headers = [LoggedRun(header) for header in (one, two, common | {"processes": "2"})]
    assert differing_settings(headers) == {"processes": ["1", "2", "2"], "a": ["1", "2", "-"]}
    many = [LoggedRun({f"config.{number}": word for number in range(101)}) for word in "xy"]
    assert [*differing_settings(many)] == [str(number) for number in range(100)]
    # Logs without a configuration in the header are compared by their records.
    logged = [run_of(train_samples=1), run_of(opt_epsilon=[1]), run_of(opt_epsilon=[2], global_batch_size=448.0)]
    assert differing_settings(logged) == {"opt_epsilon": ["-", "[1]", "[2]"]}
    assert differing_settings([*headers[:1], *logged[1:]]) == {"opt_epsilon": ["-", "[1]", "[2]"]}


# The official tools


def test_a_log_cannot_make_the_package_checker_execute_code(root: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    (tmp_path / "evil_common.yaml").write_text(f"- BEGIN:\n    CODE: \"open('{made}', 'w')\"\n")
    rule_files = Path(mlp_compliance.__file__).parent / "training_5.0.0"
    division = f"{os.path.relpath(tmp_path, rule_files)}/evil"
    (root / LOGS[0]).write_text(value("submission_division", division)((root / LOGS[0]).read_text()))
    [folder] = find(root).benchmarks
    ask_about_folder(folder, {"division": "closed"}, "5.0.0")
    assert not made.exists()


def test_a_pipe_in_place_of_a_log_is_reported_without_blocking(root: Path) -> None:
    (root / LOGS[2]).unlink()
    os.mkfifo(root / LOGS[2])
    verdict = of_folder(check_paths([root]))
    assert "result_2.txt is not counted as a log" in verdict.errors[0].found
    answer = ask_about_folder(find(root).benchmarks[0], {"division": "closed"}, "5.0.0")
    assert (answer.outcome, "did not end" in answer.message) == ("fail", False)


def test_a_folder_fails_if_a_tool_dies_twice(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text(f"#!/bin/sh\nread request\nprintf half\necho x >> {tmp_path}/tries\n")
    broken.chmod(0o755)
    process.the_worker().end()
    monkeypatch.setattr(process.sys, "executable", str(broken))
    said = "the official package checker ended without a verdict"
    assert ask_about_folder(find(root).benchmarks[0], {"division": "closed"}, "5.0.0") == Answer("fail", said)
    assert (tmp_path / "tries").read_text() == "x\nx\n"
    monkeypatch.undo()
    assert ask("system", root / "systems" / f"{SYSTEM}.json", "5.0.0") == Answer("pass")


# Links and very deep folders


def test_links_out_of_the_folder_are_reported_and_their_contents_never_shown(bare: Path, tmp_path: Path) -> None:
    folder = benchmark_folder(bare.parent)
    secret = tmp_path / "secret.env"
    secret.write_text("# password: hunter2\nTOKEN=hunter2\n")
    outside = tmp_path / "scratch.txt"
    outside.write_bytes((folder / "result_3.txt").read_bytes())
    (folder / "result_3.txt").unlink()
    (folder / "result_3.txt").symlink_to(outside)
    (folder / "result_4.txt").rename(folder / "kept.txt")
    (folder / "result_4.txt").symlink_to("kept.txt")  # a link to a file in the same folder is not reported
    (folder / "result_5.txt").unlink()
    (folder / "result_5.txt").symlink_to(secret)
    verdicts = {verdict.path.name: verdict for verdict in check_paths([bare])}
    (link,) = [found for found in verdicts["bert"].findings if "symbolic link" in found.found]
    assert (link.found.split()[0], link.more, link.severity) == ("result_3.txt", 1, "warning")
    [empty] = verdicts["result_5.txt"].findings
    assert empty.found == "no MLLOG record in the file; expected the log of a run"
    results = load_results(folder)
    for shown in (render(results), as_markdown(results), as_json(results)):
        assert "hunter2" not in shown


@pytest.mark.slow
def test_a_submission_with_paths_beyond_the_system_limit_is_checked(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth = 1500
    monkeypatch.chdir(root / "benchmarks")
    for _ in range(depth):
        Path("d").mkdir()
        os.chdir("d")
    inmost = os.open(".", os.O_RDONLY)
    try:
        os.chdir(root)
        (root / "loop").symlink_to(".")
        found = [finding.found for finding in check_paths([root])[0].errors]
        assert "loop is a symbolic link, expected the file itself" in found
    finally:
        os.fchdir(inmost)
        os.close(inmost)
        for _ in range(depth):  # pytest's own cleanup would recurse too deeply
            os.chdir("..")
            Path("d").rmdir()
