"""Faults of submissions: the check must report each one with its location, the rule that it breaks and a remedy."""

import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from compliance.check.checker import check_log
from compliance.folders import find
from compliance.log.findings import Finding, Verdict
from compliance.log.reader import Log
from compliance.log.rules import SYSTEM_FIELDS
from compliance.log.run import LoggedRun
from compliance.official.package import Answer
from compliance.submission import check as submission
from compliance.submission.description import against_logs, description_findings, read_description
from tests.compliance.command import run
from tests.compliance.log_edits import Edit, delete, garble, in_turn, metadata, repeat_before, value
from tests.compliance.result_folders import SYSTEM, without_chain, write_description, write_log

LOG = f"results/{SYSTEM}/bert/result_3.txt"
FOLDER = f"results/{SYSTEM}/bert"
DESCRIPTION = f"systems/{SYSTEM}.json"

Mutation = Callable[[Path], object]
"""Function that adds one fault to the submission at a path."""


@dataclass(frozen=True)
class Case:
    """One fault. `accepted` tells whether the submission passes despite the finding."""

    name: str
    mutate: Mutation
    accepted: bool = False


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Cache verdicts, so that each log is checked only once."""
    known: dict[object, Verdict] = {}

    def check_once(log: Log, ruleset: str) -> Verdict:
        key = (tuple(log.evidence), tuple(log.header.items()), ruleset)
        if key not in known:
            known[key] = check_log(log, ruleset)
        return replace(known[key], path=log.path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submission, "check_logs", lambda logs, ruleset, _: [check_once(log, ruleset) for log in logs])
        yield


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the official package tools by functions that accept everything."""
    monkeypatch.setattr(submission, "ask", lambda *_: Answer("pass"))
    monkeypatch.setattr(submission, "ask_about_folder", lambda *_: Answer("pass"))


def findings_of(verdicts: list[Verdict], root: Path) -> list[tuple[str, Finding]]:
    """Return (path, finding) pairs, without the folder's findings that only say that a log has findings."""
    pairs = [(os.path.relpath(verdict.path, root), finding) for verdict in verdicts for finding in verdict.findings]
    return [pair for pair in pairs if not ((pair[1].rule, pair[1].key) == ("TR 12", "") and "result_" in pair[1].found)]


# Mutations


def both(*mutations: Mutation) -> Mutation:
    return lambda root: [mutate(root) for mutate in mutations]


def in_log(change: Edit, log: str = LOG) -> Mutation:
    return lambda root: (root / log).write_text(change((root / log).read_text()))


def describe(**changes: Any) -> Mutation:
    """Rewrite the system description."""
    return lambda root: write_description(root, **changes)


def remove(path: str) -> Mutation:
    return lambda root: (root / path).unlink()


def rename(old: str, new: str) -> Mutation:
    return lambda root: (root / old).rename(root / new)


def write(path: str, text: str) -> Mutation:
    def make(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)

    return make


def link(path: str, target: str) -> Mutation:
    return lambda root: (root / path).symlink_to(target)


def rewrite(number: int, **options: Any) -> Mutation:
    """Replace a log by another run's log."""
    path = f"{FOLDER}/result_{number}.txt"
    return lambda root: without_chain(write_log(root / path, number, platform=SYSTEM, **options))


def rewrite_all(**options: Any) -> Mutation:
    return both(*(both(remove(f"{FOLDER}/result_{number}.txt"), rewrite(number, **options)) for number in range(10)))


ABORT = in_turn(value("eval_accuracy", 0.7101, -1), metadata("run_stop", "status", "aborted"))
RATE = value("opt_base_learning_rate", 3e-4)
SEED_OF_ANOTHER = in_log(value("seed", 1000))
SOURCE = "benchmarks/bert/implementations/pytorch"

