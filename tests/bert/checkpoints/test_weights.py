"""Saved weights load unchanged, and a file that does not fit is rejected with one clear line."""

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping
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
from bert.checkpoints.weights import model_metadata, read_header, save_weights, text_metadata
from bert.configuration.sections import ModelConfig
from bert.convert import convert
from bert.fill_mask import GapFiller
from bert.optimizer import FlatParameters
from console.commands import run_program
from dataloading.options import Normalization, NormalizationOptions
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


def test_saved_weights_load_unchanged(tmp_path: Path):
    """Overwrite a file with parameters that are views of one buffer. The safetensors library writes equal bytes."""
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
    import transformers  # a slow import that most tests do not need

    load: Any = transformers.BertForPreTraining.from_pretrained
    model, report = load(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


HEADS = ("pooler.weight", "pooler.bias", "next_sentence.weight", "next_sentence.bias")
FOUR_HEADS = ModelConfig(2, 24, 4, 16, 30, 12, hidden_dropout=0.2, layer_norm_eps=1e-6)


def test_the_architecture_comes_from_the_metadata_and_survives_conversion(tmp_path: Path):
    """Shapes do not determine the whole model: the number of heads, for example, comes from the metadata."""
    write_vocabulary(tmp_path / "vocab.txt")
    ours, again, theirs = tmp_path / "ours.safetensors", tmp_path / "again.safetensors", tmp_path / "theirs"
    save_weights(drawn_model(FOUR_HEADS, 0), ours)
    convert(ours, "safetensors", again)
    convert(again, "hugging-face", theirs)
    assert open_source(ours).model == open_source(again).model == open_source(theirs).model == FOUR_HEADS
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    names = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu_new"}
    names |= {"pad_token_id": 0}
    sizes = {name: value for name, value in asdict(FOUR_HEADS).items() if "dropout" not in name}
    kinds = {"architectures": ["BertForPreTraining"], "model_type": "bert", "tie_word_embeddings": True}
    settings = {"tokenizer_class": "BertTokenizer", **asdict(Normalization()), "model_max_length": 12}
    for name, content in (("config", kinds | sizes | names), ("tokenizer_config", settings | special)):
        text = (theirs / f"{name}.json").read_text()
        assert (json.loads(text), text) == (content, json.dumps(json.loads(text), indent=2) + "\n")
    with pytest.raises(ValueError, match="holds a model with 4 attention heads: leave --num-attention-heads 2 out"):
        open_source(ours, 2)
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(ours), bare)
    with pytest.raises(ValueError, match=r"does not say how many attention heads .* set --num-attention-heads"):
        open_source(bare)
    assert open_source(bare, 4).model.num_attention_heads == 4


INDEX, LAST = "model.safetensors.index.json", "model-00003-of-00003.safetensors"
Changes = Mapping[str, Tensor | str | int | dict[str, Any] | None]


def change(path: Path, changes: Changes) -> None:
    """Replace or remove tensors in the file ``path``, or replace, truncate or remove files in its folder."""
    for name, value in changes.items():
        file = path.with_name(name)
        if isinstance(value, Tensor) or (value is None and not file.exists()):
            tensors = load_file(path) | {name: value}
            tensors = {name: each for name, each in tensors.items() if each is not None}
            save_file(tensors, path, read_header(path)[1])
        elif isinstance(value, int):
            os.truncate(file, value)
        elif value is None:
            file.unlink()
        else:
            file.write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"weights.safetensors": kept}, "safetensors file") for kept in (0, 4, 100)),
        ({"weights.safetensors": 8000}, "not a whole safetensors file"),
        ({"weights.safetensors": None}, r": no such file"),
        ({"pooler.bias": None}, " lacks pooler.bias: expected BERT's encoder and pooler with the masked-LM"),
        ({"pooler.bias": torch.zeros(4)}, r": pooler.bias has the shape \(4,\), but the other weights imply \(8,\)"),
        ({"pooler.bias": torch.ones(8, dtype=torch.int32)}, " holds pooler.bias as torch.int32, expected fp32"),
        ({"pooler.bias": torch.ones(8).to(torch.float8_e4m3fn)}, " holds pooler.bias as torch.float8"),
        ({"pooler.bias": torch.full((8,), torch.nan)}, ": pooler.bias has NaN or infinity in fp32"),
        ({"pooler.bias": torch.full((8,), 1e300, dtype=torch.float64)}, ": pooler.bias has NaN or infinity in fp32"),
        (dict.fromkeys(HEADS), " lacks pooler.weight, pooler.bias, next_sentence.weight and 1 more: expected BERT's"),
        ({"embeddings.segment": torch.ones(8)}, r" is no BERT, with 2 layers and tables of shapes .*\(8,\)\]: choose"),
    ],
)
def test_damaged_and_incompatible_weights_are_refused(saved: Path, changes: Changes, message: str):
    change(saved, changes)
    with pytest.raises(ValueError, match=rf"weights\.safetensors.*{message}"):
        load_initial_weights(drawn_model(CONFIG, 1), saved)


