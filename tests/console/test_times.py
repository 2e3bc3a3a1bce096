from console.text import clock, clock_span, duration


def test_times_have_the_unit_that_fits_and_a_time_left_may_have_one_end() -> None:
    clocks = {0: "0:00", 59.6: "1:00", 61: "1:01", 3599: "59:59", 3661: "1:01:01", -5: "0:00"}
    assert {seconds: clock(seconds) for seconds in clocks} == clocks
    spans = {(None, None): "-", (None, 61.0): "at most 1:01", (5.0, None): "0:05 or more", (5.0, 61.0): "0:05 to 1:01"}
    assert {ends: clock_span(*ends) for ends in spans} == spans
    durations = {None: "-", 0.0: "0.0 s", 1.23e-8: "12.3 ns", 0.5: "500 ms", 119.94: "119.9 s", 1012.9: "16.88 min"}
    assert {seconds: duration(seconds) for seconds in durations} == durations
