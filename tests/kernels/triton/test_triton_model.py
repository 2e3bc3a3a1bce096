"""The whole model with dropout has the same losses and gradients with Triton's kernels as with the definitions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bert.checkpoints.initial_model import initialize_
from bert.configuration.sections import ModelConfig
from bert.model import BertForPreTraining
from dataloading.batches.loader import Batch, batch_of
from dataloading.batches.sampler import ShapeBucket
from dataloading.shards.samples import synthetic_samples
from kernels import OPS, choose

MODEL = ModelConfig(2, 32, 2, 64, 100, 48)
SAMPLES = synthetic_samples(np.array([33, 17, 3]), MODEL.vocab_size)
MODEL_OPS = [name for name, op in OPS.items() if "triton" in op.implementations and name != "lamb_step"]
Trained = tuple[list[float], dict[str, Tensor]]


def trained(implementation: str, config: ModelConfig, batch: Batch) -> Trained:
    """Train on a batch with one implementation of all ops; return losses, correct predictions and gradients."""
    model = BertForPreTraining(config).train()
    initialize_(model, seed=0)
    model.seed_dropout(11)
    choose(dict.fromkeys(MODEL_OPS, implementation))
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
@pytest.mark.parametrize(
    ("p", "bucket"), [(0.1, None), (0.0, ShapeBucket(96, len(SAMPLES) + 2, 32, 48))], ids=["dropout", "padded"]
)
def test_losses_and_gradients_agree_with_the_definitions(p: float, bucket: ShapeBucket | None):
    """conftest.py fills new memory with NaN, so a row that no program writes would change the results."""
    config = replace(MODEL, hidden_dropout=p, attention_dropout=p)
    expected_losses, definition = trained("reference", config, batch_of(SAMPLES))
    losses, gradients = trained("triton", config, batch_of(SAMPLES, shape_bucket=bucket))
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, expected in definition.items():
        error = (gradients[name] - expected).abs().max().item()
        assert error <= 2e-5 * max(expected.abs().max().item(), 1e-3), name
