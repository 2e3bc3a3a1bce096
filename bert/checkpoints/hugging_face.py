"""Hugging Face's format for BERT models: weight names, and a folder that ``transformers`` loads with its tokenizer."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from bert.checkpoints.weights import Weight, write_safetensors
from bert.configuration.sections import ModelConfig
from console.documents import read_typed
from console.files import atomic_path, shown, sync
from dataloading.options import Normalization
from dataloading.text.tokenization import MAX_CHARACTERS_PER_WORD
from dataloading.text.vocabulary import Vocabulary

SHARDS_SUFFIX = ".safetensors.index.json"
"""Suffix of the index of a checkpoint that consists of several files. The index names the file of each tensor."""
_MOST_JSON_BYTES = 1 << 20
_SHARD = re.compile(r"[\w-][\w.-]{0,200}\.safetensors", re.ASCII)

_HUGGING_FACE = {
    "embeddings.word": "bert.embeddings.word_embeddings.weight",
    "embeddings.position": "bert.embeddings.position_embeddings.weight",
    "embeddings.segment": "bert.embeddings.token_type_embeddings.weight",
    "embeddings.norm": "bert.embeddings.LayerNorm",
    "pooler": "bert.pooler.dense",
    "next_sentence": "cls.seq_relationship",
    "transform": "cls.predictions.transform.dense",
    "transform_norm": "cls.predictions.transform.LayerNorm",
    "decoder_bias": "cls.predictions.bias",
}
_HUGGING_FACE_LAYER = {
    # ``EncoderLayer`` splits the fused weight in this order.
    "query_key_value": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention_output": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "intermediate": ("intermediate.dense",),
    "output": ("output.dense",),
    "output_norm": ("output.LayerNorm",),
}

_THEIR_NAMES = {"hidden_dropout": "hidden_dropout_prob", "attention_dropout": "attention_probs_dropout_prob"}
"""Map from fields of ``ModelConfig`` to their names in config.json, where the names differ."""


def hugging_face_names(layers: int) -> dict[str, tuple[str, ...]]:
    """Map this program's names to Hugging Face's. If a name has several, the tensors are concatenated along dimension 0."""
    parts: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in _HUGGING_FACE.items()}
    for index in range(layers):
        for ours, theirs in _HUGGING_FACE_LAYER.items():
            parts[f"layers.{index}.{ours}"] = tuple(f"bert.encoder.layer.{index}.{part}" for part in theirs)
    # These names denote parameters. All other names denote modules, which have a weight and a bias.
    whole = ("embeddings.word", "embeddings.position", "embeddings.segment", "decoder_bias")
    return {
        ours + suffix: tuple(part + suffix for part in theirs)
        for ours, theirs in parts.items()
        for suffix in ([""] if ours in whole else [".weight", ".bias"])
    }


def to_hugging_face(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename this program's tensors as in Hugging Face's ``BertForPreTraining``. Its decoder repeats two of them."""
    result, layers = {}, 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    for ours, theirs in hugging_face_names(layers).items():
        result |= dict(zip(theirs, tensors[ours].chunk(len(theirs)), strict=True))
    result["cls.predictions.decoder.weight"] = tensors["embeddings.word"]
    result["cls.predictions.decoder.bias"] = tensors["decoder_bias"]
    return result


