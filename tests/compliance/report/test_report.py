"""Pages of the report: recorded pages, and pages for hostile or unusual input."""

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
from msgspec import structs

from compliance.log.findings import Finding
from compliance.log.metrics import Metrics, RunRecord, WarningRecord, read_metrics
from compliance.report import page as report
from compliance.report.results import Results, load_results
from tests.compliance import command
from tests.compliance.run_logs import write_metrics
from tests.conftest import at_most
from tests.html_page import Page

FOLDER = Path(__file__).parent
HEADINGS = {"h1", "h2", "h3", "summary"}
LINES = {"tr", "li", "dl", "figure", "footer", "p"}
CELLS = {"th", "td", "dt", "dd", "p", "span", "small"}


class Outline(Page):
    """A page as text with a line for each row, list item and chart. CSS classes and guides are in brackets."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        is_in_key = tag == "li" and self.of("ul")[-1] == {"class": "key"}
        if tag in HEADINGS:
            self.text += "\n# "
        elif tag in LINES and not is_in_key and "li" not in self.stack[:-1]:
            self.text += "\n"
        elif tag in CELLS:
            self.text += " | "
        values = {name: str(value) for name, value in attrs}
        kind = values.get("class", "").strip()
        if kind == "chart":
            self.text += f" [{values['aria-label']}]"
        elif kind.startswith("guide"):
            self.text += f" [{' '.join(values.values())}] "
        elif tag in ("g", "i", "li", "td") and kind:
            self.text += f" [{kind}] "

    def handle_data(self, data: str) -> None:
        super().handle_data(re.sub(r"\s+", " ", data))


def outline(text: str) -> str:
    """Return the text of a page as in `Outline`, without line numbers of source files."""
    words = Outline(re.sub("<(head|style)>.*?</\\1>", "", text, flags=re.DOTALL)).text
    words = re.sub(r"run_logs\.py:\d+", "run_logs.py", re.sub(" +", " ", words))
    lines = "".join(f"{line.strip(' |')}\n" for line in words.split("\n") if line.strip(" |"))
    return re.sub(r"^(# [^\[\n]*)\n", r"\1: ", lines, flags=re.MULTILINE)  # join each heading with the following line


@pytest.mark.slow
def test_report_pages_equal_the_recorded_pages_and_are_accessible(
    closed: Results, failing: Results, experiments: Results
) -> None:
    for name, results in {"closed": closed, "failing": failing, "experiments": experiments}.items():
        text = report.render(results)
        assert outline(text) == (FOLDER / f"{name}_page.txt").read_text()
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


PARTS = {"step_ms": 41.0, "forward_backward_ms": 21.0, "reduce_ms": 15.0, "update_ms": 4.0, "data_wait_ms": 0.0}
STEPS: list[dict[str, Any]] = [
    {
        "step": 1,
        "loss": 9.0,
        "sequences_per_s": 900.0,
        "skipped_steps": 2,
        "site_bytes": 1_500_000,
        "site_wait_ms": 1.5,
    },
    {"step": 2, "loss": 7.0, "sequences_per_s": 1e8},  # 1e8 is too large for the chart, as is the loss below
    {"step": 1, "loss": None, "sequences_per_s": 800.0, "skipped_steps": 1},  # after a restart
    {"step": 4, "loss": 1e8, "sequences_per_s": 700.0, "site_bytes": 2_000_000, "site_wait_ms": 0.5},
]


def test_the_page_shows_sites_the_plan_a_restart_and_skipped_steps(one: Path) -> None:
    planned = {f"planned_{name}": value for name, value in (PARTS | {"step_ms": 31.0, "reduce_ms": 5.0}).items()}
    events = [
        {"event": "run", "world_size": 2, "started": "2024-01-02T03:04:05"},
        {"event": "plan", **PARTS, **planned, "other_ms": 1.0, "planned_other_ms": 1.0},
        *({"event": "step", "samples": 32 * step["step"], **PARTS, **step} for step in STEPS),
        {"event": "eval", "step": 4, "samples": 128, "eval_s": 0.01},
    ]
    (one / "metrics_0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    results = load_results(one)
    text = report.render(results)
    assert outline(text) == (FOLDER / "sites_page.txt").read_text()
    rate, loss = (re.findall(r'class="stroke" d="M([^"]*)"', text)[index].count("L") for index in (1, 2))
    assert (rate, loss) == (2, 1)  # lines join three rates and two losses
    [run] = results.runs
    alone = Metrics(steps=[structs.replace(step, site_bytes=0) for step in run.metrics.steps])
    both = outline(report.render(replace(results, runs=(run, replace(run, number=1, metrics=alone)))))
    assert "waiting for other sites 0.7 %, 0.312 ms a step, 3.5 MB sent between them" in both


def test_the_page_omits_parts_without_steps_or_log_records(one: Path) -> None:
    assert "Where the time went" not in Page(report.render(load_results(one))).text
    events = [{"event": name, "step": 0, "samples": 0, "eval_s": 0.09} for name in ("step", "eval")]
    (one / "metrics_0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    key = "forward and backward 0.0 %exposed communication 0.0 %update 0.0 %waiting for data 0.0 %evaluation 50.0 %"
    assert key in Page(report.render(load_results(one))).text
    (one / "result_0.txt").write_text("<b>nothing</b>\n")
    page = Page(report.render(load_results(one)))
    assert "no MLLOG record" in page.text
    assert page.charts == ["Sequences per second over sequences trained, 1 run"]  # the metrics file is still valid


def test_the_subtitle_of_the_page_names_tensor_and_pipeline_parallelism(closed: Results) -> None:
    header = closed.shown.log.header | {"config.parallel.tensor": "4", "config.parallel.pipeline": "2"}
    run = replace(closed.shown, log=replace(closed.shown.log, header=header))
    shared = Page(report.render(replace(closed, runs=(run,))))
    assert "8 x NVIDIA H100 80GB HBM3, tensor parallel 4, pipeline parallel 2, global batch size 768" in shared.text


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
def test_the_page_escapes_hostile_text(closed: Results, text: str) -> None:
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
def test_any_metrics_give_a_page_with_finite_coordinates(one: Path, entries: list[dict[str, Any]]) -> None:
    (one / "metrics_0.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    page = Page(report.render(replace(load_results(one), ruleset="5.0.0")))
    for _, attrs in page.tags:
        for name in ("d", "points", "style", "x", "y", "height", "width"):
            assert not re.search(r"nan|inf\b|e[+-]?\d", str(attrs.get(name, "")))


def test_the_page_of_100_runs_is_small_and_quickly_rendered(tmp_path: Path, closed: Results) -> None:
    metrics = read_metrics(write_metrics(tmp_path / "metrics_0.jsonl", 250, every=1, batch=768))
    begin = time.process_time()
    for number, bars in ((100, 1), (13, 1), (12, 12)):
        runs = [replace(closed.runs[n % 10], number=n, metrics=metrics) for n in range(number)]
        text = report.render(replace(closed, runs=tuple(runs)))
        assert len(text) < 500_000
        page = Page(text)
        assert len(page.of("div", "bar-row")) == bars
        assert page.charts[0] == f"Masked-LM accuracy over sequences trained, {number} runs"
    assert time.process_time() - begin < 10


def test_a_report_is_written_to_the_runs_folder_or_to_the_file_of_the_option_out(one: Path, tmp_path: Path) -> None:
    assert command.run("report", one) == (0, f"{one}/report.html\n")
    assert (one / "report.html").read_text() == report.render(load_results(one, "auto"))
    for form, head in {"csv": "run,official", "json": "{\n", "markdown": "# BERT on node\n"}.items():
        assert command.run("report", one, "--format", form, "--out", tmp_path / "a") == (0, f"{tmp_path}/a\n")
        assert (tmp_path / "a").read_text().startswith(head)
    status, said = command.run("report", one, "--out", tmp_path / "a" / "report.html")
    assert status == 2
    assert "a/report.html cannot be written" in said
