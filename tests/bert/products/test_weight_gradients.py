"""16-bit copies of weights, and weight gradients that bypass autograd, give the results of autocast and autograd.

The tests run on a CPU. As on a GPU, steps use the op that adds products to gradients, in its reference implementation.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from bert.configuration.sections import Precision, Recompute
from bert.model import Dense
from bert.optimizer import Lamb
from bert.products import weight_gradients
from bert.products.weight_gradients import AccumulatingProducts, WeightCopies, WeightGradients, product_weights
from bert.recomputation import RECOMPUTED_OPS
from bert.step import TrainingStep
from dataloading.batches.loader import Batch, batch_of
from kernels import choose
from tests.bert.recording import Recording, recordable_attention
from tests.bert.small_models import OF_SMALL_RUN, assert_same, step_config, training_step
from tests.bert.test_recompute import step_of, trained
from tests.conftest import SmallRun

MODEL = replace(OF_SMALL_RUN, hidden_size=256, hidden_dropout=0.0, attention_dropout=0.0)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as patch:
        patch.setattr(weight_gradients, "accumulates_products", lambda _device, precision: precision != "fp32")
        yield patch


def made(precision: str = "bf16", **training: Any) -> TrainingStep:
    return training_step(step_config(MODEL, precision=precision, gradient_accumulation_steps=2, **training))


def global_batch(run: SmallRun) -> list[Batch]:
    return [batch_of(run.train.slice(first, first + 4)) for first in (0, 4)]


def gradients(step: TrainingStep, run: SmallRun) -> list[Tensor]:
    step.compute_gradients(global_batch(run))
    return [view.clone() for view in step.flat.segments.views(step.flat.gradients_P)]


def test_gradients_that_bypass_autograd_are_more_exact_than_autocasts(
    small_run: SmallRun, as_on_a_gpu: pytest.MonkeyPatch
) -> None:
    accumulated = gradients(made(), small_run)
    as_on_a_gpu.undo()
    exact, plain = (gradients(made(precision), small_run) for precision in ("fp32", "bf16"))
    mine, theirs = (
        [(one - truth).norm().item() for one, truth in zip(found, exact, strict=True)] for found in (accumulated, plain)
    )
    for one, other, truth in zip(mine, theirs, exact, strict=True):
        assert one <= 1.1 * other + 1e-6 * truth.norm().item()
    assert sum(mine) < sum(theirs)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_steps_that_bypass_autograd_agree_with_steps_of_autograd(
    small_run: SmallRun, as_on_a_gpu: pytest.MonkeyPatch, precision: Precision, accumulation: int
) -> None:
    """Losses, gradients, weights and an evaluation agree up to bf16 rounding."""
    micro_batches = [batch_of(small_run.train.slice(first, first + 4)) for first in (0, 4, 8)[:accumulation]]

    def run() -> tuple[list[Tensor], Tensor, Tensor]:
        step = training_step(step_config(MODEL, precision=precision, gradient_accumulation_steps=accumulation))
        gradients = []
        for _ in range(3):
            step.compute_gradients(micro_batches)
            gradients += [view.clone() for view in step.flat.segments.views(step.flat.gradients_P)]
            step.update()
        with torch.no_grad(), step.autocast():
            output = step.model.eval()(micro_batches[0])
        losses = [*step.statistics.fetch()[0].values(), output.masked_lm_loss, output.next_sentence_loss]
        return gradients, step.flat.weights_P, torch.tensor(losses)

    found = run()
    as_on_a_gpu.undo()
    expected = run()
    scale = max(gradient.norm().item() for gradient in expected[0])
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert (mine - theirs).norm().item() <= 0.02 * theirs.norm().item() + 1e-3 * scale
    torch.testing.assert_close(found[1], expected[1], rtol=0.01, atol=0.02)
    torch.testing.assert_close(found[2], expected[2], rtol=0.01, atol=0.01)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_first_micro_batch_overwrites_the_gradients_of_the_previous_step(
    small_run: SmallRun, precision: str
) -> None:
    expected, found = (made(precision) for _ in range(2))
    weights = product_weights(found.model, True)
    assert len(weights) == 4 * len(found.model.layers) - 1 + 1, "products and the word table"
    for weight in weights:
        assert weight.grad is not None
        weight.grad.fill_(torch.nan)
    segments = found.flat.segments
    assert [bool(view.isnan().any()) for view in segments.views(found.flat.gradients_P)] == list(segments.overwritten)
    assert all(map(torch.equal, gradients(expected, small_run), gradients(found, small_run)))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_step_updates_the_weight_copies_and_zeroes_gradients_that_are_not_overwritten(small_run: SmallRun) -> None:
    """Copies equal the weights after a warm-up and a step. A step zeroes all gradients that the next step adds to."""
    step = made()
    assert isinstance(step.optimizer, Lamb)
    step.warm_up(global_batch(small_run), 1)
    before = step.flat.weights_P.clone()
    for _ in range(2):
        copies_P = step.optimizer.copies_P
        assert copies_P is not None
        assert torch.equal(copies_P, step.flat.weights_P.bfloat16())
        step(global_batch(small_run))
        for view, overwritten in zip(
            step.flat.segments.views(step.flat.gradients_P), step.flat.segments.overwritten, strict=True
        ):
            assert overwritten or not view.any()
    assert not torch.equal(before, step.flat.weights_P)
    with step.autocast():
        loss = step.model(global_batch(small_run)[0]).masked_lm_loss
        for weight in product_weights(step.model, True):
            if weight is not step.model.embeddings.word:  # the embeddings still read the fp32 table
                weight.data.fill_(torch.nan)
        assert torch.equal(step.model(global_batch(small_run)[0]).masked_lm_loss, loss)
    with torch.no_grad():
        step.flat.weights_P.copy_(before)
    step.refresh_copies_()
    assert torch.equal(step.optimizer.copies_P, before.bfloat16())  # type: ignore[arg-type]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_fp8_weights_cast_by_lamb_equal_a_separate_cast(small_run: SmallRun) -> None:
    """LAMB's own cast and a separate cast give the same FP8 weights, scales and magnitudes, even after a skipped step."""
    found, expected = made("fp8"), made("fp8")
    assert isinstance(expected.optimizer, Lamb)
    expected.optimizer.casts = ()
    steps = found, expected
    for step in steps:
        step.warm_up(global_batch(small_run), 1)
    for number in range(3):
        for step in steps:
            step.compute_gradients(global_batch(small_run))
            if number == 1:
                step.flat.gradients_P[5] = torch.nan
            step.update()
        assert expected.fp8 is not None
        expected.fp8.refresh_weights_()
        assert all(map(torch.equal, *map(fp8_numbers, steps)))
    assert isinstance(found.optimizer, Lamb)
    assert found.optimizer.state.skipped.item() == 1


