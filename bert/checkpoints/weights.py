"""Weights in and out, in safetensors files under our own names.

A file says in its header which model its weights are of, since shapes do not tell how many heads there are, and, by its
digest, with which vocabulary it was trained.
"""

import json
import math
import re
import shlex
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from bert.configuration.sections import ModelConfig
from bert.model import BertForPreTraining, parameter_shapes
from console.files import atomic_path
from console.safetensors_header import read_header


@dataclass(frozen=True)
class Weight:
    """A weight that is read when it is needed."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


MODEL, VOCABULARY = "model", "vocabulary_sha256"
"""Entries of a file's metadata."""


def save_weights(model: BertForPreTraining, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write the weights and the model's configuration, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: Weight(tuple(tensor.shape), tensor.detach().cpu) for name, tensor in model.state_dict().items()}
    with atomic_path(path) as temporary:
        write_safetensors(temporary, weights, model_metadata(model.config) | dict(metadata or {}))


def model_metadata(model: ModelConfig) -> dict[str, str]:
    """The metadata that says what ``stated_model`` reads."""
    return {MODEL: json.dumps(asdict(model))}


def stated_model(metadata: Mapping[str, str], source: str) -> ModelConfig | None:
    """The model whose weights a file says it holds, or None. Raises ``ValueError`` where what it says makes no sense."""
    if MODEL not in metadata:
        return None
    kinds = {name: (int, type(value)) for name, value in asdict(ModelConfig()).items()}
    try:
        stated = json.loads(metadata[MODEL])
        # By type(), as isinstance takes True for a number. JSON may write a float without its point.
        if set(stated) != set(kinds) or any(type(stated[name]) not in kind for name, kind in kinds.items()):
            raise ValueError(f"expected {', '.join(kinds)}")
        return ModelConfig(**stated)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{source} does not state its model as this program does: {error}") from None


def write_safetensors(path: Path, weights: Mapping[str, Weight], metadata: Mapping[str, str]) -> None:
    """Write fp32 weights one after the other, so that no more than one of them is in memory."""
    # The library's own writer wants all tensors in memory at once.
    with path.open("xb") as file:
        file.write(safetensors_header({name: weight.shape for name, weight in weights.items()}, metadata)[0])
        # By name, in which order the header has counted the offsets.
        for name, weight in sorted(weights.items()):
            tensor = weight.read().float().contiguous()
            assert tensor.shape == weight.shape, name
            file.write(tensor.numpy().data)


def safetensors_header(shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """Return the beginning of a file of fp32 tensors, and the number of bytes that follow: the tensors, by name.

    The format: eight bytes with the length of a JSON header, the header, the tensors (safetensors, "Format").
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, shape in sorted(shapes.items()):
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    return struct.pack("<Q", len(text)) + text, end


def require_weights(path: Path) -> None:
    """Raise ``ValueError``, with the command that helps, unless ``path`` may be a file of ``save_weights``."""
    index = path.with_name(path.name + ".index")
    if index.is_file() or ".data-" in path.name or path.suffix in (".index", ".meta"):
        source = path if index.is_file() else path.with_name(re.sub(r"\.data-.*|\.index$|\.meta$", "", path.name))
        raise ValueError(
            f"{path} is a TensorFlow checkpoint: convert it with `python -m bert.convert {shlex.quote(str(source))} "
            "--to safetensors --out FILE.safetensors` and set data.initial_checkpoint to that file"
        )
    if not path.is_file():
        raise ValueError(
            f"no checkpoint at {path}: `python -m dataloading wikipedia` makes the benchmark's (docs/data.md), or set "
            "data.initial_checkpoint to a safetensors file or a Hugging Face folder"
        )


def check_weights(path: Path, model: ModelConfig, vocabulary_sha256: str) -> None:
    """Raise ``ValueError``, by the header alone, where ``load_weights`` would, or where another vocabulary was in use."""
    require_weights(path)
    shapes, metadata = _header(path)
    _require_fit(parameter_shapes(model), shapes, str(path))
    _require_stated(metadata, model, str(path))
    # A file that does not say which vocabulary it was trained with passes.
    stated = metadata.get(VOCABULARY, vocabulary_sha256)
    if stated != vocabulary_sha256:
        raise ValueError(
            f"{path} was trained with another vocabulary (SHA-256 {stated[:12]}...) than data.vocab "
            f"({vocabulary_sha256[:12]}...): set data.vocab to that one, and make the samples with it"
        )


def load_weights(model: BertForPreTraining, path: Path) -> None:
    """Read the weights of ``save_weights`` into ``model``.

    Raises ``ValueError`` when the file is missing, damaged, of another kind, or made for another architecture.
    """
    require_weights(path)
    _require_stated(_header(path)[1], model.config, str(path))
    copy_weights(model, load_file(path), str(path))


def _header(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shapes by name, and the metadata, of a file of this program's."""
    shapes, metadata = read_header(path)
    if any(name.startswith("bert.") for name in shapes):
        raise ValueError(f"{path} is a file of Hugging Face's: set data.initial_checkpoint to the folder that it is in")
    return shapes, metadata


def _require_stated(metadata: Mapping[str, str], model: ModelConfig, source: str) -> None:
    """Check what shapes do not tell, heads and epsilon, against what the file states."""
    stated = stated_model(metadata, source)
    for name in ("num_attention_heads", "layer_norm_eps"):
        if stated is not None and getattr(stated, name) != getattr(model, name):
            raise ValueError(
                f"{source} holds a model with {name} {getattr(stated, name)}, but model.{name} is {getattr(model, name)}"
            )


def _require_fit(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], source: str) -> None:
    for name in sorted(expected.keys() ^ found.keys()):
        place = "lacks" if name in expected else "holds the unknown tensor"
        raise ValueError(f"{source} {place} {name}: it was made for another architecture than the model section's")
    for name, shape in found.items():
        if shape != expected[name]:
            raise ValueError(f"{source} holds {name} of shape {shape}, but the model section asks for {expected[name]}")


@torch.no_grad()
def copy_weights(model: BertForPreTraining, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy ``tensors``, named as in ``model.state_dict()``, into the model.

    Raises ``ValueError``, with the model as it was, unless names, shapes and kinds all fit.
    """
    state = model.state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
    _require_fit(expected, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, source)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{source} holds {name} as {tensor.dtype}: expected floating point weights")
    for name, tensor in tensors.items():
        state[name].copy_(tensor)
