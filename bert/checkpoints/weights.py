"""This program's safetensors files: weights by name, and metadata about the model and its training text."""

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bert.configuration.sections import ModelConfig
from bert.model import BertForPreTraining
from console.files import atomic_path
from dataloading.options import Normalization

_Content = TypeVar("_Content")


@dataclass(frozen=True)
class Weight:
    """Shape of a weight, and a function that reads its values, so that they are read only when needed."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


MODEL, VOCABULARY, NORMALIZATION = "model", "vocabulary_sha256", "normalization"
"""Keys in a file's metadata. The model's configuration is stored because shapes do not reveal the number of heads."""


def save_weights(model: BertForPreTraining, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write the weights and the model's configuration atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: Weight(tuple(tensor.shape), tensor.detach().cpu) for name, tensor in model.state_dict().items()}
    with atomic_path(path) as temporary:
        write_safetensors(temporary, weights, model_metadata(model.config) | dict(metadata or {}))


def model_metadata(model: ModelConfig) -> dict[str, str]:
    return {MODEL: json.dumps(asdict(model))}


def metadata_entry(metadata: Mapping[str, str], key: str, kind: type[_Content], source: str) -> _Content | None:
    """Decode an entry of a file's metadata to an object of ``kind``, or return None if there is no such entry.

    Raises ``ValueError``, with the name of the file ``source``, if the entry is invalid.
    """
    if key not in metadata:
        return None
    try:
        return msgspec.json.decode(metadata[key], type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(
            f"{source}: its metadata entry {key} is invalid ({error}): fetch or make the file again"
        ) from None


def text_metadata(vocabulary_sha256: str | None, normalization: Normalization | None) -> dict[str, str]:
    """Return metadata about the text that a model was trained on. Values that are None are left out."""
    known = {} if vocabulary_sha256 is None else {VOCABULARY: vocabulary_sha256}
    return known if normalization is None else known | {NORMALIZATION: json.dumps(asdict(normalization))}


def write_safetensors(path: Path, weights: Mapping[str, Weight], metadata: Mapping[str, str]) -> None:
    """Write fp32 weights one after the other, because the safetensors package would need all of them in memory at once."""
    with path.open("xb") as file:
        file.write(safetensors_header({name: weight.shape for name, weight in weights.items()}, metadata)[0])
        # Write in the order of the names, because the header's offsets follow this order.
        for name, weight in sorted(weights.items()):
            tensor = weight.read().float().contiguous()
            assert tensor.shape == weight.shape, name
            file.write(tensor.numpy().data)


def safetensors_header(shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """Return the beginning of a file of fp32 tensors, and the number of bytes that the tensors after it will take.

    The beginning consists of eight bytes with the length of a JSON header, and of this header. Then the tensors follow, in
    the order of their names ("Format" in the documentation of safetensors).
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, shape in sorted(shapes.items()):
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # pad the header, so that tensors begin at a multiple of eight bytes
    return struct.pack("<Q", len(text)) + text, end


def read_header(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Read the shape of each tensor by name, and the metadata. The file's size must match its header.

    Raises ``ValueError`` if the file is missing, truncated, or not a safetensors file.
    """
    if not path.is_file():  # also refuses named pipes, because opening one would block
        raise ValueError(f"{path}: no such file")
    try:
        # "numpy" is the framework that tensors would be read into, but only shapes are read here.
        with safe_open(path, "numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            return shapes, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}): fetch or make it again") from error
