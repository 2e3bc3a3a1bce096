"""The model against Hugging Face's ``BertForPreTraining`` with the same weights, and against itself.

Dropout is 0 throughout: the comparisons are exact up to rounding.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.training.hugging_face import new_model
from bert.checkpoints.hugging_face import from_hugging_face, to_hugging_face
from bert.checkpoints.weights import copy_weights
from bert.configuration.config import ModelConfig
from bert.model import BertForPreTraining, initialize_
from dataloading.batches.loader import Batch, batch_of
from dataloading.batches.synthetic import synthetic_samples
from dataloading.shards.samples import Samples

CONFIG = ModelConfig(
    num_hidden_layers=3,
    hidden_size=24,
    num_attention_heads=3,
    intermediate_size=40,
    vocab_size=97,
    max_position_embeddings=32,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LENGTHS = np.array([32, 32, 31, 17, 9, 3])
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def samples() -> Samples:
    """Without id 0, the pad token: it stands in no real sample, and Hugging Face cuts its embedding's gradient."""
    block = synthetic_samples(LENGTHS, CONFIG.vocab_size, seed=3, masked_lm_prob=0.2)
    return replace(block, input_ids=np.maximum(block.input_ids, 1))


def random_model(dtype: torch.dtype = torch.float64, config: ModelConfig = CONFIG) -> BertForPreTraining:
    """Weights large enough, biases and gains included, for every path to leave a trace in the result."""
    model = BertForPreTraining(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.ndim == 1 and bool((parameter == 1).all()) else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + centre)
    return model.to(dtype)


def mean_loss(model: BertForPreTraining, batch: Batch) -> Tensor:
    masked_lm_loss, next_sentence_loss = model(batch).mean_losses(batch)
    return masked_lm_loss + next_sentence_loss


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    result = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        result[name] = parameter.grad
    return result


def assert_relatively_close(got: Tensor, expected: Tensor, tolerance: float, name: str = "") -> None:
    """Largest error relative to the largest entry.

    A tensor that is 0 in exact arithmetic, as a key bias's gradient is, has rounding and nothing else, hence the floor.
    """
    error = (got - expected).abs().max().item()
    assert error <= tolerance * max(expected.abs().max().item(), 1e-2), f"{name}: {error}"


# --- Hugging Face ---------------------------------------------------------------------------------------------------


def hugging_face_model(dtype: torch.dtype) -> Any:
    pytest.importorskip("transformers", reason="transformers, the independent model, is not installed")
    theirs = new_model(replace(CONFIG, hidden_dropout=0.0, attention_dropout=0.0), "eager").to(dtype)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype) * 0.2)
    return theirs.train()


def imported(theirs: Any, dtype: torch.dtype) -> BertForPreTraining:
    model = BertForPreTraining(CONFIG).to(dtype)
    copy_weights(model, from_hugging_face(theirs.state_dict()), "Hugging Face")
    return model.train()


def coordinates(block: Samples) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sample and position inside it of every token [T], and the sample of every masked token [M]."""
    rows = np.repeat(np.arange(len(block)), block.lengths)
    columns = np.arange(len(rows)) - block.sequence_offsets[rows]
    return rows, columns, np.repeat(np.arange(len(block)), block.masked_counts)


def padded_form(block: Samples) -> dict[str, Tensor]:
    """[B, L] with a key mask; pads carry a token that would show if it were seen."""
    rows, columns, masked_rows = coordinates(block)
    shape = (len(block), CONFIG.max_position_embeddings)
    ids, segments, mask = np.full(shape, 5), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    labels = np.full(shape, -100)
    ids[rows, columns], segments[rows, columns], mask[rows, columns] = block.input_ids, block.segment_ids, 1
    labels[masked_rows, block.masked_lm_positions] = block.masked_lm_ids
    arrays = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask, "labels": labels}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def hugging_face_padded(theirs: Any, block: Samples) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, masked-LM logits [M, V] and next-sentence logits [S, 2]."""
    labels = torch.from_numpy(block.next_sentence_labels.astype(np.int64))
    output = theirs(**padded_form(block), next_sentence_label=labels)
    _, _, masked_rows = coordinates(block)
    logits = output.prediction_logits[masked_rows, block.masked_lm_positions.astype(np.int64)]
    return output.loss, logits, output.seq_relationship_logits


