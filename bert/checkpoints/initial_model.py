"""The model that training starts from, with random weights or a checkpoint's weights.

Modules that read files are imported only when needed, so that GPU benchmarks do not require safetensors and tokenizers.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from bert.configuration.config import Config
from bert.configuration.sections import ModelConfig
from bert.model import BertForPreTraining
from bert.parallel.mesh import Mesh
from console.program import say

if TYPE_CHECKING:
    from bert.checkpoints.sources import CheckpointSource
    from dataloading.options import Normalization
    from dataloading.text.vocabulary import Vocabulary

# A checkpoint's model may differ from the configured model in these fields. A padded word table has a larger vocab_size,
# and the other fields do not affect loading.
_NOT_COMPARED = ("vocab_size", "hidden_dropout", "attention_dropout", "initializer_range")


def first_model(config: Config, mesh: Mesh, seed: int) -> BertForPreTraining:
    """Return the model that training starts from. Weights that a checkpoint lacks are random, and rank 0 lists them."""
    with mesh.device:
        model = BertForPreTraining(config.model)
    start = config.data.initial_checkpoint
    # Only a folder may lack weights. Other checkpoints need no random ones, and drawing them takes half a minute on a CPU.
    if start is None or start.is_dir():
        initialize_(model, seed)
    missing = [] if start is None else load_initial_weights(model, start)
    if missing and mesh.is_main:
        say(f"{start} lacks {', '.join(missing)}: these weights start at random values")
    return model


@torch.no_grad()
def initialize_(model: BertForPreTraining, seed: int) -> None:
    """Draw matrices from a normal distribution, truncated at two standard deviations. Biases stay 0, and gains stay 1."""
    # Use a separate generator, so that the weights depend only on the seed and not on earlier random numbers.
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    deviation = model.config.initializer_range
    for parameter in model.parameters():
        # Skip vectors (biases and gains), which already have their initial values.
        if parameter.ndim > 1:
            nn.init.trunc_normal_(parameter, 0.0, deviation, -2 * deviation, 2 * deviation, generator=generator)


def check_initial_weights(path: Path, config: Config, vocabulary: "Vocabulary") -> "Normalization | None":
    """Raise ``ValueError`` if the weights cannot be loaded, or if the model was trained with another vocabulary.

    Returns the normalization of the text that the model was trained with, or None if the checkpoint does not state it.
    Only names, shapes and the configuration are read, except that a stored decoder is compared with the word table. In
    the open division, a Hugging Face folder may lack the pooler and the heads.
    """
    from dataloading.text.vocabulary import Vocabulary, read_stated

    # In the closed division, even a folder needs both heads, because the benchmark's checkpoint has them.
    source = _open(path, config.model, whole=not path.is_dir() or config.log.division == "closed")
    theirs = Vocabulary.from_folder(path) if path.is_dir() else None
    sha256 = source.vocabulary_sha256 if theirs is None else theirs.sha256
    if sha256 not in (None, vocabulary.sha256):
        raise ValueError(
            f"{path} was trained with another vocabulary (SHA-256 {sha256[:12]}...) than {config.data.vocab} "
            f"({vocabulary.sha256[:12]}...): set data.vocab to the model's vocabulary, and make the samples with it"
        )
    vocabulary.require_table(source.model.vocab_size, config.data.vocab)
    return source.normalization or (read_stated(path) if path.is_dir() else None)


@torch.no_grad()
def load_initial_weights(model: BertForPreTraining, path: Path) -> list[str]:
    """Read a checkpoint's weights into ``model``, and return the names of the weights that the checkpoint lacks.

    Only a Hugging Face folder may lack weights. Rows of the checkpoint's word table after the model's vocabulary are padding
    and are omitted. Raises ``ValueError`` if weights are missing, damaged, or of another architecture.
    """
    state, found = model.state_dict(), _open(path, model.config, whole=not path.is_dir()).weights
    for name, weight in found.items():
        state[name].copy_(weight.read()[: len(state[name])])
    return [name for name in state if name not in found]


def _open(path: Path, model: ModelConfig, whole: bool) -> "CheckpointSource":
    from bert.checkpoints.sources import open_source

    source = open_source(path, whole=whole)
    for name, expected in asdict(model).items():
        found = getattr(source.model, name)
        if name not in _NOT_COMPARED and found != expected:
            raise ValueError(
                f"{path} holds a model with {name} {found}, but model.{name} is {expected}: "
                f"set --model.{name.replace('_', '-')} {found}"
            )
    # The word table may have extra rows, which are padding. With fewer rows, some tokens would have no embedding.
    if source.model.vocab_size < model.vocab_size:
        raise ValueError(
            f"{path} holds a model with a vocabulary of {source.model.vocab_size:,} tokens, but model.vocab_size is "
            f"{model.vocab_size:,}: make the samples with that model's vocabulary, and set data.vocab to it"
        )
    return source
