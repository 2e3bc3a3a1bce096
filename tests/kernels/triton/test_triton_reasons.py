"""Reasons that Triton's implementations of the ops give for what they cannot do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import OPS
from kernels.reference.lamb import LambSegments
from kernels.tuning.examples import example_inputs
from tests.kernels.accuracy import CPU

IN_TRITON = [name for name, op in OPS.items() if "triton" in op.implementations]


def reasons(op: str, changes: dict[int | str, Callable[[Any], object]]) -> str:
    """Reasons for small inputs, some of which are changed."""
    args, kwargs = example_inputs(op, CPU, torch.float32)
    changed = [changes.get(place, lambda same: same)(value) for place, value in enumerate(args)]
    named = {name: changes.get(name, lambda same: same)(value) for name, value in kwargs.items()}
    return "; ".join(OPS[op].implementations["triton"].unsupported_reasons(op, *changed, **named))


def short(tensor: Tensor) -> Tensor:
    return tensor[:-1]


def wide(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(2, 4104)


def narrow(tensor: Tensor) -> Tensor:
    return tensor[:, :12].contiguous()


def elsewhere(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


@pytest.mark.parametrize(
    ("op", "changes", "reason"),
    [
        ("varlen_attention", {0: Tensor.double, 1: Tensor.double, 2: Tensor.double}, "float64"),
        ("varlen_attention", {1: Tensor.bfloat16}, "dtypes"),
        ("varlen_attention", {place: lambda x: x[..., :48] for place in range(3)}, "head size 48"),
        ("varlen_attention", {3: Tensor.long}, "int64"),
        ("varlen_attention", {3: lambda _: torch.zeros(70_000, dtype=torch.int32)}, "69999 sequences"),
        ("varlen_self_attention", {0: Tensor.double}, "float64"),
        ("dense_gelu", {0: Tensor.double}, "x of dtype torch.float64"),
        ("dense_gelu", {2: Tensor.double}, "bias of dtype torch.float64"),
        ("bias_gelu", {0: Tensor.double}, "product of dtype torch.float64"),
        ("dropout_add_layer_norm", {0: narrow, 2: narrow}, "hidden size of 12"),
        ("dropout_add_layer_norm", {0: wide, 2: wide}, "hidden size of 4104"),
        ("dropout_add_layer_norm", {0: Tensor.bfloat16}, "x and residual are bfloat16, float32"),
        ("dropout_add_layer_norm", {3: Tensor.double}, "bias, weight and norm_bias are float32, float64"),
        ("embedding_layer_norm", {5: lambda _: torch.zeros(3, 128)}, "segment table of 3"),
        ("embedding_layer_norm", {0: Tensor.short}, "int64"),
        ("embedding_layer_norm", {3: Tensor.double}, "float64"),
        ("masked_lm_loss", {0: Tensor.double}, "float64"),
        ("masked_lm_loss", {3: Tensor.short}, "int16"),
        ("masked_lm_loss", {4: lambda _: 0}, "ignore_index of 0"),
        ("cast_fp8", {1: Tensor.double}, "float64"),
        ("cast_fp8", {0: lambda x: x[:, :8]}, "multiple of 16"),
        ("cast_transpose_into_fp8", {4: lambda x: x[:, :16]}, "casts of"),
        ("cast_transpose_into_fp8", {3: lambda x: x.view(torch.uint8)}, "not of one FP8 type"),
        ("sum_of_squares", {0: Tensor.double}, "float64"),
        ("sum_of_squares", {0: lambda x: x[::2]}, "contiguous"),
        ("lamb_step", {3: lambda _: LambSegments((3, 1), (True, True))}, "segments of 4 elements for"),
        ("lamb_step", {0: Tensor.double}, "float32"),
        ("lamb_step", {1: short}, "shapes"),
        ("lamb_step", {1: lambda x: torch.zeros(2 * len(x))[::2]}, "contiguous"),
        ("lamb_step", {"step": elsewhere}, "device"),
        ("lamb_step", {"copies_P": lambda _: torch.zeros(3)}, "copies of another shape"),
        ("lamb_directions", {"norm": elsewhere}, "device"),
        ("lamb_apply", {3: lambda _: torch.zeros(2, 2)}, "1 adapted"),
        ("lamb_apply", {"norm": elsewhere}, "device"),
    ],
)
def test_what_an_op_cannot_do(op: str, changes: dict[int | str, Callable[[Any], object]], reason: str):
    assert reasons(op, {}) == ""
    assert reason in reasons(op, changes)


@pytest.mark.parametrize("change", [Tensor.bfloat16, Tensor.t])
def test_a_gradient_that_the_embeddings_cannot_be_added_to(change: Callable[[Tensor], Tensor]):
    args, _ = example_inputs("embedding_layer_norm", CPU, torch.float32)
    asked = OPS["embedding_layer_norm"].implementations["triton"].unsupported_reasons
    gradient = torch.zeros(512, 128)
    assert not asked("embedding_layer_norm", *args, word_gradient_VD=gradient)
    [reason] = asked("embedding_layer_norm", *args, word_gradient_VD=change(gradient))
    assert "expected float32, contiguous" in reason


@pytest.mark.parametrize("op", IN_TRITON)
def test_what_is_compiled_needs_a_gpu(op: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    assert "cuda" in reasons(op, {}).lower()
