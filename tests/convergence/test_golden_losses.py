"""The golden loss curve: a small model on synthetic samples, with every number drawn from fixed seeds.

    python -m tests.convergence.test_golden_losses        # overwrites tests/convergence/golden_losses.json

A change to the program must reproduce the losses in this file, unless it is meant to change them. Then overwrite the
file and give the reason in the commit message.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bert.configuration.sections import ModelConfig, OptimizerConfig
from bert.optimizer import FlatParameters, Lamb
from dataloading.batches.loader import batch_of
from dataloading.batches.sampler import BatchSampler
from dataloading.shards.samples import Samples, synthetic_samples
from tests.bert.small_models import drawn_model

FILE = Path(__file__).with_name("golden_losses.json")
STEPS = 30
MODEL = ModelConfig(2, 64, 4, 128, 128, 64, hidden_dropout=0.0, attention_dropout=0.0)


def predictable_samples() -> Samples:
    """Return synthetic samples whose masked tokens depend on their positions, so that there is something to learn."""
    samples = synthetic_samples(np.random.default_rng(5).integers(8, 65, 400), vocab_size=128, seed=5)
    learnable = (samples.masked_lm_positions % 16 + 16).astype(np.uint16)
    return Samples(**{**samples.__dict__, "masked_lm_ids": learnable})


def losses() -> list[dict[str, float]]:
    """Train without dropout, and return both losses and the gradient norm of every step."""
    torch.manual_seed(0)
    model = drawn_model(MODEL, 1)
    optimizer = Lamb(FlatParameters.of(model), OptimizerConfig(2e-2, 60, num_warmup_steps=5, start_warmup_step=-1))
    samples = predictable_samples()
    plan = BatchSampler(samples.lengths, samples.masked_counts, 16, 1, 1, seed=2)
    curve = []
    for step in range(STEPS):
        (micro,) = plan.rank_batches(step, 0)
        batch = batch_of(samples.take(micro.indices), micro)
        masked_lm, next_sentence = model(batch).mean_losses(batch)
        (masked_lm + next_sentence).backward()
        losses = {"masked_lm_loss": float(masked_lm.detach()), "next_sentence_loss": float(next_sentence.detach())}
        curve.append(losses | {"gradient_norm": float(optimizer.step())})
    return curve


def test_the_loss_curve_equals_the_golden_curve() -> None:
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    curve = losses()
    assert len(golden) == len(curve) == STEPS
    for step, (expected, found) in enumerate(zip(golden, curve, strict=True)):
        assert found == pytest.approx(expected, rel=1e-4), step
    assert curve[-1]["masked_lm_loss"] < 0.7 * curve[0]["masked_lm_loss"], "the run learns"


if __name__ == "__main__":
    FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in losses()) + "\n]\n", encoding="utf-8")
    print(FILE)
