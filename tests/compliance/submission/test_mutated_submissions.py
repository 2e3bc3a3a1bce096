"""Faults of folders and submissions: each is reported once, with its location, its rule and a remedy."""

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from compliance.official import checker as official
from tests.compliance.command import run
from tests.compliance.log_edits import Edit, delete, epoch_nums, garble, in_turn, lines_of, metadata, value
from tests.compliance.log_edits import repeat_before as repeat
from tests.compliance.result_folders import SYSTEM, write_description, write_log
from tests.compliance.result_folders import without_chain as without_digests

FOLDER = f"results/{SYSTEM}/bert"
LOG = f"{FOLDER}/result_3.txt"
DESCRIPTION = f"systems/{SYSTEM}.json"
SOURCE = "benchmarks/bert/implementations/pytorch"
FEW = 11
"""Number of evaluations of a run with batch size 448 that converges faster than the reference allows."""

Mutation = Callable[[Path], object]
"""Function that changes the submission at a path."""


Case = tuple[tuple[Mutation, ...], str, str]
"""Changes of a valid submission, the part of it that is checked, and the ruleset."""


def case(*mutations: Mutation, part: str = ".", ruleset: str = "5.0.0") -> Case:
    return mutations, part, ruleset


def in_logs(change: Edit, *numbers: int) -> Mutation:
    """Edit the logs of these numbers, or all logs."""

    def make(root: Path) -> None:
        paths = [root / f"{FOLDER}/result_{number}.txt" for number in numbers]
        for path in paths or sorted((root / FOLDER).glob("result_*.txt")):
            path.write_text(change(path.read_text()))

    return make


def in_log(change: Edit) -> Mutation:
    return in_logs(change, 3)


def describe(**changes: Any) -> Mutation:
    """Rewrite the system description."""
    return lambda root: write_description(root, **changes)


def remove(*paths: str) -> Mutation:
    """Remove files, or folders with all that they contain."""
    return lambda root: subprocess.run(["rm", "-r", *paths], cwd=root, check=True)


def rename(old: str, new: str) -> Mutation:
    return lambda root: (root / old).rename(root / new)


def copy(old: str, new: str) -> Mutation:
    return lambda root: shutil.copytree(root / old, root / new)


def write(path: str, text: str) -> Mutation:
    def make(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)

    return make


def link(path: str, target: str) -> Mutation:
    return lambda root: (root / path).symlink_to(target)


def rewrite(*numbers: int, **options: Any) -> Mutation:
    """Replace logs by other runs' logs."""
    options = {"platform": SYSTEM} | options
    paths = {number: f"{FOLDER}/result_{number}.txt" for number in numbers}
    return lambda root: [without_digests(write_log(root / path, n, **options)) for n, path in paths.items()]


def only_first(number: int) -> Mutation:
    """Remove all logs but the first ones."""
    return remove(*(f"{FOLDER}/result_{each}.txt" for each in range(number, 10)))


def bare(root: Path) -> None:
    """Remove everything but the logs."""
    remove("systems", "benchmarks")(root)


def plain(root: Path) -> None:
    """Remove everything but the logs, and write a description to results/systems."""
    bare(root)
    write_description(root / "results")


def placeholder(count: int) -> Edit:
    return lambda text: epoch_nums(*[count] * len(lines_of(text, "eval_accuracy")))(text)


def went_on(first: int) -> Edit:
    """Return an edit after which a log of 17 evaluations reaches the target at evaluation `first`."""
    return in_turn(*(value("eval_accuracy", 0.7201, nth) for nth in range(first - 1, 16)))


def dead_attempt(root: Path) -> None:
    """Begin log 1 with an attempt that has the seed of run 2."""
    first, second = ((root / FOLDER / f"result_{number}.txt").read_text() for number in (2, 1))
    begin = first[: first.index(lines_of(first, "quality_target")[0])]
    # Run 2 started three hours after run 1, so set its times back to before run 1.
    begin = begin.replace('"time_ms": 17000216', '"time_ms": 17000100')
    (root / FOLDER / "result_1.txt").write_text(begin + second)


def copied(root: Path) -> None:
    (root / FOLDER / "result_2.txt").write_text("# a copy\n" + (root / FOLDER / "result_1.txt").read_text())


ABORT = in_turn(value("eval_accuracy", 0.7101, -1), metadata("run_stop", "status", "aborted"))
RATE = value("opt_base_learning_rate", 3e-4)
SEED_OF_ANOTHER = in_log(value("seed", 1000))
ALL = range(10)
FAST = rewrite(*ALL, evaluations=FEW)
SCALED = rewrite(*ALL, evaluations=16)
FACTOR = 2_414_421 / 2_400_384
"""Mean of the reference divided by the mean of runs with 16 evaluations."""


def scaling(content: object) -> Mutation:
    return write(f"{FOLDER}/scaling.json", str(content))


