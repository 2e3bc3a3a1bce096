"""Triton's masked-LM head under the interpreter, against float64."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.reference import ops as reference
from kernels.triton import loss as triton_loss

SHAPES = {
    "one token": (1, 8, 16),
    "one class": (3, 8, 1),
    "odd everywhere": (5, 7, 13),
    "a class over the width of a row": (4, 8, 65),
    "a class over a tile": (7, 16, 1025),
    "several tiles, ragged": (9, 16, 3001),
    "wide rows": (6, 8, 30522),
}


def inputs(masked: int, size: int, vocabulary: int, dtype: torch.dtype) -> list[Tensor]:
    """Hidden, decoder, bias and labels, every third of which is ignored; logits are tens wide."""
    generator = torch.Generator().manual_seed(masked * vocabulary)
    hidden, decoder, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((masked, size), (vocabulary, size), (vocabulary,))
    )
    labels = torch.randint(vocabulary, (masked,), generator=generator)
    labels[2::3] = -1
    return [hidden, decoder, bias, labels]


def loss_and_gradients(masked_lm_loss, leaves: list[Tensor], upstream: float = 0.37) -> tuple[list[Tensor], int]:
    *floats, labels = leaves
    floats = [leaf.detach().clone().requires_grad_() for leaf in floats]
    loss, correct = masked_lm_loss(*floats, labels)
    return [loss.detach(), *torch.autograd.grad(loss * upstream, floats)], correct.item()


def error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_error_is_at_most_twice_plain_pytorch(shape: tuple[int, int, int], dtype: torch.dtype):
    *floats, labels = inputs(*shape, dtype)
    oracle, _ = loss_and_gradients(reference.masked_lm_loss, [*(leaf.double() for leaf in floats), labels])
    plain, _ = loss_and_gradients(reference.masked_lm_loss, [*floats, labels])
    ours, _ = loss_and_gradients(triton_loss.masked_lm_loss, [*floats, labels])
    for name, exact, expected, got in zip(("loss", "hidden", "decoder", "bias"), oracle, plain, ours, strict=True):
        # a unit in the last place: the interpreter's casts to bf16 cut off, and a lone token's logits can be lucky
        floor = torch.finfo(dtype).eps
        assert got.shape == exact.shape
        assert got.dtype == (torch.float32 if name == "loss" else dtype)
        assert error(got, exact) <= 2 * error(expected, exact) + floor, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_loss_of_a_token_is_as_good_as_plain_pytorchs(dtype: torch.dtype):
    """Root mean square over tokens, so that no floor is needed."""
    hidden, decoder, bias, _ = inputs(100, 16, 300, dtype)
    labels = torch.arange(100) * 3
    oracle = _losses(reference.masked_lm_loss, hidden.double(), decoder.double(), bias.double(), labels)
    plain = _losses(reference.masked_lm_loss, hidden, decoder, bias, labels)
    ours = _losses(triton_loss.masked_lm_loss, hidden, decoder, bias, labels)
    assert (ours - oracle).square().mean().sqrt() <= 1.5 * (plain - oracle).square().mean().sqrt()


def _losses(masked_lm_loss, hidden: Tensor, decoder: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    losses = [masked_lm_loss(hidden[i : i + 1], decoder, bias, labels[i : i + 1])[0] for i in range(len(labels))]
    return torch.stack(losses).double()


@pytest.mark.parametrize("vocabulary", [13, 1025, 5000])
def test_correct_and_loss_are_those_of_the_definition(vocabulary: int):
    """Labels are mostly the largest logit, so that the count is neither all nor nothing."""
    hidden, decoder, bias, labels = inputs(40, 16, vocabulary, torch.float32)
    logits = torch.nn.functional.linear(hidden, decoder, bias)
    labels[::2] = logits.argmax(dim=-1)[::2]
    labels[5] = -1
    expected_loss, expected = reference.masked_lm_loss(hidden, decoder, bias, labels)
    loss, correct = triton_loss.masked_lm_loss(hidden, decoder, bias, labels)
    assert correct is not None
    assert expected is not None
    assert correct.dtype == torch.int64
    assert correct.shape == loss.shape == ()
    assert 0 < int(expected) < 40
    assert int(correct) == int(expected)
    torch.testing.assert_close(loss, expected_loss)


def test_ignored_slots_are_inert_whatever_they_hold():
    hidden, decoder, bias, labels = inputs(12, 8, 1500, torch.float32)
    real = labels != -1
    garbage = torch.where(real[:, None], hidden, 1e4)
    alone, correct_alone = loss_and_gradients(triton_loss.masked_lm_loss, [hidden[real], decoder, bias, labels[real]])
    padded, correct_padded = loss_and_gradients(triton_loss.masked_lm_loss, [garbage, decoder, bias, labels])
    assert correct_alone == correct_padded
    assert not padded[1][~real].any()
    padded[1] = padded[1][real]
    for expected, got in zip(alone, padded, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_every_slot_ignored_and_no_slots():
    for masked in (4, 0):
        hidden, decoder, bias, _ = inputs(masked, 8, 100, torch.bfloat16)
        labels = torch.full((masked,), -1)
        (loss, *gradients), correct = loss_and_gradients(triton_loss.masked_lm_loss, [hidden, decoder, bias, labels])
        assert loss == 0
        assert correct == 0
        assert all(not gradient.any() for gradient in gradients)


def test_another_ignore_index():
    hidden, decoder, bias, labels = inputs(9, 8, 50, torch.float32)
    expected = triton_loss.masked_lm_loss(hidden, decoder, bias, labels)
    moved = torch.where(labels == -1, -100, labels)
    got = triton_loss.masked_lm_loss(hidden, decoder, bias, moved, -100)
    assert (got[0], got[1]) == (expected[0], expected[1])


def test_a_label_past_the_vocabulary_is_not_overlooked():
    hidden, decoder, bias, labels = inputs(2, 8, 50, torch.float32)
    labels[0] = 50
    assert triton_loss.masked_lm_loss(hidden, decoder, bias, labels)[0].isnan()


@pytest.mark.parametrize("height", [1e4, -1e4])
def test_logits_far_from_zero_and_classes_that_cannot_be(height: float):
    """Exponentials neither overflow nor vanish, and -inf as the bias of a class takes it out."""
    hidden, decoder, bias, labels = inputs(4, 8, 2000, torch.float32)
    bias = bias + height
    bias[:1100] = float("-inf")
    labels = torch.where(labels == -1, labels, 1100 + labels % 900)
    (loss, hidden_gradient, decoder_gradient, bias_gradient), _ = loss_and_gradients(
        triton_loss.masked_lm_loss, [hidden, decoder, bias, labels]
    )
    expected, *_ = reference.masked_lm_loss(hidden, decoder, bias, labels)
    torch.testing.assert_close(loss, expected)
    assert hidden_gradient.isfinite().all()
    assert not decoder_gradient[:1100].any()
    assert not bias_gradient[:1100].any()


def test_evaluation_writes_no_gradients(monkeypatch: pytest.MonkeyPatch):
    hidden, decoder, bias, labels = inputs(3, 8, 70, torch.float32)
    hidden.requires_grad_()
    asked = []
    inner = triton_loss._masked_lm_loss
    monkeypatch.setattr(triton_loss, "_masked_lm_loss", lambda *args: (asked.append(args[-2]), inner(*args))[1])
    with torch.no_grad():
        loss, _ = triton_loss.masked_lm_loss(hidden, decoder, bias, labels)
    with_gradient, _ = triton_loss.masked_lm_loss(hidden, decoder, bias, labels)
    assert asked == [False, True]
    assert loss == with_gradient
    assert inner(hidden.detach(), decoder, bias, labels, -1, False, True)[2].shape[0] == 0


@pytest.mark.parametrize("vocabulary", [70, 5000])
@pytest.mark.parametrize("masked_lm_loss", [triton_loss.masked_lm_loss, reference.masked_lm_loss])
def test_without_counting_the_rest_is_the_same(masked_lm_loss, vocabulary: int):
    hidden, decoder, bias, labels = inputs(7, 8, vocabulary, torch.float32)
    leaves = [leaf.requires_grad_() for leaf in (hidden, decoder, bias)]
    results = []
    for count_correct in (True, False):
        loss, correct = masked_lm_loss(hidden, decoder, bias, labels, count_correct=count_correct)
        assert (correct is not None) == count_correct
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_backward_twice_and_in_part():
    """The kept gradient is not used up, and nothing else is asked of inputs that need none."""
    hidden, decoder, bias, labels = inputs(5, 8, 70, torch.float32)
    hidden.requires_grad_()
    loss, _ = triton_loss.masked_lm_loss(hidden, decoder, bias, labels)
    (once,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (again,) = torch.autograd.grad(2 * loss, hidden)
    torch.testing.assert_close(again, 2 * once)


def test_upstream_is_not_rounded_to_the_operands_dtype():
    """In bf16 either factor here would be 1."""
    hidden, decoder = torch.zeros(32, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    bias = torch.zeros(2, requires_grad=True)
    loss, _ = triton_loss.masked_lm_loss(hidden, decoder, bias, torch.ones(32, dtype=torch.int64))
    (gradient,) = torch.autograd.grad(loss * (1 + 2**-9), bias)
    assert gradient.tolist() == [16 + 2**-5, -16 - 2**-5]
    scaled = triton_loss._scaled(torch.tensor([1.75], dtype=torch.bfloat16), torch.tensor(1 + 0.49 * 2**-7))
    assert scaled.item() == 1.75 + 2**-7


def test_autocast():
    hidden, decoder, bias, labels = inputs(6, 8, 90, torch.float32)
    leaves = [leaf.requires_grad_() for leaf in (hidden, decoder, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = triton_loss.masked_lm_loss(hidden, decoder, bias, labels)
    gradients = torch.autograd.grad(loss, leaves)
    assert [gradient.dtype for gradient in (loss, *gradients)] == [torch.float32] * 4
    (exact, *_), _ = loss_and_gradients(reference.masked_lm_loss, [hidden, decoder, bias, labels])
    assert error(loss.detach(), exact.double()) < 0.02


@pytest.mark.parametrize("count_correct", [True, False])
@pytest.mark.parametrize("with_gradient", [True, False])
def test_opcheck(with_gradient: bool, count_correct: bool):
    hidden, decoder, bias, labels = inputs(4, 8, 70, torch.float32)
    leaves = [leaf.requires_grad_(with_gradient) for leaf in (hidden, decoder, bias)]
    torch.library.opcheck(torch.ops.mlperf_bert.masked_lm_loss, (*leaves, labels, -1, with_gradient, count_correct))
    gradient = torch.randn(4, 128)
    plain = [leaf.detach() for leaf in leaves]
    torch.library.opcheck(torch.ops.mlperf_bert.masked_lm_loss_backward, (torch.tensor(0.5), gradient, *plain))


def test_reasons(monkeypatch: pytest.MonkeyPatch):
    hidden, decoder, bias, labels = inputs(2, 8, 16, torch.float32)
    reasons = triton_loss.unsupported_reasons
    assert reasons(hidden, decoder, bias, labels) == []
    assert "float64" in reasons(hidden.double(), decoder, bias, labels)[0]
    assert "ignore_index of 0" in reasons(hidden, decoder, bias, labels, 0)[0]
    assert "int16" in reasons(hidden, decoder, bias, labels.short())[0]
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    assert "CUDA" in reasons(hidden, decoder, bias, labels)[0]
