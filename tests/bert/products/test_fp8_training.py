"""The FP8 encoder on the reference ops: products, gradients, and the scales over time.

Shape legend in ``bert/products/fp8.py``.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert.configuration.sections import ModelConfig
from bert.model import BertForPreTraining
from bert.products.fp8 import DENSES, Fp8Dense, Fp8Scales, Fp8State, require_fp8
from bert.products.fp8_layer import Fp8Products
from bert.products.weight_gradients import WeightGradients
from dataloading.batches.loader import Batch, batch_of
from dataloading.shards.samples import synthetic_samples
from kernels import OPS
from kernels.reference.fp8 import E4M3, E5M2, largest_scaled
from tests.bert.small_models import drawn_model, fp8_model, gradients, mean_loss

pytestmark = pytest.mark.slow

CONFIG = ModelConfig(3, 64, 2, 128, 128, 32, hidden_dropout=0.0, attention_dropout=0.0, initializer_range=0.04)
TOKENS = 203
"""Number of tokens, not a multiple of 16, so that FP8 products need padding."""


def batches(count: int) -> list[Batch]:
    lengths = np.random.default_rng(5).integers(8, 33, (count, 12))
    return [batch_of(synthetic_samples(row, CONFIG.vocab_size, seed)) for seed, row in enumerate(lengths)]


def forward_backward(model: BertForPreTraining, batch: Batch) -> float:
    loss = mean_loss(model, batch)
    loss.backward()
    return loss.item()


def calibrated() -> tuple[BertForPreTraining, Fp8State, Batch]:
    (model, state), (batch,) = fp8_model(CONFIG), batches(1)
    for _ in state.calibration_():
        forward_backward(model, batch)
    model.zero_grad()
    return model, state, batch


def made(*sizes: tuple[int, int]) -> tuple[Fp8State, Fp8Products, list[Fp8Dense]]:
    """Return FP8 state and products, and dense layers with the given numbers of inputs and outputs."""
    generator = torch.Generator().manual_seed(2)
    scales = Fp8Scales(1, torch.device("cpu"))
    products = Fp8Products(scales, WeightGradients(), fused=False)
    denses = [products.dense(0, name, *size) for name, size in zip(DENSES, sizes, strict=False)]
    with torch.no_grad():
        for dense in denses:
            dense.weight.normal_(0, 0.05, generator=generator)
            dense.bias.normal_(0, 0.1, generator=generator)
    return Fp8State(scales, nn.ModuleList(denses)), products, denses


def input_and_upstream() -> tuple[Tensor, Tensor]:
    """Return an input [T, 64] and an upstream gradient of the same shape whose values are far below E5M2's range."""
    generator = torch.Generator().manual_seed(3)
    x, upstream = (torch.randn(TOKENS, 64, generator=generator) for _ in range(2))
    return x.requires_grad_(), upstream * 1e-6


