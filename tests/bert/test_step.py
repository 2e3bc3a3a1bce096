"""The training step in one process: statistics and skipped steps."""

import pytest
import torch

from bert.step import TrainingStep
from dataloading.batches.loader import batch_of
from tests.bert.operators import Operators
from tests.bert.small_models import step_config, training_step
from tests.conftest import SmallRun

pytestmark = pytest.mark.oldest_torch


@pytest.fixture
def step() -> TrainingStep:
    return training_step(step_config())


def test_statistics_are_means_over_the_steps_since_the_last_fetch(step: TrainingStep, small_run: SmallRun) -> None:
    batches = [batch_of(small_run.train.slice(first, first + 8)) for first in (0, 8)]
    for batch in batches:
        step([batch])
    with Operators() as operators:
        means, stopping = step.statistics.fetch(stop=True, own_seconds=0.25)
    # The host must not copy a number to the GPU, because it would wait until the GPU has finished all queued work.
    assert "fill_" in operators.names
    assert not {"copy_", "_to_copy", "scalar_tensor", "lift_fresh"} & set(operators.names)
    assert (stopping, step.statistics.own_seconds) == (True, [0.25])
    assert means["tokens"] == sum(batch.tokens for batch in batches) / 2
    assert 4 < means["masked_lm_loss"] < 7
    assert 0.3 < means["next_sentence_loss"] < 1.5
    assert means["gradient_norm"] > 0


def test_a_step_with_gradients_that_are_not_finite_is_skipped_and_counted(
    step: TrainingStep, small_run: SmallRun
) -> None:
    """A skipped step changes neither weights, moments nor the step count, and the mean norm does not include it."""
    batches = [batch_of(small_run.train.slice(0, 8))]
    step(batches)
    norm = step.statistics.fetch()[0]["gradient_norm"]
    before = [tensor.clone() for tensor in (step.flat.weights_P, *step.optimizer.moments(), step.optimizer.steps)]
    for bad in (float("nan"), float("inf"), -float("inf")):
        step.flat.gradients_P[1234] = bad
        step(batches)
    after = (step.flat.weights_P, *step.optimizer.moments(), step.optimizer.steps)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not step.flat.gradients_P.any()
    step(batches)
    means, _ = step.statistics.fetch()
    assert means["skipped_steps"] == 3
    assert 0.5 * norm < means["gradient_norm"] < 2 * norm
    assert step.optimizer.steps.item() == 2
    assert not torch.equal(before[0], step.flat.weights_P)
    assert step.statistics.fetch()[0]["skipped_steps"] == 0
