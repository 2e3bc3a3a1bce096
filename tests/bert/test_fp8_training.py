"""The FP8 encoder, computed by the definitions: gradients, the life of the scales, and training against fp32.

Shape legend in ``bert/fp8.py``.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from bert.configuration.config import ModelConfig, OptimizerConfig
from bert.configuration.recipes import tiny_cpu
from bert.fp8 import Fp8Dense, Fp8Products, Fp8State, _FeedForward, _Product, enable_fp8, require_fp8
from bert.model import BertForPreTraining, Dense, EncoderLayer, initialize_
from bert.optimizer import FlatParameters, Lamb
from dataloading.batches.loader import Batch, batch_of
from dataloading.batches.synthetic import synthetic_samples
from kernels import OPS
from kernels.reference.fp8 import E4M3, E5M2, largest_scaled

pytestmark = pytest.mark.slow

CONFIG = ModelConfig(
    num_hidden_layers=3,
    hidden_size=64,
    num_attention_heads=2,
    intermediate_size=128,
    vocab_size=128,
    max_position_embeddings=32,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    initializer_range=0.04,
)
FP8_OPS = [name for name in OPS if "fp8" in name or name == "scaled_matmul"]
TOKENS = 203
"""No multiple of 16."""


@pytest.fixture(autouse=True)
def definitions() -> Iterator[None]:
    """Of every FP8 op: on a CPU PyTorch's scaled product takes seconds where the definition takes milliseconds."""
    with ExitStack() as stack:
        for name in FP8_OPS:
            stack.enter_context(OPS[name].using("reference"))
        yield


def batches(count: int) -> list[Batch]:
    lengths = np.random.default_rng(5).integers(8, 33, (count, 12))
    return [batch_of(synthetic_samples(row, CONFIG.vocab_size, seed)) for seed, row in enumerate(lengths)]


def new_model() -> BertForPreTraining:
    model = BertForPreTraining(CONFIG)
    initialize_(model, torch.Generator().manual_seed(1))
    return model.train()


def forward_backward(model: BertForPreTraining, batch: Batch, factor: float = 1.0) -> float:
    """The loss; gradients are ``factor`` times its."""
    masked_lm_loss, next_sentence_loss = model(batch).mean_losses(batch)
    ((masked_lm_loss + next_sentence_loss) * factor).backward()
    return masked_lm_loss.item() + next_sentence_loss.item()


def calibrated() -> tuple[BertForPreTraining, Fp8State, Batch]:
    model, (batch,) = new_model(), batches(1)
    state = enable_fp8(model)
    state.calibrate_(lambda: forward_backward(model, batch))
    model.zero_grad()
    return model, state, batch


# --- one dense layer, one feed-forward half ------------------------------------------------------------------------


def made(*denses: Dense) -> tuple[Fp8State, Fp8Products]:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for dense in denses:
            dense.weight.normal_(0, 0.05, generator=generator)
            dense.bias.normal_(0, 0.1, generator=generator)
    state = Fp8State(denses, torch.device("cpu"))
    return state, Fp8Products(state.denses)


def input_and_upstream() -> tuple[Tensor, Tensor]:
    """[T, 64], and an upstream gradient of the same shape, far below what E5M2 holds."""
    generator = torch.Generator().manual_seed(3)
    x, upstream = (torch.randn(TOKENS, 64, generator=generator) for _ in range(2))
    return x.requires_grad_(), upstream * 1e-6


