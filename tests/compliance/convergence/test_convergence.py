"""The convergence check, compared with the official RCP checker, the choice of runs, and the convergence command."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compliance.convergence.outlook import outlook, outlook_of, reference
from compliance.convergence.selection import FAILED, olympic_mean, select
from compliance.log import rules
from compliance.log.reader import read_log
from compliance.log.rules import RULESETS
from compliance.log.schedule import EvaluationSchedule, evaluation_interval
from tests.compliance.command import run
from tests.compliance.log_edits import delete, value
from tests.compliance.result_folders import write_series
from tests.compliance.run_logs import write_run
from tests.conftest import at_most

LATE, DUE = 2_550_528, 2_400_000
SETS: dict[str, tuple[list[int | None], int, rules.Division]] = {
    "no run": ([], 768, "closed"),
    "one run": ([DUE], 768, "closed"),
    "two runs": ([LATE, DUE], 768, "closed"),
    "three runs": ([LATE, DUE, 2_701_056], 768, "closed"),
    "four runs with a failed one": ([LATE, DUE, DUE, None], 768, "closed"),
    "nine fast runs": ([2_250_240] * 9, 768, "closed"),
    "nine slow runs": ([2_701_056] * 9, 768, "closed"),
    "two failed runs": ([LATE] * 3 + [None] * 2, 768, "closed"),
    "ten runs with a failed one": ([LATE] * 9 + [None], 768, "closed"),
    "ten runs": ([LATE, *[DUE] * 9], 768, "closed"),
    "ten fast runs": ([2_250_240] * 10, 768, "closed"),
    "above the largest point": ([9_000_000] * 10, 20_000, "closed"),
    "below the smallest point": ([DUE] * 10, 256, "closed"),
    "open": ([38_400] * 10, 32, "open"),
}


def test_each_set_of_runs_gets_the_recorded_outlook() -> None:
    found = {name: outlook(runs, batch, "5.0.0", division) for name, (runs, batch, division) in SETS.items()}
    lines = [f"{name}: {o.verdict}, mean {o.mean}, x {o.scaling:.6f}. {o.sentence}\n" for name, o in found.items()]
    assert "".join(lines) == Path(__file__).with_name("sets.txt").read_text()
    assert [name for name, each in found.items() if each.reference is None] == ["above the largest point", "open"]


def test_a_mean_below_the_references_mean_is_scaled_and_below_its_minimum_fails() -> None:
    found = reference("5.0.0", 448)
    assert found
    limits = {found.minimum - 1: "fail", found.minimum: "scaled", found.mean - 1: "scaled", found.mean: "pass"}
    assert {mean: found.verdict(mean) for mean in limits} == limits
    assert [found.scaling(found.mean / factor) for factor in (0.5, 1.0, 1.25)] == [1.0, 1.0, 1.25]


def test_a_reference_requires_a_valid_ruleset_and_batch_size() -> None:
    assert reference("5.0.0", 16_385) is None
    batch: Any
    for batch in (0, -448, 4.5, True):
        with pytest.raises(ValueError, match="global_batch_size is"):
            reference("5.0.0", batch)
    with pytest.raises(ValueError, match="ruleset is"):
        reference("6.0.0", 448)


def write_minimal(path: Path, batch: int, samples: int | None) -> None:
    """Write a log with only the records that the RCP checker reads."""
    status = "success" if samples else "aborted"
    records = [
        ("submission_benchmark", "bert", {}),
        ("global_batch_size", batch, {}),
        ("eval_accuracy", 0.72, {"epoch_num": samples or 1}),
        ("run_stop", None, {"status": status}),
    ]
    lines = [f":::MLLOG {json.dumps({'key': key, 'value': value, 'metadata': data})}\n" for key, value, data in records]
    path.write_text("".join(lines))


BATCHES = st.one_of(st.sampled_from([256, 448, 768, 4608, 6144, 12288, 16384, 20000]), st.integers(1, 17_000))


@given(data=st.data(), ruleset=st.sampled_from(RULESETS), batch=BATCHES, failed=st.sampled_from([0, 0, 0, 1, 1, 2, 3]))
def test_verdict_and_scaling_agree_with_the_rcp_checker(
    tmp_path_factory, data, ruleset: str, batch: int, failed: int
) -> None:
    # Import it here, because importing SciPy's statistics takes half a second.
    from mlperf_logging.rcp_checker import rcp_checker

    found = reference(ruleset, batch)
    centre = round(found.minimum if found and data.draw(st.booleans()) else found.mean if found else 3e6)
    near = st.integers(-3, 3).map(lambda off: centre + off)
    wide = st.integers(round(0.8 * centre), round(1.2 * centre))
    samples = data.draw(st.lists(data.draw(st.sampled_from([near, wide])), min_size=10, max_size=10))
    runs = [*samples[failed:], *([None] * failed)]
    folder = tmp_path_factory.getbasetemp() / "rcp"
    folder.mkdir(exist_ok=True)
    (folder / "scaling.json").unlink(missing_ok=True)
    for number, count in enumerate(runs):
        write_minimal(folder / f"result_{number}.txt", batch, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # undoes the RCP checker's change
        passed, message, factor = rcp_checker.check_directory(
            str(folder), "training", ruleset, False, False, rcp_pass="pruned_rcps", set_scaling=True
        )
    ours = outlook(runs, batch, ruleset)
    assert passed == (ours.verdict in ("pass", "scaled")), (ours.sentence, message)
    written = folder / "scaling.json"
    assert (ours.verdict == "scaled") == written.exists()
    if passed:
        assert ours.scaling == factor
        assert ours.scaling == (json.loads(written.read_text())["scaling_factor"] if written.exists() else 1.0)
    assert (ours.verdict == "no reference") == (found is None and failed < 2)


@at_most(10)
@given(data=st.data(), batch=st.sampled_from([448, 768, 4096, 16384]), done=st.integers(0, 9), failed=st.booleans())
def test_the_evaluation_required_of_missing_runs_agrees_with_a_brute_force_search(
    data: st.DataObject, batch: int, done: int, failed: bool
) -> None:
    schedule = [*map(EvaluationSchedule(evaluation_interval(batch), batch).samples, range(1, 161))]
    known: list[int | None] = data.draw(st.lists(st.sampled_from(schedule[10:30]), min_size=done, max_size=done))
    if failed and known:
        known[0] = None
    found = outlook(known, batch, "5.0.0")
    verdicts = [outlook([*known, *([samples] * (10 - done))], batch, "5.0.0").verdict for samples in schedule]
    to_pass = next((index for index, verdict in enumerate(verdicts) if verdict in ("pass", "scaled")), None)
    to_stand = next((index for index, verdict in enumerate(verdicts) if verdict == "pass"), None)
    assert found.verdict == ("fail" if to_pass is None else "unfinished")
    for index in (to_pass, to_stand):
        if index:
            assert f"at evaluation {index + 1} ({schedule[index]:,}) or later" in found.sentence
    assert found.sentence.count("can no longer") == [to_pass, to_stand].count(None)


def test_the_samples_to_the_target_equal_those_of_the_rcp_checker(tmp_path: Path) -> None:
    from mlperf_logging.rcp_checker import rcp_checker

    path = write_run(tmp_path / "result_0.txt")
    text = path.read_text()

    def converged(text: str) -> int | None:
        path.write_text(text)
        return read_log(path).run.converged_samples()

    last = next(line for line in reversed(text.splitlines()) if '"eval_accuracy"' in line)
    for accepted in (text, text + last.replace("450240", "999999") + "\n"):
        assert converged(accepted) == rcp_checker.read_submission_file(path, "5.0.0", False)[1] == 450_240
    for odd in ("0.000001", "-5", "true", '"many"', "1e300", "null"):
        # train_samples replaces an epoch_num that does not count sequences, if the evaluations confirm it.
        uncounted = text.replace('"epoch_num": ', f'"epoch_num": {odd}, "was": ')
        assert converged(uncounted) == 450_240, odd
        assert converged(uncounted.replace('"value": 450240', '"value": 2400384')) is None
    assert converged(text.replace('"status": "success"', '"status": "aborted"')) is None
    assert converged(delete("run_stop")(text)) is converged(delete("eval_accuracy")(text)) is None


def test_the_outlook_says_which_counts_were_replaced(tmp_path: Path) -> None:
    logs = write_series(tmp_path, [17, 17, 17, 17])
    texts = [log.read_text() for log in logs]
    uncounted = texts[0].replace('"epoch_num": ', '"epoch_num": -5, "was": ')
    texts[1] = value("eval_accuracy", 0.7205, -3)(texts[1])
    texts[2] = texts[2][: texts[2].index("run_stop")]
    said = ""
    for first in (texts[0], uncounted, uncounted.replace('"value": 2550016', '"value": 9')):
        for log, text in zip(logs, (first, *texts[1:]), strict=True):
            log.write_text(text)
        found = outlook_of([read_log(log).run for log in logs], 448, "5.0.0", failed=1)
        said += f"{found.verdict}, mean {found.mean}, x {found.scaling}, {found.by_train_samples}. {found.sentence}\n"
        assert found.note in found.sentence
    assert said == Path(__file__).with_name("counted.txt").read_text()


TIMES = st.floats(1, 100) | st.just(FAILED)


def test_a_series_has_no_score_if_its_median_window_has_two_failed_runs() -> None:
    times = [*[10.0] * 8, FAILED, FAILED, 10.0, 10.0]
    assert select(list(range(12)), times).score == FAILED


@given(st.lists(st.tuples(st.integers(0, 50), TIMES), min_size=10, max_size=25))
def test_the_chosen_window_is_consecutive_and_has_the_median_score(series: list[tuple[int, float]]) -> None:
    starts, times = [start for start, _ in series], [time for _, time in series]
    found = select(starts, times)
    order = sorted(range(len(series)), key=lambda run: starts[run])
    assert [*found.chosen] == order[found.window : found.window + 10]
    windows = [order[first : first + 10] for first in range(len(order) - 9)]
    assert found.scores == tuple(olympic_mean([times[run] for run in window]) for window in windows)
    assert found.score == olympic_mean([times[run] for run in found.chosen])
    faster = sum(score < found.score for score in found.scores)
    slower = sum(score > found.score for score in found.scores)
    assert faster <= len(found.scores) // 2
    assert slower <= (len(found.scores) - 1) // 2


@pytest.mark.slow
def test_the_convergence_command_prints_the_outlook_or_why_there_is_none(tmp_path: Path) -> None:
    logs = write_series(tmp_path / "unfinished", [17, 16, 17, 18, 17], failed={3})
    text = logs[4].read_text()
    logs[4].write_text(text[: text.index("\n", text.index("eval_accuracy")) + 1])  # a run in progress
    write_series(tmp_path / "fast", [15, 14] * 5)
    write_run(tmp_path / "open" / "result_0.txt", division="open")
    write_series(tmp_path / "above", [17] * 3, global_batch_size=20_000)
    _, alike = write_series(tmp_path / "alike", [17, 17])
    alike.write_text(delete("global_batch_size")(alike.read_text()))
    logs = write_series(tmp_path / "mixed", [17, 17])
    logs[1].write_text(logs[0].read_text().replace('"value": 448', '"value": 512'))
    sets = {
        "unfinished": (
            0,
            "4 of 10 runs, 1 of them not converged",
            "will pass if the 6 missing runs converge at evaluation 15",
        ),
        "fast": (1, "BERT on ", "minimum 2,274,732"),
        "fast --ruleset 2.0.0": (1, "batch sizes 256 and 3072"),
        "open": (0, "No reference convergence point applies in the open division."),
        "above": (1, "batch size 20000 is above the largest one, 16384"),
        "alike": (0, "2 of 10 runs"),
        "mixed": (2, "the logs do not agree on one submission_division and one global_batch_size"),
        "nowhere": (2, "no such folder"),
    }
    for arguments, (expected, *words) in sets.items():
        folder, *options = arguments.split()
        status, said = run("convergence", tmp_path / folder, *options)
        assert (status, [each for each in words if each not in said]) == (expected, [])
