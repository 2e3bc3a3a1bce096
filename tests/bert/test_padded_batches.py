"""Slots past the real counts are inert: padding a batch changes neither its losses nor its gradients."""

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from bert.configuration.recipes import RECIPES
from bert.configuration.sections import Precision
from bert.setup import captures, choose_shapes, synthetic_batches
from dataloading.batches.loader import Batch, batch_of, inert_batch
from dataloading.batches.plan import ShapeBucket
from dataloading.shards.samples import synthetic_samples
from kernels import OPS
from tests.bert.small_models import CPU, SMALL, assert_near, gradients, random_model

SAMPLES = synthetic_samples(np.array([20, 17, 17, 9, 3, 32]), SMALL.vocab_size, seed=3, masked_lm_prob=0.2)
TOKENS, MASKED = len(SAMPLES.input_ids), len(SAMPLES.masked_lm_ids)
LARGE = ShapeBucket(128, len(SAMPLES) + 5, 48, 32)
SHAPE_BUCKETS = [
    ShapeBucket(TOKENS + 1, len(SAMPLES), MASKED, 32),
    ShapeBucket(TOKENS + 1, len(SAMPLES), MASKED + 1, 32),
    ShapeBucket(TOKENS + 1, len(SAMPLES) + 1, MASKED, 32),
    LARGE,
]


def trained(batch: Batch, implementation: str = "auto") -> dict[str, Tensor]:
    """Return both mean losses and the gradients of their sum."""
    model = random_model().train()
    with ExitStack() as stack:
        for name in ("varlen_attention", "varlen_self_attention", "dropout_add_layer_norm", "embedding_layer_norm"):
            stack.enter_context(OPS[name].using(implementation))
        masked_lm_loss, next_sentence_loss = model(batch).mean_losses(batch)
        (masked_lm_loss + next_sentence_loss).backward()
    return gradients(model) | {"masked-LM loss": masked_lm_loss, "next-sentence loss": next_sentence_loss}


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("shape_bucket", SHAPE_BUCKETS)
def test_a_padded_batch_trains_as_the_batch_that_it_holds(shape_bucket: ShapeBucket, implementation: str) -> None:
    """What stands in empty token slots does not matter."""
    padded = batch_of(SAMPLES, shape_bucket=shape_bucket)
    assert padded.shape_bucket == shape_bucket
    padded.input_ids[TOKENS:] = 11
    assert_near(trained(padded, implementation), trained(batch_of(SAMPLES), implementation))


def test_a_batch_of_empty_slots_has_neither_losses_nor_gradients() -> None:
    assert not any(tensor.any() for tensor in trained(inert_batch(LARGE)).values())


@pytest.mark.parametrize(("precision", "padded"), [("fp32", False), ("bf16", True)])
def test_products_in_16_bits_of_a_cpu_have_few_numbers_of_rows(precision: Precision, padded: bool) -> None:
    """oneDNN compiles 16-bit products for each number of rows, so bf16 batches are padded to few shapes."""
    config = RECIPES["tiny_cpu"]()
    model = replace(config.model, hidden_size=256, num_attention_heads=4)
    config = replace(config, model=model, training=replace(config.training, precision=precision))
    lengths = np.random.default_rng(0).integers(8, 129, 4096)
    info = SimpleNamespace(max_seq_length=128)
    train: Any = SimpleNamespace(lengths=lengths, masked_counts=lengths // 7 + 1, info=info)
    assert not captures(config, CPU)
    shapes = choose_shapes(config, train, CPU)
    assert bool(shapes) == padded
    assert len(shapes) <= 16
    [batch] = synthetic_batches(config, train, CPU, shapes)
    assert (batch.shape_bucket in shapes) == padded