CASES = (
    # Faults of one log, and their effect on the submission
    Case("aborted", in_log(ABORT), accepted=True),
    Case("second run_start", in_log(repeat_before("run_start", "train_samples"))),
    Case("planned train_samples", in_log(value("train_samples", 156_725_653)), accepted=True),
    Case("an empty log", in_log(lambda _: ""), accepted=True),
    # Disagreement between logs
    Case("another division", in_log(value("submission_division", "open"))),
    Case("another organisation", in_log(value("submission_org", "Other")), accepted=True),
    Case("another batch size and its learning rate", in_log(in_turn(value("global_batch_size", 512), RATE))),
    Case("another learning rate", in_log(RATE)),
    Case("several settings", in_log(in_turn(RATE, value("opt_lamb_beta_2", 0.99)))),
    Case("seed of another run", SEED_OF_ANOTHER),
    Case("seed of another run, logged elsewhere", both(SEED_OF_ANOTHER, in_log(metadata("seed", "lineno", 77)))),
    Case("seed twice", in_log(repeat_before("seed", "init_stop"))),
    Case("no seed", in_log(delete("seed"))),
    # Faults of the system description
    Case("division Closed", describe(division="Closed")),
    Case("division open", describe(division="open")),
    Case("nodes as a number", describe(number_of_nodes=1), accepted=True),
    Case("accelerators as a number", describe(accelerators_per_node=8)),
    Case("old status word", describe(status="onprem")),
    Case("status unlike the log's", describe(status="Preview"), accepted=True),
    Case("submitter unlike the log's", describe(submitter="Other"), accepted=True),
    Case("fields missing", describe(cooling=None, sw_notes=None)),
    Case("no description", remove(DESCRIPTION)),
    Case("broken description", write(DESCRIPTION, "{,}")),
    # Names and numbers of files
    Case("9 logs", remove(f"{FOLDER}/result_9.txt")),
    Case("11 logs", rewrite(10)),
    Case("results_0.txt", rename(f"{FOLDER}/result_0.txt", f"{FOLDER}/results_0.txt")),
    Case("folder BERT", rename(FOLDER, f"results/{SYSTEM}/BERT")),
    Case("a file of 51 MiB", write("benchmarks/bert/weights.bin", "0" * (51 * 2**20))),
    Case("a space in a name", write(f"{SOURCE}/run all.sh", "")),
    Case("a hidden file", write(f"{SOURCE}/.gitignore", "")),
    Case("a link", link("benchmarks/bert/README.md", "implementations/pytorch/README.md")),
    Case("a loop of links", link("results/loop", "../results")),
    # Faults of the runs as a set
    Case("faster than the reference", rewrite_all(evaluations=14)),
    Case("no reference", rewrite_all(global_batch_size=20480)),
)  # fmt: skip


FINDINGS = dict(line.split(" => ") for line in Path(__file__).with_name("findings.txt").read_text().splitlines())
"""Place and text of the finding about each fault, by the fault's name."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("unasked")
def test_one_fault_gets_one_clear_message(root: Path, case: Case) -> None:
    case.mutate(root)
    verdicts = submission.check_paths([root], "5.0.0")
    [(where, finding)] = findings_of(verdicts, root)
    said = re.sub(r"; logged at [^\]]*", "", str(finding)).replace(str(root), "ROOT")
    if finding.line and finding.key:
        assert f'"{finding.key}"' in (root / where).read_text().splitlines()[finding.line - 1]
    assert f"{where}: {said}" == FINDINGS[case.name]
    assert submission.accepted(verdicts) is case.accepted


# The official tools themselves

ASKED: dict[str, tuple[Mutation, str]] = {
    "seed of another run": (SEED_OF_ANOTHER, "fail"),
    "no seed": (in_log(delete("seed")), "fail"),
    "another batch size": (in_log(value("global_batch_size", 512)), "fail"),
    "results_0.txt": (rename(f"{FOLDER}/result_0.txt", f"{FOLDER}/results_0.txt"), "fail"),
    "a link to nothing": (both(remove(LOG), link(LOG, "nowhere.txt")), "fail"),
    "folder BERT": (rename(FOLDER, f"results/{SYSTEM}/BERT"), "pass"),
    "seeds left out": (both(SEED_OF_ANOTHER, write(f"{FOLDER}/package_checker_params", "seed-checker-bypass")), "pass"),
    "division Closed": (both(describe(division="Closed"), SEED_OF_ANOTHER), "pass"),
    "no division": (describe(division=None), "pass"),  # our check of the description finds it
    "text after a record": (in_log(garble("seed", "} done")), "fail"),
    "no description": (remove(DESCRIPTION), "fail"),
    "faster than the reference": (rewrite_all(evaluations=14), "fail"),
    "a power measurement missing": (write(f"{FOLDER}/power/result_4/node_0.txt", ""), "fail"),
}
"""Mutations, each with the verdict that the official package checker gives on the folder of logs."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
def test_what_the_official_package_checker_fails_fails_here(root: Path, name: str) -> None:
    mutate, outcome = ASKED[name]
    mutate(root)
    [folder] = find(root).benchmarks
    [verdict] = [verdict for verdict in submission.check_paths([root], "5.0.0") if verdict.path == folder.path]
    assert verdict.official == outcome
    assert outcome == "pass" or len(verdict.errors) == 1, verdict.errors