def test_weights_of_a_different_architecture_are_refused(saved: Path):
    for name, value, message in (
        ("vocab_size", 31, "a vocabulary of 30 tokens, but model.vocab_size is 31: make the samples with that model"),
        ("num_attention_heads", 4, "num_attention_heads 2, but model.num_attention_heads is 4: set --model"),
        ("type_vocab_size", 3, "type_vocab_size 2, but model.type_vocab_size is 3: set --model.type-vocab-size 2"),
        ("layer_norm_eps", 1e-7, "layer_norm_eps 1e-12, but model.layer_norm_eps is 1e-07: set --model.layer-norm-eps"),
    ):
        with pytest.raises(ValueError, match=f"weights.safetensors holds a model (with )?{message}"):
            load_initial_weights(drawn_model(replace(CONFIG, **{name: value}), 1), saved)


ODD = ({"hidden_size": True}, {"num_attention_heads": 3}, {"intermediate_size": 17})


@pytest.mark.parametrize("stated", ["{", "[" * 100_000, "null", *(json.dumps(asdict(CONFIG) | each) for each in ODD)])
def test_invalid_metadata_about_the_model_is_refused(tmp_path: Path, stated: str):
    save_file(drawn_model(CONFIG, 0).state_dict(), tmp_path / "odd.safetensors", {"model": stated})
    other = "its metadata states intermediate_size 17, but the weights in .* have 16"
    message = other if "17" in stated else r"odd\.safetensors: its metadata entry model is invalid"
    with pytest.raises(ValueError, match=message):
        load_initial_weights(drawn_model(CONFIG, 1), tmp_path / "odd.safetensors")


@pytest.mark.slow
def test_an_exported_folder_fills_masks_as_the_model_does(tmp_path: Path):
    """``transformers`` loads the exported folder, with its tokenizer. The model has an unusual head size."""
    import transformers

    model = drawn_model(FOUR_HEADS, 3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20)  # so that words get clearly different scores
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


def test_export_needs_the_vocabulary_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    digest = write_vocabulary(tmp_path / "words")
    save_weights(drawn_model(CONFIG, 0), tmp_path / "ours.safetensors", {"vocabulary_sha256": digest})
    out = tmp_path / "theirs"
    with pytest.raises(ValueError, match=r"there is no .*vocab\.txt: set --vocab to the vocabulary"):
        convert(tmp_path / "ours.safetensors", "hugging-face", out)
    write_vocabulary(tmp_path / "vocab.txt", 24)
    with pytest.raises(ValueError, match=r"vocab\.txt is not the vocabulary that the model was trained with"):
        convert(tmp_path / "ours.safetensors", "hugging-face", out)
    padded = replace(CONFIG, vocab_size=32)
    stated = text_metadata(digest, Normalization(False, False))
    save_weights(drawn_model(padded, 0), tmp_path / "ours.safetensors", stated)
    (tmp_path / "words").rename(tmp_path / "vocab.txt")
    convert(tmp_path / "ours.safetensors", "hugging-face", tmp_path / "padded")
    rows = f"the word embedding table has 2 rows more than {tmp_path}/vocab.txt has tokens: they are padding"
    assert capsys.readouterr().out.splitlines()[0] == rows
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(
        ValueError, match=r"ours.safetensors was trained on text with capital letters kept, accents kept"
    ):
        convert(tmp_path / "ours.safetensors", "hugging-face", out)
    given = NormalizationOptions(do_lower_case=True, strip_accents=True)
    convert(tmp_path / "ours.safetensors", "hugging-face", tmp_path / "given", normalization=given)
    (tmp_path / "tokenizer_config.json").unlink()
    save_weights(drawn_model(CONFIG, 0), tmp_path / "ours.safetensors")  # this file lacks the vocabulary's digest
    for words in (24, 26):  # 30 is not a multiple of 8, so no row can be padding
        write_vocabulary(tmp_path / "vocab.txt", words)
        with pytest.raises(ValueError, match=f"{words + 5} tokens, but the model's word embedding table has 30 rows"):
            convert(tmp_path / "ours.safetensors", "hugging-face", out)
    assert not out.exists()