def trained(
    state: Fp8State, run: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor, *parameters: Tensor
) -> list[Tensor]:
    """Output and the gradients of ``x`` and ``parameters``, with the scales that calibration finds."""
    state.calibrate_(lambda: run(x).backward(upstream))
    for tensor in (x, *parameters):
        tensor.grad = None
    output = run(x)
    output.backward(upstream)
    gradients = [tensor.grad for tensor in (x, *parameters) if tensor.grad is not None]
    assert len(gradients) == 1 + len(parameters)
    return [output.detach(), *gradients]


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``x`` is after FP8, by a formula of its own: the power of two from logarithms. fp64."""
    scale = 2.0 ** torch.floor(torch.log2(largest_scaled(dtype) / x.abs().max().double()))
    return (x.double() * scale).float().to(dtype).double() / scale


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("biased", [True, False])
def test_a_dense_layer_is_the_product_of_what_was_rounded(biased: bool) -> None:
    dense = Dense(64, 64)
    state, products = made(dense)
    x, upstream = input_and_upstream()
    parameters = (dense.weight, dense.bias) if biased else (dense.weight,)
    run = partial(products.with_bias if biased else products.without_bias, dense=dense)
    output, x_gradient, weight_gradient, *bias_gradient = trained(state, run, x, upstream, *parameters)
    x = x.detach()
    rounded_x, rounded_weight, rounded_upstream = rounded(x, E4M3), rounded(dense.weight, E4M3), rounded(upstream, E5M2)
    bias = dense.bias.double() if biased else 0.0
    assert distance(output, rounded_x @ rounded_weight.T + bias) < 1e-6
    assert distance(x_gradient, rounded_upstream @ rounded_weight) < 1e-6
    assert distance(weight_gradient, rounded_upstream.T @ rounded_x) < 1e-6
    for gradient in bias_gradient:
        assert distance(gradient, upstream.sum(0)) < 1e-5


def test_a_feed_forward_half_is_the_products_of_what_was_rounded() -> None:
    wide, narrow = Dense(64, 160), Dense(160, 64)
    state, products = made(wide, narrow)
    x, upstream = input_and_upstream()
    parameters = (wide.weight, wide.bias, narrow.weight)
    output, *gradients = trained(
        state, partial(products.feed_forward, wide=wide, narrow=narrow), x, upstream, *parameters
    )
    rounded_x, wide_weight, narrow_weight = (
        rounded(x.detach(), E4M3),
        rounded(wide.weight, E4M3),
        rounded(narrow.weight, E4M3),
    )
    before = (rounded_x @ wide_weight.T + wide.bias.double()).detach().requires_grad_()
    after = F.gelu(before, approximate="tanh")
    rounded_after = rounded(after.detach(), E4M3)
    rounded_upstream = rounded(upstream, E5M2)
    after.backward(rounded_upstream @ narrow_weight)
    assert before.grad is not None
    rounded_gradient = rounded(before.grad, E5M2)
    # What is rounded to FP8 here comes from fp32 there and from fp64 here: a few elements may fall on the other side.
    assert distance(output, rounded_after @ narrow_weight.T) < 1e-3
    expected = (
        rounded_gradient @ wide_weight,
        rounded_gradient.T @ rounded_x,
        before.grad.sum(0),
        rounded_upstream.T @ rounded_after,
    )
    for gradient, exact in zip(gradients, expected, strict=True):
        assert distance(gradient, exact) < 1e-3


def test_rounding_costs_a_few_percent() -> None:
    """Against the same in fp64 without FP8."""
    wide, narrow = Dense(64, 160), Dense(160, 64)
    state, products = made(wide, narrow)
    x, upstream = input_and_upstream()
    parameters = (wide.weight, wide.bias, narrow.weight)
    output, *gradients = trained(
        state, partial(products.feed_forward, wide=wide, narrow=narrow), x, upstream, *parameters
    )
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, *parameters)]
    expected = F.gelu(exact[0] @ exact[1].T + exact[2], approximate="tanh") @ exact[3].T
    expected.backward(upstream.double())
    assert 0.01 < distance(output, expected.detach()) < 0.06
    for gradient, tensor in zip(gradients, exact, strict=True):
        assert tensor.grad is not None
        assert 0.01 < distance(gradient, tensor.grad) < 0.09


@pytest.mark.parametrize(("kind", "times"), [("input", 4), ("weight", 4), ("gradient", 4), ("gradient", 16)])
def test_what_grows_in_one_step_is_rounded_as_before(kind: str, times: int) -> None:
    """Scales are those of the step before. Without headroom the errors here are 0.16 to 0.7."""
    dense = Dense(64, 64)
    state, products = made(dense)
    x, upstream = input_and_upstream()
    state.calibrate_(lambda: products.with_bias(x, dense).backward(upstream))
    with torch.no_grad():
        {"input": x, "weight": dense.weight, "gradient": upstream}[kind].mul_(times)
    state.refresh_weights_()
    for tensor in (x, dense.weight, dense.bias):
        tensor.grad = None
    output = products.with_bias(x, dense)
    output.backward(upstream)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, dense.weight, dense.bias)]
    expected = exact[0] @ exact[1].T + exact[2]
    expected.backward(upstream.double())
    assert distance(output.detach(), expected.detach()) < 0.06
    for tensor, other in zip((x, dense.weight), exact, strict=False):
        assert tensor.grad is not None
        assert other.grad is not None
        assert distance(tensor.grad, other.grad) < 0.09


def test_only_sums_over_a_layers_width_are_left_to_the_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def scaled_mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, use_fast_accum: bool, **_: object) -> Tensor:
        asked.append((a.shape[1], use_fast_accum))
        return torch.zeros(len(a), b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    dense, wide, narrow = Dense(64, 96), Dense(64, 160), Dense(160, 64)
    with OPS["scaled_matmul"].using("pytorch"):
        _, products = made(dense, wide, narrow)
        x, _ = input_and_upstream()
        products.without_bias(x, dense).sum().backward()
        products.feed_forward(x, wide, narrow).sum().backward()
    tokens = 208
    assert asked[:3] == [(64, True), (tokens, False), (96, True)]
    assert asked[3:] == [(64, True), (160, True), (tokens, False), (64, True), (tokens, False), (160, True)]


def test_rows_without_a_gradient_add_nothing() -> None:
    """Shape bucket slots: their input is some number, their upstream gradient 0."""
    wide, narrow = Dense(64, 160), Dense(160, 64)
    results = []
    for slots in (0, 21):
        state, products = made(wide, narrow)
        x, upstream = input_and_upstream()
        x = torch.cat([x.detach(), torch.full((slots, 64), 0.3)]).requires_grad_()
        upstream = torch.cat([upstream, torch.zeros(slots, 64)])
        parameters = (wide.weight, wide.bias, narrow.weight)
        output, *gradients = trained(
            state, partial(products.feed_forward, wide=wide, narrow=narrow), x, upstream, *parameters
        )
        assert not gradients[0][TOKENS:].any()
        results.append([output[:TOKENS], *(gradient[:TOKENS].clone() for gradient in gradients)])
    for plain, padded in zip(*results, strict=True):
        assert distance(padded, plain) < 1e-6


def test_a_backward_pass_after_the_update_is_refused() -> None:
    wide, narrow = Dense(64, 160), Dense(160, 64)
    state, products = made(wide, narrow)
    x = torch.ones(16, 64)
    for output in (products.with_bias(x, wide), products.feed_forward(x, wide, narrow)):
        state.update_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


# --- the scales ----------------------------------------------------------------------------------------------------


def test_calibration_finds_the_scales() -> None:
    """Every site has the scale of its own largest magnitude, and more rounds change next to nothing."""
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


def test_without_calibration_gradients_vanish() -> None:
    """As small as BERT-Large's, they are below the smallest number of E5M2."""
    (batch,) = batches(1)
    found = []
    for fp8, calibrate in ((False, False), (True, False), (True, True)):
        model = new_model()
        state = enable_fp8(model) if fp8 else None
        if state is not None and calibrate:
            state.calibrate_(lambda model=model: forward_backward(model, batch, 1e-5))
            model.zero_grad()
        forward_backward(model, batch, 1e-5)
        found.append(model.layers[0].get_parameter("intermediate.weight").grad)
    plain, uncalibrated, calibrated = found
    assert not uncalibrated.any()
    assert distance(calibrated, plain) < 0.15


