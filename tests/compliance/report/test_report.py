import json
import re
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compliance.log.findings import Finding
from compliance.log.records import Metrics, RunRecord, WarningRecord, read_metrics
from compliance.report import page as report
from compliance.report.results import Results, load_results
from tests.compliance.run_logs import write_metrics
from tests.conftest import at_most
from tests.html_page import Page

FOLDER = Path(__file__).parent
MARKS = {"g", "guide", "bar-row", "good", "warn", "bad", "verdict", "error", "warning"}


def outline(text: str) -> str:
    """Return the text of a page, below the kinds and places of its marks. Lines of the source files are left out."""
    page = Page(re.sub("<style>.*?</style>", "", text, flags=re.DOTALL))
    marks = [(tag, *attrs.values()) for tag, attrs in page.tags if MARKS & {tag, *str(attrs.get("class")).split()}]
    words = re.sub(r"run_logs\.py:\d+", "run_logs.py", re.sub(r"\s*\n\s*", "\n", page.text))
    return "".join(f"{' '.join(map(str, mark))}\n" for mark in marks) + words


def test_a_closed_folder_has_every_part(closed: Results) -> None:
    text = report.render(closed)
    assert outline(text) == (FOLDER / "closed_page.txt").read_text()
    assert Page(text).charts == [
        "Masked-LM accuracy over sequences trained, 10 runs",
        "Time to train of 10 runs in minutes",
        "Sequences to the target of 10 runs",
        "Sequences per second over sequences trained, 10 runs",
        "Training loss over sequences trained, 10 runs",
    ]
    header = closed.shown.log.header | {"config.parallel.tensor": "4", "config.parallel.pipeline": "2"}
    run = replace(closed.shown, log=replace(closed.shown.log, header=header))
    shared = Page(report.render(replace(closed, runs=(run,))))
    assert "8 x NVIDIA H100 80GB HBM3, tensor parallel 4, pipeline parallel 2, global batch size 768" in shared.text


