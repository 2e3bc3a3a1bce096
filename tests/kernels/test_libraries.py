# pyright: reportCallIssue=false
"""The adapters to flash-attn and apex, tested with stand-ins, and matrix products that PyTorch supports on CUDA only."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_parts.accuracy import outcome
from kernels import OPS, Dropout, accumulate_weight_gradient, masked_lm_loss, varlen_attention
from kernels.libraries import apex, flash_attention, pytorch
from kernels.tuning.examples import example_inputs
from tests.kernels.accuracy import CPU

BOUNDS = torch.tensor([0, 3, 8, 8], dtype=torch.int32)
SPARE = 4
"""Number of rows after the last sequence."""


def spoilt(x: Tensor, bounds: Tensor) -> Tensor:
    """Return ``x`` with NaN in the rows after the last sequence, which flash-attn leaves uninitialized."""
    return torch.where(torch.arange(len(x))[:, None, None] < bounds[-1], x, torch.nan)


@pytest.fixture
def called_with(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-in for flash-attn 2's functions that records their arguments."""
    seen: dict[str, Any] = {}

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None
    ):
        seen.update(longest=(max_seqlen_q, max_seqlen_k), dropout_p=dropout_p, softmax_scale=softmax_scale)
        for x, bounds in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k)):
            x.register_hook(partial(spoilt, bounds=bounds))
        return spoilt(varlen_attention.definition(q, k, v, cu_seqlens_q, cu_seqlens_k, 100), cu_seqlens_q)

    def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None):
        bounds = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
        return flash_attn_varlen_func(*qkv.unbind(1), *bounds, dropout_p, softmax_scale)

    library = ModuleType("flash_attn")
    vars(library).update(
        flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func=flash_attn_varlen_qkvpacked_func
    )
    monkeypatch.setitem(sys.modules, "flash_attn", library)
    return seen


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("p", [0.25, 0.0])
def test_flash_attn_gives_zeros_after_the_last_sequence(fused: bool, p: float, called_with: dict[str, Any]) -> None:
    """Rows outside of all sequences are 0 in the output and in all gradients."""
    dropout = Dropout(p, torch.zeros(2, dtype=torch.int64), 0) if p else None
    bounds_q = torch.tensor([0, 1, 3, 3], dtype=torch.int32)
    rows = (8, 8) if fused else (3, 3, 8, 8)
    bounds = (BOUNDS,) if fused else (bounds_q, BOUNDS)
    shapes = [(8 + SPARE, 3, 2, 8)] if fused else [(count + SPARE, 2, 8) for count in rows[1:]]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    name = "varlen_self_attention" if fused else "varlen_attention"
    found = outcome(getattr(flash_attention, name), ([*tensors, *bounds, 5, dropout], {})).tensors
    expected = outcome(OPS[name].definition, ([*tensors, *bounds, 5], {})).tensors
    for got, exact, owned in zip(found, expected, rows, strict=True):
        assert not got[owned:].any()
        torch.testing.assert_close(got[:owned], exact[:owned])
    assert called_with == {"longest": (5, 5), "dropout_p": p, "softmax_scale": None}


@pytest.mark.parametrize(
    ("size", "dtype", "wrong"),
    [(256, "bfloat16", ""), (8, "float16", ""), (64, "float32", "torch.float32, expected float16 or bfloat16")]
    + [(size, "float16", f"a head size of {size}, expected a multiple of 8 up to 256") for size in (60, 264)],
)
def test_flash_attn_gives_reasons_against_unsupported_devices_types_and_head_sizes(
    monkeypatch: pytest.MonkeyPatch, size: int, dtype: str, wrong: str
) -> None:
    with FakeTensorMode():
        query = torch.zeros(4, 2, size, dtype=getattr(torch, dtype), device="cuda")
        reasons = [wrong] if wrong else []
        assert flash_attention.unsupported_reasons(query) == reasons
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        for capability, old in (((8, 0), []), ((7, 5), ["compute capability 7.5, expected 8.0 at least"])):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
            assert flash_attention.unsupported_reasons(query) == reasons + old
        on_cpu = ["the tensors are on cpu, expected a GPU", *reasons]
        assert flash_attention.unsupported_reasons(torch.zeros_like(query, device="cpu")) == on_cpu


