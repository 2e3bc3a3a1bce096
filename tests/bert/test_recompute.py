"""Recomputation gives bit-identical losses, moments and weights, and repeats the intended ops only."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bert.configuration.sections import Precision, Recompute
from bert.recomputation import RECOMPUTED_OPS
from bert.step import TrainingStep
from dataloading.batches.loader import Batch, batch_of
from dataloading.batches.sampler import ShapeBucket
from kernels import OPS, only_capturable, varlen_attention
from kernels.tuning.examples import example_inputs
from tests.bert.operators import Operators
from tests.bert.recording import Recording
from tests.bert.small_models import OF_SMALL_RUN, assert_same, step_config, take_steps, training_step
from tests.conftest import MAX_SEQ_LENGTH, SmallRun
from tests.kernels.test_registry import attention_call

pytestmark = pytest.mark.oldest_torch

MODES: tuple[Recompute, ...] = ("selective", "full")
SHAPE_BUCKETS = [ShapeBucket(size, 2, 16, MAX_SEQ_LENGTH) for size in (16, 32)]


def step_of(recompute: Recompute, precision: Precision = "fp32", capturer: Recording | None = None) -> TrainingStep:
    model = replace(OF_SMALL_RUN, num_hidden_layers=3, hidden_size=256 if precision == "bf16" else 32)
    config = step_config(model, precision=precision, recompute=recompute, gradient_accumulation_steps=2)
    return training_step(config, capturer=capturer)


def global_batches(run: SmallRun) -> list[list[Batch]]:
    """Make two global batches of two micro-batches each, padded alternately to two shape buckets."""
    short = np.argsort(run.train.lengths)[:8].reshape(4, 2)
    shapes = itertools.cycle(SHAPE_BUCKETS)
    batches = [batch_of(run.train.take(pair), shape_bucket=next(shapes)) for pair in short]
    return [batches[:2], batches[2:]]


def trained(step: TrainingStep, run: SmallRun) -> dict[str, Tensor]:
    """Return the statistics of two steps and all state that training leaves."""
    batches = global_batches(run)
    torch.manual_seed(9)
    step.warm_up(batches[0], 1, SHAPE_BUCKETS)
    return take_steps(step, batches)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.slow
def test_recomputed_steps_equal_plain_steps(small_run: SmallRun, precision: Precision) -> None:
    """Compare steps with dropout and gradient accumulation. In FP8, the next step's scales must match too."""
    plain = trained(step_of("none", precision), small_run)
    assert 8 < plain["means"][0][0] < 14, "the masked-LM loss of two micro-batches"
    for mode in MODES:
        assert_same(trained(step_of(mode, precision), small_run), plain)


def test_recomputation_repeats_only_the_intended_ops(small_run: SmallRun) -> None:
    """Selective recomputation repeats attention and GELU in two of three layers, but no product with a weight.

    Forward hooks run once per forward pass, not again in recomputation.
    """
    (batch, *_), *_ = global_batches(small_run)
    calls, hooked = {}, Counter[str]()
    for mode in ("none", *MODES):
        step = step_of(mode)
        step([batch] * 2)
        step.model.layers[1].register_forward_pre_hook(lambda *_, mode=mode: hooked.update([mode]))
        with Operators() as trained:
            step([batch] * 2)
        step.model.eval()
        with Operators() as evaluated, torch.inference_mode():
            step.model(batch)
        calls[mode], calls[f"{mode}, evaluation"] = Counter(trained.names), Counter(evaluated.names)
    assert hooked == {"none": 4 - 1, "selective": 3, "full": 3}
    assert calls["selective, evaluation"] == calls["full, evaluation"] == calls["none, evaluation"]
    for name, selective, full in (("gelu", 2, 2), ("softmax", 0, 0), ("native_layer_norm", 4, 4), ("addmm", 0, 4)):
        again = {mode: calls[mode][name] - calls["none"][name] for mode in MODES}
        assert again == {"selective": 2 * selective, "full": 2 * full}, name


def no_graph(name: str, implementation: str, *args: Any) -> bool:
    """Return whether an op's implementation is rejected because a CUDA graph cannot capture it."""
    op = OPS[name]
    return "CUDA graph" in " ".join(op.unsupported_reasons(op.implementations[implementation], *args))


def test_captured_steps_reject_dropout_that_cannot_be_repeated() -> None:
    """Implementations whose dropout cannot be repeated are rejected for recomputed ops, even if a setting names them."""
    with FakeTensorMode():
        usual = attention_call(64)
        with only_capturable():
            assert not no_graph("varlen_attention", "flash_attn", *usual)
        with only_capturable(["varlen_attention"]):
            assert varlen_attention.chosen(*usual).name == "triton"
            assert not no_graph("varlen_attention", "flash_attn", *attention_call(64, "cpu"))
            with (
                varlen_attention.using("flash_attn"),
                pytest.raises(ValueError, match=r"flash_attn cannot .*training.recompute"),
            ):
                varlen_attention.chosen(*usual)
        with only_capturable(RECOMPUTED_OPS):
            assert not no_graph("varlen_attention", "flash_attn", *usual)
            x_TD, vector_D = torch.zeros(8, 64, device="cuda"), torch.zeros(64, device="cuda")
            norm = "dropout_add_layer_norm", x_TD, vector_D, x_TD, vector_D, vector_D, 1e-12, usual[-1]
            refused = {each for each in OPS[norm[0]].implementations if no_graph(norm[0], each, *norm[1:])}
            assert refused == OPS[norm[0]].implementations.keys() - {"triton", "reference"}


@pytest.mark.parametrize("name", RECOMPUTED_OPS)
def test_implementations_are_marked_repeatable_if_they_repeat_their_dropout_mask(name: str) -> None:
    args, kwargs = example_inputs(name, torch.device("cpu"), torch.float32)
    for implementation in OPS[name].implementations.values():
        if implementation.name in ("pytorch", "reference"):
            once, again = (implementation.function(name)(*args, **kwargs) for _ in range(2))
            assert torch.equal(once, again) == implementation.repeatable, implementation.name