def test_magnitudes_are_collected_over_micro_batches() -> None:
    """The scale after two micro-batches is the smaller of those after each."""
    scales = []
    first, second = batches(2)
    for micro_batches in ([first], [second], [first, second]):
        model, state, _ = calibrated()
        for batch in micro_batches:
            forward_backward(model, batch)
        state.update_()
        scales.append(state.scale_S.clone())
    assert not torch.equal(scales[0], scales[1])
    assert torch.equal(torch.minimum(scales[0], scales[1]), scales[2])


def test_a_bad_step_leaves_the_scales() -> None:
    model, state, batch = calibrated()
    before = state.scale_S.clone()
    masked_lm_loss, _ = model(batch).mean_losses(batch)
    (masked_lm_loss * float("nan")).backward()
    gradient = state.denses[0].gradient
    assert not gradient.amax.isfinite()
    state.update_()
    assert torch.equal(state.scale_S[2::3], before[2::3])
    forward_backward(model, batch)
    assert gradient.amax.isfinite()


def test_an_older_checkpoints_scales_without_headroom_last_one_step() -> None:
    model, state, batch = calibrated()
    expected = state.scale_S.clone()
    state.set_scales_(expected * torch.tensor([4.0, 4.0, 16.0]).repeat(len(state.denses)))
    state.refresh_weights_()
    forward_backward(model, batch)
    state.update_()
    assert (state.scale_S / expected).log2().abs().max() <= 1