def readme(minutes: str, system: str = SYSTEM) -> Mutation:
    return write("README.md", f"| {system} | closed | bert | 10 | {minutes} | 1.000000 |\n")


def settings(text: str) -> Mutation:
    return write(f"benchmarks/bert/{SYSTEM}/{SYSTEM}_pytorch.json", text)


CASES: dict[str, Case] = {
    "nothing": case(),
    # Faults of one log, and their effect on the submission
    "aborted": case(in_log(ABORT)),
    "second run_start": case(in_log(repeat("run_start", "train_samples"))),
    "planned train_samples": case(in_log(value("train_samples", 156_725_653))),
    "an empty log": case(in_log(lambda _: "")),
    "text after a record": case(in_log(garble("seed", "} done"))),
    # Disagreement between logs
    "another division": case(in_log(value("submission_division", "open"))),
    "another organisation": case(in_log(value("submission_org", "Other"))),
    "two organisations of four": case(plain, only_first(4), in_logs(value("submission_org", "Other"), 2, 3)),
    "another batch size and its learning rate": case(in_log(in_turn(value("global_batch_size", 512), RATE))),
    "several settings": case(in_log(in_turn(RATE, value("opt_lamb_beta_2", 0.99)))),
    "a learning rate in a list": case(in_log(value("opt_base_learning_rate", [3e-4]))),
    "seed of another run": case(SEED_OF_ANOTHER),
    "seed of another run, logged elsewhere": case(SEED_OF_ANOTHER, in_log(metadata("seed", "lineno", 77))),
    "seed of another run, and left out": case(
        SEED_OF_ANOTHER, write(f"{FOLDER}/package_checker_params", "seed-checker-bypass")
    ),
    "seed twice": case(in_log(repeat("seed", "init_stop"))),
    "seeds without a position": case(in_logs(metadata("seed", "lineno", None))),
    "no seed": case(in_log(delete("seed"))),
    "no seed in an old round": case(in_log(delete("seed")), ruleset="4.0.0"),
    "a copy": case(plain, only_first(3), copied),
    "a dead attempt with the seed of another run": case(plain, only_first(3), dead_attempt),
    "open logs": case(
        plain, lambda root: write_description(root / "results", division="open"),
        rewrite(0, division="open", global_batch_size=64), rewrite(*range(1, 10), division="open"),
        in_logs(value("seed", 1000)),
    ),
    # Failed runs
    "three logs, one aborted": case(bare, only_first(3), in_logs(ABORT, 0), part=FOLDER),
    "ten logs, one aborted": case(bare, in_logs(ABORT, 0), part=FOLDER),
    "ten logs, five aborted": case(bare, in_logs(ABORT, *range(5)), part=FOLDER),
    # Faults of the system description
    "division Closed, and a seed twice": case(describe(division="Closed"), SEED_OF_ANOTHER),
    "division open": case(describe(division="open")),
    "no division": case(describe(division=None)),
    "nodes as a number": case(describe(number_of_nodes=1)),
    "accelerators as a number": case(describe(accelerators_per_node=8)),
    "old status word": case(describe(status="onprem")),
    "status unlike the log's": case(describe(status="Preview")),
    "submitter unlike the log's": case(describe(submitter="Other")),
    "fields missing": case(describe(cooling=None, sw_notes=None)),
    "no description": case(remove(DESCRIPTION)),
    "broken description": case(write(DESCRIPTION, "{,}")),
    # Names and numbers of files
    "9 logs": case(remove(f"{FOLDER}/result_9.txt")),
    "9 logs, checked alone": case(remove(f"{FOLDER}/result_0.txt"), part=FOLDER),
    "9 bare logs": case(bare, only_first(9), part=f"results/{SYSTEM}"),
    "bare results with a bad description": case(
        bare, lambda root: write_description(root / "results", accelerators_per_node=8), part="results"
    ),
    "11 logs": case(rewrite(10)),
    "results_0.txt": case(rename(f"{FOLDER}/result_0.txt", f"{FOLDER}/results_0.txt")),
    "folder BERT": case(rename(FOLDER, f"results/{SYSTEM}/BERT")),
    "a file of 51 MiB": case(write("benchmarks/bert/weights.bin", "0" * (51 * 2**20))),
    "a space in a name": case(write(f"{SOURCE}/run all.sh", "")),
    "a link": case(link("benchmarks/bert/README.md", "implementations/pytorch/README.md")),
    "a link to nothing": case(remove(LOG), link(LOG, "nowhere.txt")),
    "a loop of links": case(link("results/loop", "../results")),
    "a power measurement missing": case(write(f"{FOLDER}/power/result_4/node_0.txt", "")),
    "an empty folder beside": case(plain, lambda root: (root / "results" / "other" / "bert").mkdir(parents=True)),
    "earlier runs below": case(plain, only_first(2), copy(FOLDER, f"{FOLDER}/bert_old/{FOLDER}"), part=FOLDER),
    "another system with the same log": case(plain, only_first(1), copy(f"results/{SYSTEM}", "results/other")),
    # Counts and convergence
    "placeholders": case(in_logs(placeholder(1))),
    "placeholders in some logs": case(plain, in_logs(placeholder(1), 0, 1, 2)),
    "too fast": case(FAST),
    "too fast behind the size of the data set": case(plain, FAST, in_logs(placeholder(156_725_653))),
    "too fast, and went on": case(plain, in_logs(went_on(FEW))),
    "too fast, nine runs": case(plain, FAST, only_first(9)),
    "too fast, eleven runs": case(plain, FAST, rewrite(10, evaluations=FEW)),
    "too fast beside a failed run": case(plain, FAST, in_logs(ABORT, 4)),
    "placeholders and a planned number": case(
        plain, FAST, in_logs(in_turn(placeholder(1), value("train_samples", 2_550_016)))
    ),
    "no reference": case(rewrite(*ALL, global_batch_size=20480)),
    # Scaling. A factor that is too large only makes the score worse.
    **{f"scaling {content}": case(plain, scaling(content)) for content in ("{}", '{"scaling_factor": 1}', "[]", "{")},
    **{f"scaled by {factor}": case(plain, SCALED, scaling(f'{{"scaling_factor": {factor}}}')) for factor in (
        "0.5", "NaN", FACTOR, FACTOR * 1.0000009, FACTOR * 1.0000012,
    )},
    "scaled, and a run removed": case(
        plain, SCALED, remove(f"{FOLDER}/result_9.txt"), scaling(f'{{"scaling_factor": {FACTOR}}}')
    ),
    "not scaled by the last evaluation": case(plain, in_logs(went_on(16)), scaling('{"scaling_factor": 1}')),
    # Tables of a package. The runs took 88 s, or 83 s if they are scaled.
    **{f"minutes {minutes}": case(readme(minutes)) for minutes in ("1.4656", "1.4657", "1.4676", "1.4677", "1.2.3", "٣.٣")},
    "scaled minutes": case(SCALED, readme("1.3914")),
    "minutes of another system": case(readme("0.5", "other")),
    "minutes of three runs": case(only_first(3), readme("1.4667")),
    "minutes of two runs": case(only_first(2), readme("1.4667")),
    "settings of other runs": case(settings('{"logged": {"seed": 1, "unknown": 2, "global_batch_size": 4480}}')),
    "settings in a list": case(settings('{"logged": ["global_batch_size"]}')),
    "broken settings": case(settings("{")),
    # Rulesets. 16 evaluations are 2,400,384 samples, and the mean of the reference in 2.0.0 is 2,410,606.
    "points of an old round": case(plain, SCALED, in_logs(delete("opt_lamb_epsilon")), ruleset="1.0.0"),
    "a bare log without a seed": case(plain, only_first(3), in_logs(delete("seed"), 1), ruleset="auto"),
    "a submission without seeds": case(
        copy(f"results/{SYSTEM}", "results/other"), in_logs(delete("seed")), ruleset="auto"
    ),
    "bare results of two rounds": case(
        bare, only_first(2), copy(f"results/{SYSTEM}", "results/other"), in_logs(delete("seed")), ruleset="auto"
    ),
    "a submission of an old round": case(describe(status="onprem"), ruleset="auto"),
}  # fmt: skip