@pytest.mark.slow
def test_conversion_gives_the_same_weights_from_every_format(tmp_path: Path):
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


@pytest.mark.slow
def test_folders_with_a_decoder_half_precision_or_old_names_load(theirs: Path, tmp_path: Path):
    """transformers saves one folder. The other has a decoder, half precision and old names. Weights load as fp32."""
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


def renamed(path: Path, rename: Callable[[str], str]) -> None:
    save_file({rename(name): tensor for name, tensor in load_file(path).items()}, path, read_header(path)[1])


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.module."])
def test_prefixes_that_torch_compile_and_ddp_add_are_removed(saved: Path, theirs: Path, prefix: str):
    """Names in the folder ``bare`` also lack "bert.", as if ``BertModel`` had been wrapped."""
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


@pytest.fixture
def sharded(theirs: Path) -> Path:
    """Return a folder in which transformers has saved the model of ``theirs`` in several files."""
    from_pretrained(theirs).save_pretrained(folder := theirs.with_name("sharded"), max_shard_size="3KB")
    assert len(list(folder.glob("model-0*"))) > 2
    return folder


@pytest.mark.parametrize("named", ["", INDEX])
def test_weights_in_several_files_equal_the_single_file(sharded: Path, tmp_path: Path, named: str):
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
    assert open_source(sharded).digest() == expected.digest()  # the single file is preferred, as in transformers


