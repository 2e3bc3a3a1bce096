"""Readers of checkpoints in several formats: TensorFlow 1, Hugging Face, and this program's safetensors files.

The format is detected from the content. Opening a checkpoint checks everything except the values of its weights. These are
read later, one weight at a time.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from bert.checkpoints.hugging_face import SHARDS_SUFFIX, hugging_face_names, read_shards, stated_configuration
from bert.checkpoints.tensorflow import INDEX_SUFFIX, MAGIC, TensorBundle, tf1_name
from bert.checkpoints.weights import MODEL, NORMALIZATION, VOCABULARY, Weight, metadata_entry, read_header
from bert.configuration.sections import ModelConfig
from bert.model import parameter_shapes
from console.files import open_regular, sha256_of, shown
from console.text import counted
from dataloading.options import Normalization

_HEADS = ("pooler", "next_sentence", "transform", "decoder_bias")
"""Beginnings of the names of weights that belong to the pooler or to a head."""
_WRAPPERS = ("_orig_mod", "module")
"""Parts that torch.compile and DistributedDataParallel add to the names of weights."""
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_PICKLE = (
    "is a pickle file, which can run any code when it is read: have transformers (from_pretrained, then save_pretrained) "
    "write it as model.safetensors"
)
_TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


@dataclass(frozen=True)
class CheckpointSource:
    """An open checkpoint whose weights have not been read yet."""

    kind: str
    weights: Mapping[str, Weight]
    """Each weight, by the name that this program gives it."""
    model: ModelConfig
    digest: Callable[[], str]
    """Function that reads the checkpoint's main files and returns their digests as text."""
    vocabulary_sha256: str | None = None
    """Digest of the vocabulary that the model was trained with, if known."""
    normalization: Normalization | None = None
    """Normalization of the text that the model was trained with, if known."""


def open_source(path: Path, num_attention_heads: int | None = None, whole: bool = True) -> CheckpointSource:
    """Open a checkpoint and check that it holds a BERT.

    ``num_attention_heads`` is for files that do not state this number. Unless ``whole`` is set, Hugging Face's files may
    lack the pooler and the heads. For example, files of ``BertForMaskedLM`` lack the pooler and the next-sentence head.
    Raises ``ValueError`` if the checkpoint is missing, damaged or not supported.
    """
    if not path.exists() and path.with_name(path.name + INDEX_SUFFIX).is_file():
        return _open_tensorflow(path, num_attention_heads)
    if path.is_dir():
        return _open_safetensors(_weights_file(path), num_attention_heads, whole)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder, and no {path.name}{INDEX_SUFFIX} beside it")
    if path.name.endswith(SHARDS_SUFFIX):
        return _open_safetensors(path, num_attention_heads, whole)
    with open_regular(path) as file:
        start = file.read(16)
        file.seek(-min(8, path.stat().st_size), 2)
        end = file.read(8)
    if end == MAGIC:
        return _open_tensorflow(path.with_suffix(""), num_attention_heads)
    if start[8:9] == b"{":  # a safetensors file starts with a length of eight bytes and a JSON header
        return _open_safetensors(path, num_attention_heads, whole)
    # Refuse pickle files. torch.save stores them in a ZIP archive.
    if start.startswith((b"PK\x03\x04", b"\x80")) or path.suffix in (".bin", ".pt", ".pth", ".pkl"):
        raise ValueError(f"{path} {_PICKLE}")
    raise ValueError(
        f"{path} is neither a safetensors file nor the index of a TensorFlow checkpoint. Name a TensorFlow checkpoint by "
        f"the prefix of its files, without {INDEX_SUFFIX} or .data-..."
    )


def _open_tensorflow(prefix: Path, heads: int | None) -> CheckpointSource:
    bundle = TensorBundle(prefix)

    def find(name: str) -> Weight | None:
        entry = bundle.readable(variable := tf1_name(name))
        if entry is None:
            return None

        def read() -> Tensor:
            return _checked(torch.from_numpy(bundle.array(variable)), bundle.data_file(entry.shard), variable)

        if not variable.endswith("/kernel"):
            return Weight(entry.shape, read)
        # TensorFlow stores dense weights as [in, out]. The transpose is a view, which becomes contiguous when it is written.
        return Weight(entry.shape[::-1], lambda: read().T)

    layers = _layers(r"bert/encoder/layer_(\d+)/", bundle.entries)
    weights, missing = _collect(find, hugging_face_names(layers))
    _require_whole(str(bundle.index), missing)
    which = "the benchmark's phase-1 checkpoint" if bundle.is_published else "not the benchmark's published file"
    # The file does not state the number of heads. In all of Google's models, a head has 64 columns, so derive the number.
    if heads is None:
        heads, rest = divmod(math.prod(weights["embeddings.norm.weight"].shape), 64)
        heads = None if rest else heads
    return CheckpointSource(
        kind=f"TensorFlow checkpoint (TF1), {which} by size and MD5 of its index",
        weights=weights,
        model=_model_of(weights, layers, _heads(str(bundle.index), None, heads), str(bundle.index)),
        digest=lambda: f"sha256 of the index, which holds every tensor's checksum: {sha256_of(bundle.index)}",
    )