FINDINGS = dict(line.split(" => ") for line in Path(__file__).with_name("findings.txt").read_text().splitlines())
"""Exit status and output of `check` for each case, without lines about valid parts.

Cases that are not listed are valid submissions of ten logs.
"""
VALID = re.compile(r"ours pass: (valid closed log|no errors), ruleset 5\.0\.0$")


@pytest.fixture(scope="module", autouse=True)
def _each_log_is_judged_once() -> Iterator[None]:
    """Remember the official checker's opinions, because most logs of a submission are the same in all cases."""
    ask = cache(official.opinion)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(official, "opinion", lambda lines, ruleset: ask(tuple(lines), ruleset))
        yield


def outcome(root: Path, mutations: tuple[Mutation, ...], part: str, ruleset: str) -> str:
    """Return the exit status and the output of a check on one line. Equal lines are counted."""
    for mutate in mutations:
        mutate(root)
    status, text = run("check", root / part, "--ruleset", ruleset)
    text = re.sub(r"; logged at [^\]]*", "", text.replace(f"{root}/", "").replace(str(root), "."))
    lines = [line.strip() for line in text.splitlines() if not VALID.search(line)]
    counts = Counter(re.sub(r"result_\d+\.txt: official", "result_<n>.txt: official", line) for line in lines)
    return " | ".join([str(status), *(f"{count} x {line}" if count > 1 else line for line, count in counts.items())])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_fault_of_a_submission_gets_the_recorded_findings(root: Path, name: str) -> None:
    assert outcome(root, *CASES[name]) == FINDINGS.get(name, "0 | 10 logs: 10 pass; 3 folders and descriptions: 3 pass")
