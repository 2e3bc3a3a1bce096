# pyright: reportArgumentType=false, reportCallIssue=false
"""Adapters to libraries that are not installed here: what they would call, and that nothing is imported before.

Functions with the parameters of the libraries (flash-attn 2, FlashAttention-3, apex), as read in their sources, stand in for
them. They compute the definition and, as the libraries do, leave rows that no sequence owns as they find them: here NaN, in
the output and in the gradients.
"""

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import OPS, Dropout
from kernels.libraries import apex, flash_attention, flash_attention_3
from kernels.reference import ops as reference
from kernels.registry import Implementation
from kernels.tuning.examples import example_inputs
from tests.kernels.accuracy import CPU, output_and_gradients
from tests.kernels.libraries.library_stand_ins import SoftmaxCrossEntropyLoss, library

LIBRARIES = {
    "amp_C",
    "apex",
    "flash_attn",
    "flash_attn_interface",
    "fused_layer_norm_cuda",
    "xentropy_cuda",
}
BOUNDS = torch.tensor([0, 3, 8, 8], dtype=torch.int32)
SPARE = 4
"""Rows after the last sequence."""
ATTENTIONS = [flash_attention, flash_attention_3]


def test_no_library_is_loaded_by_the_package():
    assert all(module.__name__ in sys.modules for module in (apex, *ATTENTIONS))
    assert not LIBRARIES & set(sys.modules)


def test_every_adapter_is_registered_with_what_it_needs():
    found = {(op.name, each.name): each.requires for op in OPS.values() for each in op.implementations.values()}
    for op in ("varlen_attention", "varlen_self_attention"):
        assert found[op, "flash_attn"] == "flash_attn"
        assert found[op, "flash_attn_3"] == "flash_attn_interface"
    for op in ("dropout_add_layer_norm", "embedding_layer_norm"):
        assert found[op, "apex"] == "fused_layer_norm_cuda"
    assert found["masked_lm_loss", "apex"] == "xentropy_cuda"
    for op in OPS.values():
        for each in op.implementations.values():
            assert each.missing() or callable(each.function(op.name))


def test_another_package_of_the_name_is_not_taken_for_nvidias(monkeypatch: pytest.MonkeyPatch):
    other = ModuleType("apex")
    other.__spec__ = importlib.machinery.ModuleSpec("apex", None)
    monkeypatch.setitem(sys.modules, "apex", other)
    assert OPS["dropout_add_layer_norm"].implementations["apex"].missing() == ["fused_layer_norm_cuda is not installed"]
    broken = ModuleType("fused_layer_norm_cuda")
    broken.__spec__ = None
    monkeypatch.setitem(sys.modules, "fused_layer_norm_cuda", broken)
    assert Implementation("x", "y", requires="fused_layer_norm_cuda").missing()


class _Careless(torch.autograd.Function):
    """The definition, with NaN in every row that no sequence owns."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bounds_q: Tensor, bounds_k: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value, bounds_q, bounds_k)
        output = reference.varlen_attention(query, key, value, bounds_q, bounds_k, 100)
        output[int(bounds_q[-1]) :] = torch.nan
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        *inputs, bounds_q, bounds_k = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs]
            query, key, value = leaves
            output = reference.varlen_attention(query, key, value, bounds_q, bounds_k, 100)
        gradients = torch.autograd.grad(output, leaves, gradient)
        for x, bounds in zip(gradients, (bounds_q, bounds_k, bounds_k), strict=True):
            x[int(bounds[-1]) :] = torch.nan
        return *gradients, None, None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The libraries' attention, by their parameters' names and order, and what they were called with beyond the tensors."""
    seen: dict[str, Any] = {}

    def attend(*tensors: Tensor, **others: object) -> Any:
        seen.update(others)
        return _Careless.apply(*tensors)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None
    ):
        assert softmax_scale is None
        return attend(q, k, v, cu_seqlens_q, cu_seqlens_k, longest=(max_seqlen_q, max_seqlen_k), dropout_p=dropout_p)

    def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None):
        bounds = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
        return flash_attn_varlen_func(*qkv.unbind(1), *bounds, dropout_p, softmax_scale)

    def flash_attn_3_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None
    ):  # fmt: skip
        assert (seqused_q, seqused_k, softmax_scale) == (None, None, None)
        output = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, longest=(max_seqlen_q, max_seqlen_k))
        return (output, None) if seen.get("early") else output

    packed = {"flash_attn_varlen_qkvpacked_func": flash_attn_varlen_qkvpacked_func}
    library(monkeypatch, "flash_attn", flash_attn_varlen_func=flash_attn_varlen_func, **packed)
    library(monkeypatch, "flash_attn_interface", flash_attn_varlen_func=flash_attn_3_varlen_func)
    return seen


