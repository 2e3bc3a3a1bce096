"""Inputs that Triton's implementations of ops do not support, with the reasons."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import OPS
from kernels.tuning.examples import example_inputs
from tests.kernels.accuracy import CPU, IN_TRITON

FIRST = {"embedding_layer_norm": 3, "attention_backward_cast_fp8": 1}
"""Index of the input whose type an op checks, for ops that do not check the first input."""


def reasons(op: str, changes: dict[int, Callable[[Any], object]]) -> str:
    """Return why Triton's implementation does not support the op's example inputs after the changes."""
    args, kwargs = example_inputs(op, CPU, torch.float32)
    changed = [changes.get(place, lambda same: same)(value) for place, value in enumerate(args)]
    return "; ".join(OPS[op].implementations["triton"].unsupported_reasons(*changed, **kwargs))


def columns(count: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.new_zeros(2, count)


@pytest.mark.parametrize(
    ("op", "changes", "reason"),
    [
        *((op, {FIRST.get(op, 0): Tensor.double}, "float64") for op in IN_TRITON),
        ("varlen_attention", {1: Tensor.bfloat16}, "bfloat16"),
        ("varlen_attention", {place: lambda x: x[..., :48] for place in range(3)}, "head size 48"),
        ("dense_gelu", {2: Tensor.double}, "float64"),
        ("dropout_add_layer_norm", {0: columns(12), 2: columns(12)}, "hidden size of 12"),
        ("dropout_add_layer_norm", {0: columns(4104), 2: columns(4104)}, "hidden size of 4104"),
        ("dropout_add_layer_norm", {0: Tensor.bfloat16}, "x and residual"),
        ("dropout_add_layer_norm", {3: Tensor.half}, "bias, weight and norm_bias"),
        ("cast_fp8", {1: Tensor.double}, "float64"),
        ("cast_fp8", {0: columns(24)}, "24 columns"),
        ("add_norm_cast_fp8", {0: columns(24), 2: columns(24)}, "24 columns"),
        ("add_norm_backward_cast_fp8", {0: Tensor.bfloat16}, "gradient"),
        ("attention_backward_cast_fp8", {4: lambda _: torch.empty(0)}, "another implementation"),
    ],
)
def test_unsupported_inputs_give_a_reason(op: str, changes: dict[int, Callable[[Any], object]], reason: str) -> None:
    assert reasons(op, {}) == ""
    assert reason in reasons(op, changes)
