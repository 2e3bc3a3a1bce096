"""The step and the evaluation, in one process."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from bert.checkpoints.initial_model import build_model, first_model
from bert.configuration.config import Config, ModelConfig, OptimizerConfig
from bert.configuration.recipes import tiny_cpu
from bert.evaluator import Accuracy, Evaluator
from bert.optimizer import Lamb, learning_rate
from bert.parallel.mesh import Mesh, join_mesh
from bert.reporting.stopwatch import Stopwatch
from bert.step import TrainingStep
from dataloading.batches.loader import batch_of
from dataloading.batches.shape_buckets import ShapeBucket
from dataloading.dataset.folder import open_dataset
from tests.conftest import MAX_SEQ_LENGTH, VOCAB_SIZE, SmallRun

pytestmark = pytest.mark.oldest_torch

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
    assert step.optimizer.steps.item() == 0
    assert step.model.dropout_state.tolist() == [0, 0]
    for state in (*step.optimizer.moments(), step.flat.gradients_P):
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
    for parameter, place in step.flat.places.items():
        assert torch.equal(parameter.detach().flatten(), step.flat.weights_P[place])
    gradient = step.model.embeddings.word.grad
    assert gradient is not None
    assert gradient.untyped_storage().data_ptr() == step.flat.gradients_P.untyped_storage().data_ptr()


READS = ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")


def count_reads(monkeypatch: pytest.MonkeyPatch, reads: list[str]) -> None:
    """From now on, ``reads`` gets ``method in module.function`` of every call that hands values to the host."""
    for name in READS:
        original = getattr(torch.Tensor, name)

        def counted(
            tensor: torch.Tensor, *args: Any, name: str = name, original: Callable[..., Any] = original, **kwargs: Any
        ) -> Any:
            caller = sys._getframe(1)
            reads.append(f"{name} in {caller.f_globals['__name__']}.{caller.f_code.co_name}")
            return original(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)


class Recorder(TorchDispatchMode):
    """Every operator that runs, with the numbers and other values that the host hands over with it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[object]]] = []
        self.waits: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        values, _ = tree_flatten((args, kwargs))
        self.calls.append((str(func), [value for value in values if isinstance(value, int | float | str)]))
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            self.waits.append(str(func))
        return func(*args, **kwargs or {})


