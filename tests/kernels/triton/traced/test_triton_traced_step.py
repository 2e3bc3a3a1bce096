"""The whole training step on tensors without values, so that reading a value is an error.

Forward and backward passes, LAMB and statistics run through Triton's operators, whose fake functions replace the kernels.
The device is "meta", because PyTorch without CUDA cannot fake gradients on a CUDA device. Meta tensors have no values
either, and they are not on the host, so that transfers of numbers from the host are detected as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bert.configuration.config import Config
from bert.configuration.recipes import tiny_cpu
from bert.configuration.sections import ModelConfig, OptimizerConfig, ParallelConfig
from bert.execution.cuda_graphs import CudaCapturer
from bert.model import BertForPreTraining
from bert.optimizer import Lamb
from bert.parallel.mesh import Mesh
from bert.step import TrainingStep
from bert.timing.stopwatch import Stopwatch
from dataloading.batches.loader import Batch, inert_batch
from dataloading.batches.shape_buckets import ShapeBucket
from kernels import OPS

SHAPE_BUCKET = ShapeBucket(192, 5, 32, 48)
OF_THE_STEP = (
    "varlen_attention",
    "varlen_self_attention",
    "dropout_add_layer_norm",
    "dense_gelu",
    "embedding_layer_norm",
    "masked_lm_loss",
    "lamb_step",
)


class Watch(TorchDispatchMode):
    """Record of all operators, and of operators that mix tensors of the host and the device."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []
        self.crossings: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        tensors = [value for value in tree_leaves((args, kwargs, result)) if isinstance(value, Tensor)]
        self.operators.append(str(func))
        if len({tensor.device.type for tensor in tensors}) > 1:
            self.crossings.append(str(func))
        return result


class TracedStep(TrainingStep):
    """Training step without autocast, which "meta" does not have."""

    def autocast(self) -> Any:
        return nullcontext()


def config() -> Config:
    model = ModelConfig(2, 32, 2, 64, 50, 48)
    return replace(tiny_cpu(), model=model, optimizer=OptimizerConfig(1e-2, 100))


def shared_step(
    mesh: Mesh, layers: int, virtual_stages: int = 1, capturer: CudaCapturer | None = None, **training: Any
) -> TracedStep:
    """Return the training step of one rank of ``mesh``."""
    recipe = config()
    recipe = replace(
        recipe,
        model=replace(recipe.model, num_hidden_layers=layers, hidden_size=64, intermediate_size=128),
        training=replace(recipe.training, bucket_bytes=20_000, **training),
        parallel=ParallelConfig(mesh.tensor, mesh.pipeline, virtual_stages),
    )
    model = BertForPreTraining(recipe.model).to(mesh.device).train()
    return TracedStep(model, recipe, mesh, Stopwatch(), capturer)


@pytest.fixture(autouse=True)
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report autocast as off, because PyTorch raises if it is asked about autocast on "meta"."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _device=None: False)


@contextmanager
def triton() -> Iterator[None]:
    with ExitStack() as stack:
        for name in OF_THE_STEP:
            stack.enter_context(OPS[name].using("triton"))
        yield


def meta_step() -> tuple[TrainingStep, Batch]:
    device = torch.device("meta")
    model = BertForPreTraining(config().model).to(device).train()
    step = TracedStep(model, config(), Mesh(0, 1, 0, device), Stopwatch())
    return step, inert_batch(SHAPE_BUCKET).to(device)


@pytest.mark.oldest_torch
def test_a_step_needs_no_value_on_the_host_and_none_from_it() -> None:
    step, batch = meta_step()
    with triton():
        step([batch])  # the first call creates tables
        with Watch() as watch:
            step([batch, batch])
    assert len(watch.operators) > 200
    assert sum("lamb_apply" in name for name in watch.operators) == 1
    assert sum("attention" in name for name in watch.operators) >= 8  # 2 layers x 2 passes x 2 batches
    assert watch.crossings == []


def test_reading_a_value_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    step, batch = meta_step()
    monkeypatch.setattr(step.statistics, "add_step", Tensor.item)
    with triton(), pytest.raises(RuntimeError, match="meta tensor"):
        step([batch])


def test_a_number_from_the_host_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    step, batch = meta_step()
    original = Lamb.step

    def with_a_copy(optimizer: Lamb) -> Tensor:
        optimizer.steps.copy_(torch.tensor(3))
        return original(optimizer)

    monkeypatch.setattr(Lamb, "step", with_a_copy)
    with triton():
        step([batch])
        with Watch() as watch:
            step([batch])
    assert watch.crossings == ["aten.copy_.default"]
