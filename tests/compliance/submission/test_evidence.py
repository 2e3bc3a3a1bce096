"""No folder passes without evidence: logs that were read, counts that can be trusted, derived files that agree."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from compliance.convergence.outlook import outlook_of
from compliance.log.findings import Finding, Verdict
from compliance.log.reader import read_log
from compliance.log.records import EndRecord, EvaluationRecord, Metrics, Record, RunRecord, StepRecord
from compliance.submission import check as submission
from compliance.submission.check import accepted, check_paths
from compliance.submission.derived import metrics_fault
from compliance.submission.description import against_logs, read_description
from tests.compliance.command import run
from tests.compliance.log_edits import Edit, delete, epoch_nums, in_turn, lines_of, metadata, value
from tests.compliance.result_folders import (
    SYSTEM,
    benchmark_folder,
    without_chain,
    write_closed_folder,
    write_description,
    write_log,
    write_series,
    write_submission,
)
from tests.compliance.run_logs import START_MS

pytestmark = pytest.mark.slow

FEW = 11
"""Number of evaluations after which a run of batch size 448 has converged too fast."""


def closed(root: Path, evaluations: int = 17, change: Edit | None = None, runs: int = 10) -> Path:
    """Write results/<system>/bert with closed logs without digests, each changed, and a description."""
    folder = root / "results" / SYSTEM / "bert"
    for path in write_series(folder, [evaluations] * runs, platform=SYSTEM):
        without_chain(path)
        path.write_text(change(path.read_text()) if change else path.read_text())
    write_description(root / "results")
    return folder


def placeholder(count: int) -> Edit:
    return lambda text: epoch_nums(*[count] * len(lines_of(text, "eval_accuracy")))(text)


def of_folder(verdicts: list[Verdict]) -> Verdict:
    [folder] = [verdict for verdict in verdicts if verdict.part == "folder"]
    return folder


def said(verdict: Verdict, key: str) -> list[Finding]:
    return [finding for finding in verdict.findings if finding.key == key]


# Paths


@pytest.mark.parametrize("options", [[], ["--json"], ["--format", "github"], ["--quiet"], ["--junit", "../a.xml"]])
def test_a_failing_folder_fails_from_within(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    folder = closed(tmp_path, change=value("global_batch_size", 0), runs=2)
    monkeypatch.chdir(folder)
    for path in (".", "./", f"../{folder.name}", folder):
        assert run("check", path, *options)[0] == 1


def test_a_submission_is_checked_from_within(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert run("check", ".")[0] == 0
    (root / "systems" / f"{SYSTEM}.json").write_text("{}")
    status, text = run("check", ".")
    assert (status, f"FAIL systems/{SYSTEM}.json" in text) == (1, True)


@pytest.mark.parametrize("names", [None, "20240928_{}.log", "Result_{}.TXT", "run-{}.out"])
def test_a_folder_without_a_log_that_was_read_never_passes(tmp_path: Path, names: str | None) -> None:
    folder = closed(tmp_path, runs=2)
    (folder / "scaling.json").write_text("{}")
    for number in range(2):
        log = folder / f"result_{number}.txt"
        log.unlink() if names is None else log.rename(folder / names.format(number))
    for path in (folder, folder.parent, tmp_path, tmp_path / "results"):
        status, text = run("check", path)
        assert (status, "no log was read" in text) == (2, True)
        assert names is None or (names.format(0) in text and "result_0.txt" in text)
    for command in ("summary", "report", "convergence"):
        status, text = run(command, folder)
        assert (status, "result_<n>.txt" in text) == (2, True)
        assert names is None or names.format(0) in text


def test_an_empty_folder_beside_a_good_one_fails(tmp_path: Path) -> None:
    closed(tmp_path)
    (tmp_path / "results" / "other" / "bert").mkdir(parents=True)
    verdicts = check_paths([tmp_path])
    assert [verdict.passed for verdict in verdicts if verdict.part == "folder"] == [True, False]
    assert not accepted(verdicts)


def test_earlier_runs_below_a_folder_do_not_take_its_place(tmp_path: Path) -> None:
    folder = closed(tmp_path, change=value("global_batch_size", 0), runs=2)
    closed(folder / "bert_old", runs=1)
    verdicts = check_paths([folder])
    assert [verdict.path.parent for verdict in verdicts if verdict.part == "log"] == [folder] * 2


@pytest.mark.parametrize("arguments", [("check", ""), ("check", "{}", ""), ("summary", ""), ("convergence", "")])
def test_an_empty_argument_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(closed(tmp_path))
    status, text = run(*(argument.format(".") for argument in arguments))
    assert (status, "empty argument" in text) == (2, True)


def test_too_many_entries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = closed(tmp_path, runs=3)
    monkeypatch.setattr("compliance.folders.MAX_ENTRIES", 2)
    status, text = run("check", folder)
    assert (status, "more than 2 entries" in text) == (2, True)


def test_nothing_checked_is_not_accepted() -> None:
    assert not accepted([])


# Convergence


def went_on(text: str) -> str:
    """Reach the target at evaluation `FEW`."""
    later = range(FEW - 1, len(lines_of(text, "eval_accuracy")) - 1)
    return in_turn(*(value("eval_accuracy", 0.7201, nth) for nth in later))(text)


COUNTS: dict[str, tuple[int, Edit | None]] = {
    "true counts": (17, None),
    "placeholders": (17, placeholder(1)),
    "data set size": (17, placeholder(156_725_653)),
    "too fast behind placeholders": (FEW, placeholder(1)),
    "too fast behind the data set size": (FEW, placeholder(156_725_653)),
    "placeholders and a planned number": (FEW, in_turn(placeholder(1), value("train_samples", 2_550_016))),
    "too fast, and went on": (17, went_on),
}
FOUND = dict(line.split(" => ") for line in Path(__file__).with_name("counts.txt").read_text().splitlines())


@pytest.mark.parametrize("name", COUNTS)
def test_convergence_is_judged_by_counts_that_can_be_trusted(tmp_path: Path, name: str) -> None:
    folder = closed(tmp_path, *COUNTS[name])
    verdicts = check_paths([folder], "5.0.0")
    found = "; ".join(map(str, said(of_folder(verdicts), "eval_accuracy")))
    assert found == FOUND[name]
    passes = not found.startswith("error")
    assert (of_folder(verdicts).passed, accepted(verdicts)) == (passes, passes)
    status, text = run("convergence", folder)
    sentence = found.partition("eval_accuracy: ")[2].partition(" [")[0]
    assert (status, sentence in text) == (0 if passes else 1, True)


def test_only_more_than_half_of_the_logs_are_most_of_them(tmp_path: Path) -> None:
    folder = closed(tmp_path, runs=4)
    for odd, named in ((3, "most logs of the folder"), (2, "result_0.txt: all logs must agree")):
        (folder / f"result_{odd}.txt").write_text(
            value("submission_org", "Other")((folder / f"result_{odd}.txt").read_text())
        )
        found = [
            finding.found for verdict in check_paths([folder], "5.0.0") for finding in said(verdict, "submission_org")
        ]
        assert found == [f"value 'Other', expected 'Example' as in {named}"] * (4 - odd)


def test_placeholders_in_some_logs_are_no_fast_runs(tmp_path: Path) -> None:
    folder = closed(tmp_path)
    for number in range(3):
        (folder / f"result_{number}.txt").write_text(placeholder(1)((folder / f"result_{number}.txt").read_text()))
    verdict = of_folder(check_paths([folder], "5.0.0"))
    [finding] = said(verdict, "eval_accuracy")
    assert (verdict.passed, finding.severity) == (True, "warning")
    assert "of 3 logs" in finding.found


@pytest.mark.parametrize("runs", [9, 10, 11])
def test_fast_runs_fail_also_beside_a_failed_one_or_before_the_set_is_complete(tmp_path: Path, runs: int) -> None:
    folder = closed(tmp_path, FEW, runs=runs)
    if runs == 10:
        failed = in_turn(value("eval_accuracy", 0.7, -1), metadata("run_stop", "status", "aborted"))
        (folder / "result_4.txt").write_text(failed((folder / "result_4.txt").read_text()))
    verdict = of_folder(check_paths([folder], "5.0.0"))
    assert [finding.severity for finding in said(verdict, "eval_accuracy")] == ["error"]


@pytest.mark.parametrize("change", [None, placeholder(1)])
def test_the_official_checker_is_told_which_count_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Edit | None
) -> None:
    root = write_submission(tmp_path / "example")
    for log in benchmark_folder(root).iterdir():
        without_chain(log)
        log.write_text(change(log.read_text()) if change else log.read_text())
    asked: list[bool] = []
    original = submission.ask_about_folder

    def ask(*arguments: object) -> object:
        asked.append(bool(arguments[-1]))
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(submission, "ask_about_folder", ask)
    verdict = of_folder(check_paths([root], "5.0.0"))
    assert (verdict.official, asked) == ("pass", [change is not None])


def test_a_package_is_judged_by_the_newest_ruleset_and_by_trusted_counts(tmp_path: Path) -> None:
    description = write_description(tmp_path, framework="PyTorch")
    for name, evaluations, change, words in (
        ("Placeholder", 17, placeholder(1), "train_samples counts the sequences"),
        ("Fast", FEW, placeholder(156_725_653), "converges faster"),
        ("Old", 17, delete("seed"), "seed: no record"),
    ):
        folder = closed(tmp_path / name, evaluations, change)
        status, text = run(
            "package", "--org", name, "--system", description, "--runs", folder, "--out", tmp_path / "out"
        )
        assert (status, words in text) == ({"Placeholder": 0, "Fast": 1, "Old": 2}[name], True), text
    assert run("package", "--ruleset", "4.0.0")[0] == 2


def test_a_run_without_an_end_is_said_to_be_left_out(tmp_path: Path) -> None:
    folder = closed(tmp_path, runs=11)
    (folder / "result_3.txt").write_text(delete("run_stop")((folder / "result_3.txt").read_text()))
    description = write_description(tmp_path, framework="PyTorch")
    text = run("package", "--org", "A", "--system", description, "--runs", folder, "--out", tmp_path / "out")[1]
    assert "result_3.txt has no run_stop and is left out" in text


# Rulesets


def test_a_set_that_only_the_points_of_its_round_fail_says_so(tmp_path: Path) -> None:
    folder = closed(tmp_path, 16, delete("opt_lamb_epsilon"))  # 2,400,384 samples, of at least 2,410,606 in 2.0.0
    status, text = run("check", folder, "--ruleset", "1.0.0")
    assert (status, "The points of 5.0.0 would not fail it." in text) == (1, True)


def test_one_submission_is_judged_under_one_ruleset(tmp_path: Path) -> None:
    root = write_submission(tmp_path / "example", runs=2)
    write_description(root, "other")
    for number in range(2):
        path = write_log(root / "results" / "other" / "bert" / f"result_{number}.txt", 5 + number)
        path.write_text(delete("seed")(without_chain(path).read_text()))
    for log in benchmark_folder(root).iterdir():
        without_chain(log)
    assert {verdict.ruleset for verdict in check_paths([root], "auto")} == {"4.0.0"}
    shutil.move(root / "results", tmp_path / "bare")
    verdicts = check_paths([tmp_path / "bare"], "auto")
    assert [verdict.ruleset for verdict in verdicts if verdict.part == "folder"] == ["5.0.0", "4.0.0"]


def test_a_submission_of_an_old_round_is_judged_with_its_description(tmp_path: Path) -> None:
    root = write_submission(tmp_path / "example")
    for log in benchmark_folder(root).iterdir():
        without_chain(log)
    write_description(root, status="onprem")  # the word of the rounds before 4.0
    verdicts = check_paths([root], "auto")
    assert {verdict.ruleset for verdict in verdicts} == {"3.1.0"}
    assert accepted(verdicts)
    said = {verdict.part: verdict.missed for verdict in verdicts}
    assert said["description"].startswith("5.0.0 would fail it: status: value 'onprem'")
    assert (said["log"], said["folder"]) == ("", "")


def test_a_folder_says_what_the_newest_ruleset_would_miss(tmp_path: Path) -> None:
    folder = closed(tmp_path, change=delete("seed"), runs=2)
    status, text = run("check", folder)
    lines = [line for line in text.splitlines() if line.startswith("PASS")]
    assert (status, len(lines)) == (0, 4)
    assert all("ruleset 4.0.0 (5.0.0 would fail it: seed: no record" in line for line in lines[1:])


def test_the_seed_of_a_dead_attempt_fails_no_other_run(tmp_path: Path) -> None:
    folder = closed(tmp_path, runs=3)
    first, second = ((folder / f"result_{number}.txt").read_text() for number in (2, 1))
    # Run 2 started three hours after run 1, so it cannot have died before it.
    begin = first[: first.index(lines_of(first, "quality_target")[0])].replace(
        '"time_ms": 17000216', '"time_ms": 17000100'
    )
    (folder / "result_1.txt").write_text(begin + second)
    verdicts = {verdict.path.name: verdict for verdict in check_paths([folder], "5.0.0")}
    assert verdicts["result_2.txt"].passed
    [finding] = verdicts["result_1.txt"].findings
    assert "two attempts" in finding.found
    shown = json.loads(run("report", folder, "--format", "json")[1])["runs"][1]
    assert (shown["seconds"], shown["seed"], shown["outcome"]) == (None, None, "invalid")


# Systems


def test_systems_with_the_same_logs_are_warned_of(tmp_path: Path) -> None:
    folder = closed(tmp_path)
    shutil.copytree(folder, tmp_path / "results" / "other" / "bert")
    first, second = (verdict for verdict in check_paths([tmp_path]) if verdict.part == "folder")
    shared = [finding for finding in (*first.findings, *second.findings) if "also in" in finding.found]
    assert [finding.severity for finding in shared] == ["warning"]
    assert "10 logs also in" in shared[0].found


def test_accelerators_cannot_be_faster_than_any(tmp_path: Path) -> None:
    logged = read_log(write_log(tmp_path / "result_0.txt", 0)).run  # 30,000 sequences a second
    for accelerators, keys in (("8", []), ("1", ["accelerators_per_node"])):
        changes = {"accelerators_per_node": accelerators, "submitter": "Example, Inc.", "system_name": "one-machine"}
        path = write_description(tmp_path)
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        assert [
            finding.key for finding in against_logs(read_description(path), [logged])
        ] == keys  # the names are alike


# Derived files


def scaled(folder: Path) -> float:
    runs = [read_log(path).run for path in sorted(folder.glob("result_*.txt"))]
    return outlook_of(runs, 448, "5.0.0").scaling


@pytest.mark.parametrize("evaluations", [16, 17])
@pytest.mark.parametrize(
    "content", ['{"scaling_factor": 0.5}', "[]", "{", '{"scaling_factor": "1"}', '{"scaling_factor": NaN}']
)
def test_a_scaling_that_the_logs_do_not_give_is_an_error(tmp_path: Path, evaluations: int, content: str) -> None:
    folder = closed(tmp_path, evaluations)
    (folder / "scaling.json").write_text(content)
    [finding] = said(of_folder(check_paths([folder])), "scaling_factor")
    of_means = f"{2_414_421 / 2_400_384:.6f}, the mean of the reference divided by the mean of the runs"
    expected = {16: of_means, 17: "no file, because the score of these logs is not scaled"}[evaluations]
    assert (finding.severity, finding.found.partition(", expected ")[2]) == ("error", expected)


def test_the_true_scaling_is_accepted(tmp_path: Path) -> None:
    unscaled = closed(tmp_path / "unscaled")
    for content in ("{}", '{"scaling_factor": 1}'):
        (unscaled / "scaling.json").write_text(content)
        assert of_folder(check_paths([unscaled])).findings == ()
    folder = closed(tmp_path, 16)
    assert scaled(folder) > 1
    (folder / "scaling.json").write_text(json.dumps({"scaling_factor": scaled(folder)}))
    assert of_folder(check_paths([folder])).passed
    # A larger factor, or the factor of a set that is no longer there, only makes the score worse.
    for number, content in enumerate((1.2, scaled(folder))):
        (folder / "scaling.json").write_text(json.dumps({"scaling_factor": content}))
        if number:
            (folder / "result_9.txt").unlink()
        verdict = of_folder(check_paths([folder]))
        assert [finding.severity for finding in said(verdict, "scaling_factor")] == ["warning"]


def test_metrics_of_another_run_are_said_and_not_shown(tmp_path: Path) -> None:
    folder = write_closed_folder(tmp_path, [16] * 3)
    assert "of another run" not in run("check", folder)[1]
    with (folder / "metrics_2.jsonl").open("a") as file:
        file.write('{"event": "eval", "step": 1, "samples": 150528, "masked_lm_accuracy": 0.5}\n')
    fault = "metrics_2.jsonl is of another run: accuracy 0.50000 at 150528 samples, the log has 0.64800"
    assert run("check", folder)[1].count(fault) == 1
    runs = json.loads(run("report", folder, "--format", "json")[1])["runs"]
    assert [bool(each["seconds_by_part"]) for each in runs] == [True, True, False]


def accuracy(samples: int, value: float) -> EvaluationRecord:
    return EvaluationRecord(1, samples, masked_lm_accuracy=value)


@pytest.mark.parametrize(
    ("records", "fault"),  # the run took 180 s and trained 2,501.3 sequences/s
    [
        ([], ""),
        ([RunRecord()], ""),
        ([RunRecord(global_batch_size=448)], ""),
        ([RunRecord(global_batch_size=449)], "global_batch_size 449, the log has 448"),
        ([accuracy(150_080, 0.648009)], ""),
        ([accuracy(150_080, 0.647989)], "accuracy 0.64799 at 150080 samples, the log has 0.64800"),
        ([accuracy(7, 0.5), accuracy(150_080, 0.648)], ""),
        ([accuracy(7, math.nan)], ""),
        ([accuracy(7, 0.5), accuracy(9, 0.5)], "an evaluation at 7 samples, the log has none there"),
        ([EndRecord("aborted", 180.0)], "status 'aborted', the log has 'success'"),
        ([EndRecord("success")], ""),
        *(([EndRecord("success", seconds)], "") for seconds in (171.0, 189.0)),
        *(([EndRecord("success", s)], f"{s} s, the log has 180.0 s") for s in (3.0, 170.9, 189.1, 180_000.0)),
        ([StepRecord(1, 1, sequences_per_s=rate) for rate in (1.0, 250_133.0, 9e9)], ""),
        (
            [StepRecord(1, 1, sequences_per_s=250_134.0)],
            "250,134 sequences a second, the log has 2,501 with evaluations",
        ),
    ],
)
def test_metrics_contradict_a_log_from_a_bound_on(
    tmp_path: Path, records: list[RunRecord | Record], fault: str
) -> None:
    metrics = Metrics()
    for record in records:
        metrics.add(record)
    assert metrics_fault(metrics, read_log(write_log(tmp_path / "a", 0, evaluations=3, step_ms=10_000)).run) == fault
    short = read_log(write_log(tmp_path / "b", 0, evaluations=3, step_ms=1000)).run  # of 18 s
    faults = [metrics_fault(Metrics(end=EndRecord("success", seconds)), short) for seconds in (16.0, 20.0, 20.1)]
    assert faults == ["", "", "20.1 s, the log has 18.0 s"]


def spoil_csv(text: str) -> str:
    head, first, *rest = text.splitlines()
    seconds = first.split(",")[head.split(",").index("seconds")]
    return "\n".join([head, first.replace(seconds, "9.5"), *rest])


def spoil_json(text: str) -> str:
    return text.replace('"converged_samples": 2550016', '"converged_samples": 2560016', 1)


@pytest.mark.parametrize(("form", "spoil"), [("csv", spoil_csv), ("json", spoil_json)])
def test_a_report_that_contradicts_the_logs_is_said(tmp_path: Path, form: str, spoil: Callable[[str], str]) -> None:
    folder = closed(tmp_path)
    failed = in_turn(value("eval_accuracy", 0.7, -1), metadata("run_stop", "status", "aborted"))
    (folder / "result_9.txt").write_text(failed((folder / "result_9.txt").read_text()))
    out = folder.parent / f"runs.{form}"
    assert run("report", folder, "--format", form, "--out", out)[0] == 0
    assert [finding.rule for finding in of_folder(check_paths([folder])).findings] == ["TR 12"]
    out.write_text(spoil(out.read_text()))
    [_, finding] = of_folder(check_paths([folder])).findings
    assert f"runs.{form} contradicts the logs: run 0 has" in finding.found
    out.write_text("seconds,run,converged_samples\nx,\x1b[2J,1\n" if form == "csv" else '{"runs": [{"run": {}}, 3]}')
    assert "\x1b" not in run("check", folder)[1]


def test_a_package_whose_tables_were_edited_fails(tmp_path: Path) -> None:
    folder, description = closed(tmp_path), write_description(tmp_path, framework="PyTorch")
    assert run("package", "--org", "A", "--system", description, "--runs", folder, "--out", tmp_path)[0] == 0
    tree = tmp_path / "A"
    assert of_folder(check_paths([tree])).passed
    readme, settings = tree / "README.md", tree / "benchmarks" / "bert" / SYSTEM / f"{SYSTEM}_mlperf-bert.json"
    row = next(line for line in readme.read_text().splitlines() if line.startswith(f"| {SYSTEM} |"))
    minutes = row.split("|")[5].strip()
    for path, old, new, words in (
        (readme, f"| {minutes} |", "| 0.5000 |", "README.md says 0.5000 minutes"),
        (settings, '"global_batch_size": 448', '"global_batch_size": 4480', "has global_batch_size 4480, expected 448"),
    ):
        before = path.read_text()
        path.write_text(before.replace(old, new))
        [error] = of_folder(check_paths([tree])).errors
        assert words in error.found
        path.write_text(before)
    for odd in ("...", "1.2.3", "٣.٣", ""):
        readme.write_text(readme.read_text() + f"| {SYSTEM} | closed | bert | 10 | {odd} | {odd} |\n")
    assert of_folder(check_paths([tree])).passed


def test_the_times_of_a_report_are_of_the_runs(tmp_path: Path) -> None:
    """A log without usable times has no time in any output."""
    folder = closed(tmp_path, runs=2)
    text = (folder / "result_0.txt").read_text()
    (folder / "result_0.txt").write_text(text.replace(f'"time_ms": {START_MS // 10**6}', '"time_ms": '))
    assert run("check", folder)[0] == 1
    [first, _] = json.loads(run("report", folder, "--format", "json")[1])["runs"]
    assert (first["seconds"], first["sequences_per_s"], first["outcome"]) == (None, None, "invalid")
