"""Initial weights that a run reads from a Hugging Face folder, and the trained weights that it saves."""

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bert.checkpoints.initial_model import check_initial_weights, load_initial_weights
from bert.checkpoints.sources import open_source
from bert.checkpoints.trained import TrainedWeights, stated_evaluation
from bert.configuration.config import Config
from bert.configuration.recipes import tiny_cpu
from bert.configuration.sections import EvaluationConfig, ModelConfig
from bert.guards import preflight
from bert.train import parse
from compliance.log.metrics import EvaluationRecord
from dataloading.options import Normalization
from dataloading.text.vocabulary import Vocabulary
from tests.bert.small_models import CPU, OF_SMALL_RUN, drawn_model
from tests.conftest import MAX_SEQ_LENGTH, VOCAB_SIZE, SmallRun

MODEL = replace(OF_SMALL_RUN, hidden_dropout=0.0, attention_dropout=0.0, layer_norm_eps=1e-7)


def save_pretrained(folder: Path, vocab: Path | None, kind: str = "BertForPreTraining", rows: int = VOCAB_SIZE) -> Path:
    """Save a model with ``transformers``. Its fast tokenizer writes tokenizer.json and no vocab.txt."""
    import transformers  # a slow import that most tests do not need

    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=rows,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=MAX_SEQ_LENGTH,
        hidden_act="gelu_new",
        layer_norm_eps=1e-7,
    )
    getattr(transformers, kind)(config).save_pretrained(folder)
    if vocab is not None:
        library: Any = transformers
        library.BertTokenizerFast(vocab=str(vocab)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory, small_run: SmallRun) -> Path:
    return save_pretrained(tmp_path_factory.mktemp("pretrained") / "theirs", small_run.folder / "vocab.txt")


def config_of(small_run: SmallRun, model: ModelConfig = MODEL) -> Config:
    config = tiny_cpu()
    return replace(config, model=model, data=replace(config.data, vocab=small_run.folder / "vocab.txt"))


def check(folder: Path, config: Config) -> Normalization | None:
    return check_initial_weights(folder, config, Vocabulary.from_file(config.data.vocab))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertModel"])
def test_missing_heads_remain_random_in_the_open_division_and_are_refused_in_the_closed(
    tmp_path: Path, small_run: SmallRun, kind: str
) -> None:
    folder = save_pretrained(tmp_path / "theirs", small_run.folder / "vocab.txt", kind)
    config = config_of(small_run)
    assert check(folder, config) == Normalization(), "as its tokenizer's settings state"
    model, before = drawn_model(MODEL, 1), drawn_model(MODEL, 1).state_dict()
    missing = load_initial_weights(model, folder)
    state = model.state_dict()
    assert "next_sentence.weight" in missing
    assert ("pooler.weight" in missing) == (kind == "BertForMaskedLM")
    assert ("transform.weight" in missing) == (kind == "BertModel")
    assert all(torch.equal(state[name], before[name]) for name in missing)
    assert not torch.equal(state["layers.1.output.weight"], before["layers.1.output.weight"])
    closed = replace(
        config, log=replace(config.log, division="closed"), model=ModelConfig(), evaluation=type(config.evaluation)()
    )
    with pytest.raises(ValueError, match=r"lacks .*: expected BERT's encoder and pooler with the masked-LM"):
        check(folder, closed)


