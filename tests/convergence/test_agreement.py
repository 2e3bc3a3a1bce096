"""Training on real text agrees with an independent implementation in losses, gradient norms and weights.

The program trains on two ranks over gloo, as a user runs it. Hugging Face's model with the reference's LAMB
(``independent.py``) trains from the same weights on the same global batches, without dropout: once in float64, the
ground truth, and twice in fp32 with different summation orders. The differences between these three runs show the
accuracy that fp32 allows.

By default, three steps of a one-layer model detect a wrong loss, clipping, schedule, direction or global norm. With the
variables AGREEMENT_STEPS=300 AGREEMENT_LAYERS=4, the test takes minutes and also detects slowly growing errors.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.inputs import flags
from bert.checkpoints.hugging_face import to_hugging_face
from bert.checkpoints.weights import save_weights
from bert.configuration.recipes import ARTIFACTS
from bert.configuration.sections import ModelConfig, OptimizerConfig
from dataloading.batches.sampler import BatchSampler
from dataloading.dataset.folder import Dataset, write_dataset
from dataloading.options import PretrainingOptions
from dataloading.preparation.prepare import Job, prepare
from dataloading.shards.samples import Samples
from tests.bert.small_models import drawn_model
from tests.conftest import REPOSITORY
from tests.convergence.independent import Side, Trained, train
from tests.distributed.ranks import records, torchrun
from tests.programs import PATIENCE_S

# Two ranks, so that the comparison covers the reduction and the distribution of batches.
RANKS, BATCH, LENGTH, SEED = 2, 16, 128, 7
STEPS, LAYERS = int(os.environ.get("AGREEMENT_STEPS", "3")), int(os.environ.get("AGREEMENT_LAYERS", "1"))
OPTIMIZER = OptimizerConfig(1e-3, learning_rate_training_steps=400, num_warmup_steps=30, start_warmup_step=-1)
GOALS = {"loss": 1e-6, "weight matrix": 5e-7, "bias or norm": 3e-5, "gradient norm": 1e-6}
"""Limit of the relative difference from float64, by kind of number, unless the independent runs differ even more."""


def test_the_program_trains_as_an_independent_implementation_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers, the independent model, is not installed")
    sides = (
        Side(torch.float64, micro_batches=2),
        Side(torch.float32),
        Side(torch.float32, micro_batches=3, reverse=True, attention="eager"),
    )
    vocab = full_size_vocabulary(tmp_path / "vocab.txt")
    options = PretrainingOptions(max_seq_length=LENGTH, max_predictions_per_seq=20)
    data = prepare(Job((REPOSITORY / "README.md",), vocab, options), tmp_path / "train")
    write_dataset(tmp_path / "evaluation", data.take(np.arange(BATCH)), shards=1, info=data.info)
    config = ModelConfig(LAYERS, 128, 2, 512, data.info.vocab_size, LENGTH, hidden_dropout=0, attention_dropout=0)
    model = drawn_model(config, SEED)
    save_weights(model, tmp_path / "initial.safetensors")
    program = train_by_the_program(config, vocab, tmp_path)
    independent = [train(side, model, global_batches(data), OPTIMIZER) for side in sides]
    between = [differences(one, other) for one, other in itertools.combinations(independent, 2)]
    for kind, found in differences(program, independent[0]).items():
        limit = max(GOALS[kind], *(max(row[kind].values()) for row in between))
        assert all(difference <= limit for difference in found.values()), (kind, limit, found)


def differences(one: Trained, other: Trained) -> dict[str, dict[str, float]]:
    """Return relative differences by kind, and by step or weight. Differences of a weight are norms of tensors."""
    weights: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for name, weight in other.weights.items():
        # Softmax ignores key biases, so their gradients are only rounding errors.
        if not name.endswith("key.bias"):
            distance = torch.linalg.vector_norm(one.weights[name] - weight) / torch.linalg.vector_norm(weight)
            weights[weight.ndim > 1][name] = distance.item()

    def by_step(*names: str) -> dict[str, float]:
        steps = enumerate(zip(one.steps, other.steps, strict=True), 1)
        return {
            f"{name}, step {step}": abs(found[name] - expected[name]) / abs(expected[name])
            for step, (found, expected) in steps
            for name in names
        }

    return {
        "loss": by_step("masked_lm_loss", "next_sentence_loss"),
        "weight matrix": weights[True],
        "bias or norm": weights[False],
        "gradient norm": by_step("gradient_norm"),
    }


def train_by_the_program(model: ModelConfig, vocab: Path, folder: Path) -> Trained:
    """Train with ``bert.train`` from the initial weights in ``folder`` for all steps, with an unreachable target."""
    saved = folder / "trained.safetensors"
    settings: dict[str, object] = {f"model.{name}": value for name, value in asdict(model).items()}
    settings |= {f"optimizer.{name}": value for name, value in asdict(OPTIMIZER).items()}
    settings |= {f"data.{name}": folder / name for name in ("train", "evaluation")}
    settings |= {
        "data.vocab": vocab,
        "data.initial-checkpoint": folder / "initial.safetensors",
        "training.global-batch-size": BATCH,
        "training.max-samples": STEPS * BATCH,
        "training.seed": SEED,
        "evaluation.interval-samples": STEPS * BATCH,
        "evaluation.target": 0.999,
        "log.results": folder,
        "log.interval-steps": 1,
        "save-checkpoint": saved,
    }
    program = torchrun(RANKS, ["tiny_cpu", *flags(settings)])
    assert program.wait(PATIENCE_S) == 0, program.output
    weights = {name: weight.double() for name, weight in to_hugging_face(load_file(saved)).items()}
    return Trained(records(folder, "step"), weights)


def global_batches(data: Dataset) -> Iterator[Samples]:
    """Yield the samples of each global batch, which the program divides among its ranks."""
    plan = BatchSampler(data.lengths, data.masked_counts, BATCH, RANKS, gradient_accumulation_steps=1, seed=SEED)
    return (data.take(plan.global_batch(step)) for step in range(STEPS))


def full_size_vocabulary(path: Path) -> Path:
    """Write the shipped vocabulary, with unused tokens added to reach BERT's size, which affects the norms."""
    tokens = (ARTIFACTS / "tiny_cpu" / "vocab.txt").read_text(encoding="utf-8").splitlines()
    tokens += [f"[unused{number}]" for number in range(30522 - len(tokens))]
    path.write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    return path
