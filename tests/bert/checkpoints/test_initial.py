"""A Hugging Face folder as the start of a run: the weights of ``bert.convert``, and a clear line where it does not fit."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bert import evaluate
from bert.checkpoints.initial import check_initial_weights, load_initial_weights
from bert.checkpoints.sources import open_source
from bert.configuration.config import Config, ModelConfig
from bert.configuration.recipes import tiny_cpu
from bert.convert import convert
from bert.guards import preflight
from bert.model import BertForPreTraining, initialize_
from bert.train import parse
from dataloading.text.tokenization import Vocabulary
from tests.conftest import MAX_SEQ_LENGTH, VOCAB_SIZE, SmallRun
from tests.programs import PATIENCE_S, Program

pytestmark = pytest.mark.slow

MODEL = ModelConfig(
    2, 32, 2, 64, VOCAB_SIZE, MAX_SEQ_LENGTH, hidden_dropout=0.0, attention_dropout=0.0, layer_norm_eps=1e-7
)
"""Of ``SmallRun``."""


def save_pretrained(folder: Path, vocab: Path | None, kind: str = "BertForPreTraining", rows: int = VOCAB_SIZE) -> Path:
    """A folder as ``transformers`` writes it, with its fast tokenizer, which brings no vocab.txt."""
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


@pytest.fixture
def folder(tmp_path: Path, small_run: SmallRun) -> Path:
    return save_pretrained(tmp_path / "theirs", small_run.folder / "vocab.txt")


def config_of(small_run: SmallRun, model: ModelConfig = MODEL) -> Config:
    config = tiny_cpu()
    return replace(config, model=model, data=replace(config.data, vocab=small_run.folder / "vocab.txt"))


def check(folder: Path, config: Config) -> None:
    check_initial_weights(folder, config, Vocabulary.from_file(config.data.vocab))


def random_model(model: ModelConfig = MODEL) -> BertForPreTraining:
    made = BertForPreTraining(model)
    initialize_(made, torch.Generator().manual_seed(1))
    return made


def loaded(path: Path, model: ModelConfig = MODEL) -> BertForPreTraining:
    made = random_model(model)
    assert load_initial_weights(made, path) == []
    return made


def test_a_folder_is_what_its_conversion_is(folder: Path, small_run: SmallRun, tmp_path: Path) -> None:
    config = config_of(small_run)
    check(folder, config)
    convert(folder, "safetensors", tmp_path / "converted.safetensors")
    check(tmp_path / "converted.safetensors", config)
    direct, converted = loaded(folder).state_dict(), loaded(tmp_path / "converted.safetensors").state_dict()
    assert all(torch.equal(direct[name], converted[name]) for name in converted)
    theirs = load_file(folder / "model.safetensors")
    assert torch.equal(direct["embeddings.word"], theirs["bert.embeddings.word_embeddings.weight"])


def test_a_run_and_an_evaluation_start_from_a_folder(
    folder: Path, small_run: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the accuracy that its conversion has."""
    convert(folder, "safetensors", tmp_path / "converted.safetensors")
    found, runs = list[str](), list[Program]()
    for start in (folder, tmp_path / "converted.safetensors"):
        changes = {"data__initial_checkpoint": start, "model__layer_norm_eps": 1e-7}
        arguments = small_run.arguments(tmp_path / "results", **changes)
        capsys.readouterr()
        assert evaluate.main(arguments) == 0
        found += re.findall(r"masked-LM accuracy .* of \d+ samples", capsys.readouterr().out)
        runs.append(Program("bert.train", arguments))
        assert runs[-1].wait(PATIENCE_S) == 1, runs[-1].output  # it misses the target
    assert len(found) == 2
    assert found[0] == found[1]
    losses = [re.findall(r"loss [\d.]+", run.output) for run in runs]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 10


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertModel"])
def test_heads_that_are_missing_stay_random_in_the_open_division(
    tmp_path: Path, small_run: SmallRun, kind: str
) -> None:
    folder = save_pretrained(tmp_path / "theirs", small_run.folder / "vocab.txt", kind)
    config = config_of(small_run)
    check(folder, config)
    model, before = random_model(config.model), random_model(config.model).state_dict()
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