@pytest.mark.slow
def test_padding_rows_of_the_word_table_are_dropped(tmp_path: Path, small_run: SmallRun) -> None:
    """Some models pad the word table to a round number of rows. The extra rows are dropped."""
    folder = save_pretrained(tmp_path / "theirs", small_run.folder / "vocab.txt", rows=208)
    check(folder, config_of(small_run))
    model, theirs = drawn_model(MODEL, 1), load_file(folder / "model.safetensors")
    assert load_initial_weights(model, folder) == []
    assert torch.equal(model.embeddings.word, theirs["bert.embeddings.word_embeddings.weight"][:VOCAB_SIZE])
    assert open_source(folder).model == replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1, vocab_size=208)
    folder = save_pretrained(tmp_path / "fewer", None, rows=192)
    with pytest.raises(ValueError, match=r"a vocabulary of 192 tokens, but model\.vocab_size is 200: make the"):
        check(folder, config_of(small_run))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("token", "message"),
    [
        (r'"other": \1', r"theirs was trained with .* \(SHA-256 \w{12}\.{3}\) than .*vocab\.txt \(\w{12}\.{3}\): set"),
        ('"word3": 7', r"tokenizer\.json: two tokens have the same id"),
        (r'"wor\\nd3": \1', r"tokenizer\.json: the token 'wor.*' holds a line feed"),
    ],
)
def test_a_folder_with_a_different_or_broken_vocabulary_is_refused_in_one_line(
    pretrained: Path, small_run: SmallRun, tmp_path: Path, token: str, message: str
) -> None:
    folder = shutil.copytree(pretrained, tmp_path / "theirs")
    path = folder / "tokenizer.json"
    path.write_text(re.sub(r'"word3": (\d+)', token, path.read_text()))
    changes = {"data__initial_checkpoint": folder, "model__layer_norm_eps": 1e-7}
    with pytest.raises(ValueError, match=message) as refused:
        preflight.check(parse(small_run.arguments(tmp_path / "results", **changes)), 1)
    assert "\n" not in str(refused.value)


SMALL = ModelConfig(1, 16, 2, 32, 50, 16)


class Leaving:
    """A run that only saves weights. Its decoder bias holds the number of the last evaluation."""

    def __init__(self, path: Path, *, keeps_best: bool, is_resumed: bool = False) -> None:
        self.path, self.model = path, drawn_model(SMALL, seed=0)
        evaluation = EvaluationConfig(target=None if keeps_best else 0.3)
        config = replace(tiny_cpu(), save_checkpoint=path, evaluation=evaluation)
        step: Any = SimpleNamespace(mesh=CPU, gather_whole_model=lambda: self.model)
        self.weights = TrainedWeights(config, {}, step, is_resumed=is_resumed)

    def evaluated(self, number: int, correct: int) -> None:
        torch.nn.init.constant_(self.model.decoder_bias, number)
        record = EvaluationRecord(number, 100 * number, 0.0, 0.0, correct / 1000, correct, 1000, math.exp(2))
        self.weights.evaluated(record)

    @property
    def saved(self) -> int:
        """Number of the evaluation whose weights are saved."""
        return int(open_source(self.path).weights["decoder_bias"].read()[0])


def test_a_run_without_a_target_keeps_its_best_weights_even_after_resuming(tmp_path: Path) -> None:
    run = Leaving(tmp_path / "weights.safetensors", keeps_best=True)
    for number, correct, kept in ((1, 0, 1), (2, 300, 2), (3, 300, 2), (4, 299, 2)):
        run.evaluated(number, correct)
        assert run.saved == kept
    run.weights.ended()
    assert run.saved == 2
    found = stated_evaluation(run.path)
    assert found is not None
    assert (found.samples, found.masked_lm_accuracy, found.count) == (200, 0.3, 1000)
    assert found.perplexity == pytest.approx(7.389, rel=1e-3)
    assert found.error == pytest.approx(0.0284, rel=1e-2)
    resumed = Leaving(run.path, keeps_best=True, is_resumed=True)
    for number, correct, kept in ((5, 299, 2), (6, 301, 6)):
        resumed.evaluated(number, correct)
        assert resumed.saved == kept
    again = Leaving(run.path, keeps_best=True)
    again.evaluated(7, 1)
    assert again.saved == 7, "a new run does not compare itself with an earlier one"
    run.path.write_bytes(b"cut off")
    resumed = Leaving(run.path, keeps_best=True, is_resumed=True)
    resumed.evaluated(8, 5)
    assert resumed.saved == 8, "a damaged file is replaced"


def test_a_run_with_a_target_or_without_evaluations_saves_its_last_weights(tmp_path: Path) -> None:
    run = Leaving(tmp_path / "early.safetensors", keeps_best=True)
    run.weights.ended()
    assert stated_evaluation(run.path) is None
    run.evaluated(1, 0)
    run.weights.ended()
    assert stated_evaluation(run.path) is not None, "its best evaluation got nothing right"
    run = Leaving(tmp_path / "target.safetensors", keeps_best=False)
    run.evaluated(1, 500)
    assert not run.path.exists()
    run.evaluated(2, 400)
    run.weights.ended()
    assert run.saved == 2
