"""The model that training starts from, on its device: a checkpoint's weights, or random ones."""

import torch

from bert.configuration.config import Config
from bert.model import BertForPreTraining, initialize_
from bert.parallel.mesh import Mesh
from console.program import say


def first_model(config: Config, mesh: Mesh, seed: int) -> BertForPreTraining:
    """The model that training starts from: the initial checkpoint's weights if there is one, else random ones."""
    start = config.data.initial_checkpoint
    if start is None:
        return build_model(config, mesh, seed)
    from bert.checkpoints.initial import load_initial_weights  # needs safetensors, which benchmarks of a GPU do without

    if not start.is_dir():
        model = empty_model(config, mesh)
        load_initial_weights(model, start)  # all of them, or it raises
        return model
    model = build_model(config, mesh, seed)
    if (missing := load_initial_weights(model, start)) and mesh.is_main:
        say(f"{start} lacks {', '.join(missing)}: random at the start")
    return model


def build_model(config: Config, mesh: Mesh, seed: int) -> BertForPreTraining:
    """The model on its device, from random weights that are drawn there: a CPU takes half a minute for BERT-Large's."""
    model = empty_model(config, mesh)
    initialize_(model, torch.Generator(mesh.device).manual_seed(seed))
    return model


def empty_model(config: Config, mesh: Mesh) -> BertForPreTraining:
    """The model on its device, for weights that are loaded: its matrices hold what was in memory."""
    with mesh.device:
        return BertForPreTraining(config.model).train()
