"""Checks that must hold for any checkpoint, settings file or file of ``cluster``, whoever wrote it, run by the fuzzer."""

import hashlib
import json
import shutil
from contextlib import suppress
from itertools import chain
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save

from bert.checkpoints.hugging_face import hugging_face_names, to_hugging_face
from bert.checkpoints.sources import open_source
from bert.checkpoints.weights import model_metadata, write_safetensors
from bert.configuration.config import flattened
from bert.train import parse
from cluster import display, view
from tests.bert.checkpoints.test_weights import CONFIG
from tests.bert.checkpoints.tf_bundles.expected import BUNDLES
from tests.bert.small_models import drawn_model

CONFIGURATION = {
    "num_attention_heads": 2,
    "hidden_size": 8,
    "vocab_size": 30,
    "hidden_act": "gelu",
    "is_decoder": False,
}


def take_checkpoint(path: Path) -> None:
    """Check that the weights of a checkpoint with the file ``path`` are unchanged when written and read again."""
    if path.name == "config.json":
        path.with_name("model.safetensors").write_bytes(theirs())
    elif path.name == "model.safetensors.index.json":
        path.with_name("part.safetensors").write_bytes(theirs())
        path.with_name("config.json").write_text(json.dumps(CONFIGURATION))
    elif path.suffix == ".index":
        shutil.copy(BUNDLES / "tf1.data-00000-of-00001", path.parent)
    source = open_source(path.parent if path.name == "config.json" else path, 2)
    source.digest()
    write_safetensors(path.with_name("out"), source.weights, model_metadata(source.model))
    again = open_source(path.with_name("out"))
    assert again.model == source.model
    assert all(torch.equal(again.weights[name].read(), weight.read()) for name, weight in source.weights.items())


def theirs() -> bytes:
    tensors = to_hugging_face(drawn_model(CONFIG, 0).state_dict())
    return save({name: tensor.clone().contiguous() for name, tensor in tensors.items()})


def index_of_theirs() -> bytes:
    names = [*hugging_face_names(CONFIG.num_hidden_layers).values()]
    return json.dumps({"weight_map": dict.fromkeys(chain(*names), "part.safetensors")}).encode()


def take_settings(path: Path) -> list[tuple[str, object]]:
    of_one_run = ("config.dry_run", "config.log.run", "config.log.cache_cleared")
    return [row for row in flattened("config", parse(["--config", str(path)])) if row[0] not in of_one_run]


def write_header(rows: list[tuple[str, object]], path: Path) -> None:
    path.write_text("".join(f"# {name}: {value}\n" for name, value in rows))


def take_view(path: Path) -> view.View:
    found = view.read_view(path)
    display.render(found)
    list(display.lines(found))
    return found


def sealed(content: bytes) -> bytes:
    """Return a file of ``cluster`` (a plan or a view) with the correct digest of its content."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        document = json.loads(content)
        body = msgspec.json.format(json.dumps(document["content"]).encode(), indent=-1)
        return json.dumps(document | {"digest": hashlib.sha256(body).hexdigest()}).encode()
    return content
