"""Checkpoints as others write them, and our own, opened: TensorFlow, Hugging Face, safetensors.

A checkpoint is what it is by content. Each is seen as Hugging Face's BertForPreTraining, weight by weight; when it is open,
everything is known and checked but the numbers, which are read weight by weight, when they are needed.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from bert.checkpoints.hugging_face import hugging_face_names, stated_configuration
from bert.checkpoints.tensorflow import INDEX_SUFFIX, TensorBundle, tf1_name, tf2_names
from bert.checkpoints.tensorflow_index import MAGIC
from bert.checkpoints.weights import VOCABULARY, Weight, stated_model
from bert.configuration.sections import ModelConfig
from bert.model import parameter_shapes
from console.files import open_regular, sha256_of
from console.safetensors_header import read_header

_FORMER_ENDINGS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Hugging Face's names of today to those in its older files."""
_HEADS = ("cls.", "bert.pooler.")
"""How the names of weights begin that are not the encoder's."""


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint, opened: everything is known but the numbers."""

    kind: str
    """in words"""
    digested: Callable[[], str]
    """reads the source through and returns its digest, with what it was taken over"""
    notes: tuple[str, ...]
    """more lines about it, for people"""
    weights: Mapping[str, Weight]
    """by Hugging Face's names, [out, in]"""
    ignored: int
    """tensors that are no weights of the model"""
    model: ModelConfig
    vocabulary_sha256: str | None = None
    """of the file that it was trained with, where that is known"""

    @cached_property
    def digest(self) -> str:
        """The result of ``digested``, kept."""
        return self.digested()

    @property
    def ours(self) -> dict[str, Weight]:
        """The weights by this program's names; those of heads that the source lacks are left out."""
        names = hugging_face_names(self.model.num_hidden_layers)
        return {
            ours: _joined([self.weights[name] for name in theirs])
            for ours, theirs in names.items()
            if all(name in self.weights for name in theirs)
        }


def open_source(path: Path, num_attention_heads: int | None = None, whole: bool = True) -> CheckpointSource:
    """Find out what ``path`` is and check that it holds a BERT, if ``whole`` with both heads. Raises ``ValueError``.

    Of Hugging Face's files pooler and heads may be missing otherwise, as from those of ``BertForMaskedLM``.
    """
    if not path.exists() and path.with_name(path.name + INDEX_SUFFIX).is_file():
        return _open_tensorflow(path, num_attention_heads)
    if path.is_dir():
        return _open_safetensors(_weights_file(path), num_attention_heads, whole)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder, and no {path.name}{INDEX_SUFFIX} beside it")
    with open_regular(path) as file:
        start = file.read(16)
        file.seek(-min(8, path.stat().st_size), 2)
        end = file.read(8)
    # By the mark at the end, since a table of LevelDB begins with its records.
    if end == MAGIC:
        if path.suffix != INDEX_SUFFIX:
            raise ValueError(f"{path} is a TensorFlow index under another name: rename it to PREFIX{INDEX_SUFFIX}")
        return _open_tensorflow(path.with_suffix(""), num_attention_heads)
    # An archive of torch.save, or a bare pickle.
    if start.startswith((b"PK\x03\x04", b"\x80")) or path.suffix in (".bin", ".pt", ".pth", ".pkl"):
        raise ValueError(
            f"{path} is a pickle file, which can run any code when it is read, and is not: save it as safetensors first"
        )
    if start[8:9] == b"{":  # behind the length of the header, which is JSON
        return _open_safetensors(path, num_attention_heads, whole)
    raise ValueError(
        f"{path} is neither a safetensors file nor the index of a TensorFlow checkpoint; of the latter, name the prefix "
        f"that its files begin with, without {INDEX_SUFFIX} or .data-..."
    )


def _open_tensorflow(prefix: Path, heads: int | None) -> CheckpointSource:
    bundle = TensorBundle(prefix)
    variables = bundle.variable_names
    form = "TF2" if variables else "TF1"
    layers = _layers(
        r"transformer/layer_(\d+)/" if variables else r"bert/encoder/layer_(\d+)/", variables or bundle.entries
    )
    weights: dict[str, Weight] = {}
    missing = []
    for name in _names(layers):
        # TF2 keeps variables under keys of its object graph, and their names in it; TF1 under the names themselves.
        candidates = tf2_names(name) if variables else [tf1_name(name)]
        variable = next((each for each in candidates if variables.get(each, each) in bundle.entries), None)
        if variable is None:
            missing.append(candidates[0])
            continue
        key = variables.get(variable, variable)
        weights[name] = _from_tensorflow(bundle, name, variable, key)
        if name.endswith("query.weight") and len(bundle.entries[key].shape) == 3:
            heads = heads or bundle.entries[key].shape[1]  # TF2: [in, heads, a head's width]
    published = bundle.published()
    note = (
        f"the benchmark's phase-1 checkpoint ({published})"
        if published
        else "not one of the benchmark's published files"
    )
    _require_whole(f"{bundle.index} ({note})", missing)
    return CheckpointSource(
        kind=f"TensorFlow checkpoint ({form})",
        digested=lambda: f"sha256 of the index, which holds every tensor's checksum: {bundle.index_sha256}",
        notes=(f"by size and by the MD5 of the index: {note}",),
        weights=weights,
        ignored=len(bundle.entries) - len(weights),
        model=_model_of(weights, layers, heads, str(bundle.index)),
    )


