"""Training on packs is exact: the same losses and gradients as the same samples one by one, and as padded rows.

Three ways to compute one step in fp64: a ``Batch`` whose sequences stand in pack order, single sequences, and [P, L] rows
of packed tokens and padding under a document mask, in plain PyTorch without the kernels or the flat stream.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bert.configuration.config import ModelConfig
from bert.model import BertForPreTraining, EncoderLayer, LayerNorm
from dataloading.batches.loader import batch_of
from dataloading.batches.packing import Packs, pack_samples
from dataloading.batches.synthetic import synthetic_samples
from dataloading.shards.samples import Samples

CAPACITY = 32
CONFIG = ModelConfig(
    num_hidden_layers=3,
    hidden_size=24,
    num_attention_heads=3,
    intermediate_size=40,
    vocab_size=97,
    max_position_embeddings=CAPACITY,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LENGTHS = np.array([32, 31, 20, 17, 12, 11, 10, 9, 9, 8, 5, 3])
PAD_TOKEN = 5
"""Stands in the padding; any other token there would do, as no sequence sees it."""


def samples() -> Samples:
    return synthetic_samples(LENGTHS, CONFIG.vocab_size, seed=3, masked_lm_prob=0.2)


def random_model() -> BertForPreTraining:
    """Weights large enough, biases and gains included, for every path to leave a trace in the result."""
    model = BertForPreTraining(CONFIG)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.ndim == 1 and bool((parameter == 1).all()) else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + centre)
    return model.double()


def gradients(model: BertForPreTraining) -> dict[str, Tensor]:
    result = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        result[name] = parameter.grad
    return result


# --- padded rows ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Packs as rows [P, L], padded, and where the heads read."""

    input_ids: Tensor
    segment_ids: Tensor
    position_ids: Tensor
    document: Tensor
    """[P, L] number of the sequence inside its pack from 0; -1 is padding."""
    cls: tuple[Tensor, Tensor]
    """Row and column of every sequence's first token, two [S]."""
    masked: tuple[Tensor, Tensor]
    """Row and column of every masked token, two [M]."""
    masked_lm_ids: Tensor
    next_sentence_labels: Tensor


def rows_of(block: Samples, packs: Packs) -> Rows:
    """Filled token by token, so that nothing is shared with what is tested."""
    shape = (len(packs), CAPACITY)
    ids, segments = torch.full(shape, PAD_TOKEN), torch.zeros(shape, dtype=torch.long)
    positions, document = torch.zeros(shape, dtype=torch.long), torch.full(shape, -1)
    cls, masked, masked_ids, labels = [], [], [], []
    for row in range(len(packs)):
        column = 0
        for number, sample in enumerate(packs.samples[packs.offsets[row] : packs.offsets[row + 1]]):
            one = block.slice(sample, sample + 1)
            cls.append((row, column))
            masked += [(row, column + position) for position in one.masked_lm_positions.tolist()]
            masked_ids += one.masked_lm_ids.tolist()
            labels.append(int(one.next_sentence_labels[0]))
            for position, (token, segment) in enumerate(zip(one.input_ids, one.segment_ids, strict=True)):
                ids[row, column], segments[row, column] = int(token), int(segment)
                positions[row, column], document[row, column] = position, number
                column += 1
    cls_rows, cls_columns = torch.tensor(cls).T
    masked_rows, masked_columns = torch.tensor(masked).T
    return Rows(
        ids,
        segments,
        positions,
        document,
        (cls_rows, cls_columns),
        (masked_rows, masked_columns),
        torch.tensor(masked_ids),
        torch.tensor(labels),
    )


def norm(x: Tensor, layer: LayerNorm) -> Tensor:
    return F.layer_norm(x, layer.weight.shape, layer.weight, layer.bias, CONFIG.layer_norm_eps)


def padded_encoder(model: BertForPreTraining, rows: Rows) -> Tensor:
    """[P, L, D]: attention between tokens of one document alone."""
    tables = model.embeddings
    x_PLD = tables.word[rows.input_ids] + tables.position[rows.position_ids] + tables.segment[rows.segment_ids]
    x_PLD = norm(x_PLD, tables.norm)
    same_PLL = rows.document[:, :, None] == rows.document[:, None, :]
    heads, size = CONFIG.num_attention_heads, CONFIG.hidden_size // CONFIG.num_attention_heads
    for layer in model.layers:
        assert isinstance(layer, EncoderLayer)
        query, key, value = layer.query_key_value(x_PLD).unflatten(-1, (3, heads, size)).permute(2, 0, 3, 1, 4)
        scores_PHLL = (query @ key.mT / size**0.5).masked_fill(~same_PLL[:, None], float("-inf"))
        context_PLD = (scores_PHLL.softmax(-1) @ value).transpose(1, 2).flatten(2)
        attended_PLD = norm(layer.attention_output(context_PLD) + x_PLD, layer.attention_norm)
        wide_PLF = F.gelu(layer.intermediate(attended_PLD), approximate="tanh")
        x_PLD = norm(layer.output(wide_PLF) + attended_PLD, layer.output_norm)
    return x_PLD