def _weights_file(folder: Path) -> Path:
    # Like transformers, prefer the single file if the folder also has shards.
    for name in ("model.safetensors", "model" + SHARDS_SUFFIX):
        if (folder / name).is_file():
            return folder / name
    names = sorted(each.name for each in folder.iterdir())
    for name in names:
        if re.fullmatch(r"pytorch_model.*\.bin", name):
            raise ValueError(f"{folder / name} {_PICKLE}")
    prefixes = [path.with_suffix("") for depth in ("", "*/") for path in sorted(folder.glob(f"{depth}*{INDEX_SUFFIX}"))]
    if prefixes:
        TensorBundle(prefixes[0])  # raises if the checkpoint is unsupported, because the hint must name a usable one
    hint = f"; for a TensorFlow checkpoint name its prefix: {prefixes[0]}" if prefixes else ""
    raise ValueError(f"{folder} holds no model.safetensors: name a checkpoint file or a Hugging Face folder{hint}")


def _open_safetensors(path: Path, heads: int | None, whole: bool) -> CheckpointSource:
    files, found, metadata = _stored(path)
    is_ours = "embeddings.word" in map(_unwrapped, found)
    found = _renamed(found, _unwrapped if is_ours else _current_name, path)
    layers = _layers(r"layers\.(\d+)\." if is_ours else r"bert\.encoder\.layer\.(\d+)\.", found)
    names = hugging_face_names(layers)
    if is_ours:
        names = {name: (name,) for name in names}
        entry = metadata_entry(metadata, MODEL, ModelConfig, str(path))
        stated = {} if entry is None else asdict(entry)
    else:
        stated = stated_configuration(path.with_name("config.json"))
    weights, missing = _collect(found.get, names)
    if not (is_ours or whole):
        missing = {name: theirs for name, theirs in missing.items() if not name.startswith(_HEADS)}
    _require_whole(str(path), missing)
    if not is_ours:
        _require_tied(path, found)
    model = _model_of(weights, layers, _heads(str(path), stated.get("num_attention_heads"), heads), str(path))
    for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"):
        actual = getattr(model, name)
        if stated.get(name, actual) != actual:
            source = "its metadata" if is_ours else "config.json"
            raise ValueError(
                f"{source} states {name} {stated[name]}, but the weights in {path} have {actual}: "
                "fetch or make the checkpoint again"
            )
    return CheckpointSource(
        kind="safetensors file of this program" if is_ours else "Hugging Face checkpoint",
        weights=weights,
        model=replace(model, **stated),
        digest=lambda: ", ".join(f"sha256 of {file.name}: {sha256_of(file)}" for file in files),
        vocabulary_sha256=metadata.get(VOCABULARY) if is_ours else None,
        normalization=metadata_entry(metadata, NORMALIZATION, Normalization, str(path)) if is_ours else None,
    )


def _stored(path: Path) -> tuple[list[Path], dict[str, Weight], dict[str, str]]:
    """Return the files of a safetensors checkpoint, its tensors by name, and its metadata, which is {} for several files."""
    if not path.name.endswith(SHARDS_SUFFIX):
        shapes, metadata = read_header(path)
        return [path], {name: Weight(shape, partial(_read, path, name)) for name, shape in shapes.items()}, metadata
    shards = read_shards(path)
    files = sorted({*shards.values()})
    headers = {file: read_header(file)[0] for file in files}
    for name, file in shards.items():
        if name not in headers[file]:
            raise ValueError(f"{file} lacks {shown(name)}, which {path.name} expects there: fetch the folder again")
    tensors = {name: Weight(headers[file][name], partial(_read, file, name)) for name, file in shards.items()}
    return [path, *files], tensors, {}


def _renamed(tensors: Mapping[str, Weight], rename: Callable[[str], str], source: Path) -> dict[str, Weight]:
    names: dict[str, str] = {}
    for name in tensors:
        other = names.setdefault(rename(name), name)
        if other != name:
            raise ValueError(
                f"{source} holds the same weight as {shown(other)} and as {shown(name)}: remove one of them"
            )
    return {renamed: tensors[name] for renamed, name in names.items()}


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _heads(source: str, stated: float | None, given: int | None) -> int:
    if stated is not None and given not in (None, stated):
        raise ValueError(
            f"{source} holds a model with {stated} attention heads: leave --num-attention-heads {given} out"
        )
    heads = stated or given
    if heads is None:
        raise ValueError(
            f"{source} does not say how many attention heads there are, nor does a config.json beside it: set "
            "--num-attention-heads of bert.convert"
        )
    return int(heads)


