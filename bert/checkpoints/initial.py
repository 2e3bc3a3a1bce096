"""The weights that training starts from: a file of this program's, or a Hugging Face folder as it is."""

from pathlib import Path

import torch

from bert.checkpoints.sources import Source, open_source
from bert.checkpoints.weights import check_weights, load_weights
from bert.configuration.config import Config, ModelConfig
from bert.model import BertForPreTraining
from dataloading.text.tokenization import Vocabulary

_COMPARED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
    "layer_norm_eps",
)


def check_initial_weights(path: Path, config: Config, vocabulary: Vocabulary) -> None:
    """Raise ``ValueError`` where ``load_initial_weights`` would, or where another vocabulary was in use.

    Read are names, shapes and configuration, and of a Hugging Face folder the decoder, if it has one of its own. A folder
    whose heads are missing will do in the open division only.
    """
    if not path.is_dir():
        check_weights(path, config.model, vocabulary.sha256)
        return
    _open_folder(path, config.model, whole=config.log.division == "closed")
    theirs = Vocabulary.from_folder(path)
    if theirs is not None and theirs.tokens != vocabulary.tokens:
        raise ValueError(
            f"{path} has another vocabulary ({theirs.size:,} tokens) than {config.data.vocab} ({vocabulary.size:,}): make "
            "the samples with that of the folder, and set data.vocab to it"
        )


@torch.no_grad()
def load_initial_weights(model: BertForPreTraining, path: Path) -> list[str]:
    """Read the weights of a file of ``save_weights``, or of a Hugging Face folder, into ``model``.

    Returns the names of what a folder lacks of pooler and heads, which stays as it was. Rows of its word table past the
    model's vocabulary, which others pad, are left out. Raises ``ValueError`` when the weights are missing, damaged, of
    another kind, or made for another architecture.
    """
    if not path.is_dir():
        load_weights(model, path)
        return []
    state, found = model.state_dict(), _open_folder(path, model.config, whole=False).ours
    for name, weight in found.items():
        state[name].copy_(weight.read()[: len(state[name])])
    return [name for name in state if name not in found]


def _open_folder(path: Path, model: ModelConfig, whole: bool) -> Source:
    source = open_source(path, whole=whole)
    for name in _COMPARED:
        found, expected = getattr(source.model, name), getattr(model, name)
        if found != expected:
            raise ValueError(
                f"{path} holds a model with {name} {found}, but model.{name} is {expected}: "
                f"set --model.{name.replace('_', '-')} {found}"
            )
    if source.model.vocab_size < model.vocab_size:
        raise ValueError(
            f"{path} holds a model of {source.model.vocab_size:,} tokens, but model.vocab_size is {model.vocab_size:,}: "
            "make the samples with the vocabulary of that folder, and set data.vocab to it"
        )
    return source
