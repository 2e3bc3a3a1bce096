# pyright: reportArgumentType=false, reportCallIssue=false
"""Triton's masked-LM head under the interpreter, against float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.reference import ops as reference
from kernels.triton import loss as triton_loss
from kernels.tuning.examples import Size, example_inputs
from tests.kernels.accuracy import CPU, assert_within_twice, output_and_gradients

SHAPES = {
    "one token": (1, 8, 16),
    "one class": (3, 8, 1),
    "odd everywhere": (5, 7, 13),
    "a class over the width of a row": (4, 8, 65),
    "a class over a tile": (7, 16, 1025),
    "several tiles, ragged": (9, 16, 3001),
    "wide rows": (6, 8, 30522),
}


def inputs(masked: int, size: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Hidden, decoder, bias and labels, every third of which is ignored; logits are tens wide."""
    sizes = Size(masked=masked, hidden=size, vocabulary=vocabulary)
    hidden, decoder, bias, labels, *_ = example_inputs("masked_lm_loss", CPU, dtype, sizes)[0]
    labels[2::3] = -1
    return hidden, decoder, bias, labels


@pytest.mark.parametrize(
    ("dtype", "counting"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)],
    ids=["fp32, counting", "bf16, counting", "bf16", "fp16"],
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_error_is_at_most_twice_plain_pytorch(shape: tuple[int, int, int], dtype: torch.dtype, counting: bool):
    """Free is a unit in the last place: the interpreter's casts to bf16 cut off, and a lone token's logits can be lucky."""
    arguments = (*inputs(*shape, dtype), -1, counting)
    assert_within_twice(triton_loss.masked_lm_loss, reference.masked_lm_loss, arguments, free=torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_of_a_token_is_as_good_as_plain_pytorchs(dtype: torch.dtype):
    """Root mean square over tokens, so that nothing need be free."""
    hidden, decoder, bias, _ = (x.detach() for x in inputs(100, 16, 300, dtype))

    def losses(masked_lm_loss, *operands: Tensor) -> Tensor:
        rows, *others = operands
        return torch.stack([masked_lm_loss(rows[i : i + 1], *others, torch.tensor([3 * i]))[0] for i in range(100)])

    oracle = losses(reference.masked_lm_loss, hidden.double(), decoder.double(), bias.double())
    errors = [
        (losses(each.masked_lm_loss, hidden, decoder, bias) - oracle).square().mean().sqrt()
        for each in (triton_loss, reference)
    ]
    assert errors[0] <= 1.5 * errors[1]


def test_ignored_slots_are_inert_whatever_they_hold():
    hidden, decoder, bias, labels = inputs(12, 8, 1500)
    real = labels != -1
    garbage = torch.where(real[:, None], hidden, 1e4)
    _, counted = triton_loss.masked_lm_loss(hidden[real], decoder, bias, labels[real])
    assert triton_loss.masked_lm_loss(garbage, decoder, bias, labels)[1] == counted
    alone = output_and_gradients(triton_loss.masked_lm_loss, [hidden[real], decoder, bias, labels[real]])
    padded = output_and_gradients(triton_loss.masked_lm_loss, [garbage, decoder, bias, labels])
    assert not padded[1][~real].any()
    padded[1] = padded[1][real]
    for expected, got in zip(alone, padded, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("masked", [4, 0], ids=["every slot ignored", "no slots"])
def test_nothing_to_learn(masked: int):
    hidden, decoder, bias, _ = inputs(masked, 8, 100, torch.bfloat16)
    arguments = hidden, decoder, bias, torch.full((masked,), -1)
    assert not any(x.any() for x in output_and_gradients(triton_loss.masked_lm_loss, arguments))
    assert triton_loss.masked_lm_loss(*arguments)[1] == 0


def test_another_ignore_index():
    hidden, decoder, bias, labels = inputs(9, 8, 50)
    expected = triton_loss.masked_lm_loss(hidden, decoder, bias, labels)
    moved = torch.where(labels == -1, -100, labels)
    assert triton_loss.masked_lm_loss(hidden, decoder, bias, moved, -100) == expected


def test_a_label_past_the_vocabulary_is_not_overlooked():
    hidden, decoder, bias, labels = inputs(2, 8, 50)
    labels[0] = 50
    assert triton_loss.masked_lm_loss(hidden, decoder, bias, labels)[0].isnan()


@pytest.mark.parametrize("height", [1e4, -1e4])
def test_logits_far_from_zero_and_classes_that_cannot_be(height: float):
    """Exponentials neither overflow nor vanish, and -inf as the bias of a class takes it out."""
    hidden, decoder, bias, labels = inputs(4, 8, 2000)
    bias = bias.detach() + height
    bias[:1100] = float("-inf")
    labels = torch.where(labels == -1, labels, 1100 + labels % 900)
    arguments = hidden, decoder, bias, labels
    loss, *gradients = output_and_gradients(triton_loss.masked_lm_loss, arguments)
    torch.testing.assert_close(loss, reference.masked_lm_loss(*arguments)[0].detach())
    assert gradients[0].isfinite().all()
    assert not any(gradient[:1100].any() for gradient in gradients[1:])


def test_evaluation_writes_no_gradients(monkeypatch: pytest.MonkeyPatch):
    arguments = inputs(3, 8, 70)
    asked = []
    inner = triton_loss._masked_lm_loss
    monkeypatch.setattr(triton_loss, "_masked_lm_loss", lambda *args: (asked.append(args[5]), inner(*args))[1])
    with torch.no_grad():
        loss, _ = triton_loss.masked_lm_loss(*arguments)
    with_gradient, _ = triton_loss.masked_lm_loss(*arguments)
    assert asked == [False, True]
    assert loss == with_gradient
    assert inner(*(x.detach() for x in arguments), -1, False, True)[2].shape[0] == 0


def test_backward_twice_and_in_part():
    """The kept gradient is not used up, and nothing else is asked of inputs that need none."""
    hidden, decoder, bias, labels = inputs(5, 8, 70)
    loss, _ = triton_loss.masked_lm_loss(hidden, decoder.detach(), bias.detach(), labels)
    (once,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (again,) = torch.autograd.grad(2 * loss, hidden)
    torch.testing.assert_close(again, 2 * once)


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("definition", [True, False], ids=["definition", "triton"])
def test_the_decoders_gradient_is_added_or_written_where_it_is_asked_for(definition: bool, copied: bool):
    """In fp32, and autograd has none of it, whether the decoder is a parameter or a copy without a gradient."""
    hidden, decoder, bias, labels = inputs(9, 8, 70, torch.bfloat16)
    masked_lm_loss = reference.masked_lm_loss if definition else triton_loss.masked_lm_loss
    leaves = hidden, decoder, bias
    expected = torch.autograd.grad(masked_lm_loss(*leaves, labels, -1, False)[0], leaves)
    gradient = torch.full((70, 8), torch.nan)
    for calls, overwrite in ((1, True), (2, False)):
        for leaf in leaves:
            leaf.grad = None
        given = hidden, decoder.detach() if copied else decoder, bias, labels, -1, False
        masked_lm_loss(*given, decoder_gradient_VD=gradient, overwrite=overwrite)[0].backward()
        assert decoder.grad is None
        assert torch.equal(hidden.grad, expected[0])
        assert torch.equal(bias.grad, expected[2])
        torch.testing.assert_close(gradient, calls * expected[1].float(), rtol=0.01, atol=1e-3)
    assert definition == torch.equal(gradient.bfloat16().float(), gradient), "Triton's is never rounded to 16 bits"


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
    *leaves, labels = inputs(6, 8, 90)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = triton_loss.masked_lm_loss(*leaves, labels)
    gradients = torch.autograd.grad(loss, leaves)
    assert [gradient.dtype for gradient in (loss, *gradients)] == [torch.float32] * 4
    assert loss.item() == pytest.approx(reference.masked_lm_loss(*leaves, labels)[0].item(), rel=0.02)


@pytest.mark.parametrize("training", [True, False])
def test_opcheck(training: bool):
    *leaves, labels = inputs(4, 8, 70)
    plain = [leaf.detach() for leaf in leaves]
    given = leaves if training else plain
    torch.library.opcheck(torch.ops.mlperf_bert.masked_lm_loss, (*given, labels, -1, training, not training))
    arguments = torch.tensor(0.5), torch.randn(4, 128), *plain
    backward, tests = torch.ops.mlperf_bert.masked_lm_loss_backward, ("test_schema", "test_faketensor")
    torch.library.opcheck(backward, arguments, test_utils=tests)
