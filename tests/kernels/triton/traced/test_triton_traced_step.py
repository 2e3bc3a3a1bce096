"""The whole training step on tensors without values, so that reading a value is an error.

Forward and backward passes, LAMB and statistics run through Triton's operators, whose fake functions replace the kernels.
The device is "meta", because PyTorch without CUDA cannot fake gradients on a CUDA device. Meta tensors have no values
either, and they are not on the host, so that transfers of numbers from the host are detected as well.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bert.parallel.mesh import Mesh
from dataloading.batches.loader import inert_batch
from kernels import OPS
from tests.bert.small_models import step_config
from tests.kernels.triton.traced.traced_steps import META, MODEL, SHAPE_BUCKET, traced_step

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


@pytest.mark.oldest_torch
def test_a_step_needs_no_value_on_the_host_and_none_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _device=None: False)  # "meta" has no autocast
    step, batch = traced_step(Mesh(0, 1, 0, META), step_config(MODEL)), inert_batch(SHAPE_BUCKET).to(META)
    with ExitStack() as stack:
        for name in OF_THE_STEP:
            stack.enter_context(OPS[name].using("triton"))
        step([batch])  # the first call creates tables
        with Watch() as watch:
            step([batch, batch])
    assert len(watch.operators) > 200
    assert sum("lamb_apply" in name for name in watch.operators) == 1
    assert sum("attention" in name for name in watch.operators) >= 8  # 2 layers x 2 passes x 2 batches
    assert watch.crossings == []