def dropout_of(module: ModuleType) -> Dropout | None:
    return Dropout(0.25, torch.zeros(2, dtype=torch.int64), 0) if module is flash_attention else None


EACH = pytest.mark.parametrize("module", ATTENTIONS, ids=lambda module: module.__name__)


def assert_as_defined(attention: Any, definition: Any, tensors: list[Tensor], rows: list[int], *others: Any) -> None:
    """Compare rows that sequences own: elsewhere output and gradients are 0. ``others``: what both take, then dropout."""
    *bounds, dropout = others
    found = output_and_gradients(lambda *leaves: attention(*leaves, *bounds, dropout), tensors)
    expected = output_and_gradients(lambda *leaves: definition(*leaves, *bounds), tensors)
    for got, exact, owned in zip(found, expected, rows, strict=True):
        assert not got[owned:].any()
        torch.testing.assert_close(got[:owned], exact[:owned])


@EACH
def test_self_attention_of_a_batch_that_is_filled_up(module: ModuleType, calls: dict[str, Any]):
    packed = torch.randn(8 + SPARE, 3, 2, 8)
    attention, definition = module.varlen_self_attention, reference.varlen_self_attention
    assert_as_defined(attention, definition, [packed], [8, 8], BOUNDS, 5, dropout_of(module))
    assert calls["longest"] == (5, 5)
    assert calls.get("dropout_p", 0.25) == 0.25


@EACH
def test_attention_of_some_rows_of_a_batch_that_is_filled_up(module: ModuleType, calls: dict[str, Any]):
    bounds_q = torch.tensor([0, 1, 3, 3], dtype=torch.int32)
    tensors = [torch.randn(rows + SPARE, 2, 8) for rows in (3, 8, 8)]
    attention, definition = module.varlen_attention, reference.varlen_attention
    assert_as_defined(attention, definition, tensors, [3, 3, 8, 8], bounds_q, BOUNDS, 5, None)
    assert calls.get("dropout_p", 0.0) == 0


def test_the_first_releases_of_flash_attention_3_return_more(calls: dict[str, Any]):
    packed = torch.randn(8, 3, 2, 8)
    expected = flash_attention_3.varlen_self_attention(packed, BOUNDS, 5)
    calls["early"] = True
    assert flash_attention_3.varlen_self_attention(packed, BOUNDS, 5).equal(expected)


@EACH
def test_reasons_against_attention(module: ModuleType, monkeypatch: pytest.MonkeyPatch):
    fine = torch.zeros(4, 2, 64, dtype=torch.bfloat16)
    assert module.unsupported_reasons(fine)[0] == "the tensors are on cpu, expected a GPU"
    assert "torch.float32, expected float16 or bfloat16" in module.unsupported_reasons(fine.float())
    for size in (60, 264):
        reasons = module.unsupported_reasons(torch.zeros(4, 2, size, dtype=torch.float16))
        assert f"a head size of {size}, expected a multiple of 8 up to 256" in reasons
    reasons = module.unsupported_reasons(fine, dropout=dropout_of(flash_attention))
    assert ("it has no dropout" in reasons) == (dropout_of(module) is None)
    for capability, by_2, by_3 in (((7, 5), 1, 2), ((8, 0), 0, 1), ((9, 0), 0, 0), ((10, 0), 0, 1)):
        monkeypatch.setattr(flash_attention, "capability_of", lambda _x, capability=capability: capability)
        monkeypatch.setattr(flash_attention_3, "capability_of", lambda _x, capability=capability: capability)
        count = sum("compute capability" in reason for reason in module.unsupported_reasons(fine))
        assert count == (by_3 if module is flash_attention_3 else by_2)


