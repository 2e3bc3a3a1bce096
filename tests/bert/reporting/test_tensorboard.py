"""TensorBoard itself reads the event files that a run writes."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bert.guards.preflight import check
from bert.reporting import reporter
from bert.train import parse
from tests.conftest import SmallRun
from tests.distributed.ranks import Ranks, records

OF_A_STEP = """
    loss/loss loss/masked_lm_loss loss/next_sentence_loss
    optimizer/learning_rate optimizer/gradient_norm optimizer/skipped_steps
    rate/sequences_per_s rate/tokens_per_s
    step/step_ms step/data_wait_ms step/forward_backward_ms step/reduce_ms step/update_ms
"""
OF_AN_EVALUATION = "evaluation/masked_lm_accuracy evaluation/eval_s"


@pytest.mark.slow
def test_a_run_shows_the_numbers_of_its_metrics_by_samples(small_run: SmallRun, tmp_path: Path) -> None:
    settings = small_run.arguments(tmp_path / "r", log__tensorboard=tmp_path / "t" / "b")
    with Ranks(settings, 2) as ranks:
        assert ranks.ends() == [1, 1], ranks.output  # the target is out of reach
    [file] = (tmp_path / "t" / "b" / "tiny_cpu" / "result_0").iterdir()  # only rank 0 writes events
    events = EventAccumulator(str(file)).Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(f"{OF_A_STEP} {OF_AN_EVALUATION}".split())
    for tags, event, count in ((OF_A_STEP, "step", 10), (OF_AN_EVALUATION, "eval", 2)):
        expected = records(tmp_path / "r", event)
        assert len(expected) == count
        for tag in tags.split():
            shown = events.Scalars(tag)
            assert [scalar.step for scalar in shown] == [record["samples"] for record in expected]
            values = [record[tag.partition("/")[2]] for record in expected]
            assert [scalar.value for scalar in shown] == pytest.approx(values, rel=1e-6)


def test_without_the_package_the_error_says_what_to_install(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse(small_run.arguments(tmp_path / "r", log__tensorboard=tmp_path / "t"))
    check(config, 1)
    monkeypatch.setattr(reporter, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"^log.tensorboard is set, .*: pip install '\.\[tensorboard\]', or"):
        check(config, 1)
    assert list(tmp_path.iterdir()) == []
