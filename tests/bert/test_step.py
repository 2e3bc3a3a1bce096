"""The training step in one process."""

import sys
from collections.abc import Callable
from typing import Any

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


READS = ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")


def count_reads(monkeypatch: pytest.MonkeyPatch, reads: list[str]) -> None:
    """Append ``method in module.function`` to ``reads`` for every later call that copies values to the host."""
    for name in READS:
        original = getattr(torch.Tensor, name)

        def counted(
            tensor: torch.Tensor, *args: Any, name: str = name, original: Callable[..., Any] = original, **kwargs: Any
        ) -> Any:
            caller = sys._getframe(1)
            reads.append(f"{name} in {caller.f_globals['__name__']}.{caller.f_code.co_name}")
            return original(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)


def test_a_step_reads_nothing_back(step: TrainingStep, small_run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only attention on a CPU may read lengths. Reads in Python and below it count, in the first step and the second."""
    batches = [batch_of(small_run.train.slice(first, first + 8)) for first in (0, 8)]
    reads: list[str] = []
    with monkeypatch.context() as patch, Operators() as operators:
        count_reads(patch, reads)
        for _ in range(2):
            step(batches)
    assert set(reads) == {"tolist in kernels.libraries.pytorch._lengths"}
    assert operators.waits == []


def test_the_host_hands_over_the_same_in_every_step(step: TrainingStep, small_run: SmallRun) -> None:
    """Compare the operators and host values that a captured step would replay.

    The learning rate, step count and bias corrections must not be among these values.
    """
    batches = [batch_of(small_run.train.slice(0, 8))]
    calls = []
    for _ in range(3):
        with Operators() as operators:
            step(batches)
        calls.append((operators.names, operators.values))
    assert len(calls[0][0]) > 100
    assert calls[0] == calls[1] == calls[2]


def test_statistics_are_means_over_the_steps_since_the_last_fetch(step: TrainingStep, small_run: SmallRun) -> None:
    batches = [batch_of(small_run.train.slice(first, first + 8)) for first in (0, 8)]
    for batch in batches:
        step([batch])
    with Operators() as operators:
        means, stopping = step.statistics.fetch(stop=True, own_seconds=0.25)
    # Copying a number to a GPU would make the host wait until the GPU has finished all queued work.
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
    """Weights, moments and the step count stay the same, the mean norm covers the other steps, and training continues."""
    batches = [batch_of(small_run.train.slice(0, 8))]
    step(batches)
    norm = step.statistics.fetch()[0]["gradient_norm"]
    before = [tensor.clone() for tensor in (step.flat.weights_P, *step.optimizer.moments(), step.optimizer.steps)]
    for bad in (float("nan"), float("inf"), -float("inf")):
        step.flat.gradients_P[1234] = bad
        step(batches)
    after = (step.flat.weights_P, *step.optimizer.moments(), step.optimizer.steps)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert step.optimizer.skipped.item() == 3
    assert not step.flat.gradients_P.any()
    step(batches)
    means, _ = step.statistics.fetch()
    assert means["skipped_steps"] == 3
    assert 0.5 * norm < means["gradient_norm"] < 2 * norm
    assert step.optimizer.steps.item() == 2
    assert not torch.equal(before[0], step.flat.weights_P)
    assert step.statistics.fetch()[0]["skipped_steps"] == 0