def _from_tensorflow(bundle: TensorBundle, name: str, variable: str, key: str) -> Weight:
    """A variable as the weight ``name``: kernels are [in, out] there, in TF2 with a dimension of heads."""
    entry = bundle.entries[key]
    shape = entry.shape
    if entry.dtype != 1:
        raise ValueError(f"{bundle.index}: {key} is of TensorFlow's type number {entry.dtype}, expected 1 (float32)")
    is_kernel = variable.endswith("/kernel") and len(shape) > 1
    if is_kernel:
        inputs = len(shape) - 1 if ".attention.output." in name else 1  # of these, TF2: [heads, a head's width, out]
        shape = (math.prod(shape[inputs:]), math.prod(shape[:inputs]))
    elif name.endswith(".bias"):
        shape = (math.prod(shape),)

    def read() -> Tensor:
        array = bundle.array(key)
        # Kernels are [in, out] there; the transpose is a view, made contiguous when it is written.
        return torch.from_numpy(array.reshape(shape[::-1]).T if is_kernel else array.reshape(shape))

    return Weight(shape, read)


def _weights_file(folder: Path) -> Path:
    path = folder / "model.safetensors"
    if path.is_file():
        return path
    names = sorted(each.name for each in folder.iterdir())
    if "pytorch_model.bin" in names:
        raise ValueError(
            f"{folder} holds pytorch_model.bin, a pickle file, which can run any code when it is read, and is not: have "
            "transformers (from_pretrained, then save_pretrained) write it as model.safetensors, where it can do no harm"
        )
    indices = [name.removesuffix(INDEX_SUFFIX) for name in names if name.endswith(INDEX_SUFFIX)]
    hint = f"; for a TensorFlow checkpoint name its prefix: {folder / indices[0]}" if indices else ""
    raise ValueError(f"{folder} holds no model.safetensors{hint}")


def _open_safetensors(path: Path, heads: int | None, whole: bool) -> CheckpointSource:
    """Open our own file, or one of Hugging Face's."""
    shapes, metadata = read_header(path)
    is_ours = "embeddings.word" in shapes
    layers = _layers(r"layers\.(\d+)\." if is_ours else r"(?:bert\.)?encoder\.layer\.(\d+)\.", shapes)
    weights, missing = (_from_ours if is_ours else _from_theirs)(path, shapes, layers)
    heads_may_lack = not whole and not is_ours
    _require_whole(str(path), [name for name in missing if not (heads_may_lack and name.startswith(_HEADS))])
    stated = stated_model(metadata, str(path)) if is_ours else None
    configuration: Mapping[str, int | float] = {}
    if is_ours:
        known = metadata.get("num_attention_heads", "")  # of files from before they held the whole configuration
        # Bounded, as int() raises an error of its own at thousands of digits.
        known = int(known) if known.isdecimal() and len(known) < 6 else None
        known = stated.num_attention_heads if stated else known
    else:
        # Read before anything is converted: an untied decoder would be dropped without a word.
        _require_tied(path, shapes)
        configuration = stated_configuration(path.with_name("config.json")) or {}
        known = int(configuration["num_attention_heads"]) if configuration else None
    if known is None and heads is None:
        beside = "" if is_ours else ", and there is no config.json beside it: fetch that, or convert it and"
        raise ValueError(
            f"{path} does not say how many attention heads there are{beside or ':'} set --num-attention-heads"
        )
    if heads is not None and stated is not None and heads != known:
        raise ValueError(f"{path} holds a model with {known} attention heads: leave --num-attention-heads {heads} out")
    model = _model_of(weights, layers, heads or known, str(path), stated)
    return CheckpointSource(
        kind="safetensors file of this program" if is_ours else "Hugging Face checkpoint",
        # When it is asked for: it reads the whole file.
        digested=lambda: f"sha256 of {path.name}: {sha256_of(path)}",
        notes=(),
        weights=weights,
        ignored=len(shapes) - (len(hugging_face_names(layers)) if is_ours else len(weights)),
        model=_agreed(model, configuration, path) if configuration and heads is None else model,
        vocabulary_sha256=metadata.get(VOCABULARY) if is_ours else None,
    )


def _agreed(model: ModelConfig, configuration: Mapping[str, int | float], path: Path) -> ModelConfig:
    """``model`` with what config.json says besides the shapes of weights. Raises ``ValueError`` where the two differ."""
    beside = path.with_name("config.json")
    for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"):
        found = getattr(model, name)
        if configuration.get(name, found) != found:
            raise ValueError(
                f"{beside} states {name} {configuration[name]}, but the weights in {path.name} have {found}"
            )
    try:
        return replace(model, **configuration)
    except ValueError as error:
        raise ValueError(f"{beside}: {error}") from None