WORD, DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
NAN = torch.full((30, 8), torch.nan)
TWO = {"num_attention_heads": 2}
NO_NAME = "is not the name of a safetensors file; expected the index of safetensors files"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {DECODER: torch.ones(30, 8)},
            r"decoder\.weight differs from bert\.embeddings.*, but a BERT uses one tensor for both: choose",
        ),
        ({DECODER: torch.ones(0, 8)}, r"decoder\.weight differs from bert\.embeddings"),
        ({DECODER: NAN, WORD: NAN}, r"model\.safetensors: .*\.weight has NaN or infinity"),
        ({"module.bert.pooler.dense.bias": torch.ones(8)}, r"the same weight as .*pooler\.dense\.bias and as "),
        ({"pooler.dense.bias": torch.ones(8)}, r"holds the same weight as .*pooler\.dense\.bias and as "),
        ({"config.json": "[" * 100_000}, "config.json"),
        ({"config.json": " " * 2_000_000 + "{}"}, "config.json: 2,000,002 bytes, expected at most"),
        ({"config.json": "[]"}, "config.json"),
        ({"config.json": "{}"}, "num_attention_heads"),
        ({"config.json": {"num_attention_heads": 3}}, "is 8, which model.num_attention_heads 3 does not divide"),
        ({"config.json": {"num_attention_heads": True}}, "num_attention_heads"),
        ({"config.json": TWO | {"hidden_size": "8"}}, "hidden_size"),
        ({"config.json": TWO | {"hidden_size": 16}}, "config.json states hidden_size 16, but the weights in .* have 8"),
        ({"config.json": TWO | {"layer_norm_eps": math.nan}}, "config.json"),
        ({"config.json": TWO | {"model_type": "roberta"}}, "model_type"),
        ({"config.json": TWO | {"position_embedding_type": "relative_key"}}, "position_embedding_type"),
        ({"config.json": TWO | {"hidden_act": "relu"}}, "hidden_act"),
        ({"config.json": TWO | {"hidden_act": ["\x1b"]}}, "hidden_act"),
        ({"config.json": TWO | {"hidden_act": "gelu_10"}}, "hidden_act"),
        ({"config.json": TWO | {"is_decoder": True}}, "is_decoder is True, but only encoders"),
        ({"config.json": TWO | {"is_decoder": 1}}, "is_decoder"),
        ({"config.json": TWO | {"add_cross_attention": True}}, "add_cross_attention is True"),
        ({"config.json": TWO | {"quantization_config": {"quant_method": "fp8"}}}, "quantization_config is"),
        ({LAST: None}, rf"index\.json names files that are missing \({LAST}\)"),
        ({LAST: 50}, "not a whole safetensors file"),
        ({INDEX: {"weight_map": {"more": LAST}}}, f"{LAST} lacks more, which {INDEX} expects there"),
        ({INDEX: {"weight_map": {"more": "../theirs/model.safetensors"}}}, NO_NAME),
        ({INDEX: {"weight_map": {"more": "/etc/passwd"}}}, NO_NAME),
        ({INDEX: {"weight_map": {"more": f"{'x' * 300}.safetensors"}}}, NO_NAME),
        ({INDEX: {"weight_map": {"more": 3}}}, "index.json"),
        ({INDEX: {"weight_map": {}}}, "index.json lacks bert"),
        ({INDEX: "{}"}, "weight_map"),
        ({INDEX: "[" * 100_000}, "index.json"),
        ({INDEX: " " * 2_000_000}, "2,000,000 bytes, expected at most"),
    ],
)
def test_invalid_hugging_face_folders_are_refused(request: pytest.FixtureRequest, changes: Changes, message: str):
    folder = request.getfixturevalue("sharded" if {LAST, INDEX} & changes.keys() else "theirs")
    change(folder / "model.safetensors", changes)
    with pytest.raises(ValueError, match=message):
        open_source(folder)


def test_pickles_are_refused_by_their_content_and_by_their_name(tmp_path: Path):
    names = "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "weights.pt", "weights"
    for name, start in ((name, start) for name in names for start in (b"PK\3\4", b"\x80\2", b"other")):
        path = tmp_path / name
        path.write_bytes(start + bytes(99))
        is_other = (name, start) == ("weights", b"other")
        with pytest.raises(ValueError, match="neither a safetensors file" if is_other else f"{name} is a pickle file"):
            open_source(path)
        with pytest.raises(
            ValueError, match=f"{name} is a pickle" if "_" in name else "holds no model.safetensors: name a"
        ):
            open_source(tmp_path)
        path.unlink()


def test_convert_overwrites_nothing(saved: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling link").symlink_to("nowhere")
    for kind in ("file", "folder", "dangling link"):
        with pytest.raises(ValueError, match=f"{kind} exists already: move it away, or name another --out"):
            convert(saved, "safetensors", tmp_path / kind, 2)


def test_convert_prints_the_models_kind_sizes_and_digest(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["convert", *map(str, arguments)])
        return run_program(convert, "python -m bert.convert")

    out = tmp_path / "new" / "weights.safetensors"
    assert run(BUNDLES / "tf1", "--to", "safetensors", "--out", out, "--num-attention-heads", 2) == 0
    kind = "TensorFlow checkpoint (TF1), not the benchmark's published file by size and MD5 of its index"
    digest = open_source(BUNDLES / "tf1", 2).digest()
    assert capsys.readouterr().out.splitlines() == [
        f"{kind}: 1,776 parameters",
        "2 layers, hidden size 8, intermediate size 16, 2 heads, 12 positions",
        "30 vocabulary rows, not the benchmark's 30,522: set model.vocab_size, and data.vocab to a vocabulary of that size",
        digest,
        f"wrote {out}",
    ]
    assert read_header(out)[1] == {"source": kind, "source_digest": digest} | model_metadata(CONFIG)
    assert run(saved, "--to", "safetensors", "--out", saved / "below a file") == 2
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