def test_evaluation_leaves_the_state_alone() -> None:
    model, state, batch = calibrated()
    with torch.no_grad():
        for dense in state.denses:
            dense.dense.bias.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(4))
    tensors = [state.scale_S, state.inverse_S, state.amax_S]
    tensors += [tensor for dense in state.denses for tensor in (dense.weight_NK, dense.weight_KN)]
    before = [tensor.clone().float() for tensor in tensors]
    trained_loss = forward_backward(model, batch)
    state.amax_S.copy_(before[2])
    model.eval()
    with torch.inference_mode():
        loss = sum(loss.item() for loss in model(batch).mean_losses(batch))
    with torch.no_grad():
        model(batch)
    assert all(torch.equal(tensor.float(), old) for tensor, old in zip(tensors, before, strict=True))
    assert loss == pytest.approx(trained_loss, rel=1e-6), "evaluation computes in FP8 with the scales of training"


def test_the_last_layer_stays_as_it_is() -> None:
    model, state, _ = calibrated()
    kinds = [isinstance(layer.products, Fp8Products) for layer in model.layers if isinstance(layer, EncoderLayer)]
    assert kinds == [True, True, False]
    assert len(state.denses) == 8
    assert [dense.dense.weight.shape for dense in state.denses[:4]] == [(192, 64), (64, 64), (128, 64), (64, 128)]


def test_nothing_of_it_is_saved_with_the_weights() -> None:
    model, _, _ = calibrated()
    assert model.state_dict().keys() == new_model().state_dict().keys()


def test_under_autocast_products_are_bf16_and_gradients_of_parameters_fp32() -> None:
    model, state, batch = calibrated()
    products = model.layers[0].products
    assert isinstance(products, Fp8Products)
    with torch.autocast("cpu", torch.bfloat16):
        assert products.with_bias(torch.ones(16, 64), state.denses[0].dense).dtype == torch.bfloat16
        forward_backward(model, batch)
    plain = new_model()
    forward_backward(plain, batch)
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert found.grad.dtype == torch.float32
        assert distance(found.grad, expected.grad) < 0.15, name


# --- weights in flat buffers ---------------------------------------------------------------------------------------


def holds_the_weights(dense: Fp8Dense) -> bool:
    """Whether the FP8 weights are those of now, both ways round, but for what the scale's last step may have cut."""
    now = (dense.dense.weight.detach() * dense.weight.scale).clamp(-448, 448).to(E4M3)
    return torch.equal(dense.weight_NK.float(), now.float()) and torch.equal(dense.weight_KN.float(), now.float().T)


def test_weights_follow_the_flat_buffer() -> None:
    model, (batch,) = new_model(), batches(1)
    state = enable_fp8(model)
    flat = FlatParameters.of(model)
    assert all(holds_the_weights(dense) for dense in state.denses)
    addresses = [(dense.weight_NK.data_ptr(), dense.weight_KN.data_ptr()) for dense in state.denses]
    flat.weights_P.mul_(-1.5)
    assert not any(holds_the_weights(dense) for dense in state.denses)
    state.refresh_weights_()
    assert all(holds_the_weights(dense) for dense in state.denses)
    flat.weights_P.mul_(3)
    state.update_()
    assert all(holds_the_weights(dense) for dense in state.denses)
    assert addresses == [(dense.weight_NK.data_ptr(), dense.weight_KN.data_ptr()) for dense in state.denses]
    forward_backward(model, batch)
    for parameter, place in flat.places.items():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad.flatten(), flat.gradients_P[place])
    first = flat.gradients_P.clone()
    forward_backward(model, batch)
    assert distance(flat.gradients_P, 2 * first) < 1e-6, "gradients add up in the flat vector"


# --- training ------------------------------------------------------------------------------------------------------

STEPS = 80
OPTIMIZER = OptimizerConfig(base_learning_rate=1e-2, learning_rate_training_steps=200, num_warmup_steps=10)
NEAR = 0.01
"""Largest relative difference of the losses, averaged over 10 steps: 0.0003 has been seen, and 0.09 with a mistake."""


def no_change(state: Fp8State) -> None:
    """FP8 as it is."""


def one_inverse_off(state: Fp8State) -> None:
    """The input of the second layer's FC2 comes out of its product four times too large."""
    state.denses[7].input.inverse.mul_(4)