def hugging_face_packed(theirs: Any, block: Samples, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The same from rows that hold three samples each: block-diagonal mask, positions that restart.

    The heads are applied by hand, since the model's own next-sentence head sees the first sample of a row only.
    """
    row_length = int(block.sequence_offsets[3:][::3].max())
    rows, columns, masked_rows = coordinates(block)
    starts = block.sequence_offsets[:-1] - block.sequence_offsets[np.arange(len(block)) // 3 * 3]
    place = (rows // 3, starts[rows] + columns)
    shape = (len(block) // 3, row_length)
    ids, segments, positions, owner = np.full(shape, 5), np.zeros(shape, int), np.zeros(shape, int), np.full(shape, -1)
    ids[place], segments[place], positions[place], owner[place] = block.input_ids, block.segment_ids, columns, rows
    same = torch.from_numpy(owner[:, None, :, None] == owner[:, None, None, :])
    mask = torch.zeros(same.shape, dtype=dtype).masked_fill_(~same, torch.finfo(dtype).min)
    hidden = theirs.bert(
        input_ids=torch.from_numpy(ids),
        token_type_ids=torch.from_numpy(segments),
        position_ids=torch.from_numpy(positions),
        attention_mask=mask,
    ).last_hidden_state
    masked_columns = starts[masked_rows] + block.masked_lm_positions
    cls = np.arange(len(block))
    logits = theirs.cls.predictions(hidden[masked_rows // 3, masked_columns])
    cls_hidden = hidden[cls // 3, starts]
    pooled = torch.tanh(theirs.bert.pooler.dense(cls_hidden))
    next_sentence = theirs.cls.seq_relationship(pooled)
    cross_entropy = torch.nn.functional.cross_entropy
    loss = cross_entropy(logits, torch.from_numpy(block.masked_lm_ids.astype(np.int64))) + cross_entropy(
        next_sentence, torch.from_numpy(block.next_sentence_labels.astype(np.int64))
    )
    return loss, logits, next_sentence


@DTYPES
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_agrees_with_hugging_face(form: str, dtype: torch.dtype):
    """Loss, logits and every gradient."""
    theirs, block, tolerance = hugging_face_model(dtype), samples(), TOLERANCE[dtype]
    ours, batch = imported(theirs, dtype), batch_of(block)
    expected = hugging_face_padded(theirs, block) if form == "padded" else hugging_face_packed(theirs, block, dtype)
    expected_loss, expected_logits, expected_next_sentence = expected
    cls_SD, masked_MD = ours.head_inputs(batch)
    assert_relatively_close(ours.masked_lm_logits(masked_MD), expected_logits, tolerance, "masked-LM logits")
    assert_relatively_close(ours.next_sentence_logits(cls_SD), expected_next_sentence, tolerance, "NSP logits")
    loss = mean_loss(ours, batch)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=tolerance)
    loss.backward()
    expected_loss.backward()
    expected_gradients = from_hugging_face(gradients(theirs))
    got = gradients(ours)
    assert got.keys() == expected_gradients.keys()
    for name, gradient in got.items():
        assert_relatively_close(gradient, expected_gradients[name], tolerance, name)


def test_hugging_face_round_trip():
    theirs = hugging_face_model(torch.float32).state_dict()
    back = to_hugging_face(from_hugging_face(theirs))
    buffers = {"bert.embeddings.position_ids"}
    assert back.keys() == theirs.keys() - buffers
    for name, tensor in back.items():
        assert torch.equal(tensor, theirs[name]), name


def test_a_state_that_is_not_hugging_faces_is_refused():
    model = random_model()
    with pytest.raises(ValueError, match="expected the state of a BertForPreTraining"):
        from_hugging_face(model.state_dict())
    theirs = to_hugging_face(model.state_dict())
    del theirs["bert.encoder.layer.1.output.dense.bias"]
    with pytest.raises(ValueError, match=r"lacks .*bert\.encoder\.layer\.1\.output\.dense\.bias"):
        from_hugging_face(theirs)


# --- itself ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3])
def test_last_layer_subset_is_exact(layers: int):
    """``head_inputs`` is ``encode`` at the rows that the heads read, and so are its gradients."""
    config = ModelConfig(layers, 24, 3, 40, 97, 32, hidden_dropout=0.0, attention_dropout=0.0)
    model, batch = random_model(config=config), batch_of(samples())
    rows = torch.cat([batch.cu_seqlens[:-1].long(), batch.masked_lm_positions])
    upstream = torch.randn(
        len(rows), config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    encoder = [*model.embeddings.parameters(), *model.layers.parameters()]
    subset = torch.cat(model.head_inputs(batch))
    whole = model.encode(batch)[rows]
    torch.testing.assert_close(subset, whole, rtol=1e-12, atol=1e-12)
    for got, expected in zip(
        torch.autograd.grad(subset, encoder, upstream), torch.autograd.grad(whole, encoder, upstream), strict=True
    ):
        assert_relatively_close(got, expected, 1e-12)


def test_grouping_into_batches_does_not_matter():
    """One batch, single sequences, and another order give the same sums of losses, counts and gradients."""
    block = samples()
    groupings = [[list(range(6))], [[i] for i in range(6)], [[4, 0, 5], [2, 1, 3]]]
    results = []
    for groups in groupings:
        model = random_model().eval()
        total, correct = 0.0, 0
        for indices in groups:
            output = model(batch_of(block.take(np.array(indices))))
            (output.masked_lm_loss + output.next_sentence_loss).backward()
            total += (output.masked_lm_loss + output.next_sentence_loss).item()
            assert output.masked_lm_correct is not None
            correct += int(output.masked_lm_correct)
        results.append((total, correct, gradients(model)))
    whole_total, whole_correct, whole_gradients = results[0]
    for total, correct, parts in results[1:]:
        assert total == pytest.approx(whole_total, rel=1e-12)
        assert correct == whole_correct
        for name, gradient in parts.items():
            assert_relatively_close(gradient, whole_gradients[name], 1e-12, name)


def test_sequences_do_not_see_each_other():
    model, block = random_model(), samples()
    alone = model.encode(batch_of(block.slice(2, 3)))
    together = model.encode(batch_of(block))
    start, stop = block.sequence_offsets[2:4]
    torch.testing.assert_close(together[start:stop], alone, rtol=1e-12, atol=1e-12)


def test_correct_counts_the_largest_logits():
    model, batch = random_model().eval(), batch_of(samples())
    _, masked_MD = model.head_inputs(batch)
    logits = model.masked_lm_logits(masked_MD)
    expected = int((logits.argmax(-1) == batch.masked_lm_ids).sum())
    assert model(batch).masked_lm_correct == expected
    assert model.train()(batch).masked_lm_correct is None


def test_dropout_acts_in_training_and_not_in_evaluation():
    config = ModelConfig(2, 24, 3, 40, 97, 32, hidden_dropout=0.1, attention_dropout=0.1)
    model, batch = random_model(config=config), batch_of(samples())
    torch.manual_seed(0)
    assert not torch.equal(model.encode(batch), model.encode(batch))
    model.eval()
    assert torch.equal(model.encode(batch), model.encode(batch))
    undropped = random_model()
    copied = {name: tensor for name, tensor in undropped.state_dict().items() if not name.startswith("layers.2.")}
    copy_weights(model, copied, "the same weights")


def test_bert_large_has_336_million_parameters():
    with torch.device("meta"):
        model = BertForPreTraining(ModelConfig())
    assert sum(parameter.numel() for parameter in model.parameters()) == 336_226_108


def test_initialization_is_bounded_and_repeatable():
    one, other = BertForPreTraining(CONFIG), BertForPreTraining(CONFIG)
    for model in (one, other):
        initialize_(model, torch.Generator().manual_seed(5))
    for (name, first), second in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(first, second)
        if first.ndim > 1:
            assert first.abs().max() <= 2 * CONFIG.initializer_range
            assert first.std() > 0.5 * CONFIG.initializer_range
        else:
            assert bool((first == (1.0 if name.endswith("norm.weight") else 0.0)).all()), name
