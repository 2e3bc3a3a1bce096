"""Training steps of one rank on the device "meta", whose tensors have no values."""

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from bert.configuration.config import Config
from bert.configuration.sections import ModelConfig, ParallelConfig
from bert.execution.cuda_graphs import CudaCapturer
from bert.model import BertForPreTraining
from bert.parallel.mesh import Mesh
from bert.step import TrainingStep
from bert.timing.stopwatch import Stopwatch
from dataloading.batches.shape_buckets import ShapeBucket
from kernels import OPS
from tests.bert.small_models import step_config
from tests.bert.timeline import Timeline

META = torch.device("meta")
SHAPE_BUCKET = ShapeBucket(192, 5, 32, 48)
MODEL = ModelConfig(2, 32, 2, 64, 50, 48)


class TracedStep(TrainingStep):
    """Training step without autocast, which "meta" does not have."""

    def autocast(self) -> Any:
        return nullcontext()


def traced_step(mesh: Mesh, config: Config, capturer: CudaCapturer | None = None) -> TracedStep:
    model = BertForPreTraining(config.model).to(mesh.device).train()
    return TracedStep(model, config, mesh, Stopwatch(), capturer)


def shared_step(
    mesh: Mesh, layers: int, virtual_stages: int = 1, capturer: CudaCapturer | None = None, **training: Any
) -> TracedStep:
    model = replace(MODEL, num_hidden_layers=layers, hidden_size=64, intermediate_size=128)
    config = step_config(model, bucket_bytes=20_000, **training)
    parallel = ParallelConfig(mesh.tensor, mesh.pipeline, virtual_stages)
    return traced_step(mesh, replace(config, parallel=parallel), capturer)


def watched(rank: int, stack: ExitStack, patch: pytest.MonkeyPatch) -> Timeline:
    """Choose Triton's implementations and start a rank's timeline; ``stack`` ends both."""
    for op in OPS.values():
        stack.enter_context(op.using("triton" if "triton" in op.implementations else "reference"))
    # "meta" has no autocast, and PyTorch raises if it is asked about it.
    patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    patch.setattr(torch, "is_autocast_enabled", lambda _device=None: False)
    return stack.enter_context(Timeline(rank).watching(patch))
