"""Fused FP8 layers give the same results, bit for bit, as the layers that they replace."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bert.configuration.sections import ModelConfig, Recompute
from bert.products import fp8_layer
from dataloading.batches.loader import Batch, batch_of
from dataloading.shards.samples import synthetic_samples
from kernels import OPS, choose
from kernels.registry import Implementation
from kernels.tuning import autotune
from tests.bert.small_models import fp8_model, gradients, mean_loss

CONFIG = ModelConfig(4, 64, 2, 128, 128, 32, hidden_dropout=0.0, attention_dropout=0.0, initializer_range=0.04)
DROPPING = replace(CONFIG, hidden_dropout=0.1, attention_dropout=0.1)
Found = tuple[float, dict[str, Tensor], Tensor]


def small_batch() -> Batch:
    return batch_of(synthetic_samples(np.array([9, 31, 17, 26, 32, 8]), CONFIG.vocab_size, 0))


def choose_definitions() -> None:
    """Compute attention and norms by the reference implementations, which a CPU uses for all other ops anyway."""
    names = "varlen_self_attention", "varlen_attention", "dropout_add_layer_norm", "embedding_layer_norm"
    choose(dict.fromkeys(names, "reference"))


def trained(config: ModelConfig, batch: Batch, autocast: bool, fused: bool, **how: Any) -> Found:
    model, state = fp8_model(config, fused, **how)
    model.seed_dropout(3)

    def forward_backward() -> float:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = mean_loss(model, batch)
        loss.backward()
        return loss.item()

    for _ in state.calibration_():
        forward_backward()
    model.zero_grad()
    return forward_backward(), gradients(model), state.amax_S.clone()


def assert_same(found: Found, expected: Found) -> None:
    assert found[0] == expected[0]
    assert torch.equal(found[2], expected[2])
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_fused_layers_give_the_losses_gradients_and_magnitudes_of_separate_passes(
    autocast: bool, recompute: Recompute
) -> None:
    """PyTorch computes attention on a CPU; its output is cast separately. Recomputed layers pass no casts to the next."""
    batch = small_batch()
    plain = trained(CONFIG, batch, autocast, fused=False)
    assert_same(trained(CONFIG, batch, autocast, fused=True, recompute=recompute), plain)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_attention_with_fused_casts_changes_neither_results_nor_dropout(autocast: bool) -> None:
    batch = small_batch()
    choose_definitions()
    plain = trained(DROPPING, batch, autocast, fused=False)
    assert_same(trained(DROPPING, batch, autocast, fused=True), plain)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["attention_cast_fp8", "attention_backward_cast_fp8"])
def test_attention_and_casts_are_separate_if_their_implementations_differ(
    monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    batch = small_batch()
    choose_definitions()
    together = trained(DROPPING, batch, True, fused=True)
    monkeypatch.delattr(fp8_layer, "_ProductAttention")
    with OPS[op].using("triton"):
        assert_same(trained(DROPPING, batch, True, fused=True), together)


@pytest.mark.parametrize(("fused", "separate"), [(1.0, 2.0), (2.0, 1.0)])
def test_a_layer_uses_attention_with_or_without_casts_whichever_is_faster(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, fused: float, separate: float
) -> None:
    """The tuner always measures attention with and without FP8 casts. On a CPU, fakes replace Triton's kernels."""
    ops, called = ("varlen_self_attention", "attention_cast_fp8", "attention_backward_cast_fp8"), list[str]()

    def call(op: str, *args: Any) -> Any:
        called.append(op)
        return OPS[op].definition(*args)

    request.addfinalizer(lambda: autotune.apply([]))
    triton = Implementation("triton", {op: partial(call, op) for op in ops})
    losses = set[float]()
    for op in ops:
        order = triton, OPS[op].implementations["reference"]
        monkeypatch.setattr(OPS[op], "orders", {"cpu": order, "cuda": order})
        monkeypatch.setitem(OPS[op].implementations, "triton", triton)
    model, batch = fp8_model(CONFIG, fused=True)[0], small_batch()

    def took(work: Callable[[], object]) -> float:
        called.clear()
        work()
        return fused if ops[1] in called else separate

    for _ in range(3):
        with autotune.observed() as requests:
            losses.add(mean_loss(model, batch).item())
        (choice,) = autotune.tune([request for request in requests if request.op in ops[:2]], timed=took)
        assert len(choice.milliseconds) == 2
        autotune.apply(autotune.from_json(autotune.to_json([choice])))
        called.clear()
        mean_loss(model, batch)
        assert (ops[1] in called) == (fused < separate)
    assert len(losses) == 1


def test_evaluation_uses_the_scales_of_training_and_does_not_change_the_state() -> None:
    batch, losses = small_batch(), set()
    for fused in (False, True):
        model, state = fp8_model(CONFIG, fused)
        for _ in state.calibration_():
            mean_loss(model, batch).backward()
        with torch.no_grad():
            for dense in state.denses:
                dense.bias.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(4))
        trained_loss = mean_loss(model, batch).item()
        casts = [cast for dense in state.denses for cast in (dense.weight_NK, dense.weight_KN)]
        tensors = [state.scale_S, state.inverse_S, state.amax_S, *casts]
        before = [tensor.float() + 0 for tensor in tensors]
        with torch.no_grad():
            losses.add(mean_loss(model.eval(), batch).item())
        assert all(torch.equal(tensor.float(), old) for tensor, old in zip(tensors, before, strict=True))
        assert max(losses) == pytest.approx(trained_loss, rel=1e-6)
    assert len(losses) == 1


@pytest.mark.parametrize("attention", ["pytorch", "reference"])
def test_a_backward_pass_after_the_scales_were_updated_is_refused(attention: str) -> None:
    batch = small_batch()
    with OPS["varlen_self_attention"].using(attention):
        model, state = fp8_model(CONFIG, fused=True)
        loss = mean_loss(model, batch)
        state.update_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