def _from_ours(path: Path, shapes: Mapping[str, tuple[int, ...]], layers: int) -> tuple[dict[str, Weight], list[str]]:
    weights: dict[str, Weight] = {}
    missing = []
    for ours, theirs in hugging_face_names(layers).items():
        if ours not in shapes:
            missing.append(ours)
            continue
        shape = shapes[ours]
        if len(shape) == 0 or shape[0] % len(theirs):
            raise ValueError(f"{path} holds {ours} of shape {shape}: expected rows that divide by {len(theirs)}")
        # A fused weight is seen as the three that it holds, each a range of its rows.
        rows = shape[0] // len(theirs)
        for index, name in enumerate(theirs):
            weights[name] = Weight((rows, *shape[1:]), partial(_rows, path, ours, index * rows, (index + 1) * rows))
    return weights, missing


def _from_theirs(path: Path, shapes: Mapping[str, tuple[int, ...]], layers: int) -> tuple[dict[str, Weight], list[str]]:
    weights: dict[str, Weight] = {}
    missing = []
    for name in _names(layers):
        ending = next((each for each in _FORMER_ENDINGS if name.endswith(each)), None)
        former = name.removesuffix(ending) + _FORMER_ENDINGS[ending] if ending else name
        spelled = (name, former, name.removeprefix("bert."), former.removeprefix("bert."))  # without: of BertModel
        key = next((each for each in spelled if each in shapes), None)
        if key is None:
            missing.append(name)
            continue
        weights[name] = Weight(shapes[key], partial(_rows, path, key, 0, None))
    return weights, missing


def _rows(path: Path, name: str, start: int, stop: int | None) -> Tensor:
    with safe_open(path, "pt") as file:
        # Sliced in the file, so that of a fused weight one third is read at a time.
        tensor = file.get_slice(name)[start:stop]
    if not tensor.is_floating_point():
        raise ValueError(f"{path} holds {name} as {tensor.dtype}: expected floating point weights")
    return tensor


def _require_tied(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """The decoder of the masked-LM head, if it is there, is the word table."""
    pairs = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    for copy, original in pairs.items():
        # Without the bias the head is not whole, which is for others to judge; BertModel's word table has no prefix.
        kept = next((name for name in (original, original.removeprefix("bert.")) if name in shapes), None)
        if kept and copy in shapes and not torch.equal(_rows(path, copy, 0, None), _rows(path, kept, 0, None)):
            raise ValueError(f"{path}: {copy} is not {kept}, but this model has the two tied")


def _layers(pattern: str, names: Iterable[str]) -> int:
    """The number of layers that ``names`` speak of, at most one more than there are names."""
    # Counted, not the largest number: a file may state any, and names are made for all layers.
    matches = [match for name in names if (match := re.match(pattern, name))]
    return len({match[1] for match in matches})


def _names(layers: int) -> list[str]:
    """Hugging Face's names of all weights."""
    return [name for theirs in hugging_face_names(layers).values() for name in theirs]


def _require_whole(source: str, missing: list[str]) -> None:
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"{source} lacks {', '.join(missing[:3])}{more}: expected BERT's encoder and pooler with the masked-LM and "
            "next-sentence heads"
        )


def _model_of(
    weights: Mapping[str, Weight], layers: int, heads: int | None, source: str, like: ModelConfig | None = None
) -> ModelConfig:
    """The architecture by the weights' shapes, which must agree with each other; what they do not tell is as in ``like``.

    Raises ``ValueError``.
    """
    embeddings = "bert.embeddings.{}_embeddings.weight"
    tables = [weights[embeddings.format(name)].shape for name in ("word", "position", "token_type")]
    if layers < 1 or any(len(shape) != 2 for shape in tables):
        raise ValueError(f"{source}: {layers} layers and tables of shapes {tables}, expected a BERT")
    (vocab, hidden), (positions, _), (segments, _) = tables
    if heads is None and hidden % 64:
        raise ValueError(
            f"{source} does not say how many heads there are, and the hidden size {hidden} is no multiple of 64: set "
            "--num-attention-heads"
        )
    try:
        model = replace(
            like or ModelConfig(),
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=hidden // 64 if heads is None else heads,  # TF1 does not say; Google's all have 64
            intermediate_size=math.prod(weights["bert.encoder.layer.0.intermediate.dense.bias"].shape),
            vocab_size=vocab,
            max_position_embeddings=positions,
            type_vocab_size=segments,
        )
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    # Layers are alike: one is built for all, however many a file claims.
    expected = parameter_shapes(replace(model, num_hidden_layers=1))
    for ours, theirs in hugging_face_names(layers).items():
        rows, *columns = expected[re.sub(r"^layers\.\d+", "layers.0", ours)]
        for name in theirs:
            if name in weights and weights[name].shape != (rows // len(theirs), *columns):
                raise ValueError(
                    f"{source}: {name} has the shape {weights[name].shape}, expected {(rows // len(theirs), *columns)} "
                    "by the others"
                )
    return model


def _joined(parts: list[Weight]) -> Weight:
    """Weights one under the other."""
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    read: Callable[[], Tensor] = (
        parts[0].read if len(parts) == 1 else lambda: torch.cat([part.read() for part in parts])
    )
    return Weight(shape, read)
