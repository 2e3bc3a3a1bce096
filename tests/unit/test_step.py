"""The step and the evaluation, in one process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bert.config import Config, ModelConfig, OptimizerConfig
from bert.evaluate import Accuracy, Evaluator
from bert.metrics import Stopwatch
from bert.parallel.mesh import Mesh, join_mesh
from bert.recipes import tiny_cpu
from bert.step import TrainingStep, build_model
from dataloading.dataset import open_dataset
from dataloading.loader import batch_of
from tests.conftest import MAX_SEQ_LENGTH, VOCAB_SIZE, SmallRun

CPU = torch.device("cpu")


def small_config() -> Config:
    model = ModelConfig(2, 32, 2, 64, VOCAB_SIZE, MAX_SEQ_LENGTH, hidden_dropout=0.1, attention_dropout=0.1)
    return replace(tiny_cpu(), model=model, optimizer=OptimizerConfig(1e-2, 100))


@pytest.fixture
def step() -> TrainingStep:
    mesh = join_mesh("cpu")
    return TrainingStep(build_model(small_config(), mesh, seed=3), small_config(), mesh, Stopwatch())


def test_warm_up_leaves_no_trace(step: TrainingStep, small_run: SmallRun) -> None:
    batches = [batch_of(small_run.train.slice(0, 8))]
    weights = step.flat.weights_P.clone()
    random_state = torch.get_rng_state()
    step.warm_up(batches, steps=3)
    assert torch.equal(step.flat.weights_P, weights)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert step.optimizer.steps == 0
    for state in (step.optimizer.state.momentum_P, step.optimizer.state.variance_P, step.flat.gradients_P):
        assert not state.any()
    assert step.statistics.fetch() == (dict.fromkeys(step.statistics.NAMES, 0.0), False)


def test_a_step_after_warm_up_is_the_step_without(small_run: SmallRun) -> None:
    batches = [batch_of(small_run.train.slice(0, 8))]
    results = []
    for warm_up_steps in (0, 2):
        mesh = join_mesh("cpu")
        step = TrainingStep(build_model(small_config(), mesh, seed=3), small_config(), mesh, Stopwatch())
        torch.manual_seed(5)
        step.warm_up([batch_of(small_run.train.slice(8, 20))], warm_up_steps)
        for _ in range(3):
            step(batches)
        results.append(step.flat.weights_P.clone())
    assert torch.equal(*results)


def test_parameters_stay_views_of_the_flat_vector(step: TrainingStep, small_run: SmallRun) -> None:
    step([batch_of(small_run.train.slice(0, 8))])
    together = torch.cat([parameter.detach().flatten() for parameter in step.model.parameters()])
    assert torch.equal(together, step.flat.weights_P)
    gradient = step.model.embeddings.word.grad
    assert gradient is not None
    assert gradient.untyped_storage().data_ptr() == step.flat.gradients_P.untyped_storage().data_ptr()


def test_statistics_are_means_over_the_steps_since_the_last_fetch(step: TrainingStep, small_run: SmallRun) -> None:
    batches = [batch_of(small_run.train.slice(first, first + 8)) for first in (0, 8)]
    for batch in batches:
        step([batch])
    means, stopping = step.statistics.fetch(stop=True)
    assert stopping
    assert means["tokens"] == sum(batch.tokens for batch in batches) / 2
    assert 4 < means["masked_lm_loss"] < 7
    assert 0.3 < means["next_sentence_loss"] < 1.5
    assert means["gradient_norm"] > 0


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_accuracy_is_counted_exactly(step: TrainingStep, small_run: SmallRun, batch_size: int) -> None:
    dataset = open_dataset(small_run.folder / "evaluation")
    accuracy = Evaluator(dataset, Mesh(0, 1, 0, CPU), batch_size)(step.model, step.autocast())
    step.model.eval()
    batch = batch_of(small_run.evaluation)
    with torch.no_grad():
        logits = step.model.masked_lm_logits(step.model.encode(batch)[batch.masked_lm_positions])
    correct = int((logits.argmax(-1) == batch.masked_lm_ids).sum())
    assert accuracy == Accuracy(correct, len(small_run.evaluation.masked_lm_ids))
    assert accuracy.value == correct / accuracy.count


@pytest.mark.parametrize("world_size", [2, 3, 64])
def test_ranks_share_the_evaluation_set_and_miss_nothing(
    step: TrainingStep, small_run: SmallRun, world_size: int
) -> None:
    dataset = open_dataset(small_run.folder / "evaluation")
    whole = Evaluator(dataset, Mesh(0, 1, 0, CPU), 16)(step.model, step.autocast())
    shares = [
        Evaluator(dataset, Mesh(rank, world_size, 0, CPU), 16)(step.model, step.autocast())
        for rank in range(world_size)
    ]
    assert sum(share.count for share in shares) == whole.count
    assert sum(share.correct for share in shares) == whole.correct


def test_evaluation_leaves_the_model_training_and_reads_once(
    step: TrainingStep, small_run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_dataset(small_run.folder / "evaluation")
    evaluator = Evaluator(dataset, Mesh(0, 1, 0, CPU), 16)
    first = evaluator(step.model, step.autocast())
    monkeypatch.setattr(dataset, "take", None)
    assert evaluator(step.model, step.autocast()) == first
    assert step.model.training


def test_the_shipped_checkpoint_fits_the_recipe(tmp_path: Path) -> None:
    config = tiny_cpu()
    assert config.data.initial_checkpoint is not None
    assert config.data.initial_checkpoint.stat().st_size < 4_000_000
    from bert.checkpoint import load_weights, save_weights

    model = build_model(config, Mesh(0, 1, 0, CPU), seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    load_weights(model, config.data.initial_checkpoint)
    assert all(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items() if tensor.ndim > 1)
    save_weights(model, tmp_path / "copy.safetensors")
    load_weights(model, tmp_path / "copy.safetensors")
