"""Saved weights load unchanged, and a file that does not fit is rejected with one clear line."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from bert.checkpoints.hugging_face import to_hugging_face
from bert.checkpoints.initial_model import load_initial_weights
from bert.checkpoints.sources import open_source
from bert.checkpoints.weights import model_metadata, read_header, save_weights
from bert.configuration.sections import ModelConfig
from bert.convert import convert
from bert.optimizer import FlatParameters
from bert.predict import GapFiller
from bert.train import run_command
from dataloading.text.vocabulary import Vocabulary
from tests.bert.checkpoints.tf_bundles.expected import BUNDLES, bundle_weights
from tests.bert.small_models import drawn_model

CONFIG = ModelConfig(2, 8, 2, 16, 30, 12)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_weights(drawn_model(CONFIG, 0), path)
    return path


def write_vocabulary(path: Path, words: int = 25) -> str:
    """Write the special tokens and some words, and return the vocabulary's digest."""
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(words))]))
    return Vocabulary.from_file(path).sha256


def test_round_trip(tmp_path: Path):
    """Save parameters that are views of one buffer over an existing file, and compare with the safetensors library."""
    path = tmp_path / "new folder" / "weights.safetensors"
    source, target = drawn_model(CONFIG, 0), drawn_model(CONFIG, 1)
    save_weights(target, path)
    FlatParameters.of(source)
    save_weights(source, path)
    assert path.read_bytes() == save(drawn_model(CONFIG, 0).state_dict(), model_metadata(CONFIG))
    flat = FlatParameters.of(target)
    load_initial_weights(target, path)
    assert torch.equal(flat.weights_P, FlatParameters.of(drawn_model(CONFIG, 0)).weights_P)


@pytest.fixture
def theirs(saved: Path, tmp_path: Path) -> Path:
    """Return a Hugging Face folder with the weights of ``saved``."""
    write_vocabulary(tmp_path / "vocab.txt")
    convert(saved, "hugging-face", tmp_path / "theirs", 2)
    return tmp_path / "theirs"


def from_pretrained(folder: Path) -> Any:
    import transformers  # imported here and below because it loads more slowly than most test files

    load: Any = transformers.BertForPreTraining.from_pretrained
    model, report = load(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


FOUR_HEADS = ModelConfig(2, 24, 4, 16, 30, 12, hidden_dropout=0.2, layer_norm_eps=1e-6)


def test_a_file_says_which_model_it_holds_and_is_not_guessed_at(tmp_path: Path):
    """Shapes do not determine the whole model: the number of heads, for example, comes from the metadata."""
    write_vocabulary(tmp_path / "vocab.txt")
    ours, again, theirs = tmp_path / "ours.safetensors", tmp_path / "again.safetensors", tmp_path / "theirs"
    save_weights(drawn_model(FOUR_HEADS, 0), ours)
    convert(ours, "safetensors", again)
    convert(again, "hugging-face", theirs)
    assert open_source(ours).model == open_source(again).model == open_source(theirs).model == FOUR_HEADS
    with pytest.raises(ValueError, match="holds a model with 4 attention heads: leave --num-attention-heads 2 out"):
        open_source(ours, 2)
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(ours), bare)
    with pytest.raises(ValueError, match=r"does not say how many attention heads .* set --num-attention-heads"):
        open_source(bare)
    assert open_source(bare, 4).model.num_attention_heads == 4


@pytest.mark.parametrize(
    "stated",
    [
        "{",
        "[" * 100_000,
        "null",
        json.dumps(asdict(CONFIG) | {"hidden_size": True}),
        json.dumps(asdict(CONFIG) | {"num_attention_heads": 3}),
    ],
)
def test_a_statement_that_makes_no_sense(tmp_path: Path, stated: str):
    save_file(drawn_model(CONFIG, 0).state_dict(), tmp_path / "odd.safetensors", {"model": stated})
    with pytest.raises(ValueError, match=r"odd\.safetensors does not state its model as this program does"):
        load_initial_weights(drawn_model(CONFIG, 1), tmp_path / "odd.safetensors")


def rewritten(name: str, tensor: Tensor | None) -> Callable[[Path], object]:
    """Return a function that replaces or removes a tensor in a file."""

    def act(path: Path) -> None:
        tensors = load_file(path) | {name: tensor}
        save_file({name: each for name, each in tensors.items() if each is not None}, path, read_header(path)[1])

    return act


