"""Convert a checkpoint to another format: ``python -m bert.convert SOURCE --to FORMAT --out PATH``.

The format of SOURCE is detected from its content. It may be a TensorFlow 1 checkpoint (its prefix or its .index file), a
Hugging Face folder or model.safetensors, or a safetensors file of this program. Weights are read, checked and written one
at a time.
"""

import math
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from console.commands import run_program
from console.files import atomic_path
from console.program import say
from console.text import counted
from dataloading.options import AS_STATED, NormalizationOptions


def convert(
    source: tyro.conf.Positional[Path],
    to: Literal["safetensors", "hugging-face"],
    out: Path,
    num_attention_heads: int | None = None,
    vocab: Path | None = None,
    normalization: Annotated[NormalizationOptions, tyro.conf.arg(name="")] = AS_STATED,
) -> None:
    """Write a checkpoint in another format.

    Args:
        source: Prefix or .index of a TensorFlow checkpoint, a Hugging Face folder, or a safetensors file.
        to: safetensors is the format of data.initial_checkpoint; hugging-face makes a folder for from_pretrained.
        out: The file or folder to write; it must be absent.
        num_attention_heads: Needed if the source does not state it. For TensorFlow, the default is heads of size 64.
        vocab: The model's vocabulary, for hugging-face. By default, the files beside the source.
        normalization: Settings that replace what is known about the normalization of the text, for hugging-face.
    """
    # Import these here, so that --help does not wait for PyTorch.
    from bert.checkpoints.hugging_face import write_folder
    from bert.checkpoints.sources import open_source
    from bert.checkpoints.tokenizer import tokenizer_of
    from bert.checkpoints.weights import model_metadata, text_metadata, write_safetensors

    # Check for a link too, because exists() is False for a broken link, which would then be replaced.
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists already: move it away, or name another --out")
    found = open_source(source, num_attention_heads)
    tokenizer = tokenizer_of(found, source, vocab, normalization) if to == "hugging-face" else None
    model = found.model
    say(f"{found.kind}: {sum(math.prod(weight.shape) for weight in found.weights.values()):,} parameters")
    say(
        f"{counted(model.num_hidden_layers, 'layer')}, hidden size {model.hidden_size:,}, intermediate size "
        f"{model.intermediate_size:,}, {counted(model.num_attention_heads, 'head')}, {model.max_position_embeddings} "
        "positions"
    )
    usual = type(model).vocab_size
    other = f", not the benchmark's {usual:,}: set model.vocab_size, and data.vocab to a vocabulary of that size"
    say(f"{model.vocab_size:,} vocabulary rows{other if model.vocab_size != usual else ''}")
    say(digest := found.digest())
    metadata = {"source": found.kind, "source_digest": digest}
    out.parent.mkdir(parents=True, exist_ok=True)
    if tokenizer is None:
        metadata |= model_metadata(model) | text_metadata(found.vocabulary_sha256, found.normalization)
        with atomic_path(out) as temporary:
            write_safetensors(temporary, found.weights, metadata)
    else:
        write_folder(out, model, found.weights, *tokenizer, metadata)
    say(f"wrote {out}")


if __name__ == "__main__":
    sys.exit(run_program(convert, "python -m bert.convert"))
