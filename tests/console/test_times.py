from math import inf, nan

from console.text import clock, counted, did_you_mean, duration


def test_times_are_formatted_in_the_unit_that_fits() -> None:
    clocks = {0: "0:00", 59.6: "1:00", 61: "1:01", 3599: "59:59", 3600: "1:00:00", 90061: "25:01:01", -5: "0:00"}
    assert {seconds: clock(seconds) for seconds in clocks} == clocks
    assert [clock(inf), clock(nan)] == ["?", "?"]
    durations = {None: "-", 0.0: "0.0 s", -0.5: "-0.5 s", 1.23e-8: "12.3 ns", 9.99e-7: "999 ns", 1e-6: "1 us"}
    durations |= {9.99e-4: "999 us", 1e-3: "1 ms", 0.9994: "999 ms", 1.0: "1.0 s", 119.94: "119.9 s"}
    durations |= {0.9996: "1.0 s", 9.996e-4: "1 ms", 9.996e-7: "1 us", 5e-10: "0.5 ns"}
    durations |= {120.0: "2.00 min", 1012.9: "16.88 min"}
    assert {seconds: duration(seconds) for seconds in durations} == durations


def test_nouns_get_a_plural_and_similar_names_are_suggested() -> None:
    words = {(0, "process"): "0 processes", (1, "process"): "1 process", (2, "copy"): "2 copies", (1, "copy"): "1 copy"}
    words |= {(1000, "way"): "1,000 ways", (2, "key"): "2 keys", (2, "boy"): "2 boys", (999, "rank"): "999 ranks"}
    assert {each: counted(*each) for each in words} == words
    known = ["--batch", "--loader.validation.size", "--dataset.training.size"]
    guesses = {"--btach": "--batch", "--size": "--loader.validation.size", "--batch": "", "x": ""}
    found = {name: f"; did you mean {likely}?" if likely else "" for name, likely in guesses.items()}
    assert {name: did_you_mean(name, known) for name in guesses} == found