def fp8_numbers(step: TrainingStep) -> list[Tensor]:
    assert step.fp8 is not None
    casts = [cast.view(torch.uint8) for each in step.fp8.denses for cast in (each.weight_NK, each.weight_KN)]
    return [step.flat.weights_P, step.fp8.scale_S, step.fp8.amax_S, *casts]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.slow
def test_recomputed_and_captured_steps_equal_plain_steps(small_run: SmallRun) -> None:
    """The first micro-batch has its own graphs, because it overwrites gradients instead of adding to them."""
    # PyTorch's implementations draw dropout from its generator, which a captured recomputation cannot reset.
    choose(dict.fromkeys(RECOMPUTED_OPS, "reference"))
    with recordable_attention():
        expected = trained(step_of("none", "bf16"), small_run)
        for recompute in get_args(Recompute):
            capturer = Recording()
            assert_same(trained(step_of(recompute, "bf16", capturer), small_run), expected)
            assert len(capturer.graphs) == 2 * 2 + 1, recompute


@pytest.mark.oldest_torch
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_every_parameters_hook_runs_once_when_its_gradient_is_complete(small_run: SmallRun, precision: str) -> None:
    """Every parameter's hook runs once, when its gradient is complete, so that the reduction can start.

    This includes parameters whose gradients bypass autograd.
    """
    step = made(precision)
    said: list[tuple[str, Tensor]] = []
    for name, parameter in step.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, name=name: said.append((name, parameter.grad.clone()))
        )
    step.compute_gradients(global_batch(small_run)[:1])
    parameters = dict(step.model.named_parameters())
    assert Counter(name for name, _ in said) == dict.fromkeys(parameters, 1)
    for name, gradient in said:
        left = parameters[name].grad
        assert left is not None
        assert left.any()
        assert torch.equal(gradient, left), f"{name} gets more after its hook"


def test_autograd_creates_the_gradient_of_a_weight_whose_grad_is_none() -> None:
    """Ranks that keep only gradient shards start with ``grad`` None. The first pass creates an fp32 gradient."""
    dense, x = Dense(16, 8), torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        dense.weight.normal_(generator=torch.Generator().manual_seed(1))
    products = AccumulatingProducts(WeightGradients(), WeightCopies(), with_table=False)
    said: list[Tensor] = []
    dense.weight.register_post_accumulate_grad_hook(said.append)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            output = products.product(x.requires_grad_(), dense, dense.bias)
        assert output.dtype == torch.bfloat16
        output.float().sum().backward()
    assert [each.shape for each in said] == [dense.weight.shape] * 2
    expected = 2 * x.detach().bfloat16().float().sum(0).expand(8, 16)
    torch.testing.assert_close(dense.weight.grad, expected)
    torch.testing.assert_close(dense.bias.grad, torch.full((8,), 10.0))
    torch.testing.assert_close(
        x.grad, 2 * dense.weight.detach().bfloat16().float().sum(0).expand(5, 16), rtol=0.02, atol=0.02
    )
