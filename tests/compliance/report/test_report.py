import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compliance.log.findings import Finding
from compliance.log.records import Metrics, MetricsWriter, RunRecord, WarningRecord, read_metrics
from compliance.report import page as report
from compliance.report.results import Results, load_results
from console.charts import (
    MAX_POINTS,
    Axes,
    Bar,
    Guide,
    Line,
    level,
    line_chart,
    run_chart,
    short_count,
    thin,
    ticks,
)
from tests.compliance.report.report_folders import write_closed_run, write_failing_folder
from tests.compliance.run_logs import write_metrics

VOID = {"meta"}
ALLOWED = set(
    re.findall(
        r"\w+",
        """html head meta title style body header footer section h1 h2 h3 p small strong b i code div span ul li dl dt dd
        figure svg g path rect polygon table thead tbody tr th td details summary""",
    )
)
AXES = Axes("a chart", "x", level)


class Page(HTMLParser):
    """The tags of a page, which are balanced, load nothing and run nothing, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(str(text))
        self.close()
        assert not self.stack
        assert {tag for tag, _ in self.tags} <= ALLOWED
        names = {name for _, attrs in self.tags for name in attrs}
        assert not [name for name in names if name in ("src", "href", "srcset", "action") or name.startswith("on")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def of(self, tag: str, kind: str | None = None) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag and kind in (None, *str(attrs.get("class")).split())]

    @property
    def charts(self) -> list[str]:
        return [str(attrs["aria-label"]) for attrs in self.of("div", "chart")]


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Six runs of which four are no valid results."""
    return load_results(write_failing_folder(tmp_path_factory.mktemp("failing")))


CLOSED_WORDS = """BERT on made_up_h100
closed division, 8 x NVIDIA H100 80GB HBM3, global batch size 768
Not an MLPerf result
10 of 10
mean of 8 runs, fastest and slowest dropped
official checker: 10 of 10
target 0.72
reference 2.44M ± 192k sequences
minimum of the mean 2.31M
5.44 min, scaled by 1.002585 to 5.45 min
the set passes and its score is multiplied by 1.002585
would stand between the 5.39 min of Supermicro
this folder, unverified
forward and backward 84
What differs between the runs
1 settings of run 9
NVLink 4, NVSwitch 3"""


def test_a_closed_folder_has_every_part(closed: Results) -> None:
    page = Page(report.render(closed))
    assert page.charts == [
        "Masked-LM accuracy over sequences trained, 10 runs",
        "Time to train of 10 runs in minutes",
        "Sequences to the target of 10 runs",
        "Sequences per second over sequences trained, 10 runs",
        "Training loss over sequences trained, 10 runs",
    ]
    for words in CLOSED_WORDS.splitlines():
        assert words in page.text, words
    assert "lines not shown" not in page.text
    assert page.text.count("no, fastest") == page.text.count("no, slowest") == 1
    assert [attrs["scope"] for attrs in page.of("th", "own")] == ["row"]
    counts = {("g", "dropped"): 2, ("rect", "band"): 2, ("path", "minimum"): 2, ("path", "mean"): 2}
    for (tag, kind), number in (counts | {("path", "target"): 1}).items():
        assert len(page.of(tag, kind)) == number, kind


@pytest.mark.parametrize("folder", ["closed", "failing"])
def test_the_page_needs_nothing_but_itself_and_says_what_its_parts_are(
    folder: str, request: pytest.FixtureRequest
) -> None:
    text = report.render(request.getfixturevalue(folder))
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


FAILING_WORDS = """2 of 6 logs pass the stricter rules
No score: 4 of 6 runs are no valid results, and only one may be.
Time to train-no score
3 of them not converged
Without a score there is nothing to compare
Dashed: aborted. Dotted: no valid result.
3 runs did not reach the target.
Run 4, step 120: rank 5 on node b takes 1.4x
run 2, line
no MLLOG record"""


def test_failures_are_told_in_words(failing: Results) -> None:
    page = Page(report.render(failing))
    for words in FAILING_WORDS.splitlines():
        assert words in page.text, words
    assert len(page.of("g", "aborted")) >= 4
    assert len(page.of("li", "error")) >= 5


def test_warnings_come_after_errors(closed: Results) -> None:
    def with_finding(severity: Any, key: str) -> Any:
        finding = Finding(7, key, "TR 1", "found this.", "do that.", "train.py:9", severity, more=2)
        return replace(closed.runs[0], verdict=replace(closed.runs[0].verdict, findings=(finding,)))

    assert closed.findings == []
    runs = (with_finding("warning", "a lesser key"), *closed.runs[1:9], with_finding("error", "a greater key"))
    page = Page(report.render(replace(closed, runs=runs)))
    severities = [attrs["class"] for attrs in page.of("li") if attrs.get("class") in ("error", "warning")]
    assert severities == ["error", "warning"]
    assert page.text.index("a greater key") < page.text.index("a lesser key")
    for words in (
        "found this. (and 2 more like it)",
        "do that.",
        "TR 1, logged at train.py:9",
        "line 7",
        "; 1 warning.",
    ):
        assert words in page.text


