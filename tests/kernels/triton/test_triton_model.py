"""The whole model with dropout has the same losses and gradients with Triton's kernels as with the definitions."""

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bert.configuration.sections import ModelConfig
from bert.model import BertForPreTraining, initialize_
from dataloading.batches.loader import Batch, batch_of
from dataloading.batches.shape_buckets import ShapeBucket
from dataloading.batches.synthetic import synthetic_samples
from kernels import OPS

MODEL = ModelConfig(2, 32, 2, 64, 100, 48)
SAMPLES = synthetic_samples(np.array([33, 17, 3]), MODEL.vocab_size)
MODEL_OPS = [name for name, op in OPS.items() if "triton" in op.implementations and name != "lamb_step"]
Trained = tuple[list[float], dict[str, Tensor]]


def trained(implementation: str, batch: Batch | None = None, config: ModelConfig = MODEL) -> Trained:
    """Train on a batch with one implementation of all ops; return losses, correct predictions and gradients."""
    model = BertForPreTraining(config).train()
    initialize_(model, torch.Generator().manual_seed(0))
    model.seed_dropout(11)
    batch = batch or batch_of(SAMPLES)
    with ExitStack() as stack:
        for name in MODEL_OPS:
            stack.enter_context(OPS[name].using(implementation))
        output = model(batch)
        masked, following = output.mean_losses(batch)
        (masked + following).backward()
        with torch.no_grad():
            correct = model.eval()(batch).masked_lm_correct
    assert output.masked_lm_correct is None
    assert correct is not None
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return [masked.item(), following.item(), correct.item()], gradients


@pytest.mark.oldest_torch
def test_losses_and_gradients_are_those_of_the_definitions():
    (losses, gradients), definition = trained("triton"), trained("reference")
    assert losses == pytest.approx(definition[0], rel=1e-5)
    for name, expected in definition[1].items():
        error = (gradients[name] - expected).abs().max().item()
        assert error <= 2e-5 * max(expected.abs().max().item(), 1e-3), name


def test_a_padded_batch_trains_as_the_batch_that_it_holds():
    """conftest fills new memory with NaN, so that rows that no program writes would affect the results."""
    config = replace(MODEL, hidden_dropout=0.0, attention_dropout=0.0)
    expected_losses, expected = trained("triton", config=config)
    padded = batch_of(SAMPLES, shape_bucket=ShapeBucket(96, len(SAMPLES) + 2, 32, 48))
    losses, gradients = trained("triton", padded, config)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=2e-7, msg=lambda text, n=name: f"{n}: {text}"
        )