def trained(
    run: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor, parameters: Sequence[Tensor], state: Fp8State
) -> list[Tensor]:
    """Return the output and the gradients of ``x`` and ``parameters``, after calibrating ``state``."""
    for _ in state.calibration_():
        run(x).backward(upstream)
    for tensor in (x, *parameters):
        tensor.grad = None
    output = run(x)
    output.backward(upstream)
    gradients = [tensor.grad for tensor in (x, *parameters) if tensor.grad is not None]
    assert len(gradients) == 1 + len(parameters)
    return [output.detach(), *gradients]


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round ``x`` to FP8 values in fp64 by an independent formula: a logarithm gives the scale, a power of two."""
    x = x.detach().double()
    scale = 2.0 ** torch.floor(torch.log2(largest_scaled(dtype) / x.abs().max()))
    return (x * scale).float().to(dtype).double() / scale


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("biased", [True, False])
def test_a_dense_layer_multiplies_operands_rounded_to_fp8(biased: bool) -> None:
    state, products, (dense,) = made((64, 64))
    x, upstream = input_and_upstream()
    parameters = (dense.weight, dense.bias) if biased else (dense.weight,)
    run = partial(products.product, dense=dense, bias=dense.bias if biased else None)
    x8, weight8, upstream8 = rounded(x, E4M3), rounded(dense.weight, E4M3), rounded(upstream, E5M2)
    expected = [x8 @ weight8.T + dense.bias.detach().double() * biased, upstream8 @ weight8, upstream8.T @ x8]
    for one, exact in zip(trained(run, x, upstream, parameters, state), [*expected, upstream.sum(0)], strict=False):
        assert distance(one, exact) < 1e-5


def test_a_feed_forward_block_multiplies_operands_rounded_to_fp8() -> None:
    """The layer rounds fp32 values to FP8 and this test rounds fp64 values, so a few elements may round differently."""
    state, products, (wide, narrow) = made((64, 160), (160, 64))
    x, upstream = input_and_upstream()
    run = partial(products.feed_forward, wide=wide, narrow=narrow)
    found = trained(run, x, upstream, (wide.weight, wide.bias, narrow.weight), state)
    x8, wide8, narrow8 = (rounded(each, E4M3) for each in (x, wide.weight, narrow.weight))
    upstream8 = rounded(upstream, E5M2)
    before = (x8 @ wide8.T + wide.bias.detach().double()).requires_grad_()
    after = F.gelu(before, approximate="tanh")
    after8 = rounded(after, E4M3)
    after.backward(upstream8 @ narrow8)
    assert before.grad is not None
    gradient8 = rounded(before.grad, E5M2)
    expected = after8 @ narrow8.T, gradient8 @ wide8, gradient8.T @ x8, before.grad.sum(0), upstream8.T @ after8
    for one, exact in zip(found, expected, strict=True):
        assert distance(one, exact) < 1e-3


def test_only_products_that_sum_over_a_layers_width_use_fast_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def scaled_mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, use_fast_accum: bool, **_: object) -> Tensor:
        asked.append((a.shape[1], use_fast_accum))
        return torch.zeros(len(a), b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    with OPS["scaled_matmul"].using("pytorch"):
        _, products, (dense, wide, narrow) = made((64, 96), (64, 160), (160, 64))
        x, _ = input_and_upstream()
        products.product(x, dense, None).sum().backward()
        products.feed_forward(x, wide, narrow).sum().backward()
    tokens = 208
    assert asked[:3] == [(64, True), (tokens, False), (96, True)]
    assert asked[3:] == [(64, True), (160, True), (tokens, False), (64, True), (tokens, False), (160, True)]


def test_calibration_sets_each_scale_by_its_tensors_largest_magnitude() -> None:
    """Each scale follows from the largest magnitude of its own tensor. More calibration changes almost nothing."""
    model, state, batch = calibrated()
    before = state.scale_S.clone()
    assert (before != 1).all()
    assert state.scale_S.mul(state.inverse_S).eq(1).all()
    forward_backward(model, batch)
    largest = torch.tensor([448.0 / 4, 448.0 / 4, 57344.0 / 16] * len(state.denses))
    used = state.amax_S * state.scale_S / largest
    assert ((used > 0.5) & (used <= 1)).float().mean() > 0.95
    for _ in range(3):
        state.update_()
        forward_backward(model, batch)
    state.update_()
    steps = torch.log2(state.scale_S / before)
    assert steps.abs().max() <= 1
    assert (steps != 0).float().mean() < 0.05


def test_under_autocast_products_are_bf16_and_parameter_gradients_are_fp32() -> None:
    model, state, batch = calibrated()
    products, plain = model.layers[0].products, drawn_model(CONFIG, 1)
    assert isinstance(products, Fp8Products)
    with torch.autocast("cpu", torch.bfloat16):
        assert products.product(torch.ones(16, 64), state.denses[0], None).dtype == torch.bfloat16
        forward_backward(model, batch)
    forward_backward(plain, batch)
    expected = gradients(plain)
    for name, found in gradients(model).items():
        assert found.dtype == torch.float32
        assert distance(found, expected[name]) < 0.15, name


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_fp8(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    for capability, refused in (((9, 0), False), ((8, 9), False), ((8, 6), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        message = r"training\.precision is fp8, but A100 has compute capability 8\.6, FP8 needs 8\.9: set"
        with pytest.raises(ValueError, match=message) if refused else nullcontext():
            require_fp8(torch.device("cuda"))