def test_a_broken_run_and_a_bare_one(one: Path) -> None:
    page = Page(report.render(load_results(one)))
    assert "Where the time went" not in page.text
    assert "Among published results" not in page.text
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
    planned = {f"planned_{name}": value for name, value in measured.items()} | {"planned_reduce_ms": 5.0}
    event = {"event": "plan", "step_ms": 41.0, "planned_step_ms": 31.0, **measured, **planned}
    metrics = one / "metrics_0.jsonl"
    metrics.write_text(json.dumps(event) + "\n")
    text = Page(report.render(load_results(one))).text
    assert "Step of run 0 as planned and as measured" in text
    rows = re.sub(r"\s+", "", text)
    assert "exposedcommunication515+200%" in rows
    assert "waitingfordata00-" in rows
    assert "step3141+32%" in rows
    metrics.write_text(json.dumps(event | {"planned_step_ms": "<b>"}) + "\n")
    assert "as planned" not in Page(report.render(load_results(one))).text


def test_skipped_steps_are_told_and_losses_that_are_no_numbers_left_out(one: Path) -> None:
    steps = [{"event": "step", "step": n, "samples": 32 * n, "loss": 9.0, "skipped_steps": 2} for n in range(1, 4)]
    lines = [json.dumps(step) for step in steps]
    lines += ['{"event": "step", "step": 4, "samples": 128, "loss": null, "skipped_steps": 1}']
    lines += [
        '{"event": "step", "step": 5, "samples": 160, "loss": null}',
        '{"event": "step", "step": 6, "loss": 1e9, "samples": 192}',
    ]
    (one / "metrics_0.jsonl").write_text("\n".join(lines))
    text = report.render(load_results(one))
    assert "7 steps were skipped" in Page(text).text
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


NAMES = (
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
)
VALUES = st.one_of(
    st.sampled_from(["run", "step", "eval", "warning", "plan", "end"]),
    st.floats(),
    st.integers(),
    st.text(max_size=5),
    st.none(),
    st.lists(st.none(), max_size=1),
)


@given(st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8), max_size=12))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_metrics_give_a_page(spare: Path, entries: list[dict[str, Any]]) -> None:
    (spare / "metrics_0.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    page = Page(report.render(replace(load_results(spare), ruleset="5.0.0")))
    for _, attrs in page.tags:
        for name in ("d", "points", "style", "x", "y", "height", "width"):
            assert not re.search(r"nan|inf\b|e[+-]?\d", str(attrs.get(name, "")))


@given(st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_to_a_log_gives_a_page(spare: Path, data: st.DataObject) -> None:
    damaged = bytearray((spare / "undamaged").read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 400))] = data.draw(st.binary(max_size=30))
    (spare / "result_0.txt").write_bytes(damaged)
    results = load_results(spare)
    Page(report.render(results))
    for format in ("markdown", "json", "csv"):
        assert report.render_as(results, format)


@pytest.fixture
def spare(one: Path) -> Path:
    """A folder whose one log may be damaged."""
    (one / "undamaged").write_bytes((one / "result_0.txt").read_bytes())
    write_metrics(one / "metrics_0.jsonl")
    return one


def test_a_large_folder_makes_a_small_page_soon(tmp_path: Path, closed: Results) -> None:
    metrics = tmp_path / "metrics_0.jsonl"
    write_closed_run(tmp_path, 0)
    step = read_metrics(metrics).steps[0]
    metrics.unlink()
    writer = MetricsWriter(metrics, RunRecord())
    for n in range(1, 251):
        writer.write(replace(step, step=n, samples=768 * n, loss=9.0 / n))
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


def test_the_head_says_how_many_share_a_copy_of_the_model(closed: Results) -> None:
    run = closed.shown
    header = run.log.header | {"config.parallel.tensor": "4", "config.parallel.pipeline": "2"}
    shared = replace(closed, runs=(replace(run, log=replace(run.log, header=header)),))
    assert (
        "x NVIDIA H100 80GB HBM3, tensor parallel 4, pipeline parallel 2, global batch size 768"
        in Page(report.render(shared)).text
    )
    assert "tensor parallel" not in Page(report.render(closed)).text


