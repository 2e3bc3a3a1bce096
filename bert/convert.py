"""Checkpoints from one format into another: ``python -m bert.convert SOURCE --to FORMAT --out PATH``.

SOURCE is what it is by content: a TensorFlow checkpoint (its prefix or its .index file), a Hugging Face folder or
model.safetensors, or our own safetensors file. Weights are read, checked and written one at a time.
"""

import math
import sys
from functools import partial
from pathlib import Path
from typing import Literal

import tyro

from bert.checkpoints.hugging_face import write_folder
from bert.checkpoints.sources import Source, open_source
from bert.checkpoints.weights import VOCABULARY, model_metadata, write_safetensors
from bert.config import ModelConfig
from console.interruption import end_in_order
from console.program import accept_any_text, bound, complain, parsed, say
from dataloading.files import atomic_path
from dataloading.text.tokenization import Vocabulary


def main() -> int:
    """Runs the command; a user's error is one line on stderr and exit code 2."""
    accept_any_text()
    try:
        parsed(partial(tyro.cli, bound(convert), prog="python -m bert.convert"))()
    except (ValueError, OSError) as error:
        complain(error)
    else:
        return 0
    return 2


def convert(
    source: tyro.conf.Positional[Path],
    to: Literal["safetensors", "hugging-face"],
    out: Path,
    num_attention_heads: int | None = None,
    vocab: Path | None = None,
) -> None:
    """Write a checkpoint in another format.

    Args:
        source: Prefix or .index of a TensorFlow checkpoint, a Hugging Face folder, or a safetensors file.
        to: safetensors is the format of data.initial_checkpoint; hugging-face makes a folder for from_pretrained.
        out: The file or folder to write; it must be absent.
        num_attention_heads: Needed where the source does not say it, and is no TensorFlow checkpoint with heads 64 wide.
        vocab: The vocabulary that the model was trained with; by default vocab.txt beside the source. For hugging-face.
    """
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists already: move it away, or name another --out")
    found = open_source(source, num_attention_heads)
    vocabulary = _vocabulary(found, source, vocab) if to == "hugging-face" else None
    for line in describe(found):
        say(line)
    out.parent.mkdir(parents=True, exist_ok=True)
    if vocabulary is None:
        write_ours(found, out)
    else:
        metadata = {"source": found.kind, "source_digest": found.digest}
        write_folder(out, found.model, found.weights, vocabulary, metadata)
    say(f"wrote {out}")


def describe(found: Source) -> list[str]:
    """What was found, a line each."""
    model = found.model
    parameters = sum(math.prod(weight.shape) for weight in found.weights.values())
    expected = f"{ModelConfig.vocab_size:,}"
    vocabulary = (
        "the benchmark's vocabulary"
        if model.vocab_size == ModelConfig.vocab_size
        else f"not the benchmark's {expected}: set model.vocab_size, and data.vocab to a vocabulary of that size"
    )
    return [
        f"{found.kind}: {len(found.weights):,} tensors, {parameters:,} parameters, {found.ignored:,} other tensors left out",
        *found.notes,
        f"{model.num_hidden_layers} layers, hidden size {model.hidden_size:,}, intermediate size "
        f"{model.intermediate_size:,}, {model.num_attention_heads} heads, {model.max_position_embeddings} positions",
        f"{model.vocab_size:,} vocabulary rows: {vocabulary}",
        f"{found.digest}",
    ]


def write_ours(found: Source, out: Path) -> None:
    """Write our safetensors file, whole or not at all."""
    metadata = {"source": found.kind, "source_digest": found.digest, **model_metadata(found.model)}
    if found.vocabulary_sha256 is not None:
        metadata[VOCABULARY] = found.vocabulary_sha256
    with atomic_path(out) as temporary:
        write_safetensors(temporary, found.ours, metadata)


def _vocabulary(found: Source, source: Path, vocab: Path | None) -> Vocabulary:
    """The vocabulary of the model. Raises ``ValueError`` where there is none, or it is another's."""
    beside = (source if source.is_dir() else source.parent) / "vocab.txt"
    if vocab is None and not beside.is_file():
        raise ValueError(f"there is no {beside}: set --vocab to the vocabulary that the model was trained with")
    path = beside if vocab is None else vocab
    vocabulary = Vocabulary.from_file(path)
    if vocabulary.size > found.model.vocab_size:
        raise ValueError(
            f"{path} has {vocabulary.size:,} tokens, but the model {found.model.vocab_size:,} rows for them"
        )
    if found.vocabulary_sha256 not in (None, vocabulary.sha256):
        raise ValueError(
            f"{path} is not the vocabulary that the model was trained with (SHA-256 {found.vocabulary_sha256}): "
            "set --vocab to that one"
        )
    return vocabulary


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
