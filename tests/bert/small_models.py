"""Small models and training steps, and a comparison of their results."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bert.checkpoints.initial_model import initialize_
from bert.configuration.config import Config
from bert.configuration.recipes import tiny_cpu
from bert.configuration.sections import ModelConfig, OptimizerConfig, Recompute
from bert.execution.cuda_graphs import CudaCapturer
from bert.execution.stopwatch import Stopwatch
from bert.model import BertForPreTraining
from bert.parallel.mesh import Mesh
from bert.products.fp8 import Fp8Scales, Fp8State
from bert.products.fp8_layer import Fp8Products
from bert.products.weight_gradients import WeightGradients
from bert.setup import build_step
from bert.step import TrainingStep
from dataloading.batches.loader import Batch
from tests.conftest import MAX_SEQ_LENGTH, VOCAB_SIZE

CPU = Mesh(0, 1, 0, torch.device("cpu"))
PLAIN = torch.autocast("cpu", enabled=False)
SMALL = ModelConfig(3, 24, 3, 40, 97, 32, hidden_dropout=0.0, attention_dropout=0.0)
OF_SMALL_RUN = ModelConfig(2, 32, 2, 64, VOCAB_SIZE, MAX_SEQ_LENGTH)
"""Model that fits the data of ``SmallRun``."""


def random_model(config: ModelConfig = SMALL) -> BertForPreTraining:
    """Draw an fp64 model whose weights, biases and gains are large enough for every path to affect the result."""
    model = BertForPreTraining(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.ndim == 1 and bool((parameter == 1).all()) else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + centre)
    return model.double()


def drawn_model(config: ModelConfig, seed: int) -> BertForPreTraining:
    """Initialize a model as training does."""
    model = BertForPreTraining(config)
    initialize_(model, seed)
    return model.train()


def fp8_model(
    config: ModelConfig, fused: bool = False, recompute: Recompute = "none"
) -> tuple[BertForPreTraining, Fp8State]:
    """Initialize a model as training does, with all layers but the last in FP8."""
    scales = Fp8Scales(config.num_hidden_layers - 1, torch.device("cpu"))
    products = Fp8Products(scales, WeightGradients(), fused=fused)
    model = BertForPreTraining(config, inner_products=products, recompute=recompute)
    initialize_(model, seed=1)
    return model.train(), Fp8State(scales, model)


def step_config(model: ModelConfig = OF_SMALL_RUN, **training: Any) -> Config:
    recipe = tiny_cpu()
    return replace(
        recipe, model=model, optimizer=OptimizerConfig(1e-2, 100), training=replace(recipe.training, **training)
    )


def training_step(config: Config, mesh: Mesh = CPU, capturer: CudaCapturer | None = None) -> TrainingStep:
    return step_on(drawn_model(config.model, seed=3).to(mesh.device), config, mesh, capturer)


def step_on(
    whole: BertForPreTraining, config: Config, mesh: Mesh, capturer: CudaCapturer | None = None
) -> TrainingStep:
    """Build the kind of step that training uses."""
    return build_step(whole, config, mesh, Stopwatch(), capturer)


def state_of(step: TrainingStep) -> dict[str, Tensor]:
    """Copy all state that affects later steps."""
    momentum_P, variance_P = step.optimizer.moments()
    tensors = {
        "weights": step.flat.weights_P,
        "momentum": momentum_P,
        "variance": variance_P,
        "steps": step.optimizer.steps,
        "dropout": step.model.dropout_state,
        "random": torch.get_rng_state(),
    }
    if step.fp8 is not None:
        tensors |= {"scale": step.fp8.scale_S, "inverse": step.fp8.inverse_S, "amax": step.fp8.amax_S}
        for index, dense in enumerate(step.fp8.denses):
            tensors |= {f"fp8.{index}": dense.weight_NK.float(), f"fp8.{index}.t": dense.weight_KN.float()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def take_steps(step: TrainingStep, batches: Iterable[Sequence[Batch]]) -> dict[str, Tensor]:
    """Train on global batches and return the statistics of each step with the state that training leaves."""
    means = []
    for micro_batches in batches:
        step(micro_batches)
        means.append(list(step.statistics.fetch()[0].values()))
    return {"means": torch.tensor(means, dtype=torch.float64)} | state_of(step)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check that tensors are equal to the last bit."""
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []


def mean_loss(model: BertForPreTraining, batch: Batch) -> Tensor:
    masked_lm_loss, next_sentence_loss = model(batch).mean_losses(batch)
    return masked_lm_loss + next_sentence_loss


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-12) -> None:
    """Check that each tensor's largest error is within ``tolerance`` of its largest entry.

    The largest entry counts as at least 0.01, because tensors that are 0 in exact arithmetic, such as a key bias's
    gradient, hold only rounding errors.
    """
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        error = (tensor - expected[name]).abs().max().item()
        assert error <= tolerance * max(expected[name].abs().max().item(), 1e-2), f"{name}: {error}"
