"""The model that training starts from: random weights, those of a file of this program's, or of a Hugging Face folder.

What reads files is imported where it is needed: benchmarks of a GPU do without safetensors and tokenizers.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bert.configuration.config import Config
from bert.configuration.sections import ModelConfig
from bert.model import BertForPreTraining, initialize_
from bert.parallel.mesh import Mesh
from console.program import say

if TYPE_CHECKING:
    from bert.checkpoints.sources import CheckpointSource
    from dataloading.text.tokenization import Vocabulary

# Not the vocabulary, whose table may be padded, and not dropout, which is no property of weights.
_COMPARED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
    "layer_norm_eps",
)


def first_model(config: Config, mesh: Mesh, seed: int) -> BertForPreTraining:
    """The model that training starts from: the initial checkpoint's weights if there is one, else random ones."""
    start = config.data.initial_checkpoint
    if start is None:
        return draw_model(config, mesh, seed)
    if not start.is_dir():
        model = empty_model(config, mesh)
        load_initial_weights(model, start)  # all of them, or it raises
        return model
    # Heads that the folder lacks stay as they are drawn here.
    model = draw_model(config, mesh, seed)
    if (missing := load_initial_weights(model, start)) and mesh.is_main:
        say(f"{start} lacks {', '.join(missing)}: random at the start")
    return model


def draw_model(config: Config, mesh: Mesh, seed: int) -> BertForPreTraining:
    """The model on its device, from random weights that are drawn there: a CPU takes half a minute for BERT-Large's."""
    model = empty_model(config, mesh)
    # A generator of its own: the draw depends on the seed alone, not on what PyTorch's has been asked before.
    initialize_(model, torch.Generator(mesh.device).manual_seed(seed))
    return model


def empty_model(config: Config, mesh: Mesh) -> BertForPreTraining:
    """The model on its device, for weights that are loaded: its matrices hold what was in memory."""
    with mesh.device:
        return BertForPreTraining(config.model).train()


def check_initial_weights(path: Path, config: Config, vocabulary: "Vocabulary") -> None:
    """Raise ``ValueError`` where ``load_initial_weights`` would, or where another vocabulary was in use.

    Read are names, shapes and configuration, and of a Hugging Face folder the decoder, if it has one of its own. A folder
    whose heads are missing will do in the open division only.
    """
    from bert.checkpoints.weights import check_weights
    from dataloading.text.tokenization import Vocabulary

    if not path.is_dir():
        check_weights(path, config.model, vocabulary.sha256)
        return
    # A closed run starts from the benchmark's checkpoint, which has both heads.
    _open_folder(path, config.model, whole=config.log.division == "closed")
    theirs = Vocabulary.from_folder(path)
    # By tokens, not by digest: the folder may have them in a tokenizer.json.
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
    from bert.checkpoints.weights import load_weights

    if not path.is_dir():
        load_weights(model, path)
        return []
    state, found = model.state_dict(), _open_folder(path, model.config, whole=False).ours
    for name, weight in found.items():
        state[name].copy_(weight.read()[: len(state[name])])
    return [name for name in state if name not in found]


def _open_folder(path: Path, model: ModelConfig, whole: bool) -> "CheckpointSource":
    from bert.checkpoints.sources import open_source

    source = open_source(path, whole=whole)
    for name in _COMPARED:
        found, expected = getattr(source.model, name), getattr(model, name)
        if found != expected:
            raise ValueError(
                f"{path} holds a model with {name} {found}, but model.{name} is {expected}: "
                f"set --model.{name.replace('_', '-')} {found}"
            )
    # More rows than tokens are padding, and left out; fewer would leave tokens without one.
    if source.model.vocab_size < model.vocab_size:
        raise ValueError(
            f"{path} holds a model of {source.model.vocab_size:,} tokens, but model.vocab_size is {model.vocab_size:,}: "
            "make the samples with the vocabulary of that folder, and set data.vocab to it"
        )
    return source
