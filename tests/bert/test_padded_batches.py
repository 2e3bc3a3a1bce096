"""Slots past the real count are inert: a padded batch has the losses and gradients of the batch that it holds."""

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bert.configuration.config import ModelConfig
from bert.model import BertForPreTraining
from dataloading.batches.loader import Batch, batch_of, inert_batch
from dataloading.batches.shape_buckets import ShapeBucket
from dataloading.batches.synthetic import synthetic_samples
from kernels import OPS

CONFIG = ModelConfig(3, 24, 3, 40, 97, 32, hidden_dropout=0.0, attention_dropout=0.0)
LENGTHS = np.array([20, 17, 17, 9, 3, 32])
SAMPLES = synthetic_samples(LENGTHS, CONFIG.vocab_size, seed=3, masked_lm_prob=0.2)
TOKENS, MASKED = len(SAMPLES.input_ids), len(SAMPLES.masked_lm_ids)
SHAPE_BUCKETS = [
    ShapeBucket(TOKENS + 1, len(SAMPLES), MASKED, 32),
    ShapeBucket(TOKENS + 1, len(SAMPLES), MASKED + 1, 32),
    ShapeBucket(TOKENS + 1, len(SAMPLES) + 1, MASKED, 32),
    ShapeBucket(128, len(SAMPLES) + 5, 48, 32),
    ShapeBucket(512, len(SAMPLES), 64, 32),
]
Training = tuple[list[Tensor], dict[str, Tensor]]


def random_model() -> BertForPreTraining:
    model = BertForPreTraining(CONFIG)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.ndim == 1 and bool((parameter == 1).all()) else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + centre)
    return model.double().train()


def trained(batch: Batch, implementation: str = "auto") -> Training:
    """Both mean losses, and the gradients of their sum."""
    model = random_model()
    with ExitStack() as stack:
        for name in ("varlen_attention", "varlen_self_attention", "dropout_add_layer_norm", "embedding_layer_norm"):
            stack.enter_context(OPS[name].using(implementation))
        losses = list(model(batch).mean_losses(batch))
        (losses[0] + losses[1]).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return [loss.detach() for loss in losses], gradients


def assert_equal(got: Training, expected: Training) -> None:
    assert len(got[1]) == len(expected[1]) == len(list(random_model().parameters()))
    for loss, right in zip(got[0], expected[0], strict=True):
        torch.testing.assert_close(loss, right, rtol=1e-12, atol=0)
    for name, gradient in got[1].items():
        scale = max(expected[1][name].abs().max().item(), 1e-2)  # a key bias's gradient is 0 in exact arithmetic
        assert (gradient - expected[1][name]).abs().max().item() <= 1e-12 * scale, name


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("shape_bucket", SHAPE_BUCKETS)
def test_a_padded_batch_trains_as_the_batch_that_it_holds(shape_bucket: ShapeBucket, implementation: str) -> None:
    padded = batch_of(SAMPLES, shape_bucket=shape_bucket)
    assert padded.shape_bucket == shape_bucket
    assert_equal(trained(padded, implementation), trained(batch_of(SAMPLES), implementation))


@pytest.mark.parametrize("shape_bucket", SHAPE_BUCKETS)
def test_counts_and_heads_are_those_of_the_real_slots(shape_bucket: ShapeBucket) -> None:
    model, plain, padded = random_model().eval(), batch_of(SAMPLES), batch_of(SAMPLES, shape_bucket=shape_bucket)
    with torch.no_grad():
        for ours, theirs in zip(model.head_inputs(padded), model.head_inputs(plain), strict=True):
            torch.testing.assert_close(ours[: len(theirs)], theirs, rtol=1e-12, atol=1e-13)
            assert ours.isfinite().all()
        assert model(padded).masked_lm_correct == model(plain).masked_lm_correct
        rows = model.encode(padded)
    assert rows.isfinite().all()
    torch.testing.assert_close(padded.global_counts, plain.global_counts)


def test_what_stands_in_empty_token_slots_does_not_matter() -> None:
    shape_bucket = SHAPE_BUCKETS[3]
    padded = batch_of(SAMPLES, shape_bucket=shape_bucket)
    filled = padded.input_ids.clone()
    filled[TOKENS:] = 11
    assert_equal(trained(replace(padded, input_ids=filled)), trained(padded))


def test_a_batch_of_empty_slots_has_neither_losses_nor_gradients() -> None:
    losses, gradients = trained(inert_batch(SHAPE_BUCKETS[3]))
    assert [loss.item() for loss in losses] == [0, 0]
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("field", ["masked_lm_ids", "next_sentence_labels", "cu_seqlens"])
def test_the_comparison_notices_slots_that_are_not_inert(field: str) -> None:
    """Labels of 0 in empty slots, or a last sequence that owns an empty row."""
    padded = batch_of(SAMPLES, shape_bucket=SHAPE_BUCKETS[3])
    value = getattr(padded, field)
    wrong = torch.where(value == TOKENS, TOKENS + 1, value) if field == "cu_seqlens" else value.clamp(min=0)
    with pytest.raises(AssertionError):
        assert_equal(trained(replace(padded, **{field: wrong})), trained(padded))
