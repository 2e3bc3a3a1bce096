"""The whole model through Triton's kernels: the same losses and gradients as through the definitions, dropout included."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch import Tensor

from bert.configuration.config import ModelConfig
from bert.model import BertForPreTraining, initialize_
from dataloading.batches.loader import batch_of
from dataloading.batches.synthetic import synthetic_samples
from kernels import OPS

MODEL = ModelConfig(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=2,
    intermediate_size=128,
    vocab_size=200,
    max_position_embeddings=64,
)
MODEL_OPS = [name for name in OPS if name not in ("lamb_step", "scaled_matmul")]


def losses_and_gradients(implementation: str, low_precision: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """Of one training batch, every op computed by ``implementation``; after the losses the right answers in evaluation."""
    model = BertForPreTraining(MODEL).train()
    initialize_(model, torch.Generator().manual_seed(0))
    model.seed_dropout(11)
    batch = batch_of(synthetic_samples(np.array([40, 33, 3]), MODEL.vocab_size))
    with ExitStack() as stack:
        for name in MODEL_OPS:
            stack.enter_context(OPS[name].using(implementation))
        with torch.autocast("cpu", torch.bfloat16, enabled=low_precision):
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


@pytest.fixture(scope="module")
def definition() -> tuple[list[float], dict[str, Tensor]]:
    return losses_and_gradients("reference")


@pytest.mark.oldest_torch
def test_losses_and_gradients_are_those_of_the_definitions(definition: tuple[list[float], dict[str, Tensor]]):
    losses, gradients = losses_and_gradients("triton")
    assert losses == pytest.approx(definition[0], rel=1e-5)
    for name, expected in definition[1].items():
        error = (gradients[name] - expected).abs().max().item()
        assert error <= 2e-5 * max(expected.abs().max().item(), 1e-3), name


def test_low_precision_stays_near(definition: tuple[list[float], dict[str, Tensor]]):
    losses, gradients = losses_and_gradients("triton", low_precision=True)
    assert losses[:2] == pytest.approx(definition[0][:2], rel=2e-2)
    for name, expected in definition[1].items():
        found = gradients[name].flatten()
        likeness = torch.cosine_similarity(found, expected.flatten(), dim=0).item()
        assert likeness > 0.98 or expected.abs().max().item() < 1e-4, (name, likeness)
