"""The training step in one process: statistics and skipped steps."""

import math
from dataclasses import replace

import pytest
import torch

from bert.parallel.mesh import Mesh
from bert.step import Statistics, TrainingStep
from dataloading.batches.loader import batch_of
from tests.bert.operators import Operators
from tests.bert.small_models import OF_SMALL_RUN, step_config, training_step
from tests.conftest import SmallRun

pytestmark = pytest.mark.oldest_torch


CONFIG = step_config(replace(OF_SMALL_RUN, hidden_dropout=0.0, attention_dropout=0.0))


@pytest.fixture
def step() -> TrainingStep:
    return training_step(CONFIG)


def test_statistics_are_means_over_the_steps_since_the_last_fetch(step: TrainingStep, small_run: SmallRun) -> None:
    batches = [batch_of(small_run.train.slice(first, first + 8)) for first in (0, 8)]
    for batch in batches:
        step([batch])
    with Operators() as operators:
        means, stopping, own_seconds = step.statistics.fetch(stop=True, own_seconds=0.25)
    # The host must not copy a number to the GPU, because it would wait until the GPU has finished all queued work.
    assert "fill_" in operators.names
    assert not {"copy_", "_to_copy", "scalar_tensor", "lift_fresh"} & set(operators.names)
    assert (stopping, own_seconds) == (True, [0.25])
    assert means["tokens"] == sum(batch.tokens for batch in batches) / 2
    assert means["masked_lm_loss"] == pytest.approx(math.log(200), rel=0.1)
    assert means["next_sentence_loss"] == pytest.approx(math.log(2), rel=0.5)


@pytest.mark.parametrize(("rank", "share", "counts"), [(0, 1 / 4, True), (1, 3 / 4, True), (3, 3 / 4, False)])
def test_each_sites_statistics_are_weighted_by_its_share_of_the_ranks(rank: int, share: float, counts: bool) -> None:
    """Every rank counts its losses and tokens. The first rank of a site counts the site's steps and their norms."""
    mesh = Mesh(rank, 4, 0, torch.device("cpu"), tuple((each,) for each in range(4)), sites=("a", "b", "b", "b"))
    statistics = Statistics(mesh, apart=True)
    for _ in range(2):
        for loss in (2.0, 3.0):
            statistics.add_micro_batch(torch.tensor(loss), torch.tensor(0.5), torch.tensor(100))
        for norm in (6.0, 10.0, math.nan):
            statistics.add_step(torch.tensor(norm))
        means, stopping, own_seconds = statistics.fetch(own_seconds=1.5)
        steps = 3 * share * counts
        expected = {"masked_lm_loss": 5 * share, "next_sentence_loss": share, "tokens": 200, "gradient_norm": 0.0}
        if counts:
            expected["gradient_norm"] = 16 * share / max(1, steps) * max(1, steps) / max(1, steps - share)
        found = {name: value * (1 if name == "gradient_norm" else max(1, steps)) for name, value in means.items()}
        skipped = found.pop("skipped_steps") / max(1, steps)
        assert (found, skipped, stopping) == (pytest.approx(expected), share * counts, False)
        assert own_seconds == [1.5 * (each == rank) for each in range(4)]
    assert not Statistics(Mesh(1, 2, 0, torch.device("cpu"), ((0, 1),), tensor=2))._counts, "one rank of a copy counts"


def state(step: TrainingStep) -> list[torch.Tensor]:
    return [step.flat.weights_P, *step.optimizer.moments(), step.optimizer.steps]


def test_a_step_with_gradients_that_are_not_finite_is_skipped_and_counted(
    step: TrainingStep, small_run: SmallRun
) -> None:
    """A skipped step changes neither weights, moments nor the schedule, and the mean norm does not include it."""
    plain, batches = training_step(CONFIG), [batch_of(small_run.train.slice(0, 8))]
    for bad in (0.0, math.nan, math.inf, -math.inf, 0.0):
        step.flat.gradients_P[1234] = bad
        step(batches)
        assert not step.flat.gradients_P.any()
        if bad == 0:
            plain(batches)
        for found, expected in zip(state(step), state(plain), strict=True):
            assert torch.equal(found, expected)
    means, plain_means = step.statistics.fetch()[0], plain.statistics.fetch()[0]
    assert (means["skipped_steps"], step.optimizer.steps.item()) == (3, 2)
    assert means["gradient_norm"] == pytest.approx(plain_means["gradient_norm"], rel=1e-12)
    assert step.statistics.fetch() == (dict.fromkeys(Statistics.NAMES, 0.0), False, [0.0])