class SoftmaxCrossEntropyLoss(torch.autograd.Function):
    """Stand-in for apex's class. Like apex, it reads the logit of every label."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing=0.0, padding_idx=0, half_to_float=False) -> Tensor:
        assert smoothing == 0
        assert half_to_float == (logits.dtype != torch.float32)
        assert labels.min() >= 0
        ctx.save_for_backward(logits, labels)
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        return losses.masked_fill_(labels == padding_idx, 0)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, labels = ctx.saved_tensors
        errors = logits.float().softmax(-1) - F.one_hot(labels, logits.shape[1])
        return (grad_loss[:, None] * errors).to(logits.dtype), None, None, None, None


def fused_layer_norm_affine(input: Tensor, weight: Tensor, bias: Tensor, normalized_shape, eps=1e-6) -> Tensor:
    assert input.dtype == weight.dtype == bias.dtype
    assert not torch.is_autocast_enabled("cpu")
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


@pytest.fixture
def nvidia_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("apex", "apex.normalization", "apex.contrib", "apex.contrib.xentropy"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, function in (
        ("apex.normalization.fused_layer_norm", fused_layer_norm_affine),
        ("apex.contrib.xentropy.softmax_xentropy", SoftmaxCrossEntropyLoss),
    ):
        module = ModuleType(name)
        vars(module)[function.__name__] = function
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("nvidia_apex")
@pytest.mark.parametrize("op", ["dropout_add_layer_norm", "embedding_layer_norm"])
def test_apexs_layer_norms_agree_with_the_definition(op: str) -> None:
    inputs, named = example_inputs(op, CPU, torch.float32)
    found, expected = (
        outcome(function, ([*inputs[:-1], None], named)).tensors for function in (getattr(apex, op), OPS[op].definition)
    )
    for got, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(got, exact)


@pytest.mark.usefixtures("nvidia_apex")
@pytest.mark.parametrize("labels", [[3, -1, 0, 10, -1], [-1] * 5])
@pytest.mark.parametrize("counting", [True, False])
def test_apexs_cross_entropy_agrees_with_the_definition(labels: list[int], counting: bool) -> None:
    tensors = [torch.randn(shape, requires_grad=True) for shape in ((5, 8), (11, 8), (11,))]
    arguments = [*tensors, torch.tensor(labels), counting]
    functions = apex.masked_lm_loss, masked_lm_loss.definition
    found, expected = (outcome(function, (arguments, {})).tensors for function in functions)
    for got, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(got, exact)


def test_apex_gives_reasons_against_cpus_fp64_and_too_many_logits() -> None:
    rows, ids = torch.zeros(5, 8), torch.zeros(5, dtype=torch.int64)
    on_cpu, of_type = "the tensors are on cpu, expected a GPU", "torch.float64, expected float32, float16 or bfloat16"
    assert apex.norm_reasons(rows) == [on_cpu]
    assert apex.norm_reasons(ids, ids, ids, rows.double()) == [on_cpu, of_type]
    decoder = torch.zeros(1, 1).expand(2**15, 8)
    assert apex.loss_reasons(torch.zeros(1, 1).expand(2**17 - 1, 8), decoder) == [on_cpu]
    many = "131072 x 32768 logits, expected fewer than 2^32"
    assert apex.loss_reasons(torch.zeros(1, 1).expand(2**17, 8), decoder) == [on_cpu, many]
    with FakeTensorMode():
        assert apex.norm_reasons(torch.zeros(2, device="cuda")) == []


def operands(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return a gradient [12, 20] in fp32, and the operands of the product that is added to it."""
    generator = torch.Generator().manual_seed(tokens)
    output_gradient, x = (torch.randn(tokens, size, generator=generator).to(dtype) for size in (12, 20))
    return torch.randn(12, 20, generator=generator), output_gradient, x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_weight_gradient_is_added_in_fp32(dtype: torch.dtype, overwrite: bool) -> None:
    """Autocast must not convert fp32 operands, and a sum over the 131,072 tokens of one GPU's batch must be accurate."""
    gradient, output_gradient, x = operands(131_072, dtype)
    exact = output_gradient.double().t() @ x.double() + (0 if overwrite else gradient.double())
    if overwrite:
        gradient.fill_(torch.nan)
    with torch.autocast("cpu", torch.bfloat16):
        found = accumulate_weight_gradient.definition(gradient, output_gradient, x, overwrite)
    assert found.data_ptr() == gradient.data_ptr()
    assert ((gradient.double() - exact).norm() / exact.norm()).item() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_that_add_to_gradients_need_16_bit_operands_and_a_gpu(dtype: torch.dtype) -> None:
    on_cpu = "tensors on cpu: PyTorch supports this product on CUDA only"
    with FakeTensorMode():
        for device, reasons in (("cuda", []), ("cpu", [on_cpu])):
            x, half, wide = (torch.zeros(2, 2, dtype=kind, device=device) for kind in (dtype, torch.half, torch.float))
            if dtype == torch.float32:
                reasons = [*reasons, f"operands in {dtype} and {dtype}: expected both in bfloat16 or both in float16"]
            assert pytorch.gradient_reasons(wide, x, x) == reasons
            assert pytorch.gradient_reasons(half, x, x) == [*reasons, "a gradient in torch.float16, expected float32"]
            assert (pytorch.gradient_reasons(wide, x, half) == reasons) is (dtype == torch.float16)


class Calls(TorchDispatchMode):
    """Record of called operators. Operators with ``out`` do not run, because PyTorch has them only for CUDA."""

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
def test_one_product_of_16_bit_operands_writes_the_fp32_gradient(overwrite: bool, operator: str) -> None:
    gradient, output_gradient, x = (tensor.to("meta") for tensor in operands(48, torch.bfloat16))
    with Calls() as calls:
        found = pytorch.accumulate_weight_gradient(gradient, output_gradient, x, overwrite)
    assert found is gradient
    *views, (name, arguments, named) = calls.found
    assert [view for view, _, _ in views] == ["aten.t.default"]
    assert name == operator
    assert named["out"] is gradient
    assert torch.float32 in arguments
    assert overwrite or arguments[0] is gradient
    assert [each.dtype for each in arguments if isinstance(each, Tensor)][-2:] == [torch.bfloat16] * 2
