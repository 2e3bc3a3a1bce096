"""TensorBoard itself reads the event files that a run writes."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bert.guards.preflight import check
from bert.reporting import reporter
from bert.reporting.reporter import TensorBoard
from bert.train import parse
from tests.bert.reporting.test_displays import END, EVALUATION, STEP
from tests.conftest import SmallRun

OF_A_STEP = """
    loss/loss loss/masked_lm_loss loss/next_sentence_loss
    optimizer/learning_rate optimizer/gradient_norm optimizer/skipped_steps
    rate/sequences_per_s rate/tokens_per_s
    step/step_ms step/data_wait_ms step/forward_backward_ms step/reduce_ms step/update_ms
"""
OF_AN_EVALUATION = "evaluation/masked_lm_accuracy evaluation/eval_s"


@pytest.mark.slow
def test_the_numbers_of_records_are_shown_by_samples(tmp_path: Path) -> None:
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


def test_a_missing_package_is_named(small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(small_run.arguments(tmp_path / "r", log__tensorboard=tmp_path / "t"))
    check(config, 1)
    monkeypatch.setattr(reporter, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"^log.tensorboard is set, .*: pip install '\.\[tensorboard\]', or"):
        check(config, 1)
    assert list(tmp_path.iterdir()) == []