def test_a_page_of_failures_needs_nothing_but_itself_and_says_what_its_parts_are(failing: Results) -> None:
    text = report.render(failing)
    assert outline(text) == (FOLDER / "failing_page.txt").read_text()
    page = Page(text)
    assert not re.search(r"https?://|@import|url\(", text)
    policy = {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"}
    assert policy in page.of("meta")
    assert page.of("html")[0]["lang"] == "en"
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(following - before <= 1 for before, following in pairwise(levels))
    assert all(attrs.get("scope") in ("col", "row") for attrs in page.of("th"))
    scrolling = page.of("div", "scroll")
    assert all(attrs.get("aria-label") and attrs.get("role") for attrs in [*scrolling, *page.of("div", "chart")])
    assert all(attrs.get("tabindex") == "0" for attrs in scrolling)


def test_a_broken_run_and_a_bare_one(one: Path) -> None:
    page = Page(report.render(load_results(one)))
    assert "Where the time went" not in page.text
    assert page.of("section")
    assert page.charts == [
        "Masked-LM accuracy over sequences trained, 1 run",
        "Time to train of 1 run in seconds",
        "Sequences to the target of 1 run",
    ]
    (one / "result_0.txt").write_text("<b>nothing</b>\n")
    page = Page(report.render(load_results(one)))
    assert "no MLLOG record" in page.text
    assert page.charts == []


def test_a_step_stands_beside_the_one_that_was_planned(one: Path) -> None:
    measured = {"forward_backward_ms": 21.0, "reduce_ms": 15.0, "update_ms": 4.0, "data_wait_ms": 0.0, "other_ms": 1.0}
    measured |= {"step_ms": 41.0}
    planned = {f"planned_{name}": value for name, value in measured.items()}
    planned |= {"planned_reduce_ms": 5.0, "planned_step_ms": 31.0}
    events = [{"event": "run", "world_size": 1}, {"event": "plan", **measured, **planned}]
    (one / "metrics_0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    rows = re.sub(r"\s+", "", Page(report.render(load_results(one))).text)
    for words in (
        "opendivision,1process,globalbatchsize32",
        "Stepofrun0",
        "exposedcommunication515+200%",
        "waitingfordata00-",
        "step3141+32%",
    ):
        assert words in rows


def test_a_run_without_a_step_has_no_time_of_a_step(one: Path) -> None:
    events = [{"event": name, "step": 0, "samples": 0, "eval_s": 0.09} for name in ("step", "eval")]
    (one / "metrics_0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    key = "forward and backward 0.0 %exposed communication 0.0 %update 0.0 %waiting for data 0.0 %evaluation 50.0 %"
    assert key in Page(report.render(load_results(one))).text


def test_skipped_steps_are_told_and_losses_that_are_no_numbers_left_out(one: Path) -> None:
    steps = [{"event": "step", "step": n, "samples": 32 * n, "loss": 9.0, "skipped_steps": 2} for n in range(1, 4)]
    steps.append({"event": "step", "step": 4, "samples": 128, "loss": None, "skipped_steps": 1})
    steps.append({"event": "step", "step": 5, "samples": 160, "loss": 1e9})
    (one / "metrics_0.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    text = report.render(load_results(one))
    assert "7 steps skipped" in Page(text).text
    assert "nan" not in text.lower().replace("finance", "")
    loss = text[text.index("Training loss over sequences") :]
    stroke = re.search(r'class="stroke" d="M([^"]*)"', loss)
    assert stroke is not None
    assert stroke[1].count("L") == 2


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'; --x: url(http://x) </style><script>",
    "]]><!--",
    "\x00\x1b[2J\u202e\ud800\u2028",
    "&lt;&#x3c;",
    "x" * 100_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_only_ever_text(closed: Results, text: str) -> None:
    run = closed.runs[0]
    finding = Finding(1, text, text, text, text, text)
    hostile = replace(
        run,
        log=replace(run.log, header={text: text, "recipe": text, "accelerator": text, f"config.{text}": text}),
        verdict=replace(run.verdict, findings=(finding, replace(finding, severity="warning"))),
        metrics=Metrics(RunRecord(started=text), warnings=[WarningRecord(1, text=text)]),
    )
    described = dict.fromkeys(("accelerator_model_name", "submitter", text), text)
    described |= {"number_of_nodes": "1", "accelerators_per_node": "8"}
    results = replace(closed, runs=(hostile, *closed.runs[1:]), system=text, description=described)
    page_text = report.render(results)
    page_text.encode("utf-8")
    page = Page(page_text)
    assert len(page_text) < 1_000_000
    shown = page.text
    assert all(character.isprintable() or character == "\n" for character in shown)
    if text.isprintable():
        assert text[:100] in shown


NAMES = [
    "event",
    "step",
    "samples",
    "loss",
    "step_ms",
    "sequences_per_s",
    "update_ms",
    "eval_s",
    "text",
    "skipped_steps",
]
KINDS = st.sampled_from(["run", "step", "eval", "warning", "plan", "end"])
VALUES = KINDS | st.floats() | st.integers() | st.text(max_size=5) | st.none() | st.lists(st.none(), max_size=1)


@given(st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8), max_size=12))
@at_most(25)
def test_any_metrics_give_a_page(one: Path, entries: list[dict[str, Any]]) -> None:
    (one / "metrics_0.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    page = Page(report.render(replace(load_results(one), ruleset="5.0.0")))
    for _, attrs in page.tags:
        for name in ("d", "points", "style", "x", "y", "height", "width"):
            assert not re.search(r"nan|inf\b|e[+-]?\d", str(attrs.get(name, "")))


def test_a_large_folder_makes_a_small_page_soon(tmp_path: Path, closed: Results) -> None:
    metrics = write_metrics(tmp_path / "metrics_0.jsonl", 250, every=1, batch=768)
    begin = time.process_time()
    entries = read_metrics(metrics)
    runs = [replace(closed.runs[n % 10], number=n, metrics=entries) for n in range(100)]
    text = report.render(replace(closed, runs=tuple(runs)))
    assert time.process_time() - begin < 10
    assert len(text) < 500_000
    page = Page(text)
    assert "100 runs" in page.text
    assert len(page.of("div", "bar-row")) == 1


def test_a_report_that_cannot_be_written_is_a_users_error(one: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        report.write_report(one, out=tmp_path / "file" / "report.html")
    assert report.write_report(one).name == "report.html"
    assert report.write_report(one, format="csv", out=tmp_path / "a.csv").read_text().startswith("run,official")
