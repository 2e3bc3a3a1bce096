import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert.mllog import MLLog
from compliance import summary
from compliance.charts import MAX_POINTS, Line, line_chart, short_count, thin, ticks
from compliance.report import breakdown, render, write_report
from compliance.results import Results, load_results, read_metrics
from tests.unit.run_logs import OPEN, initialise, train, write_metrics, write_run

VOID = {"meta", "line", "polyline", "circle", "br"}


class Page(HTMLParser):
    """The tags of a page, checked for balance, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert not self.stack

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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three valid runs of different length and an aborted one; the last two without metrics."""
    path = tmp_path / "results" / "my_node" / "bert"
    for number in range(3):
        header = {"recipe": "tiny_cpu", "config.note": "<script>alert(1)</script>"}
        write_run(path / f"result_{number}.txt", "open", header=header, step_ms=100 * (number + 1))
    with MLLog(path / "result_10.txt") as log:
        initialise(log, "open")
        train(log, OPEN, [0.1])
        log.abort()
    for number in range(2):
        write_metrics(path / f"metrics_{number}.jsonl")
    description = tmp_path / "results" / "systems" / "my_node.json"
    description.parent.mkdir()
    description.write_text(json.dumps({"submitter": "A & B", "cooling": ""}))
    return path


def test_runs_in_numeric_order_with_their_figures(folder: Path) -> None:
    results = load_results(folder)
    assert [run.number for run in results.runs] == [0, 1, 2, 10]
    assert [run.outcome for run in results.runs] == ["valid", "valid", "valid", "aborted"]
    assert results.system == "my_node"
    first = results.runs[0]
    assert first.seconds == pytest.approx(0.1 * 18)  # 18 records from run_start to run_stop
    assert first.accuracy == pytest.approx(0.315)
    assert (first.target, first.samples) == (0.3, 3008)
    assert first.sequences_per_s == pytest.approx(3008 / 1.8)


def test_score_is_the_olympic_mean(folder: Path) -> None:
    results = load_results(folder)
    times = [run.seconds for run in results.runs]
    assert times[1]
    assert times[2]
    assert results.score_seconds == pytest.approx((times[1] + times[2]) / 2)  # the aborted run is the slowest

    def score(*chosen: int) -> float | None:
        return replace(results, runs=tuple(results.runs[n] for n in chosen)).score_seconds

    assert score(0, 1, 2) == pytest.approx(times[1])
    assert score(0, 1) is None
    assert score(0, 1, 3) == pytest.approx(times[1])
    assert score(0, 1, 2, 3, 3) is None
    assert score(3, 3, 3) is None


def test_page_is_self_contained_balanced_and_escaped(folder: Path) -> None:
    text = write_report(folder).read_text(encoding="utf-8")
    page = Page(text)
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "img", "iframe")]
    assert not [attrs for _, attrs in page.tags if {"src", "href"} & attrs.keys()]
    assert not re.search(r"https?://|@import|url\(", text)
    assert "<script>alert" not in text
    for words in ("BERT on my_node", "Not an MLPerf result", "3 of 4", "A & B", "<script>alert(1)</script>", "aborted"):
        assert words in page.text
    charts = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert [attrs["aria-label"] for attrs in charts] == [
        "masked-LM accuracy over sequences trained",
        "training loss over sequences trained",
    ]
    assert page.text.count("target 0.3") >= 1
    lines = [attrs["class"] for tag, attrs in page.tags if tag == "g"]
    assert lines == ["line valid"] * 3 + ["line aborted"] + ["line valid"] * 2


def test_time_is_accounted_for(folder: Path) -> None:
    results = load_results(folder)
    parts = breakdown(results.runs[1])
    assert parts["forward and backward"] == pytest.approx(60 * 0.020)
    assert parts["waiting for data"] == pytest.approx(60 * 0.001)
    assert parts["evaluation"] == pytest.approx(3 * 0.05)
    assert sum(parts.values()) == pytest.approx(results.runs[1].seconds)
    assert breakdown(results.runs[2]) == {}
    assert "forward and backward" in Page(render(results)).text


