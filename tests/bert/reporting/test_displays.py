"""The log lines, the remaining time and the slow ranks that a run shows, and the numbers in TensorBoard."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bert.guards.preflight import check
from bert.reporting import reporter
from bert.reporting.intervals import Stragglers
from bert.reporting.reporter import StepLines, TensorBoard
from bert.train import parse
from compliance.log.metrics import EndRecord, EvaluationRecord, StepRecord, Straggler
from compliance.log.schedule import EvaluationSchedule
from tests.conftest import SmallRun

STEP = StepRecord(
    step=20, samples=640, time_s=2.0, step_ms=100.0, data_wait_ms=5.0, forward_backward_ms=80.0, reduce_ms=5.0,
    update_ms=10.0, loss=5.5, masked_lm_loss=4.8, next_sentence_loss=0.7, learning_rate=1e-3, gradient_norm=2.0,
    tokens_per_s=28_000.0, sequences_per_s=320.0,
)  # fmt: skip
EVALUATION = EvaluationRecord(
    step=20, samples=640, time_s=2.5, eval_s=0.5, masked_lm_accuracy=0.25, correct=25, count=100
)
END = EndRecord(status="success", time_s=65.0, samples=640, masked_lm_accuracy=0.36)


def display(*records: StepRecord | EvaluationRecord, **settings: Any) -> StepLines:
    schedule = EvaluationSchedule(640, 32)
    made = StepLines(lambda _: None, **({"target": 0.4, "max_samples": 6400, "schedule": schedule} | settings))
    for record in records:
        made.write(record)
    return made


def test_lines_are_shortened_to_the_terminals_width() -> None:
    """A line that is exactly as wide as the terminal is not shortened."""
    whole = {
        "  tok/s": "step     20  samples       640    100.0 ms     320.0 seq/s      28000 tok/s  wait  5.0 %  loss 5.5000  "
        "lr 1.00e-03  eta 0:18",
        "  wait": "step     20  samples       640    100.0 ms     320.0 seq/s  wait  5.0 %  loss 5.5000  lr 1.00e-03  "
        "eta 0:18",
        "  lr": "step     20  samples       640    100.0 ms     320.0 seq/s  loss 5.5000  lr 1.00e-03  eta 0:18",
        "  samples": "step     20  samples       640    100.0 ms     320.0 seq/s  loss 5.5000  eta 0:18",
        " ms": "step     20    100.0 ms     320.0 seq/s  loss 5.5000  eta 0:18",
        "": "step     20     320.0 seq/s  loss 5.5000  eta 0:18",
    }
    lines: list[str] = []
    sink = display(width=None, target=None)
    sink.put = lines.append
    for line in (None, *whole.values()):
        sink.width = None if line is None else len(line)
        sink.write(STEP)
    sink.width = 1
    sink.write(replace(STEP, skipped_steps=2))
    skipped = f"{whole['']}  WARNING: 2 skipped, gradients not finite"
    assert lines == [whole["  tok/s"], *whole.values(), skipped]
    lines.clear()
    evaluation = "eval     20  samples       640  accuracy 0.2500  (25/100)  perplexity 123.5  best 0.2500  0.50 s"
    for sink.width in (None, len(evaluation), len(evaluation) - 1, 1):
        sink.write(replace(EVALUATION, perplexity=123.45))
    without = evaluation.replace("  samples       640", "")
    assert lines == [evaluation, evaluation, without, without.replace("  (25/100)", "").replace("  0.50 s", "")]


def test_the_time_left_is_a_range_if_the_accuracy_rises_and_otherwise_an_upper_bound() -> None:
    resumed = display(replace(STEP, samples=320), resumed_samples=320)
    assert resumed.eta == "-"
    resumed.write(STEP)  # 320 samples took 2 s since resuming, and 5760 remain
    assert resumed.eta == "at most 0:36"
    rising = [
        replace(EVALUATION, samples=640 * number, masked_lm_accuracy=accuracy)
        for number, accuracy in enumerate((0.10, 0.20, 0.28, 0.33), start=1)
    ]
    later = replace(STEP, samples=2560, time_s=25.6)  # 100 samples a second
    assert display().eta == "-"
    assert display(*rising[:3], later).eta == "at most 0:38"
    assert display(*rising, later).eta == "0:06 to 0:38"
    assert display(*rising, replace(later, samples=6400, time_s=64.0)).eta == "0:00 to 0:00"
    assert display(*rising, later, target=None).eta == "0:38"  # without a target, all samples are trained
    assert display(replace(STEP, samples=656, time_s=6560.0), target=None, max_samples=650).eta == "0:00"
    flat = [replace(evaluation, masked_lm_accuracy=0.1) for evaluation in rising]
    assert display(*flat, later).eta == "at most 0:38"


def same_work() -> Stragglers:
    """Return a detector for four ranks of one stage on two hosts."""
    hosts = ["n0", "n0", "n1", "n1"]
    return Stragglers(hosts, [0] * 4, [f"rank {rank} on host {host}" for rank, host in enumerate(hosts)])


def test_a_rank_is_reported_once_after_three_slow_and_once_after_three_fast_intervals() -> None:
    """A fast interval resets the count of slow intervals."""
    ranks, said = same_work(), []
    for number, seconds in enumerate([0.15] * 2 + [0.1] + [0.15] * 8 + [0.1] * 3 + [0.15] * 3, 1):
        said += [(number, *found) for found in ranks.add([0.1, 0.1, 0.1, seconds])]
    slow = "rank 3 on host n1 is slow: 150.0 ms a step of its own, 1.50 times the median"
    fast = "rank 3 on host n1 is no longer slow: 100.0 ms a step of its own, 1.00 times the median"
    assert said == [
        (6, slow, Straggler(3, "n1", True, 150.0, 100.0)),
        (14, fast, Straggler(3, "n1", False, 100.0, 100.0)),
        (17, slow, Straggler(3, "n1", True, 150.0, 100.0)),
    ]


@pytest.mark.parametrize(
    ("seconds", "named"),
    [
        # The outlier 10.0 does not move the median with which ranks are compared.
        ([0.1, 0.1, 0.119, 10.0], "3 on host n1 is slow: 10000.0 ms a step of its own, 91.32 times"),
        ([0.1, 0.1, 0.121, 0.1], "2 on host n1 is slow: 121.0 ms a step of its own, 1.21 times"),
        ([1.0, 1.0, 1.0, 1.2], None),
        ([0.0, 0.0, 0.0, 0.5], "3 on host n1 is slow: 500.0 ms a step of its own, inf times"),
        ([0.0] * 4, None),
    ],
)
def test_a_rank_is_slow_above_1_2_times_the_median(seconds: list[float], named: str | None) -> None:
    ranks = same_work()
    said = [text for _ in range(3) for text, _ in ranks.add(seconds)]
    assert said == ([] if named is None else [f"rank {named} the median"])


def test_ranks_are_compared_with_ranks_of_the_same_pipeline_stage() -> None:
    """Stage 1 has twice the work of stage 0. Rank 2 of stage 0 takes as long as the ranks of stage 1, so it is slow."""
    names = [f"rank {rank} on host n (data {rank // 2}, pipeline {rank % 2}, tensor 0)" for rank in range(6)]
    ranks = Stragglers(["n"] * 6, stages=[0, 1] * 3, names=names)
    *before, [(text, _)] = [ranks.add([0.1, 0.2, 0.2, 0.2, 0.1, 0.2]) for _ in range(3)]
    assert before == [[], []]
    assert text.startswith("rank 2 on host n (data 1, pipeline 0, tensor 0) is slow: 200.0 ms a step of its own, 2.00")


OF_A_STEP = """
    loss/loss loss/masked_lm_loss loss/next_sentence_loss
    optimizer/learning_rate optimizer/gradient_norm optimizer/skipped_steps
    rate/sequences_per_s rate/tokens_per_s
    step/step_ms step/data_wait_ms step/forward_backward_ms step/reduce_ms step/update_ms
"""
OF_AN_EVALUATION = "evaluation/masked_lm_accuracy evaluation/eval_s"


@pytest.mark.slow
def test_tensorboard_gets_each_records_values_with_its_samples_as_step(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    for record in (STEP, EVALUATION, END):
        sink.write(record)
    sink.close()
    [file] = tmp_path.iterdir()
    events = EventAccumulator(str(file)).Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(f"{OF_A_STEP} {OF_AN_EVALUATION}".split())
    for tags, record in ((OF_A_STEP, STEP), (OF_AN_EVALUATION, EVALUATION)):
        for tag in tags.split():
            [shown] = events.Scalars(tag)
            assert (shown.step, shown.value) == (640, pytest.approx(getattr(record, tag.partition("/")[2])))


def test_a_missing_tensorboard_package_is_refused(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse(small_run.arguments(tmp_path / "r", log__tensorboard=tmp_path / "t"))
    check(config, 1)
    monkeypatch.setattr(reporter, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"^log.tensorboard is set, .*: pip install '\.\[tensorboard\]', or"):
        check(config, 1)
    assert list(tmp_path.iterdir()) == []