def test_rows_past_the_vocabulary_are_left_out(tmp_path: Path, small_run: SmallRun) -> None:
    """Others pad the word table to a round number."""
    folder = save_pretrained(tmp_path / "theirs", small_run.folder / "vocab.txt", rows=208)
    check(folder, config_of(small_run))
    theirs = load_file(folder / "model.safetensors")["bert.embeddings.word_embeddings.weight"]
    assert torch.equal(loaded(folder).state_dict()["embeddings.word"], theirs[:VOCAB_SIZE])
    folder = save_pretrained(tmp_path / "fewer", None, rows=192)
    with pytest.raises(ValueError, match=r"a model of 192 tokens, but model\.vocab_size is 200: make the samples with"):
        check(folder, config_of(small_run))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_hidden_layers": 3},
            r"num_hidden_layers 2, but model\.num_hidden_layers is 3: set --model\.num-hidden-layers 2",
        ),
        ({"hidden_size": 64}, r"hidden_size 32, but model\.hidden_size is 64"),
        ({"num_attention_heads": 4}, r"num_attention_heads 2, but model\.num_attention_heads is 4"),
        ({"intermediate_size": 128}, r"intermediate_size 64, but model\.intermediate_size is 128"),
        ({"max_position_embeddings": 64}, r"max_position_embeddings 48, but model\.max_position_embeddings is 64"),
        ({"type_vocab_size": 3}, r"type_vocab_size 2, but model\.type_vocab_size is 3"),
        ({"layer_norm_eps": 1e-12}, r"layer_norm_eps 1e-07, but model\.layer_norm_eps is 1e-12"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_shape_is_named_with_its_setting(
    folder: Path, small_run: SmallRun, change: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(folder, config_of(small_run, replace(MODEL, **change)))


def swap_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"word3"', '"other"'))


def remove_an_id(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_bytes())
    content["model"]["vocab"]["word3"] = 7
    (folder / "tokenizer.json").write_text(json.dumps(content))


def write_a_blank(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"word3"', r'"wor\nd3"'))


def write_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def spoil_config(folder: Path) -> None:
    (folder / "config.json").write_text("no JSON")


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def drop_a_layer_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["bert.encoder.layer.1.output.dense.bias"]
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (swap_tokens, r"theirs has another vocabulary \(200 tokens\) than .*vocab\.txt \(200\): make the samples with"),
        (remove_an_id, r"tokenizer\.json: no WordPiece vocabulary with an id for each token"),
        (write_a_blank, r"tokenizer\.json: tokens that repeat, or with blanks"),
        (
            write_pickle,
            r"pytorch_model\.bin, a pickle file, .* have transformers \(from_pretrained, then save_pretrained\)",
        ),
        (spoil_config, r"config\.json: damaged or of another kind"),
        (lambda folder: (folder / "config.json").unlink(), r"there is no config\.json beside it: fetch that"),
        (cut_weights, r"model\.safetensors is not a whole safetensors file"),
        (drop_a_layer_weight, r"lacks bert\.encoder\.layer\.1\.output\.dense\.bias: expected BERT's encoder"),
    ],
)
def test_a_folder_that_cannot_be_used_gets_one_line(
    folder: Path,
    small_run: SmallRun,
    tmp_path: Path,
    spoil: Callable[[Path], object],
    message: str,
) -> None:
    spoil(folder)
    changes = {"data__initial_checkpoint": folder, "model__layer_norm_eps": 1e-7}
    with pytest.raises(ValueError, match=message) as refused:
        preflight.check(parse(small_run.arguments(tmp_path / "results", **changes)), 1)
    assert "\n" not in str(refused.value)


def test_dropout_and_epsilon_of_a_folder_are_known(folder: Path) -> None:
    """To ``bert.convert`` too, whose files state the whole model."""
    expected = replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1)
    assert asdict(open_source(folder).model) == asdict(expected)