@pytest.mark.parametrize(
    ("spoil", "change", "message"),
    [
        *((lambda path, kept=kept: os.truncate(path, kept), {}, "safetensors file") for kept in (0, 4, 100)),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), {}, "not a whole safetensors file"),
        (lambda path: torch.save({}, path), {}, "pickle file"),
        (Path.unlink, {}, r"weights\.safetensors: no such file"),
        (rewritten("pooler.bias", None), {}, r"weights\.safetensors lacks pooler\.bias"),
        (rewritten("pooler.bias", torch.zeros(4)), {}, r"pooler\.bias has the shape \(4,\), expected \(8,\)"),
        (rewritten("pooler.bias", torch.ones(8, dtype=torch.int32)), {}, r"pooler\.bias as torch\.int32"),
        (rewritten("pooler.bias", torch.ones(8).to(torch.float8_e4m3fn)), {}, r"pooler\.bias as torch\.float8"),
        (rewritten("pooler.bias", torch.full((8,), torch.nan)), {}, r"safetensors: pooler\.bias has NaN or inf"),
        (rewritten("pooler.bias", torch.full((8,), 1e300, dtype=torch.float64)), {}, r"pooler\.bias has NaN or inf"),
        (Path.stat, {"vocab_size": 31}, r"of 30 tokens, but model\.vocab_size is 31"),
    ],
)
def test_what_does_not_fit_is_refused(
    saved: Path, spoil: Callable[[Path], object], change: dict[str, int], message: str
):
    spoil(saved)
    with pytest.raises(ValueError, match=message):
        load_initial_weights(drawn_model(replace(CONFIG, **change), 1), saved)


@pytest.mark.slow
def test_an_exported_folder_fills_masks_as_the_model_does(tmp_path: Path):
    """``transformers`` loads the exported folder, with its tokenizer. The model has an unusual head size."""
    import transformers

    model = drawn_model(FOUR_HEADS, 3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20)  # so that the predicted words differ
    digest = write_vocabulary(tmp_path / "vocab.txt")
    save_weights(model, tmp_path / "ours.safetensors", {"vocabulary_sha256": digest})
    convert(tmp_path / "ours.safetensors", "hugging-face", tmp_path / "theirs")
    text = "W3 [MASK] w7w1, [MASK] w5"
    pipeline: Any = transformers.pipeline("fill-mask", model=str(tmp_path / "theirs"))
    tokens = Vocabulary.from_file(tmp_path / "vocab.txt").tokens
    theirs = [{tokens[one["token"]]: one["score"] for one in gap} for gap in pipeline(text, top_k=30)]
    for checkpoint in ("ours.safetensors", "theirs"):
        gaps = GapFiller(tmp_path / checkpoint, None)(text, top=30)
        assert [dict(gap) for gap in gaps] == [pytest.approx(gap, rel=1e-4, abs=1e-6) for gap in theirs]
        assert [word for word, _ in GapFiller(tmp_path / checkpoint, None)(text, top=1)[1]] == [gaps[1][0][0]]


def test_a_vocabulary_is_asked_for_and_must_be_the_models(tmp_path: Path):
    digest = write_vocabulary(tmp_path / "words")
    save_weights(drawn_model(CONFIG, 0), tmp_path / "ours.safetensors", {"vocabulary_sha256": digest})
    out = tmp_path / "theirs"
    with pytest.raises(ValueError, match=r"there is no .*vocab\.txt: set --vocab to the vocabulary"):
        convert(tmp_path / "ours.safetensors", "hugging-face", out)
    write_vocabulary(tmp_path / "vocab.txt", 24)
    with pytest.raises(ValueError, match=r"vocab\.txt is not the vocabulary that the model was trained with"):
        convert(tmp_path / "ours.safetensors", "hugging-face", out)
    save_weights(drawn_model(CONFIG, 0), tmp_path / "ours.safetensors")  # without a digest
    for words in (24, 26):  # a table of 30 rows is not padded to a multiple of 8
        write_vocabulary(tmp_path / "vocab.txt", words)
        with pytest.raises(ValueError, match=f"{words + 5} tokens, but the model's word embedding table has 30 rows"):
            convert(tmp_path / "ours.safetensors", "hugging-face", out)
    assert not out.exists()


@pytest.mark.slow
def test_every_format_gives_the_same_weights(tmp_path: Path):
    """Convert from TensorFlow to both other formats, and from Hugging Face's folder or file to this program's format."""
    write_vocabulary(tmp_path / "words")
    convert(BUNDLES / "tf1", "hugging-face", tmp_path / "theirs", 2, tmp_path / "words")
    state, expected = from_pretrained(tmp_path / "theirs").state_dict(), bundle_weights()
    for name, array in expected.items():
        assert torch.equal(state[name], torch.from_numpy(array)), name
    sources = {"tf.safetensors": BUNDLES / "tf1", "folder.safetensors": tmp_path / "theirs"}
    for out, source in (sources | {"file.safetensors": tmp_path / "theirs" / "model.safetensors"}).items():
        convert(source, "safetensors", tmp_path / out, 2)
        found = to_hugging_face(load_file(tmp_path / out))
        assert found.keys() - expected.keys() == {f"cls.predictions.decoder.{kind}" for kind in ("weight", "bias")}
        for name, tensor in found.items():
            assert torch.equal(tensor, state[name]), name
    assert open_source(tmp_path / "folder.safetensors").model == CONFIG