def padded_losses(model: BertForPreTraining, rows: Rows) -> tuple[Tensor, Tensor]:
    """Mean masked-LM and next-sentence losses."""
    hidden_PLD = padded_encoder(model, rows)
    transformed_MD = norm(F.gelu(model.transform(hidden_PLD[rows.masked]), approximate="tanh"), model.transform_norm)
    logits_MV = transformed_MD @ model.embeddings.word.T + model.decoder_bias
    logits_S2 = model.next_sentence(torch.tanh(model.pooler(hidden_PLD[rows.cls])))
    return F.cross_entropy(logits_MV, rows.masked_lm_ids), F.cross_entropy(logits_S2, rows.next_sentence_labels)


# --- comparisons ----------------------------------------------------------------------------------------------------


def assert_equal_training(
    got: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]
) -> None:
    assert got[0] == pytest.approx(expected[0], rel=1e-12)
    for name, gradient in got[1].items():
        # A key bias's gradient is 0 in exact arithmetic and has rounding alone, hence the floor.
        scale = max(expected[1][name].abs().max().item(), 1e-2)
        assert (gradient - expected[1][name]).abs().max().item() <= 1e-12 * scale, name


def packed(block: Samples, packs: Packs) -> tuple[list[float], dict[str, Tensor]]:
    """Both mean losses and the gradients of their sum, sequences in pack order in one flat stream."""
    model, batch = random_model(), batch_of(block.take(packs.samples))
    losses = model(batch).mean_losses(batch)
    sum(losses).backward()  # pyright: ignore[reportAttributeAccessIssue]
    return [loss.item() for loss in losses], gradients(model)


def one_by_one(block: Samples) -> tuple[list[float], dict[str, Tensor]]:
    model, totals = random_model(), [0.0, 0.0]
    for sample in range(len(block)):
        batch = batch_of(block.slice(sample, sample + 1))
        whole = replace(batch, global_counts=torch.tensor([len(block), len(block.masked_lm_ids)]))
        masked_lm_loss, next_sentence_loss = model(whole).mean_losses(whole)
        (masked_lm_loss + next_sentence_loss).backward()
        totals = [totals[0] + masked_lm_loss.item(), totals[1] + next_sentence_loss.item()]
    return totals, gradients(model)


def padded(block: Samples, packs: Packs) -> tuple[list[float], dict[str, Tensor]]:
    model = random_model()
    losses = padded_losses(model, rows_of(block, packs))
    sum(losses).backward()  # pyright: ignore[reportAttributeAccessIssue]
    return [loss.item() for loss in losses], gradients(model)


@pytest.mark.parametrize("limit", [2, 3, None])
def test_packs_train_exactly(limit: int | None) -> None:
    block = samples()
    packs = pack_samples(block.lengths, CAPACITY, limit, seed=1)
    assert len(packs) < len(block)
    result = packed(block, packs)
    assert_equal_training(result, one_by_one(block))
    assert_equal_training(result, padded(block, packs))


def test_the_batch_of_packs_restarts_positions_at_every_sequence() -> None:
    block = samples()
    packs = pack_samples(block.lengths, CAPACITY, 3, seed=1)
    batch = batch_of(block.take(packs.samples))
    rows = rows_of(block, packs)
    real = rows.document >= 0
    assert torch.equal(batch.input_ids, rows.input_ids[real])
    assert torch.equal(batch.segment_ids, rows.segment_ids[real])
    assert torch.equal(batch.position_ids, rows.position_ids[real])
    assert torch.equal(batch.next_sentence_labels, rows.next_sentence_labels)
    assert torch.equal(batch.cu_seqlens.diff().long(), torch.from_numpy(LENGTHS[packs.samples]))


def test_the_comparison_sees_attention_across_sequences() -> None:
    """Without the document mask the padded rows give other losses, so the tests above are not blind to it."""
    block = samples()
    packs = pack_samples(block.lengths, CAPACITY, 3, seed=1)
    rows = rows_of(block, packs)
    mixed = replace(rows, document=torch.where(rows.document >= 0, 0, -1))
    model = random_model()
    exact, wrong = padded_losses(model, rows), padded_losses(model, mixed)
    for one, other in zip(exact, wrong, strict=True):
        assert abs(one.item() - other.item()) > 1e-4
