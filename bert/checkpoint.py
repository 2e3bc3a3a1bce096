"""Weights in and out: our own names in safetensors files, and Hugging Face's names."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from bert.model import BertForPreTraining


def save_weights(model: BertForPreTraining, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write the weights whole or not at all."""
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.incomplete")
    try:
        with aside.open("wb") as file:
            file.write(save(tensors, metadata=dict(metadata or {})))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def load_weights(model: BertForPreTraining, path: Path) -> None:
    """Read the weights of ``save_weights`` into ``model``.

    Raises ``ValueError`` when the file is missing, damaged, or made for another architecture.
    """
    if not path.is_file():
        raise ValueError(f"no checkpoint at {path}: set data.initial_checkpoint to a safetensors file")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}): fetch or make it again") from error
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
        for ours, theirs in _name_pairs(layers):
            result[ours] = tensors[theirs]
        for index in range(layers):
            for kind in ("weight", "bias"):
                parts = [tensors[name] for name in _query_key_value_names(index, kind)]
                result[f"layers.{index}.query_key_value.{kind}"] = torch.cat(parts)
    except KeyError as error:
        raise ValueError(f"the checkpoint lacks {error}: expected the state of a BertForPreTraining") from error
    return result


def to_hugging_face(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under the names of Hugging Face's ``BertForPreTraining``, with the tied decoder spelled out."""
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    result = {theirs: tensors[ours] for ours, theirs in _name_pairs(layers)}
    for index in range(layers):
        for kind in ("weight", "bias"):
            parts = tensors[f"layers.{index}.query_key_value.{kind}"].chunk(3)
            result |= dict(zip(_query_key_value_names(index, kind), parts, strict=True))
    result["cls.predictions.decoder.weight"] = tensors["embeddings.word"]
    result["cls.predictions.decoder.bias"] = tensors["decoder_bias"]
    return result


def _name_pairs(layers: int) -> list[tuple[str, str]]:
    """(ours, theirs) for every tensor that corresponds one to one."""
    pairs = dict(_HUGGING_FACE)
    for index in range(layers):
        for ours, theirs in _HUGGING_FACE_LAYER.items():
            pairs[f"layers.{index}.{ours}"] = f"bert.encoder.layer.{index}.{theirs}"
    whole = ("embeddings.word", "embeddings.position", "embeddings.segment", "decoder_bias")
    return [
        (ours + suffix, theirs + suffix)
        for ours, theirs in pairs.items()
        for suffix in ([""] if ours in whole else [".weight", ".bias"])
    ]


def _query_key_value_names(layer: int, kind: str) -> list[str]:
    return [f"bert.encoder.layer.{layer}.attention.self.{part}.{kind}" for part in ("query", "key", "value")]