def test_the_parts_of_a_step_are_stacked_over_the_run(folder: Path) -> None:
    results = load_results(folder)
    metrics = folder / "metrics_1.jsonl"
    broken = '{"event": "step", "step": 70, "samples": 2240, "step_ms": -1, "data_wait_ms": 1e300}\n'
    metrics.write_text(metrics.read_text() + broken)
    page = Page(render(replace(results, runs=load_results(folder).runs[:2])))
    areas = [attrs for tag, attrs in page.tags if tag == "polygon"]
    assert [attrs["class"] for attrs in areas] == ["compute", "reduce", "update", "data-wait", "other"]
    heights = []
    for attrs in areas:
        points = [tuple(map(float, corner.split(","))) for corner in str(attrs["points"]).split()]
        assert len(points) == 12  # six records, there and back
        heights.append(points[11][1] - points[0][1])  # above the first record; y grows downwards
    assert [height / heights[0] for height in heights] == pytest.approx([1, 0.15, 0.1, 0.05, 0.05], abs=0.01)
    assert "Parts of a step of run 1" in page.text
    assert "Parts of a step" not in render(results)  # the run that stands for all has no metrics


def test_report_without_metrics_and_description(tmp_path: Path) -> None:
    path = tmp_path / "one" / "bert"
    write_run(path / "result_0.txt")
    page = Page(render(load_results(path)))
    assert "Where the time went" not in page.text
    assert "System" not in page.text
    assert "closed division" in page.text


def test_report_of_a_broken_log(tmp_path: Path) -> None:
    path = tmp_path / "one" / "bert"
    path.mkdir(parents=True)
    (path / "result_0.txt").write_text("<b>nothing</b>\n")
    page = Page(render(load_results(path)))
    assert "no MLLOG record" in page.text
    assert not [tag for tag, _ in page.tags if tag == "svg"]


def test_broken_metrics_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics_0.jsonl"
    path.write_bytes(
        b'{"event": "eval", "eval_s": 1}\n\xff\n[1]\n{"event": "other"}\n{"event": []}\n{"event": "step", "lo'
    )
    assert read_metrics(path) == {"run": [], "step": [], "eval": [{"event": "eval", "eval_s": 1}], "end": []}
    assert read_metrics(tmp_path / "none") == {"run": [], "step": [], "eval": [], "end": []}


def test_folder_without_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "result_x.txt").write_text("")
    with pytest.raises(ValueError, match=r"no result_<n>\.txt in it"):
        load_results(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        load_results(tmp_path / "none")


def test_broken_system_description_is_refused(folder: Path) -> None:
    path = folder.parents[1] / "systems" / "my_node.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"my_node\.json: not a system description"):
        load_results(folder)


def test_summary_is_plain_text_when_not_on_a_terminal(folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "compliance", "summary", str(folder)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == "BERT on my_node"
    assert lines[1].split("  ")[-1].strip() == "sequences/s"
    assert lines[2].split() == ["0", "valid", "1.8", "s", "0.3150", "0.3000", "3,008", "1,671"]
    assert lines[5].split()[:2] == ["10", "aborted"]
    assert lines[-1] == summary.NOT_A_RESULT
    assert "\x1b" not in run.stdout


def test_summary_on_a_terminal_is_a_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results: Results = load_results(folder)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    summary.print_summary(results)
    printed = capsys.readouterr().out
    assert "aborted" in printed
    assert "3 of 4 runs valid" in printed


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.0, "0.0 s"), (119.94, "119.9 s"), (120, "2.00 min"), (1012.9, "16.88 min")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert summary.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (750, "750"), (50_000, "50k"), (2_250_000, "2.25M"), (3e6, "3M")]
)
def test_short_counts(value: float, text: str) -> None:
    assert short_count(value) == text


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_enclose_the_range_with_few_round_steps(low: float, span: float) -> None:
    high = low + span
    marks = ticks(low, high)
    tolerance = 1e-6 * (marks[1] - marks[0])
    assert marks[0] <= low + tolerance
    assert marks[-1] >= high - tolerance
    assert 2 <= len(marks) <= 9
    assert all(a < b for a, b in pairwise(marks))


@given(st.lists(st.tuples(st.floats(0, 1e7), st.floats(-1e3, 1e3)), min_size=1, max_size=2000))
def test_thinned_lines_keep_their_mean_height(points: list[tuple[float, float]]) -> None:
    thinned = thin(points)
    assert len(thinned) <= MAX_POINTS
    assert min(y for _, y in points) - 1e-6 <= min(y for _, y in thinned)
    assert max(y for _, y in thinned) <= max(y for _, y in points) + 1e-6


def test_chart_of_a_single_point_at_zero() -> None:
    chart = line_chart([Line("a<b", [(0.0, 0.0)])], title="t", x_title="x", y_format=str)
    assert "<circle" in chart
    assert "a&lt;b" in chart
    assert "nan" not in chart
