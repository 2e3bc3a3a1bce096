import re
from dataclasses import replace

import pytest

from console.html import charts
from console.html.charts import Axes, Bar, Guide, Line, line_chart, run_chart, short_count, thin
from tests.html_page import Page

AXES = Axes("a chart", "x", charts.level)


def test_counts_are_shortened_to_three_digits_and_a_unit() -> None:
    shown = {0: "0", 750: "750", 999: "999", 1000: "1k", 50_000: "50k", 192_280: "192k", 999_000: "999k", 1e6: "1M"}
    shown |= {2_250_000: "2.25M", 3e6: "3M", 12_250_000: "12.2M", 2_500: "2.5k", 120_000: "120k", 999_600: "1M"}
    assert {value: short_count(value) for value in shown} == shown
    assert [charts.level(0.123456789), charts.level(1234567.0)] == ["0.123457", "1.23457e+06"]


def test_ticks_are_few_round_numbers_around_the_range() -> None:
    expected = {
        (0.0, 10.0): [0, 2, 4, 6, 8, 10],
        (0.0, 10.009): [0, 2, 4, 6, 8, 10, 12],  # within a thousandth of the limit of five steps
        (0.0, 10.02): [0, 2.5, 5, 7.5, 10, 12.5],
        (0.0, 5.0): [0, 1, 2, 3, 4, 5],
        (-12.0, 13.0): [-15, -10, -5, 0, 5, 10, 15],
        (0.3, 0.6): [0.3, 0.4, 0.5, 0.6],  # in floating point, 0.3 / 0.1 < 3
        (0.6, 1.1): [0.6, 0.7, 0.8, 0.9, 1.0, 1.1],  # in floating point, 1.1 / 0.1 > 11
        (0.0, 5e-10): [0, 1e-10, 2e-10, 3e-10, 4e-10, 5e-10],
        # Equal values, or values that differ by rounding only
        (0.0, 0.0): [0, 0.2],
        (7.0, 7.0): [6, 8],
        (8.0, 8.0): [8, 10],
        (-8.0, -8.0): [-8, -6],
        (1e6, 1e6 + 9e-4): [1e6, 1.2e6],
        (-1e6 - 9e-4, -1e6): [-1.2e6, -1e6],
    }
    for ends, marks in expected.items():
        assert charts.ticks(*ends) == pytest.approx(marks, abs=1e-12)


def test_lines_of_many_points_are_thinned() -> None:
    """Each case maps the number of lines, whether dots are drawn, and the points per line to the points drawn."""
    cases = {(1, False, 240): 240, (1, False, 241): 121, (7, False, 215): 108, (7, True, 240): 240, (300, False, 9): 5}
    for (lines, dots, points), drawn in cases.items():
        chart = line_chart([Line("l", [(float(x), 0.0) for x in range(points)])] * lines, AXES, dots=dots)
        assert [str(path["d"]).count("L") + 1 for path in Page(chart).of("path", "stroke")] == [drawn] * lines


def test_thinning_averages_neighbouring_points_and_keeps_the_last_point() -> None:
    squares = [(x, x * x) for x in range(10)]
    assert thin(squares, 10) == squares
    assert thin(squares, 4) == [(1, 5 / 3), (4, 50 / 3), (7, 149 / 3), (9, 81)]
    assert thin(squares[:8], 4) == [(1, 5 / 3), (4, 50 / 3), (6, 36), (7, 49)]
    assert thin(squares[:2], 2) == squares[:2]


def test_lines_guides_and_bands_are_drawn_at_their_values() -> None:
    guides = [Guide("band", "b", 2.0, 4.0), Guide("mean", "m", 5.0), Guide("x", "", 1.0, 3.0, "x")]
    page = Page(line_chart([Line("l", [(0.0, 0.0), (10.0, 10.0)])], replace(AXES, guides=guides)))
    assert page.of("path", "stroke")[0]["d"] == "M0.0 1000.0L1000.0 0.0"
    band, across = page.of("rect")
    assert [band[name] for name in ("x", "y", "width", "height")] == ["0.0", "600.0", "1000.0", "200.0"]
    assert [across[name] for name in ("x", "y", "width", "height")] == ["100.0", "0.0", "200.0", "1000.0"]
    assert page.of("path", "mean")[0]["d"] == "M0 500.0H1000"
    assert page.text.split() == ["l", "02468100246810x", "bm"]  # the third guide has no label, so the key omits it
    single = line_chart([Line("a<b", [(0.0, 0.0)])], AXES)
    assert ('class="dots"' in single, "a&lt;b" in single, "nan" in single) == (True, True, False)
    # The axes extend to guides beyond the points, and to zero if ``from_zero`` is set.
    high = Page(line_chart([Line("l", [(1.0, 2.0)])], replace(AXES, guides=[Guide("t", "", 3.0)], from_zero=True)))
    assert high.of("path", "stroke")[0]["d"] == "M1000.0 333.3"


def test_only_columns_start_at_zero_and_crowded_charts_show_fewer_names() -> None:
    bars = [Bar("0", 80.0), Bar("1", 100.0, "dropped", "slowest")]
    columns = Page(run_chart(bars, AXES, columns=True))
    drawn = [[rect[name] for name in ("x", "y", "width", "height")] for rect in columns.of("rect")]
    assert drawn == [["200.0", "200.0", "100.0", "800.0"], ["700.0", "0.0", "100.0", "1000.0"]]
    assert "slowest" in columns.text
    assert "style" in columns.of("span", "note")[0]
    dots = Page(run_chart(bars, AXES, columns=False))
    assert not dots.of("rect")
    assert [str(path["d"]) for path in dots.of("path", "dots")] == [
        "M250.0 833.3h0",
        "M750.0 166.7h0",
    ]  # axis: 75 to 105
    for count, names, notes in ((12, 12, 12), (13, 7, 13), (24, 12, 24), (25, 9, 0)):
        many = Page(run_chart([Bar(str(n), 1.0, note="slowest") for n in range(count)], AXES, columns=True))
        assert (len(many.of("span", "x")), len(many.of("span", "note"))) == (names, notes)
    assert [many.of("rect")[0][name] for name in ("x", "y", "width", "height")] == ["5.6", "0.0", "28.8", "1000.0"]


def test_tick_labels_of_nearby_counts_differ() -> None:
    axes = replace(AXES, y_format=lambda value: short_count(value, 4))
    for values in ((2_975_000, 3_000_000), (2_400_000, 2_400_768), (38_400, 38_400)):
        chart = run_chart([Bar(str(n), value) for n, value in enumerate(values)], axes, columns=False)
        words = re.findall(r'<span class="y"[^>]*>([^<]*)', chart)
        assert len(words) == len(set(words)) >= 3
