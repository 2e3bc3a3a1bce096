"""The model, compared with Hugging Face's ``BertForPreTraining`` with the same weights, and with itself.

The comparisons are made without dropout, so they are exact up to rounding.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.training.hugging_face import new_model, padded
from bert.checkpoints.hugging_face import hugging_face_names
from bert.configuration.recipes import RECIPES
from bert.configuration.sections import Precision
from bert.model import BertForPreTraining, EncoderLayer, PretrainingOutput
from bert.setup import captures, choose_shapes, synthetic_batches
from dataloading.batches.loader import Batch, batch_of, inert_batch
from dataloading.batches.sampler import ShapeBucket
from dataloading.shards.samples import Samples, synthetic_samples
from kernels import choose
from tests.bert.small_models import CPU, SMALL, assert_near, drawn_model, gradients, mean_loss, random_model

LENGTHS = np.array([32, 32, 31, 17, 9, 3])
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def samples() -> Samples:
    """Return samples without id 0. It is the padding token, and Hugging Face gives its embedding no gradient."""
    block = synthetic_samples(LENGTHS, SMALL.vocab_size, seed=3, masked_lm_prob=0.2)
    return replace(block, input_ids=np.maximum(block.input_ids, 1))


def hugging_face_model(dtype: torch.dtype) -> Any:
    pytest.importorskip("transformers", reason="transformers, the independent model, is not installed")
    theirs = new_model(SMALL, attention="eager").to(dtype)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype) * 0.2)
    return theirs.train()


def renamed(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights or gradients under this program's names."""
    names = hugging_face_names(SMALL.num_hidden_layers)
    return {own: torch.cat([theirs[part] for part in parts]) for own, parts in names.items()}


def imported(theirs: Any, dtype: torch.dtype) -> BertForPreTraining:
    model = BertForPreTraining(SMALL).to(dtype)
    model.load_state_dict(renamed(theirs.state_dict()))
    return model.train()


@DTYPES
def test_the_model_agrees_with_hugging_face(dtype: torch.dtype):
    """Compare the loss, the logits and every gradient."""
    theirs, block, tolerance = hugging_face_model(dtype), samples(), TOLERANCE[dtype]
    inputs = padded(block, SMALL.max_position_embeddings)
    expected = theirs(**inputs)
    logits_MV = expected.prediction_logits[inputs["labels"] >= 0]
    ours, batch = imported(theirs, dtype), batch_of(block)
    cls_SD, masked_MD = ours.head_inputs(batch)
    found = {"masked-LM logits": ours.masked_lm_logits(masked_MD), "NSP logits": ours.next_sentence_logits(cls_SD)}
    theirs_found = {"masked-LM logits": logits_MV, "NSP logits": expected.seq_relationship_logits}
    assert_near(found, theirs_found, tolerance)
    loss = mean_loss(ours, batch)
    assert loss.item() == pytest.approx(expected.loss.item(), rel=tolerance)
    loss.backward()
    expected.loss.backward()
    assert_near(gradients(ours), renamed(gradients(theirs)), tolerance)


def test_the_division_into_batches_changes_neither_losses_nor_gradients():
    """One batch, single sequences and a different order give the same summed losses, counts and gradients."""
    block, results = samples(), []
    for groups in ([list(range(6))], [[i] for i in range(6)], [[4, 0, 5], [2, 1, 3]]):
        model = random_model().eval()
        total, correct = 0.0, 0
        for indices in groups:
            batch = batch_of(block.take(np.array(indices)))
            output = model(batch)
            loss = output.masked_lm_loss + output.next_sentence_loss
            loss.backward()
            total += loss.item()
            correct += int(output.masked_lm_correct)
            logits = model.masked_lm_logits(model.head_inputs(batch)[1])
            assert output.masked_lm_correct == (logits.argmax(-1) == batch.masked_lm_ids).sum()
        results.append((total, correct, gradients(model)))
    for total, correct, parts in results[1:]:
        assert total == pytest.approx(results[0][0], rel=1e-12)
        assert correct == results[0][1]
        assert_near(parts, results[0][2])


def test_dropout_acts_only_in_training_and_draws_other_numbers_at_every_place():
    model = random_model(replace(SMALL, hidden_dropout=0.1, attention_dropout=0.1))
    batch = batch_of(samples())
    losses = [model(batch).masked_lm_loss for _ in range(2)]
    assert model(batch).masked_lm_correct is None
    losses += [model.eval()(batch).masked_lm_loss for _ in range(2)]
    assert len({loss.item() for loss in losses}) == 3, losses
    state = model.train().next_dropout_state()
    drawn = [model.embeddings.dropout(state)]
    for layer in model.layers:
        assert isinstance(layer, EncoderLayer)
        drawn += layer.dropouts(state)
    streams = [dropout.stream for dropout in drawn if dropout]
    assert len({*streams}) == len(streams) == 1 + 3 * SMALL.num_hidden_layers, "each place has its own random numbers"


def test_initialization_is_bounded_and_repeatable():
    one, other = drawn_model(SMALL, 5), drawn_model(SMALL, 5)
    for (name, first), second in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(first, second)
        if first.ndim > 1:
            assert first.abs().max() <= 2 * SMALL.initializer_range
            assert first.std() > 0.5 * SMALL.initializer_range
        else:
            assert bool((first == (1.0 if name.endswith("norm.weight") else 0.0)).all()), name


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
    names = "varlen_attention", "varlen_self_attention", "dropout_add_layer_norm", "embedding_layer_norm"
    choose(dict.fromkeys(names, implementation))
    masked_lm_loss, next_sentence_loss = model(batch).mean_losses(batch)
    (masked_lm_loss + next_sentence_loss).backward()
    return gradients(model) | {"masked-LM loss": masked_lm_loss, "next-sentence loss": next_sentence_loss}


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("shape_bucket", SHAPE_BUCKETS)
def test_padding_a_batch_changes_neither_losses_nor_gradients(shape_bucket: ShapeBucket, implementation: str) -> None:
    """The ids in the padding do not matter."""
    padded = batch_of(SAMPLES, shape_bucket=shape_bucket)
    assert padded.shape_bucket == shape_bucket
    padded.input_ids[TOKENS:] = 11
    assert_near(trained(padded, implementation), trained(batch_of(SAMPLES), implementation))


def test_a_batch_of_padding_has_neither_losses_nor_gradients() -> None:
    empty = inert_batch(LARGE)
    assert not any(tensor.any() for tensor in trained(empty).values())
    sums = PretrainingOutput(torch.tensor(3.0), torch.tensor(4.0), None)
    for counts, means in ([2, 1], (3.0, 2.0)), ([2, 0], (3.0, 2.0)), ([1, 2], (1.5, 4.0)):
        assert sums.mean_losses(replace(empty, global_counts=torch.tensor(counts))) == means


@pytest.mark.parametrize(("precision", "padded"), [("fp32", False), ("bf16", True)])
def test_bf16_batches_on_a_cpu_are_padded_to_few_shapes(precision: Precision, padded: bool) -> None:
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