def loss_curve(after_update: Callable[[Fp8State], None] | None, refresh: bool = True) -> Tensor:
    """Losses [STEPS] of training on four batches again and again; in fp32 where there is nothing after the update."""
    model, data = new_model(), batches(4)
    state = enable_fp8(model) if after_update is not None else None
    optimizer = Lamb(FlatParameters.of(model), OPTIMIZER)
    if state is not None:
        state.calibrate_(lambda: forward_backward(model, data[0]))
        optimizer.reset()
    losses = []
    for at in range(STEPS):
        losses.append(forward_backward(model, data[at % len(data)]))
        optimizer.step()
        if state is not None and after_update is not None:
            if refresh:
                state.update_()
            else:
                state._update_scales_()
            after_update(state)
    return torch.tensor(losses)


def apart(losses: Tensor, reference: Tensor) -> float:
    averages, expected = losses.view(-1, 10).mean(1), reference.view(-1, 10).mean(1)
    return ((averages - expected).abs() / expected).max().item()


@pytest.fixture(scope="module")
def reference() -> Tensor:
    losses = loss_curve(None)
    assert losses[-10:].mean() < 0.5 * losses[:10].mean(), "there is something to learn"
    return losses


def test_trains_as_fp32_does(reference: Tensor) -> None:
    assert apart(loss_curve(no_change), reference) < NEAR


@pytest.mark.parametrize(("change", "refresh"), [(one_inverse_off, True), (no_change, False)])
def test_a_mistake_would_show(reference: Tensor, change: Callable[[Fp8State], None], refresh: bool) -> None:
    assert apart(loss_curve(change, refresh), reference) > 4 * NEAR


# --- devices and settings ------------------------------------------------------------------------------------------


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_fp8(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    require_fp8(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ValueError, match=r"training\.precision is fp8, but A100 has compute capability 8\.0"):
        require_fp8(torch.device("cuda"))


class Context:
    """What autograd hands to a function, without autograd."""

    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


@torch.no_grad()
def test_the_host_reads_nothing_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors of no content, said to be on a GPU: what asks for a value raises, and so does a tensor left on the CPU.

    Autograd and the method ``copy_`` want a real GPU, hence the context and the operator.
    """
    pytest.importorskip("triton", reason="Triton, whose kernels a GPU runs, is not installed")
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source: torch.ops.aten.copy_.default(self, source))
    cuda, dtype = torch.device("cuda"), torch.bfloat16
    with ExitStack() as stack:
        for name in FP8_OPS:
            stack.enter_context(OPS[name].using("auto"))
        stack.enter_context(FakeTensorMode())
        with cuda:
            denses = [Dense(64, 192), Dense(64, 128), Dense(128, 64)]
        state = Fp8State(denses, cuda)
        state.update_()
        x = torch.empty(TOKENS, 64, dtype=dtype, device=cuda)
        (dense, wide, narrow), products = state.denses, Fp8Products(state.denses)
        weight, bias = dense.dense.weight, dense.dense.bias
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (_Product, (weight, bias, dense)),
            (_Product, (weight, None, dense)),
            (_FeedForward, (denses[1].weight, denses[1].bias, denses[2].weight, wide, narrow)),
        ]
        for function, arguments in calls:
            context = Context()
            output = function.forward(context, x, *arguments, dtype)
            gradients = function.backward(context, torch.empty_like(output))
            assert len(gradients) == 2 + len(arguments)
            x_gradient, *others = (gradient for gradient in gradients if gradient is not None)
            assert (output.dtype, output.device.type) == (x_gradient.dtype, x_gradient.device.type) == (dtype, "cuda")
            assert x_gradient.shape == x.shape
            parameters = [argument for argument in arguments if isinstance(argument, torch.nn.Parameter)]
            assert [gradient.shape for gradient in others] == [parameter.shape for parameter in parameters]
            assert {(gradient.dtype, gradient.device.type) for gradient in others} == {(torch.float32, "cuda")}
        state.update_()
        assert products.with_bias(x, denses[0]).dtype == dtype
        assert products.feed_forward(x, *denses[1:]).device.type == "cuda"
        with pytest.raises(DataDependentOutputException):
            state.scale_S.sum().item()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 132}, "model.hidden_size is 132, but training.precision fp8"),
        ({"intermediate_size": 520}, "model.intermediate_size is 520, but training.precision fp8"),
        ({"num_hidden_layers": 1}, "model.num_hidden_layers is 1, but training.precision fp8"),
    ],
)
def test_sizes_that_fp8_cannot_take_are_named(change: dict[str, int], message: str) -> None:
    config = tiny_cpu()
    training = replace(config.training, precision="fp8")
    assert replace(config, training=training).training.precision == "fp8"
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(config, training=training, model=replace(config.model, **change))
    replace(config, model=replace(config.model, **change))
