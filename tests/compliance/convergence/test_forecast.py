import pytest

from compliance.convergence.forecast import MAX_SAMPLES, Forecast, forecast, reach, time_left
from compliance.convergence.outlook import reference
from compliance.log.schedule import EvaluationSchedule, evaluation_interval

# Batch size, and accuracies of published closed logs up to the first evaluation that reached the target.
PUBLISHED = {
    "v2.1 8 x H100": (768, "3727 4078 4881 6091 6923 7048 7088 7117 7130 7145 7158 7164 7172 7182 7183 7190 7193 7201"),
    "v2.1 8 x A100": (448, "3742 4023 4383 5152 6460 7024 7090 7120 7136 7149 7160 7168 7181 7187 7194 7197 7202"),
    "v2.0 Gaudi2": (448, "3805 4040 4408 5046 6185 6959 7080 7110 7131 7145 7153 7168 7178 7186 7192 7199 7201"),
    "v2.0 Graphcore": (3072, "3673 3878 4328 5721 6939 7060 7091 7110 7133 7148 7159 7167 7178 7185 7191 7197 7205"),
    "v3.0 Gaudi2": (3072, "3706 3801 3976 5038 6316 6973 7085 7124 7148 7159 7167 7183 7193 7200 7209"),
}
EVERY_1000 = EvaluationSchedule(1000, 10)
CLOSED = EvaluationSchedule(150_000, 448)


def closed_curve(name: str) -> tuple[EvaluationSchedule, list[tuple[int, float]]]:
    batch, digits = PUBLISHED[name]
    schedule = EvaluationSchedule(evaluation_interval(batch), batch)
    values = [int(value) / 10_000 for value in digits.split()]
    return schedule, [(schedule.samples(index), value) for index, value in enumerate(values, start=1)]


def every_1000(*values: float) -> list[tuple[int, float]]:
    return [(1000 * index, value) for index, value in enumerate(values, start=1)]


# Ranges from the reference's runs, and then from the last four evaluations. Two of the latter 37 miss the run's end.
RANGES = {
    "v2.1 8 x H100": 8 * "14-19 " + "12-18 13-20 14-20 15-21 16-22 16-20 18-21 18-21 19-22",
    "v2.1 8 x A100": 8 * "14-19 " + "11-15 13-18 14-20 15-20 15-18 15-19 16-18 17-19",
    "v2.0 Gaudi2": 9 * "14-19 " + "13-18 14-21 15-20 15-19 15-18 16-19 17-19",
    "v2.0 Graphcore": 8 * "14-17 " + "12-19 13-19 14-19 15-20 15-19 16-19 16-19 17-19",
    "v3.0 Gaudi2": 9 * "14-17 " + "12-16 13-18 14-17 14-16 15-17",
}


def test_forecasts_of_published_runs_equal_the_recorded_ranges() -> None:
    for name, (batch, _) in PUBLISHED.items():
        schedule, points = closed_curve(name)
        known = [points[:count] for count in range(1, len(points))]
        found = [forecast(each, 0.72, schedule, reference("5.0.0", batch)) for each in known]
        assert " ".join(f"{each.earliest}-{each.latest}" for each in found) == RANGES[name]
        assert {each.basis for each in found} == {"by the reference's runs", "by its last 4 evaluations"}


def test_the_forecast_is_the_references_range_until_four_evaluations_reach_0_70() -> None:
    for accuracies, first, last in (
        ([], 14, 19),  # evaluations at the mean 2,414,421 +- 2 standard deviations of 197,392
        ([0.40, 0.50, 0.60, 0.6999, 0.7], 14, 19),  # accuracies below 0.7 are ignored
        ([0.5] * 29, 30, 30),  # the run is past the reference's range, so the next evaluation is forecast
    ):
        points = [(150_000 * index, value) for index, value in enumerate(accuracies, start=1)]
        found = forecast(points, 0.72, CLOSED, reference("5.0.0", 448))
        assert found == Forecast(first, last, "by the reference's runs")
        usable = accuracies.count(0.7)
        assert forecast(points, 0.72, CLOSED, None).basis == f"too early: {usable} of 4 evaluations"


def test_a_short_or_flat_curve_has_no_forecast() -> None:
    for points, why in (
        (every_1000(0.3, 0.3, 0.3, 0.3), "no rise over the last 4 evaluations"),
        ([(0, 0.01), *every_1000(0.1, 0.2, 0.3)], "too early: 3 of 4 evaluations"),
    ):
        assert forecast(points, 0.5, EVERY_1000, None) == Forecast(None, None, why)


def test_a_straight_line_is_extrapolated_to_the_target() -> None:
    points = every_1000(0.15, 0.2, 0.25, 0.3)
    assert reach(points, 1.0, 0.5) == pytest.approx(8000)
    assert reach(points[:2], 1.0, 0.3) == pytest.approx(4000)
    assert reach([points[0]] * 4, 1.0, 0.3) is None
    found = forecast(points, 0.5, EVERY_1000, None)
    assert (found.earliest, found.latest) == (8, None)  # a - b / n with this slope stays below 0.44
    assert forecast(points, 0.52, EVERY_1000, None).earliest == 8  # reached at 8400, minus half an interval
    assert forecast(points, 0.53, EVERY_1000, None).earliest == 9


def test_a_hyperbola_is_extrapolated_only_to_targets_below_its_limit() -> None:
    points = [(1000 * index, 0.5 - 0.4 / index) for index in range(2, 6)]
    assert reach(points, -1.0, 0.46) == pytest.approx(10_000)
    assert reach(points, -1.0, 0.49) == pytest.approx(40_000)
    assert reach(points, -1.0, 0.5) is reach(points, -1.0, 0.51) is None
    found = forecast(points, 0.46, EVERY_1000, None)
    assert (found.earliest, found.latest) == (6, 12)  # a straight line reaches 0.46 at 6017


@pytest.mark.parametrize("power", [1.0, -1.0])
@pytest.mark.parametrize(
    "points",
    [
        [(1, 0.1), (2, 0.1 + 1e-17), (3, 0.1 + 2e-17), (4, 0.11)],
        [(1, 0.0), (2, 5e-324), (3, 1e-323), (4, 2e-323)],
        [(2**63 - 4, 0.1), (2**63 - 3, 0.2), (2**63 - 2, 0.3), (2**63 - 1, 0.4)],
    ],
)
def test_extrapolating_an_extreme_curve_gives_a_valid_count_or_none(
    points: list[tuple[int, float]], power: float
) -> None:
    found = reach(points, power, 0.72)
    assert found is None or 0 <= found <= MAX_SAMPLES


@pytest.mark.parametrize(
    ("earliest", "latest", "limit", "expected"),
    [
        (3, 5, None, "0:20 to 0:40"),
        (3, 5, 400, "0:20 to 0:30"),  # the run ends at its sample limit
        (3, None, None, "0:20 or more"),
        (3, None, 400, "0:20 to 0:30"),
        (None, None, 400, "at most 0:30"),
        (None, None, None, "-"),
        (1, 1, None, "0:00 to 0:00"),
    ],
)
def test_the_time_left_ends_at_the_forecast_or_at_the_sample_limit(
    earliest: int | None, latest: int | None, limit: int | None, expected: str
) -> None:
    found = Forecast(earliest, latest, "")
    assert time_left(found, EvaluationSchedule(100, 10), 100, 10.0, limit) == expected