def write_folder(
    out: Path,
    model: ModelConfig,
    weights: Mapping[str, Weight],
    vocabulary: Vocabulary,
    normalization: Normalization,
    metadata: Mapping[str, str],
    card: str = "",
) -> None:
    """Atomically write a folder from which ``from_pretrained`` of transformers loads the model and the tokenizer.

    ``card`` is the text of README.md, if any.
    """
    parts: dict[str, Weight] = {}
    for ours, theirs in hugging_face_names(model.num_hidden_layers).items():
        weight = weights[ours]
        count = len(theirs)
        shape = (weight.shape[0] // count, *weight.shape[1:])
        for place, name in enumerate(theirs):  # read the fused weight for each part again, to save memory
            parts[name] = Weight(shape, lambda each=weight, count=count, at=place: each.read().chunk(count)[at])
    with atomic_path(out) as folder:
        folder.mkdir()
        _write_json(folder / "config.json", _configuration(model) | {"pad_token_id": vocabulary.ids["[PAD]"]})
        _write_tokenizer(folder, model, vocabulary, normalization)
        # State a format in the metadata, because transformers rejects a file without one.
        write_safetensors(folder / "model.safetensors", parts, {"format": "pt"} | dict(metadata))
        if card:
            (folder / "README.md").write_text(card, encoding="utf-8")
        # Flush the files to disk, because ``atomic_path`` flushes only the folder.
        for path in folder.iterdir():
            sync(path)


def _configuration(model: ModelConfig) -> dict[str, object]:
    return {
        "architectures": ["BertForPreTraining"],
        "model_type": "bert",
        **{_THEIR_NAMES.get(name, name): value for name, value in asdict(model).items()},
        "hidden_act": "gelu_new",  # this is the tanh form of GELU, which the benchmark's reference uses
        "tie_word_embeddings": True,
    }


def _write_tokenizer(folder: Path, model: ModelConfig, vocabulary: Vocabulary, normalization: Normalization) -> None:
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    pieces = models.WordPiece(vocabulary.ids, unk_token="[UNK]", max_input_chars_per_word=MAX_CHARACTERS_PER_WORD)
    tokenizer = Tokenizer(pieces)
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=normalization.do_lower_case,
        strip_accents=normalization.strip_accents,
        handle_chinese_chars=normalization.tokenize_chinese_chars,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(
        *((token, vocabulary.ids[token]) for token in ("[SEP]", "[CLS]"))
    )
    tokenizer.decoder = decoders.WordPiece()
    # Without this call, the tokenizer would split [MASK] in a text at its brackets.
    tokenizer.add_special_tokens(list(special.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    # vocab.txt is for ``Vocabulary.from_folder`` and for tokenizers that do not read tokenizer.json.
    (folder / "vocab.txt").write_bytes(vocabulary.content)
    settings = {
        "tokenizer_class": "BertTokenizer",
        **asdict(normalization),
        "model_max_length": model.max_position_embeddings,
        **special,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


_Count = Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
_Fraction = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class _Stated(msgspec.Struct, rename=_THEIR_NAMES):
    """Fields of a config.json that this program reads. A missing field is None."""

    num_attention_heads: _Count
    num_hidden_layers: _Count | None = None
    hidden_size: _Count | None = None
    intermediate_size: _Count | None = None
    vocab_size: _Count | None = None
    max_position_embeddings: _Count | None = None
    layer_norm_eps: _Fraction | None = None
    hidden_dropout: _Fraction | None = None
    attention_dropout: _Fraction | None = None
    # Files with other values in the next three fields are refused. All forms of GELU are accepted except gelu_10, which
    # clips. The model computes the tanh form, which differs by up to 5e-4 from the exact form (docs/checkpoints.md).
    model_type: Literal["bert"] | None = None
    position_embedding_type: Literal["absolute"] | None = None
    hidden_act: Annotated[str, msgspec.Meta(pattern="^gelu(?!_10$)")] | None = None
    # Each of the next three fields changes the model that transformers computes, so such files are refused.
    is_decoder: bool | None = None
    add_cross_attention: bool | None = None
    quantization_config: dict[str, Any] | None = None


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def stated_configuration(path: Path) -> dict[str, int | float]:
    """Return the fields of ``ModelConfig`` that a Hugging Face config.json states, or {} if there is no such file.

    Raises ``ValueError`` if the number of heads is missing, a value is impossible, or the model is not a supported BERT.
    """
    if not path.is_file():
        return {}
    remedy = "expected the config.json of a Hugging Face BERT with absolute positions and GELU"
    stated = read_typed(path, _Stated, _MOST_JSON_BYTES, remedy)
    for name in ("is_decoder", "add_cross_attention", "quantization_config"):
        if getattr(stated, name):
            raise ValueError(
                f"{path}: {name} is {shown(getattr(stated, name))}, but only encoders with attention in both directions "
                "and with weights that are not quantized are supported: choose another checkpoint"
            )
    values = {each.name: getattr(stated, each.name, None) for each in fields(ModelConfig)}
    return {name: value for name, value in values.items() if value is not None}


def read_shards(index: Path) -> dict[str, Path]:
    """Read an index, and return each tensor's file. Raises ``ValueError`` if the index is wrong or a file is missing."""
    remedy = "expected the index of safetensors files in the same folder; fetch the folder again"
    files = {}
    for tensor, name in read_typed(index, _Index, _MOST_JSON_BYTES, remedy).weight_map.items():
        if not _SHARD.fullmatch(name):
            raise ValueError(f"{index}: {shown(name)} is not the name of a safetensors file; {remedy}")
        files[tensor] = index.with_name(name)
    if absent := sorted(file.name for file in {*files.values()} if not file.is_file()):
        raise ValueError(f"{index} names files that are missing ({', '.join(absent[:3])}); {remedy}")
    return files
