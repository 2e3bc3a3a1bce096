"""Properties of all logs, metrics files, system descriptions and submissions, whoever wrote them. Fuzzing tests them."""

import io
import json
import re
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console

from compliance.check.output import sarif, say_verdicts, total, write_junit
from compliance.folders import find
from compliance.log import rules
from compliance.log.findings import Verdict
from compliance.log.metrics import MetricsWriter, RunRecord, parse_record, read_metrics
from compliance.log.reader import read_log
from compliance.log.record import TOKEN, Record, parse_line
from compliance.report import page, summary
from compliance.report.results import load_results
from compliance.submission.check import check_paths
from compliance.submission.derived import report_findings, scaling_findings
from compliance.submission.description import against_logs, description_findings, read_description
from compliance.watch import screen, watched
from console.program import say
from tests.compliance.result_folders import write_listed, write_log
from tests.compliance.run_logs import log_of, without_chain
from tests.hostile import assert_harmless


@cache
def logs() -> list[bytes]:
    """Return logs of other software in both divisions, an aborted log, a log of this program, and one without settings."""
    whole = log_of((0.3, 0.7, 0.73), submission=(("layers", 1),), header=(("recipe", "x"), ("torch", "2.13.0")))
    made = [whole, log_of((0.1, 0.31), "open"), log_of((0.3, 0.4), status="aborted", submission=(("layers", 1),))]
    foreign = [without_chain(each.decode()).encode() for each in made]
    short = [line for line in foreign[0].splitlines(keepends=True) if b"opt_" not in line and b"submission" not in line]
    return [*foreign, whole, b"".join(short)]


def read(path: Path) -> None:
    """Assert that a record that is written again is read as the same record."""
    for record in read_log(path).records:
        again, _ = parse_line(f"{TOKEN}{json.dumps(record._asdict())}".encode(), record.line)
        assert repr(again) == repr(record)


def judge(path: Path) -> list[Verdict]:
    """Assert that no log passes without success, its target accuracy, and a seed if it is closed. Return the verdicts."""
    verdicts, said = check_paths([path], rules.AUTO), io.StringIO()
    with redirect_stdout(said):
        say_verdicts(verdicts)
        say(total(verdicts, is_accepted=False))
    assert_harmless(said.getvalue())
    json.dumps(sarif(verdicts, path.parent), allow_nan=False)
    write_junit(path.with_name("out"), verdicts)
    ElementTree.parse(path.with_name("out"))
    if path.is_file() and verdicts[0].passed:
        last: dict[str, Record] = {record.key: record for record in read_log(path).records}
        is_closed = last["submission_division"].value == "closed"
        least = 0.72 if is_closed else 0.0
        target = last["quality_target"].value if "quality_target" in last else least
        assert max(least, target) <= last["eval_accuracy"].value <= 1
        assert last["run_stop"].metadata["status"] == "success"
        # The official seed checker reads closed submissions only.
        assert not is_closed or re.fullmatch(r"\s*-?\d+\s*", str(last["seed"].value), re.ASCII)
    return verdicts


def judge_damaged(path: Path) -> None:
    """Judge a log with one damage: `path` holds a key and the text that replaces its last value or status."""
    key, _, text = path.read_bytes().partition(b" ")
    lines = logs()[0].splitlines(keepends=True)
    places = [number for number, line in enumerate(lines) if b'"key": "%s"' % key in line]
    if places and key in (b"seed", b"eval_accuracy", b"run_stop"):
        was = rb'(?<="status": )[^,}]*' if key == b"run_stop" else rb'(?<="value": )[^,}]*'
        lines[places[-1]] = re.sub(was, lambda _: text, lines[places[-1]], count=1)
        path.with_name("result_0.txt").write_bytes(b"".join(lines))
        judge(path.with_name("result_0.txt"))


def watch(path: Path) -> None:
    run = watched.Watch(path, rules.NEWEST_RULESET)
    run.look()
    with redirect_stdout(io.StringIO()) as said:
        Console(width=100).print(screen.view(run, 1_700_000_100_000))
        screen.EvaluationLines(run).show(1_700_000_100_000)
    assert_harmless(said.getvalue())


def rewrite_metrics(path: Path) -> None:
    """Assert that each metrics record that is written again is read as a record of its kind."""
    records = [record for line in path.read_bytes().split(b"\n") if (record := parse_record(line))]
    writer = MetricsWriter(path.with_name("out"), RunRecord())
    for record in records:
        writer.write(record)
    writer.close()
    again = map(parse_record, path.with_name("out").read_bytes().splitlines()[1:])
    assert list(map(type, again)) == list(map(type, records))
    read_metrics(path)


def describe(path: Path) -> None:
    description = read_description(path)
    findings = [finding for ruleset in rules.RULESETS for finding in description_findings(description, ruleset)]
    path.with_name("result_0.txt").write_bytes(logs()[3])
    for finding in (*findings, *against_logs(description, [read_log(path.with_name("result_0.txt")).run])):
        assert_harmless(f"{finding}")


def compare_derived(path: Path) -> None:
    """Compare a log with `path`, used as its folder's scaling.json and as a report in JSON and CSV."""
    folder = path.with_name("a") / "bert"
    if not folder.exists():
        write_log(folder / "result_0.txt", 0)
    for name in ("scaling.json", "table.json", "table.csv"):
        (folder / name).write_bytes(path.read_bytes())
    runs, found = {0: read_log(folder / "result_0.txt").run}, find(folder).benchmarks[0]
    for finding in (*scaling_findings(found, None, [runs[0]], 0), *report_findings(found, runs)):
        assert_harmless(f"{finding}")


def judge_tree(path: Path) -> None:
    """Check and report on a folder whose contents are listed in `path`."""
    root = path.with_name("tree")
    write_listed(root, path.read_bytes(), logs())
    for verdict in judge(root):
        if verdict.part == "folder" and verdict.path.is_dir():
            found = load_results(verdict.path)
            for form in (page.render, summary.as_csv, summary.as_json, summary.as_markdown):
                form(found).encode()
