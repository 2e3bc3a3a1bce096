"""Evaluation with and without CUDA graphs, division among ranks, and batches that are read ahead."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bert.evaluation import Accuracy, Evaluator
from bert.execution.cuda_graphs import CudaCapturer
from bert.model import BertForPreTraining
from bert.parallel.mesh import Mesh
from dataloading.batches.loader import batch_of
from dataloading.dataset.folder import Dataset, open_dataset
from tests.bert.recording import Recording, recordable_attention
from tests.bert.small_models import OF_SMALL_RUN, PLAIN, drawn_model
from tests.conftest import SmallRun, write_small_dataset

pytestmark = pytest.mark.oldest_torch
UNKNOWN = 1
"""Id of [UNK] in the vocabulary of ``SmallRun``."""


@pytest.fixture(autouse=True)
def recordable() -> Iterator[None]:
    with recordable_attention():
        yield


@pytest.fixture
def dataset(small_run: SmallRun) -> Dataset:
    return open_dataset(small_run.folder / "evaluation")


@pytest.fixture
def model() -> BertForPreTraining:
    """Return a random model, some of whose predictions are correct by chance."""
    return drawn_model(OF_SMALL_RUN, 3)


def evaluator(dataset: Dataset, size: int, rank: int = 0, ranks: int = 1, ignored_id: int | None = None) -> Evaluator:
    return Evaluator(dataset, Mesh(rank, ranks, 0, torch.device("cpu"), (tuple(range(ranks)),)), size, ignored_id)


@pytest.mark.parametrize("size", [1, 3, 64])
def test_accuracy_is_exact_and_the_evaluation_is_captured_in_few_graphs(
    dataset: Dataset, model: BertForPreTraining, small_run: SmallRun, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts are exact for every batch size. Capturing reads no data and does not change the model."""
    batch = batch_of(small_run.evaluation)
    with torch.no_grad():
        logits_MV = model.eval().masked_lm_logits(model.head_inputs(batch)[1])
    correct = int((logits_MV.argmax(-1) == batch.masked_lm_ids).sum())
    loss = torch.nn.functional.cross_entropy(logits_MV.double(), batch.masked_lm_ids, reduction="sum").item()
    expected = correct, len(batch.masked_lm_ids)
    found = evaluator(dataset, size)(model.train(), PLAIN)
    assert (found.correct, found.count) == expected
    assert 0 < found.value == correct / found.count < 1
    assert found.loss == pytest.approx(loss, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(loss / found.count), rel=1e-5)
    assert Accuracy(0, 2, 1e9).perplexity == math.exp(100), "finite for a diverged model"
    captured, capturer = evaluator(dataset, size), Recording()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "take", None)
        captured.warm_up(model, PLAIN, capturer)
    assert model.training
    assert model.dropout_state.tolist() == [0, 0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert 1 <= len(capturer.graphs) <= (2 if size == 64 else 16)
    for _ in range(2):
        capturer.replays.clear()
        again = captured(model, PLAIN)
        assert (again.correct, again.count) == expected
        assert again.loss == pytest.approx(loss, rel=1e-6)
        assert len(capturer.replays) == -(-len(dataset) // size), "every batch has been captured"


def with_unknown(small_run: SmallRun, folder: Path, every: int) -> Dataset:
    """Return a copy of the evaluation set in which every ``every``-th masked token is [UNK]."""
    labels = small_run.evaluation.masked_lm_ids.copy()
    labels[::every] = UNKNOWN
    write_small_dataset(folder, replace(small_run.evaluation, masked_lm_ids=labels), small_run.folder / "vocab.txt")
    return open_dataset(folder)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("predicted", ["a known token", "[UNK]"])
def test_tokens_with_the_ignored_id_are_excluded_from_the_accuracy(
    small_run: SmallRun, model: BertForPreTraining, tmp_path: Path, predicted: str, warm: bool
) -> None:
    """The model predicts one token at every masked position, so its accuracy follows from the labels."""
    dataset = with_unknown(small_run, tmp_path / "some", every=3)
    labels = dataset.take(np.arange(len(dataset))).masked_lm_ids
    known = labels[labels != UNKNOWN]
    token = UNKNOWN if predicted == "[UNK]" else int(np.bincount(known).argmax())
    with torch.no_grad():
        model.decoder_bias[token] = 1e6
    for ignored_id, counted in ((None, labels), (UNKNOWN, known)):
        evaluate = evaluator(dataset, 16, ignored_id=ignored_id)
        if warm:
            evaluate.warm_up(model, PLAIN, Recording())
        found = evaluate(model, PLAIN)
        assert (found.correct, found.count) == (int((counted == token).sum()), len(counted))


def test_an_evaluation_set_with_only_unknown_masked_tokens_is_refused(
    small_run: SmallRun, model: BertForPreTraining, tmp_path: Path
) -> None:
    dataset = with_unknown(small_run, tmp_path / "none", every=1)
    assert evaluator(dataset, 16)(model, PLAIN).count > 0
    with pytest.raises(ValueError, match=r"none: every masked token is \[UNK\], so the vocabulary does not fit"):
        evaluator(dataset, 16, ignored_id=UNKNOWN)(model, PLAIN)


@pytest.mark.parametrize("world_size", [3, 64])
def test_the_counts_of_several_ranks_add_up_to_the_counts_of_one_rank(
    dataset: Dataset, model: BertForPreTraining, world_size: int
) -> None:
    """The set has 50 samples, so some of 64 ranks have none."""
    whole, shares = evaluator(dataset, 16)(model, PLAIN), []
    for rank in range(world_size):
        evaluate = evaluator(dataset, 16, rank, world_size)
        evaluate.warm_up(model, PLAIN, Recording())
        shares.append(evaluate(model, PLAIN))
    assert sum(share.correct for share in shares) == whole.correct
    assert sum(share.count for share in shares) == whole.count


def test_data_is_read_once_and_read_errors_are_raised_by_the_evaluation(
    dataset: Dataset, model: BertForPreTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = evaluator(dataset, 16)(model, PLAIN)
    take, reads = dataset.take, []

    def counted(indices: np.ndarray) -> object:
        reads.append(len(indices))
        return take(indices)

    monkeypatch.setattr(dataset, "take", counted)
    ahead = evaluator(dataset, 16)
    assert not reads
    ahead.read_ahead()
    assert [ahead(model, PLAIN) for _ in range(2)] == [expected] * 2
    assert sum(reads) == len(dataset)

    def broken(_: np.ndarray) -> object:
        raise ValueError("the shard is damaged")

    monkeypatch.setattr(dataset, "take", broken)
    faulty = evaluator(dataset, 16)
    faulty.read_ahead()
    with pytest.raises(ValueError, match="damaged"):
        faulty(model, PLAIN)


def test_correct_predictions_are_counted_exactly_under_bf16_autocast(
    dataset: Dataset, model: BertForPreTraining, small_run: SmallRun
) -> None:
    """A bias of 16 rounds most logits of a row to the same bf16 value, so rounded logits must not be compared."""
    with torch.no_grad():
        model.decoder_bias.fill_(16.0)
    batch, autocast = batch_of(small_run.evaluation), torch.autocast("cpu", torch.bfloat16)
    model.eval()
    with torch.inference_mode(), autocast:
        _, masked_MD = model.head_inputs(batch)
        operands = model._transformed(masked_MD).bfloat16().double(), model.embeddings.word.bfloat16().double()
    labelled = replace(batch, masked_lm_ids=(operands[0] @ operands[1].T).argmax(dim=-1))
    evaluate = evaluator(dataset, len(dataset))
    evaluate._batches = [labelled]
    accuracy = evaluate(model.train(), autocast)
    assert accuracy.correct == accuracy.count == len(batch.masked_lm_ids)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here")
@pytest.mark.parametrize("record", [True, False])
def test_a_gpu_evaluates_as_a_cpu_does(dataset: Dataset, model: BertForPreTraining, record: bool) -> None:
    expected = evaluator(dataset, 16)(model, PLAIN)
    device = torch.device("cuda", 0)
    model.to(device)
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=False)
    evaluate = Evaluator(dataset, Mesh(0, 1, 0, device), 16)
    evaluate.warm_up(model, autocast, CudaCapturer(device) if record else None)
    assert evaluate(model, autocast).count == expected.count
    accuracy = evaluate(model, autocast)
    assert abs(accuracy.correct - expected.correct) <= 2, "ties may fall the other way"