def test_a_folder_that_transformers_saved(theirs: Path, tmp_path: Path):
    """Variants of the folder: an explicit decoder, half precision, or old parameter names. Read weights are fp32."""
    from_pretrained(theirs).save_pretrained(tmp_path / "again")
    path = tmp_path / "again" / "model.safetensors"
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor.half()
        for name, tensor in to_hugging_face(load_file(theirs.parent / "weights.safetensors")).items()
    }
    renamed |= {name: tensor.clone() for name, tensor in renamed.items() if ".decoder." in name}
    for index, content in enumerate((load_file(path), renamed)):
        save_file(content, path)
        convert(tmp_path / "again", "safetensors", tmp_path / f"{index}.safetensors")
        model = drawn_model(CONFIG, 1)
        load_initial_weights(model, tmp_path / f"{index}.safetensors")
        for ours, expected in zip(model.parameters(), drawn_model(CONFIG, 0).parameters(), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-3 * index, atol=1e-6 * index)  # also compares the dtype


@pytest.mark.parametrize("other", [torch.ones(30, 8), torch.ones(0, 8)])
def test_an_untied_decoder_is_refused(theirs: Path, other: Tensor):
    rewritten("cls.predictions.decoder.weight", other)(theirs / "model.safetensors")
    with pytest.raises(ValueError, match=r"decoder\.weight is not bert\.embeddings"):
        open_source(theirs)


def test_a_decoder_that_is_not_finite_is_no_untied_one(theirs: Path):
    for name in ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"):
        rewritten(name, torch.full((30, 8), torch.nan))(theirs / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: .*\.weight has NaN or infinity"):
        open_source(theirs)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[" * 100_000, "config.json"),
        (" " * 2_000_000 + "{}", "config.json: 2,000,002 bytes, expected at most"),
        ("[]", "config.json"),
        ("{}", "num_attention_heads"),
        ('{"num_attention_heads": 3}', "num_attention_heads 3"),
        ('{"num_attention_heads": true}', "num_attention_heads"),
        ('{"num_attention_heads": 2, "hidden_size": "8"}', "hidden_size"),
        ('{"num_attention_heads": 2, "hidden_size": 16}', "states hidden_size 16, but the weights in .* have 8"),
        ('{"num_attention_heads": 2, "layer_norm_eps": NaN}', "config.json"),
        ('{"num_attention_heads": 2, "model_type": "roberta"}', "model_type"),
        ('{"num_attention_heads": 2, "position_embedding_type": "relative_key"}', "position_embedding_type"),
        ('{"num_attention_heads": 2, "hidden_act": "relu"}', "hidden_act"),
        ('{"num_attention_heads": 2, "hidden_act": ["\\u001b"]}', "hidden_act"),
        ('{"num_attention_heads": 2, "hidden_act": "gelu_10"}', "hidden_act"),
        ('{"num_attention_heads": 2, "is_decoder": true}', "is_decoder is True"),
        ('{"num_attention_heads": 2, "is_decoder": 1}', "is_decoder"),
        ('{"num_attention_heads": 2, "add_cross_attention": true}', "add_cross_attention is True"),
        ('{"num_attention_heads": 2, "quantization_config": {"quant_method": "fp8"}}', "quantization_config is"),
    ],
)
def test_a_configuration_that_does_not_fit(theirs: Path, config: str, message: str):
    (theirs / "config.json").write_text(config)
    with pytest.raises(ValueError, match=message):
        open_source(theirs)


def renamed(path: Path, rename: Callable[[str], str]) -> None:
    save_file({rename(name): tensor for name, tensor in load_file(path).items()}, path, read_header(path)[1])


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.module."])
def test_prefixes_of_wrappers_are_taken_off(saved: Path, theirs: Path, prefix: str):
    """The bare folder also lacks "bert.", as a wrapped ``BertModel`` does."""
    bare = shutil.copytree(theirs, theirs.with_name("bare"))
    for path, rename in (
        (saved, lambda name: prefix + name),
        (theirs / "model.safetensors", lambda name: prefix + name),
        (bare / "model.safetensors", lambda name: prefix + name.removeprefix("bert.")),
    ):
        renamed(path, rename)
        model = drawn_model(CONFIG, 1)
        assert load_initial_weights(model, path) == []
        assert all(map(torch.equal, model.parameters(), drawn_model(CONFIG, 0).parameters()))