@pytest.fixture
def nvidia_apex(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def fused_layer_norm_affine(
        input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: list[int], eps: float = 1e-6,
        memory_efficient: bool = False,
    ) -> Tensor:  # fmt: skip
        assert input.dtype == weight.dtype == bias.dtype
        assert not memory_efficient
        assert not torch.is_autocast_enabled("cpu")
        seen.update(eps=eps)
        return F.layer_norm(input, normalized_shape, weight, bias, eps)

    library(monkeypatch, "apex.normalization.fused_layer_norm", fused_layer_norm_affine=fused_layer_norm_affine)
    library(monkeypatch, "apex.contrib.xentropy.softmax_xentropy", SoftmaxCrossEntropyLoss=SoftmaxCrossEntropyLoss)
    return seen


def assert_same(ours: Any, definition: Any, arguments: list[Any]) -> None:
    for got, expected in zip(*(output_and_gradients(each, arguments) for each in (ours, definition)), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("op", ["dropout_add_layer_norm", "embedding_layer_norm"])
def test_apex_layer_norms(nvidia_apex: dict[str, Any], op: str):
    arguments = example_inputs(op, CPU, torch.float32)[0][:-1]
    assert_same(getattr(apex, op), getattr(reference, op), [*arguments, None])
    if op == "embedding_layer_norm":
        added = [torch.zeros_like(arguments[3]) for _ in range(2)]
        for each, gradient in zip((apex, reference), added, strict=True):
            each.embedding_layer_norm(*arguments, None, gradient).square().sum().backward()
        torch.testing.assert_close(*added)
    assert nvidia_apex["eps"] == 1e-12


@pytest.mark.usefixtures("nvidia_apex")
def test_apex_layer_norm_takes_one_type_under_autocast():
    rows, vectors = [torch.randn(5, 16).bfloat16() for _ in range(2)], [torch.randn(16) for _ in range(3)]
    arguments = rows[0], vectors[0], rows[1], *vectors[1:], 1e-12
    with torch.autocast("cpu", torch.bfloat16):
        output = apex.dropout_add_layer_norm(*arguments, None)
    assert output.dtype == torch.bfloat16
    assert not apex.dropout_add_layer_norm(*arguments, dropout_of(flash_attention)).equal(output)


@pytest.mark.usefixtures("nvidia_apex")
@pytest.mark.parametrize("labels", [[3, -1, 0, 10, -1], [-1] * 5])
def test_apex_cross_entropy(labels: list[int]):
    tensors = [*(torch.randn(shape) for shape in ((5, 8), (11, 8), (11,))), torch.tensor(labels)]
    for counting in (True, False):
        assert_same(apex.masked_lm_loss, reference.masked_lm_loss, [*tensors, -1, counting])
        (_, correct), (_, expected) = (each.masked_lm_loss(*tensors, -1, counting) for each in (apex, reference))
        assert correct == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert apex.masked_lm_loss(*tensors)[0].dtype == torch.float32
    added = torch.zeros(11, 8), torch.zeros(11, 8)
    for each, gradient in zip((apex, reference), added, strict=True):
        each.masked_lm_loss(*tensors, decoder_gradient_VD=gradient)[0].backward()
    torch.testing.assert_close(*added)
    assert added[0].any() == any(label != -1 for label in labels)


def test_reasons_against_apex():
    rows = torch.zeros(5, 8)
    assert apex.dropout_add_layer_norm_unsupported_reasons(rows) == ["the tensors are on cpu, expected a GPU"]
    ids = torch.zeros(5, dtype=torch.int64)
    assert "torch.float64" in apex.embedding_layer_norm_unsupported_reasons(ids, ids, ids, rows.double())[1]
    assert "torch.float64" in apex.masked_lm_loss_unsupported_reasons(rows.double(), rows)[1]
    large = torch.zeros(1, 1).expand(2**17, 8), torch.zeros(1, 1).expand(2**15, 8)
    assert "131072 x 32768 logits, expected fewer than 2^32" in apex.masked_lm_loss_unsupported_reasons(*large)
