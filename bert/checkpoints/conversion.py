"""Description of a checkpoint for ``bert.convert``, and conversion into our format."""

import math
from pathlib import Path

from bert.checkpoints.sources import CheckpointSource
from bert.checkpoints.weights import VOCABULARY, model_metadata, write_safetensors
from bert.configuration.sections import ModelConfig
from console.files import atomic_path
from dataloading.text.tokenization import Vocabulary


def describe(found: CheckpointSource) -> list[str]:
    """Describe the checkpoint that was found, in lines."""
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


def write_ours(found: CheckpointSource, out: Path) -> None:
    """Write our safetensors file, whole or not at all."""
    # Where the weights come from, and which model they are of, stays with the file wherever it goes.
    metadata = {"source": found.kind, "source_digest": found.digest, **model_metadata(found.model)}
    if found.vocabulary_sha256 is not None:
        metadata[VOCABULARY] = found.vocabulary_sha256
    with atomic_path(out) as temporary:
        write_safetensors(temporary, found.ours, metadata)


def vocabulary_of(found: CheckpointSource, source: Path, vocab: Path | None) -> Vocabulary:
    """The vocabulary of the model. Raises ``ValueError`` where there is none, or it is another's."""
    beside = (source if source.is_dir() else source.parent) / "vocab.txt"
    if vocab is None and not beside.is_file():
        raise ValueError(f"there is no {beside}: set --vocab to the vocabulary that the model was trained with")
    path = beside if vocab is None else vocab
    vocabulary = Vocabulary.from_file(path)
    # Fewer tokens than rows will do: tables are often padded.
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
