"""Weights in and out: our own names in safetensors files, and Hugging Face's names."""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bert.model import BertForPreTraining
from dataloading.files import atomic_path


@dataclass(frozen=True)
class Weight:
    """A weight that is read when it is needed."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def save_weights(model: BertForPreTraining, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write the weights whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: Weight(tuple(tensor.shape), tensor.detach().cpu) for name, tensor in model.state_dict().items()}
    with atomic_path(path) as temporary:
        write_safetensors(temporary, weights, metadata or {})


def write_safetensors(path: Path, weights: Mapping[str, Weight], metadata: Mapping[str, str]) -> None:
    """Write fp32 weights one after the other, so that no more than one of them is in memory.

    The format: eight bytes with the length of a JSON header, the header, the tensors (safetensors, "Format").
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, weight in sorted(weights.items()):
        start, end = end, end + 4 * torch.Size(weight.shape).numel()
        header[name] = {"dtype": "F32", "shape": list(weight.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, weight in sorted(weights.items()):
            tensor = weight.read().float().contiguous()
            assert tensor.shape == weight.shape, name
            file.write(tensor.numpy().data)


def require_weights(path: Path) -> None:
    """Raise ``ValueError``, with the command that helps, unless ``path`` may be a file of ``save_weights``."""
    index = path.with_name(path.name + ".index")
    if index.is_file() or ".data-" in path.name or path.suffix in (".index", ".meta"):
        raise _unconverted(path, "a TensorFlow checkpoint", path if index.is_file() else _prefix(path))
    if (path / "model.safetensors").is_file():
        raise _unconverted(path, "a Hugging Face folder", path)
    if not path.is_file():
        raise ValueError(f"no checkpoint at {path}: set data.initial_checkpoint to a safetensors file")


def _prefix(path: Path) -> Path:
    return path.with_name(path.name.split(".data-")[0].removesuffix(".index").removesuffix(".meta"))


def _unconverted(path: Path, kind: str, source: Path) -> ValueError:
    return ValueError(
        f"{path} is {kind}: convert it with `python -m bert.convert {source} --to safetensors --out FILE.safetensors` and "
        "set data.initial_checkpoint to that file"
    )


def load_weights(model: BertForPreTraining, path: Path) -> None:
    """Read the weights of ``save_weights`` into ``model``.

    Raises ``ValueError`` when the file is missing, damaged, of another kind, or made for another architecture.
    """
    require_weights(path)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}): fetch or make it again") from error
    if any(name.startswith("bert.") for name in tensors):
        raise _unconverted(path, "a file of Hugging Face's", path)
    copy_weights(model, tensors, str(path))


@torch.no_grad()
def copy_weights(model: BertForPreTraining, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy ``tensors``, named as in ``model.state_dict()``, into the model.

    Raises ``ValueError``, with the model as it was, unless names, shapes and kinds all fit.
    """
    state = model.state_dict()
    for name in sorted(state.keys() ^ tensors.keys()):
        place = "lacks" if name in state else "holds the unknown tensor"
        raise ValueError(f"{source} {place} {name}: it was made for another architecture than the model section's")
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise ValueError(
                f"{source} holds {name} of shape {tuple(tensor.shape)}, but the model section asks for "
                f"{tuple(state[name].shape)}"
            )
        if not tensor.is_floating_point():
            raise ValueError(f"{source} holds {name} as {tensor.dtype}: expected floating point weights")
    for name, tensor in tensors.items():
        state[name].copy_(tensor)


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
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}


def hugging_face_names(layers: int) -> dict[str, tuple[str, ...]]:
    """Each of our names to the Hugging Face names whose tensors, joined along the first dimension, it holds."""
    pairs = dict(_HUGGING_FACE)
    for index in range(layers):
        for ours, theirs in _HUGGING_FACE_LAYER.items():
            pairs[f"layers.{index}.{ours}"] = f"bert.encoder.layer.{index}.{theirs}"
    whole = ("embeddings.word", "embeddings.position", "embeddings.segment", "decoder_bias")
    names: dict[str, tuple[str, ...]] = {
        ours + suffix: (theirs + suffix,)
        for ours, theirs in pairs.items()
        for suffix in ([""] if ours in whole else [".weight", ".bias"])
    }
    for index in range(layers):
        attention = f"bert.encoder.layer.{index}.attention.self"
        for kind in ("weight", "bias"):
            names[f"layers.{index}.query_key_value.{kind}"] = tuple(
                f"{attention}.{part}.{kind}" for part in ("query", "key", "value")
            )
    return names


def from_hugging_face(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a Hugging Face ``BertForPreTraining`` under our names.

    The tied decoder weight and position buffers are left out; query, key and value are joined. Raises ``ValueError`` at a
    missing tensor.
    """
    layers = 1 + max(
        (int(name.split(".")[3]) for name in tensors if name.startswith("bert.encoder.layer.")), default=-1
    )
    result: dict[str, Tensor] = {}
    try:
        for ours, theirs in hugging_face_names(layers).items():
            parts = [tensors[name] for name in theirs]
            result[ours] = torch.cat(parts) if len(parts) > 1 else parts[0]
    except KeyError as error:
        raise ValueError(f"the checkpoint lacks {error}: expected the state of a BertForPreTraining") from error
    return result


def to_hugging_face(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under the names of Hugging Face's ``BertForPreTraining``, with the tied decoder spelled out."""
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    result = {}
    for ours, theirs in hugging_face_names(layers).items():
        result |= dict(zip(theirs, tensors[ours].chunk(len(theirs)), strict=True))
    result["cls.predictions.decoder.weight"] = tensors["embeddings.word"]
    result["cls.predictions.decoder.bias"] = tensors["decoder_bias"]
    return result
