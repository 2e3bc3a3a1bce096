"""A padded batch through Triton's kernels: nothing that lies in empty slots, or is left unwritten there, reaches a result.

New memory is NaN here (conftest), so that a row which no program writes would be noticed.
"""

from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from bert.configuration.config import ModelConfig
from bert.model import BertForPreTraining, initialize_
from dataloading.batches.loader import Batch, batch_of
from dataloading.batches.shape_buckets import ShapeBucket
from dataloading.batches.synthetic import synthetic_samples
from kernels import OPS

MODEL = ModelConfig(2, 32, 2, 64, 50, 48, hidden_dropout=0.0, attention_dropout=0.0)
SAMPLES = synthetic_samples(np.array([33, 17, 3]), MODEL.vocab_size)
OF_THE_MODEL = (
    "varlen_attention",
    "varlen_self_attention",
    "dropout_add_layer_norm",
    "dense_gelu",
    "embedding_layer_norm",
    "masked_lm_loss",
)


def trained(batch: Batch) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = BertForPreTraining(MODEL).train()
    initialize_(model, torch.Generator().manual_seed(0))
    with ExitStack() as stack:
        for name in OF_THE_MODEL:
            stack.enter_context(OPS[name].using("triton"))
        losses = list(model(batch).mean_losses(batch))
        (losses[0] + losses[1]).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return [loss.detach() for loss in losses], gradients


def test_a_padded_batch_trains_as_the_batch_that_it_holds() -> None:
    expected_losses, expected = trained(batch_of(SAMPLES))
    losses, gradients = trained(batch_of(SAMPLES, shape_bucket=ShapeBucket(96, len(SAMPLES) + 2, 32, 48)))
    for loss, right in zip(losses, expected_losses, strict=True):
        torch.testing.assert_close(loss, right, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=2e-7, msg=lambda text, n=name: f"{n}: {text}"
        )