@pytest.mark.parametrize("other", ["module.bert.pooler.dense.bias", "pooler.dense.bias"])
def test_one_weight_under_two_names_is_refused(theirs: Path, other: str):
    rewritten(other, torch.ones(8))(theirs / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds the same weight as .*pooler\.dense\.bias and as "):
        open_source(theirs)


@pytest.fixture
def sharded(theirs: Path) -> Path:
    """Return the folder of ``theirs`` as transformers saves it in several files."""
    from_pretrained(theirs).save_pretrained(folder := theirs.with_name("sharded"), max_shard_size="3KB")
    assert len(list(folder.glob("model-0*"))) > 2
    return folder


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("named", ["", INDEX])
def test_weights_in_several_files(sharded: Path, tmp_path: Path, named: str):
    source = open_source(sharded / named)
    expected = open_source(tmp_path / "theirs")
    assert source.model == expected.model
    assert source.weights.keys() == expected.weights.keys()
    assert all(torch.equal(weight.read(), expected.weights[name].read()) for name, weight in source.weights.items())
    before = source.digest()
    last = max(sharded.glob("model-0*"))
    renamed(last, lambda name: f"module.{name}")
    assert source.digest() != before
    shutil.copy(tmp_path / "theirs" / "model.safetensors", sharded)
    assert open_source(sharded).digest() == expected.digest()  # transformers prefers the single file, too


def misplaced(folder: Path, **changes: Any) -> None:
    """Change the files in which the index looks for weights."""
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | {"weight_map": index["weight_map"] | changes}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: max(folder.glob("model-0*")).unlink(),
            r"index\.json names files that are missing \(model-0",
        ),
        (lambda folder: os.truncate(max(folder.glob("model-0*")), 50), "not a whole safetensors file"),
        (lambda folder: misplaced(folder, more=min(folder.glob("model-0*")).name), "safetensors lacks more, which"),
        (lambda folder: misplaced(folder, more="../theirs/model.safetensors"), "is not the name of a safetensors file"),
        (lambda folder: misplaced(folder, more="/etc/passwd"), "is not the name of a safetensors file"),
        (lambda folder: misplaced(folder, more=f"{'x' * 300}.safetensors"), "is not the name of a safetensors file"),
        (lambda folder: misplaced(folder, more=3), "index.json"),
        (lambda folder: (folder / INDEX).write_text('{"weight_map": {}}'), "index.json lacks bert"),
        (lambda folder: (folder / INDEX).write_text("{}"), "weight_map"),
        (lambda folder: (folder / INDEX).write_text("[" * 100_000), "index.json"),
        (lambda folder: (folder / INDEX).write_text(" " * 2_000_000), "2,000,000 bytes, expected at most"),
    ],
)
def test_a_folder_of_several_files_that_is_damaged(sharded: Path, spoil: Callable[[Path], object], message: str):
    spoil(sharded)
    with pytest.raises(ValueError, match=message):
        open_source(sharded)


@pytest.mark.parametrize("content", [b"PK\x03\x04" + bytes(99), b"\x80\x02" + bytes(99)], ids=["zip", "pickle"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_pickles_are_refused(tmp_path: Path, content: bytes, name: str):
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match="is a pickle file, which can run any code"):
            open_source(path)


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_nothing_is_overwritten(saved: Path, tmp_path: Path, kind: str):
    out = tmp_path / "out"
    {"file": out.touch, "folder": out.mkdir, "dangling link": lambda: out.symlink_to("nowhere")}[kind]()
    with pytest.raises(ValueError, match="exists already"):
        convert(saved, "safetensors", out, 2)


def test_the_command(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["convert", *map(str, arguments)])
        return run_command(convert, "bert.convert")

    out = tmp_path / "new" / "weights.safetensors"
    assert run(BUNDLES / "tf1", "--to", "safetensors", "--out", out, "--num-attention-heads", 2) == 0
    printed = capsys.readouterr().out
    for expected in ("(TF1)", "1,776 parameters", "2 layers", "30 vocabulary rows"):
        assert expected in printed
    assert run(saved, "--to", "safetensors", "--out", saved / "below a file") == 2
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    metadata = read_header(out)[1]
    assert metadata["source"].startswith("TensorFlow checkpoint (TF1)")
    assert "sha256 of the index" in metadata["source_digest"]
