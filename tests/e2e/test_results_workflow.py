"""The script in ``.github/workflows/results.yml``, run as GitHub runs it, on the changes of a pull request."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.conftest import REPOSITORY
from tests.hostile import assert_harmless
from tests.programs import git, write_script

WORKFLOW = yaml.safe_load((REPOSITORY / ".github/workflows/results.yml").read_text())
(STEP,) = (step for step in WORKFLOW["jobs"]["check"]["steps"] if "mlperf-bert-compliance" in step.get("run", ""))


def run_step(root: Path, tools: Path, base: str) -> subprocess.CompletedProcess[str]:
    """Run the workflow's step in a repository, on the changes since ``base``, with ``tools`` first in PATH."""
    assert STEP["shell"] == "bash"  # GitHub's runner starts a step of bash by the command below
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEP["run"]]
    environment = os.environ | {"BASE": base, "RUNNER_TEMP": str(tools), "PATH": f"{tools}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, errors="surrogateescape")


class PullRequest:
    """A repository with the results of two systems, and a branch that changes them."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "repository"
        self.results = self.root / "results"
        for system in ("node", "an older node"):
            shutil.copytree(REPOSITORY / "results/cpu_2cores", self.results / system)
            (self.results / "systems").mkdir(exist_ok=True)
            shutil.copy(REPOSITORY / "results/systems/cpu_2cores.json", self.results / f"systems/{system}.json")
        (self.root / "README.md").write_text("results\n")
        git(self.root, "init", "--quiet", "--initial-branch=main")
        self.base = self.commit()
        self.tools = folder / "bin"
        self.tools.mkdir()
        noting = f'printf "%s\\n" "$@" >{shlex.quote(str(self.tools / "given"))}'
        calling = f'PYTHONPATH={REPOSITORY} exec {sys.executable} -m compliance "$@"'
        write_script(self.tools / "mlperf-bert-compliance", f"#!/bin/bash\n{noting}\n{calling}\n")

    def commit(self) -> str:
        git(self.root, "add", "--all")
        git(self.root, "commit", "--quiet", "--allow-empty", "--message=change")
        return git(self.root, "rev-parse", "HEAD")

    def check(self, base: str = "") -> subprocess.CompletedProcess[str]:
        """Commit all changes, and run the workflow's step on the changes since ``base``."""
        self.commit()
        return run_step(self.root, self.tools, base or self.base)

    @property
    def checked(self) -> list[str]:
        """Return the sorted paths that the script passed to ``mlperf-bert-compliance``."""
        given = self.tools / "given"
        return sorted(word for word in given.read_text().splitlines() if "/" in word) if given.exists() else []


@pytest.fixture
def pull_request(tmp_path: Path) -> PullRequest:
    return PullRequest(tmp_path)


def spoil_two_logs(system: Path) -> None:
    """Make two of ten logs invalid. A single one would not fail the check, as the rules allow one failed run of ten."""
    for run in (3, 7):
        log = system / f"bert/result_{run}.txt"
        log.write_text(log.read_text().replace('"', "'", 3))


STRAY = ("ghost.json", "node.JSON", "note", "result.json", ".node.json", ".json", "..json", "...json")


@pytest.mark.parametrize(
    ("change", "status", "checked"),
    [
        (lambda results: (results.parent / "README.md").write_text("other\n"), 0, []),
        (lambda results: spoil_two_logs(results / "an older node"), 1, ["results/an older node"]),
        (lambda results: (results / "node/bert/result_3.txt").unlink(), 0, ["results/node"]),
        (lambda results: (results / "systems/node.json").unlink(), 0, ["results/node"]),
        (lambda results: (results / "systems/node.json").write_text("{}"), 1, ["results/node"]),
        # Names of no system's folder. The last three would otherwise stand for the whole folder of results.
        *((lambda results, name=name: (results / "systems" / name).write_text("{}"), 1, []) for name in STRAY),
        (lambda results: (results / "systems/new.json").symlink_to("node.json"), 1, []),
        (lambda results: shutil.copytree(results / "node", results / "systems", dirs_exist_ok=True), 0, ["results/systems"]),
        (lambda results: shutil.copy(results / "node/bert/result_0.txt", results), 0, ["results/result_0.txt"]),
        (lambda results: (results / "linked").symlink_to("node"), 1, []),
        (lambda results: (results / "result_1.txt").symlink_to("/etc/passwd"), 1, []),
    ],
    ids=[
        "nothing", "spoilt", "removed log", "removed description", "empty description", *STRAY,
        "linked description", "a system named systems", "a log beside the systems",
        "a linked system", "a linked log",
    ],
)  # fmt: skip
def test_the_workflow_checks_the_results_that_a_pull_request_changes(
    pull_request: PullRequest, change: Callable[[Path], object], status: int, checked: list[str]
) -> None:
    change(pull_request.results)
    done = pull_request.check()
    assert done.returncode == status, done.stdout + done.stderr
    assert pull_request.checked == checked


@pytest.mark.parametrize("kind", ["removed", "linked"])
def test_a_hostile_file_name_is_not_printed_as_a_command_of_the_runner(pull_request: PullRequest, kind: str) -> None:
    name = "x\n::error file=a::forged\r\n\x1b[2J\u202e\u2066$(touch made)]`"
    place = pull_request.results / name
    if kind == "removed":
        shutil.copytree(pull_request.results / "node", place)
        base = pull_request.commit()
        shutil.rmtree(place)
    else:
        base = pull_request.base
        place.symlink_to("node")
    done = pull_request.check(base)
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (int(kind == "linked"), 1, "")
    assert done.stdout.strip().isprintable()
    assert not (pull_request.root / "made").exists()


def change_names(names: Path) -> None:
    """Add files to a pull request, with the names in the file ``names``, separated by NUL. No part of a name may run."""
    root, tools = names.with_name("repository"), names.with_name("tools")
    if not tools.exists():
        tools.mkdir()
        write_script(tools / "mlperf-bert-compliance", f"#!/bin/bash\nprintf '%s\\0' \"$@\" >{tools}/given\n")
        git(names.parent, "init", "--quiet", "--initial-branch=main", str(root))
        git(root, "commit", "--quiet", "--allow-empty", "--message=first")
    for name in os.fsdecode(names.read_bytes()).split("\0")[:8]:
        with suppress(OSError, ValueError):
            (place := root / "results" / name).resolve().relative_to(root / "results")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("x")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--allow-empty", "--message=change")
    (tools / "given").write_bytes(b"")
    done = run_step(root, tools, "HEAD~1")
    given = os.fsdecode((tools / "given").read_bytes()).split("\0")
    assert all((root / word).exists() for word in given[1:-3]), given
    assert [given[0], *given[-3:]] in (["", ""], ["check", "--sarif", "findings.sarif", ""]), given
    git(root, "reset", "--quiet", "--hard", "HEAD~1")
    git(root, "clean", "-ffdqx")
    assert (done.returncode in (0, 1), done.stderr) == (True, ""), done
    assert_harmless(done.stdout)


def test_an_unknown_base_commit_fails_the_workflow_before_any_check(pull_request: PullRequest) -> None:
    done = pull_request.check("01234567" * 5)
    assert done.returncode != 0
    assert pull_request.checked == []