def _current_name(name: str) -> str:
    name = _unwrapped(name)
    # Older Hugging Face files use TensorFlow's names for the gain and the bias of a layer norm, so replace them.
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
    # Files of a bare BertModel omit the prefix of the encoder, so add it.
    return name if name.startswith(("bert.", "cls.")) else f"bert.{name}"


def _collect(
    find: Callable[[str], Weight | None], names: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, Weight], dict[str, str]]:
    """Look up all weights with ``find``, which returns None for an unknown name.

    ``names`` maps each of this program's names to names in the file. Returns the weights by this program's names, and for
    each missing weight the name that the file lacks.
    """
    weights, missing = {}, {}
    for ours, theirs in names.items():
        parts = [find(name) for name in theirs]
        present = [part for part in parts if part is not None]
        if len(present) < len(parts):
            missing[ours] = theirs[parts.index(None)]
        else:
            weights[ours] = _joined(present)
    return weights, missing


def _joined(parts: list[Weight]) -> Weight:
    if len(parts) == 1:
        return parts[0]
    shapes = [part.shape or (0,) for part in parts]
    shape = (sum(rows for rows, *_ in shapes), *shapes[0][1:])
    return Weight(shape, lambda: torch.cat([part.read() for part in parts]))


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        return _checked(file.get_tensor(name), path, name)


def _checked(tensor: Tensor, path: Path, name: str) -> Tensor:
    """Return a weight as fp32. Raises ``ValueError`` if its dtype is not in `_DTYPES`, or if it has NaN or infinity."""
    if tensor.dtype not in _DTYPES:
        raise ValueError(
            f"{path} holds {name} as {tensor.dtype}, expected fp32, fp64, fp16 or bf16: choose another checkpoint"
        )
    weight = tensor.float()
    # aminmax propagates NaN, so check only the extremes. It takes a tenth of the time of isfinite, and allocates nothing.
    if weight.numel() and not torch.stack(weight.aminmax()).isfinite().all():
        raise ValueError(f"{path}: {name} has NaN or infinity in fp32: fetch or make the checkpoint again")
    return weight


def _require_tied(path: Path, tensors: Mapping[str, Weight]) -> None:
    """Raise ``ValueError`` if a stored decoder differs from the word table, which this program uses as the decoder."""
    for copy, original in _TIED.items():
        if {copy, original} <= tensors.keys() and not torch.equal(tensors[copy].read(), tensors[original].read()):
            raise ValueError(
                f"{path}: {copy} differs from {original}, but a BERT uses one tensor for both: choose another checkpoint"
            )


def _layers(pattern: str, names: Iterable[str]) -> int:
    # Count the different layer numbers. The largest is no measure, because a damaged file may contain any number.
    return len({match[1] for name in names if (match := re.match(pattern, name))})


def _require_whole(source: str, missing: Mapping[str, str]) -> None:
    if missing:
        names = list(missing.values())
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ValueError(
            f"{source} lacks {', '.join(names[:3])}{more}: expected BERT's encoder and pooler with the masked-LM and "
            "next-sentence heads: choose another checkpoint"
        )


def _model_of(weights: Mapping[str, Weight], layers: int, heads: int, source: str) -> ModelConfig:
    """Derive the architecture from the shapes of the weights. Raises ``ValueError`` if the shapes contradict each other."""
    tables = [weights[f"embeddings.{name}"].shape for name in ("word", "position", "segment")]
    if layers < 1 or any(len(shape) != 2 for shape in tables):
        raise ValueError(
            f"{source} is no BERT, with {counted(layers, 'layer')} and tables of shapes {tables}: choose another file"
        )
    (vocab, hidden), (positions, _), (segments, _) = tables
    try:
        model = ModelConfig(
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            intermediate_size=math.prod(weights["layers.0.intermediate.bias"].shape),
            vocab_size=vocab,
            max_position_embeddings=positions,
            type_vocab_size=segments,
        )
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    # Compute the shapes of only one layer, because all are equal, and an untrusted file may claim very many layers.
    expected = parameter_shapes(replace(model, num_hidden_layers=1))
    for name, weight in weights.items():
        shape = expected[re.sub(r"^layers\.\d+", "layers.0", name)]
        if weight.shape != shape:
            raise ValueError(
                f"{source}: {name} has the shape {weight.shape}, but the other weights imply {shape}: fetch the file again"
            )
    return model
