"""The product that is added to a weight's gradient: its definition, and PyTorch's own on tensors without content."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.libraries import pytorch_products
from kernels.reference import ops as reference


def operands(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A gradient [12, 20] in fp32, and the operands that are multiplied."""
    generator = torch.Generator().manual_seed(tokens)
    output_gradient, x = (torch.randn(tokens, size, generator=generator).to(dtype) for size in (12, 20))
    return torch.randn(12, 20, generator=generator), output_gradient, x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_definition_adds_in_fp32(dtype: torch.dtype, overwrite: bool) -> None:
    """Under autocast too, which would multiply fp32 in 16 bits; over 131,072 tokens, a global batch on one GPU."""
    gradient, output_gradient, x = operands(131_072, dtype)
    exact = output_gradient.double().t() @ x.double() + (0 if overwrite else gradient.double())
    if overwrite:
        gradient.fill_(torch.nan)
    with torch.autocast("cpu", torch.bfloat16):
        found = reference.accumulate_weight_gradient(gradient, output_gradient, x, overwrite)
    assert found.data_ptr() == gradient.data_ptr()
    assert ((gradient.double() - exact).norm() / exact.norm()).item() < 1e-6


class Calls(TorchDispatchMode):
    """Operators with what they are given; those that write into a tensor do not run: PyTorch 2.11 has them on CUDA alone."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[Any, ...], Mapping[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        self.found.append((str(func), args, named))
        return named["out"] if "out" in named else func(*args, **named)


@pytest.mark.oldest_torch
@pytest.mark.parametrize(("overwrite", "operator"), [(False, "aten.addmm.dtype_out"), (True, "aten.mm.dtype_out")])
def test_on_a_gpu_one_product_reads_16_bits_and_writes_the_gradient(overwrite: bool, operator: str) -> None:
    """Nothing is cast, copied or made; PyTorch has these operators for CUDA and for tensors without content."""
    gradient, output_gradient, x = (tensor.to("meta") for tensor in operands(48, torch.bfloat16))
    with Calls() as calls:
        found = pytorch_products.accumulate_weight_gradient(gradient, output_gradient, x, overwrite)
    assert found is gradient
    *views, (name, arguments, named) = calls.found
    assert [view for view, _, _ in views] == ["aten.t.default"]
    assert name == operator
    assert named["out"] is gradient
    assert torch.float32 in arguments
    assert overwrite or arguments[0] is gradient
    assert [each.dtype for each in arguments if isinstance(each, Tensor)][-2:] == [torch.bfloat16] * 2


@pytest.mark.parametrize(
    ("place", "change", "reason"),
    [
        (0, Tensor.contiguous, "tensors on cpu"),
        (0, Tensor.double, "a gradient in torch.float64"),
        (0, Tensor.t, "not contiguous"),
        (1, Tensor.float, "operands in torch.float32 and torch.bfloat16"),
    ],
)
def test_what_pytorch_cannot_do(place: int, change: Any, reason: str) -> None:
    given = list(operands(48, torch.bfloat16))
    given[place] = change(given[place])
    gradient, output_gradient, x = given
    assert reason in "; ".join(pytorch_products.unsupported_reasons(gradient, output_gradient, x))