def test_settings_that_differ_are_named(closed: Results) -> None:
    def headed(number: int, **header: str) -> Any:
        run = closed.runs[number]
        return replace(run, log=replace(run.log, header=header))

    runs = [headed(n, same="a", seed=str(n), commit="x" if n else "y") for n in range(10)]

    def found(*headed: Any) -> dict[str, str]:
        return report.differences(replace(closed, runs=headed))

    assert found(*runs) == {"seed": ", ".join(map(str, range(10))), "commit": "y, x"}
    assert found(headed(0, a="1"), headed(1)) == {"a": "1, absent"}
    assert found(runs[0]) == {}


def test_short_counts() -> None:
    shown = {0: "0", 750: "750", 50_000: "50k", 192_280: "192k", 2_250_000: "2.25M", 3e6: "3M", 12_250_000: "12.2M"}
    assert {value: short_count(value) for value in shown} == shown


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_enclose_the_range_with_few_round_steps(low: float, span: float) -> None:
    high = low + span
    marks = ticks(low, high)
    tolerance = 1e-6 * (marks[1] - marks[0])
    assert marks[0] <= low + tolerance
    assert marks[-1] >= high - tolerance
    assert 2 <= len(marks) <= 9
    assert all(a < b for a, b in pairwise(marks))


@given(
    st.lists(st.tuples(st.floats(0, 1e7), st.floats(-1e3, 1e3)), min_size=1, max_size=1000), st.integers(2, MAX_POINTS)
)
def test_thinned_lines_keep_their_height_and_their_end(points: list[tuple[float, float]], limit: int) -> None:
    thinned = thin(points, limit)
    assert len(thinned) <= limit
    assert thinned[-1] == points[-1]
    assert min(y for _, y in points) - 1e-6 <= min(y for _, y in thinned)
    assert max(y for _, y in thinned) <= max(y for _, y in points) + 1e-6
    if len(points) <= limit:
        assert thinned == points


def test_chart_of_a_single_point_at_zero() -> None:
    chart = line_chart([Line("a<b", [(0.0, 0.0)])], AXES)
    assert 'class="dots"' in chart
    assert "a&lt;b" in chart
    assert "nan" not in chart


def test_marks_lie_where_their_values_say() -> None:
    guides = [Guide("band", "b", 2.0, 4.0), Guide("mean", "m", 5.0), Guide("x", "", 1.0, 3.0, "x")]
    page = Page(line_chart([Line("l", [(0.0, 0.0), (10.0, 10.0)])], replace(AXES, guides=guides)))
    assert page.of("path", "stroke")[0]["d"] == "M0.0 1000.0L1000.0 0.0"
    band, across = page.of("rect")
    assert [band[name] for name in ("x", "y", "width", "height")] == ["0.0", "600.0", "1000.0", "200.0"]
    assert [across[name] for name in ("x", "y", "width", "height")] == ["100.0", "0.0", "200.0", "1000.0"]
    assert page.of("path", "mean")[0]["d"] == "M0 500.0H1000"
    assert page.text.endswith("bm\n")  # the key, without the guide that has no label


def test_columns_stand_on_zero_and_dots_do_not() -> None:
    bars = [Bar("0", 80.0), Bar("1", 100.0, "dropped", "slowest")]
    columns = Page(run_chart(bars, AXES, columns=True))
    heights = [float(str(rect["height"])) for rect in columns.of("rect")]
    assert heights == [800.0, 1000.0]
    assert [float(str(rect["y"])) for rect in columns.of("rect")] == [200.0, 0.0]
    assert "slowest" in columns.text
    assert "style" in columns.of("span", "note")[0]
    dots = Page(run_chart(bars, AXES, columns=False))
    assert not dots.of("rect")
    assert [str(path["d"]) for path in dots.of("path", "dots")] == ["M250.0 833.3h0", "M750.0 166.7h0"]  # 75 to 105


@pytest.mark.parametrize(
    "values", [(2_975_000, 3_000_000), (2_400_000, 2_400_000), (2_400_000, 2_400_768), (38_400, 38_400)]
)
def test_numbers_at_the_axis_of_sequences_differ(values: tuple[float, float]) -> None:
    axes = replace(AXES, y_format=lambda value: short_count(value, 4))
    text = run_chart([Bar(str(n), value) for n, value in enumerate(values)], axes, columns=False)
    words = re.findall(r'<span class="y"[^>]*>([^<]*)', text)
    assert len(words) == len(set(words)) >= 3


def test_many_runs_have_few_names_and_no_notes() -> None:
    many = Page(run_chart([Bar(str(n), 1.0, note="slowest") for n in range(100)], AXES, columns=True))
    assert len(many.of("span", "x")) <= 12
    assert not many.of("span", "note")
