import re
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from console.html import charts
from console.html.charts import MAX_POINTS, Axes, Bar, Guide, Line, line_chart, run_chart, short_count, thin
from tests.html_page import Page

AXES = Axes("a chart", "x", charts.level)


def test_short_counts() -> None:
    shown = {0: "0", 750: "750", 50_000: "50k", 192_280: "192k", 2_250_000: "2.25M", 3e6: "3M", 12_250_000: "12.2M"}
    assert {value: short_count(value) for value in shown} == shown


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_enclose_the_range_with_few_round_steps(low: float, span: float) -> None:
    high = low + span
    marks = charts.ticks(low, high)
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


def test_marks_lie_where_their_values_say() -> None:
    guides = [Guide("band", "b", 2.0, 4.0), Guide("mean", "m", 5.0), Guide("x", "", 1.0, 3.0, "x")]
    page = Page(line_chart([Line("l", [(0.0, 0.0), (10.0, 10.0)])], replace(AXES, guides=guides)))
    assert page.of("path", "stroke")[0]["d"] == "M0.0 1000.0L1000.0 0.0"
    band, across = page.of("rect")
    assert [band[name] for name in ("x", "y", "width", "height")] == ["0.0", "600.0", "1000.0", "200.0"]
    assert [across[name] for name in ("x", "y", "width", "height")] == ["100.0", "0.0", "200.0", "1000.0"]
    assert page.of("path", "mean")[0]["d"] == "M0 500.0H1000"
    assert page.text.endswith("bm\n")  # the key has "b" and "m"; the third guide has no label
    single = line_chart([Line("a<b", [(0.0, 0.0)])], AXES)
    assert 'class="dots"' in single
    assert "a&lt;b" in single
    assert "nan" not in single


def test_columns_stand_on_zero_and_dots_do_not_and_many_have_few_names() -> None:
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
    many = Page(run_chart([Bar(str(n), 1.0, note="slowest") for n in range(100)], AXES, columns=True))
    assert len(many.of("span", "x")) <= 12
    assert not many.of("span", "note")


def test_numbers_at_the_axis_of_sequences_differ() -> None:
    axes = replace(AXES, y_format=lambda value: short_count(value, 4))
    for values in ((2_975_000, 3_000_000), (2_400_000, 2_400_768), (38_400, 38_400)):
        chart = run_chart([Bar(str(n), value) for n, value in enumerate(values)], axes, columns=False)
        words = re.findall(r'<span class="y"[^>]*>([^<]*)', chart)
        assert len(words) == len(set(words)) >= 3