# System descriptions: their fields, field types, and agreement with the logs' headers


FIELDS: list[dict[str, Any]] = [
    *({"host_processors_per_node": value} for value in ("8x", "", "-1", "8.0", "٨", 8.5, [], True, " 8 ")),
    *({"host_processors_per_node": value} for value in ("0", "1", "64", "65")),
    *({"number_of_nodes": value} for value in ("0", "1", "100000", "100001", "9" * 30)),
    *({"accelerators_per_node": value} for value in ("0", "1024", "1025", 8)),
    *(dict.fromkeys(SYSTEM_FIELDS[-count:]) for count in (1, 5, 6)),  # fields that are missing
    *({"status": value} for value in ("onprem", "Preview")),
]
FILES = [b"", b"{", b"[]", b"3", b"\xff{}", b'{"a": ' * 100_000, b"null", b"1" * 10_000]


def test_what_is_said_of_fields_and_files(tmp_path: Path) -> None:
    path, said = tmp_path / "systems" / f"{SYSTEM}.json", ""
    for change in (*FIELDS, *FILES):
        write_description(tmp_path, **(change if isinstance(change, dict) else {}))
        if isinstance(change, bytes):
            path.write_bytes(change)
        found = "; ".join(map(str, description_findings(read_description(path), "5.0.0"))).replace(str(path), "PATH")
        found = re.sub(r"(JSON \(|maximum|Exceeds).*?, expected", r"\1..., expected", found)  # Python's words
        said += f"{change if isinstance(change, dict) else change[:9]} => {found}\n"
    assert said == Path(__file__).with_name("descriptions.txt").read_text()
    assert [*description_findings(read_description(write_description(tmp_path, status="onprem")), "3.1.0")] == []


HEAD = {"accelerator": "NVIDIA H100 80GB HBM3", "cpu": "Intel(R) Xeon(R) Platinum 8480C, 224 logical cores"}
HEAD |= {"torch": "2.13.0+cu130", "processes": "16 x 14 threads, data 16"}
MACHINE = {"number_of_nodes": "2", "accelerators_per_node": "8", "accelerator_model_name": "NVIDIA H100-SXM5-80GB"}
MACHINE |= {"host_processor_model_name": "Intel Xeon 8480C", "framework": "PyTorch 2.13.0"}


@pytest.mark.parametrize(
    ("head", "described", "expected"),
    [
        ({}, {}, []),
        ({}, {"accelerator_model_name": "NVIDIA A100-SXM4-80GB"}, [("accelerator_model_name", "error")]),
        ({}, {"accelerator_model_name": "N/A"}, [("accelerator_model_name", "error")]),
        ({}, {"number_of_nodes": "1"}, [("accelerators_per_node", "error")]),
        ({}, {"number_of_nodes": "9" * 5000}, []),
        ({}, {"host_processor_model_name": "EPYC 7742"}, [("host_processor_model_name", "warning")]),
        ({}, {"framework": "PyTorch 2.11.0"}, [("framework", "warning")]),
        ({}, {"framework": ""}, []),
        ({"accelerator": "none"}, {}, [("accelerator_model_name", "error")]),
        ({"accelerator": "none"}, {"accelerator_model_name": "N/A", "accelerators_per_node": "0"}, []),
        (dict.fromkeys(HEAD, ""), {"accelerator_model_name": "TPU"}, []),
        ({"processes": "many"}, {}, [("accelerators_per_node", "error")]),
    ],
)
def test_a_description_is_held_against_the_heads_of_the_logs(
    tmp_path: Path, head: dict[str, str], described: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    description = read_description(write_description(tmp_path, **(MACHINE | described)))
    found = [*against_logs(description, [LoggedRun(HEAD | head)] * 3)]
    assert [(finding.key, finding.severity) for finding in found] == expected


def test_the_remedy_for_missing_fields_repairs_the_description(tmp_path: Path) -> None:
    path = write_description(tmp_path / "a folder", cooling=None, sw_notes=None)
    [finding] = description_findings(read_description(path), "5.0.0")
    command = shlex.split(finding.remedy.split("`")[1])
    assert command[:3] == ["python", "-m", "compliance"]
    assert run(*command[3:])[0] == 0
    assert [*description_findings(read_description(path), "5.0.0")] == []