def test_a_step_reads_nothing_back(step: TrainingStep, small_run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the lengths that attention on a CPU goes by; in Python and below it, in the first step and the second."""
    batches = [batch_of(small_run.train.slice(first, first + 8)) for first in (0, 8)]
    reads: list[str] = []
    with monkeypatch.context() as patch, Recorder() as recorder:
        count_reads(patch, reads)
        for _ in range(2):
            step(batches)
    assert set(reads) == {"tolist in kernels.libraries.pytorch._lengths"}
    assert recorder.waits == []


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.tolist, bool, float, int])
def test_every_way_to_read_is_noticed(
    step: TrainingStep, small_run: SmallRun, monkeypatch: pytest.MonkeyPatch, read: Callable[[torch.Tensor], object]
) -> None:
    """A reading of the gradient norm, slipped into the step, is seen by the means of the test above."""
    reads: list[str] = []
    add_step = step.statistics.add_step
    name = {bool: "__bool__", float: "__float__", int: "__int__"}.get(read, getattr(read, "__name__", ""))

    def reading(gradient_norm: torch.Tensor) -> None:
        getattr(gradient_norm, name)()
        add_step(gradient_norm)

    monkeypatch.setattr(step.statistics, "add_step", reading)
    with monkeypatch.context() as patch:
        count_reads(patch, reads)
        step([batch_of(small_run.train.slice(0, 8))])
    assert f"{name} in {__name__}.reading" in reads


def test_the_host_hands_over_the_same_in_every_step(step: TrainingStep, small_run: SmallRun) -> None:
    """Operators and their host values: what a captured step would replay. Rate, step count and corrections are not there."""
    batches = [batch_of(small_run.train.slice(0, 8))]
    recorders = []
    for _ in range(3):
        with Recorder() as recorder:
            step(batches)
        recorders.append(recorder)
    first, *later = recorders
    assert len(first.calls) > 100
    assert all(recorder.calls == first.calls for recorder in later)


def test_a_host_rate_is_noticed(step: TrainingStep, small_run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails for an optimizer whose rate is a number of the host."""
    counted = iter(range(10))

    def baked(optimizer: Lamb) -> torch.Tensor:
        rate = learning_rate(optimizer.config, next(counted))
        with torch.no_grad():
            optimizer.flat.weights_P.sub_(optimizer.flat.gradients_P, alpha=rate)
        return optimizer.flat.gradients_P.norm()

    monkeypatch.setattr(Lamb, "step", baked)
    with pytest.raises(AssertionError):
        test_the_host_hands_over_the_same_in_every_step(step, small_run)


def test_the_rate_follows_the_counter_on_the_device(step: TrainingStep) -> None:
    """Set from outside, as a replay would: the step is in proportion to the rate of the count that it finds."""
    flat, optimizer, config = step.flat, step.optimizer, small_config().optimizer
    weights_P = flat.weights_P.clone()
    moves = []
    for count in (10, 55, config.learning_rate_training_steps):
        optimizer.reset()
        flat.weights_P.copy_(weights_P)
        optimizer.steps.fill_(count)
        momentum_P, variance_P = optimizer.moments()
        momentum_P.fill_(1e-3)
        variance_P.fill_(1e-2)
        optimizer.step()
        assert optimizer.steps.item() == count + 1
        first = flat.segments.adapted.index(True)
        before, after = (flat.segments.views(flat_P)[first] for flat_P in (weights_P, flat.weights_P))
        moves.append(((after - before).norm() / before.norm()).item())
    rates = [learning_rate(config, count) for count in (10, 55, config.learning_rate_training_steps)]
    assert moves == pytest.approx(rates, rel=1e-5)
    assert moves[-1] == 0


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


def test_a_step_with_gradients_that_are_not_finite_is_skipped_and_counted(
    step: TrainingStep, small_run: SmallRun
) -> None:
    """Weights, moments and the step count stay; the mean norm is that of the other steps; training goes on."""
    batches = [batch_of(small_run.train.slice(0, 8))]
    step(batches)
    norm = step.statistics.fetch()[0]["gradient_norm"]
    before = [tensor.clone() for tensor in (step.flat.weights_P, *step.optimizer.moments(), step.optimizer.steps)]
    for bad in (float("nan"), float("inf"), -float("inf")):
        step.flat.gradients_P[1234] = bad
        step(batches)
    after = (step.flat.weights_P, *step.optimizer.moments(), step.optimizer.steps)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert step.optimizer.skipped.item() == 3
    assert not step.flat.gradients_P.any()
    step(batches)
    means, _ = step.statistics.fetch()
    assert means["skipped_steps"] == 3
    assert 0.5 * norm < means["gradient_norm"] < 2 * norm
    assert step.optimizer.steps.item() == 2
    assert not torch.equal(before[0], step.flat.weights_P)
    assert step.statistics.fetch()[0]["skipped_steps"] == 0


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


def test_empty_slots_are_not_counted(step: TrainingStep, small_run: SmallRun) -> None:
    dataset = open_dataset(small_run.folder / "evaluation")
    plain, padded = (Evaluator(dataset, Mesh(0, 1, 0, CPU), 64) for _ in range(2))
    shape_bucket = ShapeBucket(2048, 64, 512, MAX_SEQ_LENGTH)
    padded._batches = [batch_of(small_run.evaluation, shape_bucket=shape_bucket)]
    assert padded(step.model, step.autocast()) == plain(step.model, step.autocast())


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
    from bert.checkpoints.weights import load_weights, save_weights

    model = build_model(config, Mesh(0, 1, 0, CPU), seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    load_weights(model, config.data.initial_checkpoint)
    assert all(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items() if tensor.ndim > 1)
    save_weights(model, tmp_path / "copy.safetensors")
    load_weights(model, tmp_path / "copy.safetensors")


def test_random_weights_are_drawn_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by a generator of the device, and nothing of the model's size is made elsewhere first."""
    device, seen = torch.device("meta"), []

    class Generator:
        def __init__(self, device: torch.device = CPU) -> None:
            self.device = device

        def manual_seed(self, seed: int) -> "Generator":
            seen.append((self.device, seed))
            return self

    def draw(model: torch.nn.Module, generator: Generator) -> None:
        seen.extend({(tensor.device, generator.device) for tensor in (*model.parameters(), *model.buffers())})

    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr("bert.checkpoints.initial_model.initialize_", draw)
    model = build_model(small_config(), Mesh(0, 1, 0, device), seed=3)
    assert seen == [(device, 3), (device, device)]
    assert model.training


def test_weights_that_a_checkpoint_brings_are_not_drawn_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's weights are all there is to the model, and random numbers go on as after drawing."""
    config, mesh = tiny_cpu(), Mesh(0, 1, 0, CPU)
    assert config.data.initial_checkpoint is not None
    random_state = torch.get_rng_state()
    drawn = first_model(replace(config, data=replace(config.data, initial_checkpoint=None)), mesh, seed=3)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(map(torch.equal, drawn.parameters(), build_model(config, mesh, seed=3).parameters()))
    monkeypatch.setattr("bert.checkpoints.initial_model.initialize_", None)
    loaded = first_model(config, mesh, seed=3)
    assert torch.equal(torch.get_rng_state(), random_state)
    state = loaded.state_dict()
    expected = load_file(config.data.initial_checkpoint)
    assert state.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())
    assert {name for name, _ in loaded.named_parameters()} == state.keys()
    assert loaded.training
