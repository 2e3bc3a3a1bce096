# ruff: noqa: ARG001
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
"""Masked-LM head: logits by cuBLAS, then bias, softmax, loss, accuracy and gradient by one kernel, in place.

Shape legend in ``kernels/__init__.py``; in addition, W is the length of a row of logits, V rounded up to a multiple of 64.

In training, the kernel reads a row of logits twice, the second time from the L2 cache, and overwrites it with its
gradient. The upstream gradient is known only in the backward pass. The backward pass multiplies small tensors by it, so
that no tensor of size [M, V] is written twice. Rows are W elements apart so that each row starts on a cache line;
BERT's V, 30,522, is not even a multiple of four. In an evaluation, the kernel counts correct predictions and writes no
gradient, and the logits are fp32.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.configuration import Configuration
from kernels.reference.ops import IGNORED, accumulate_weight_gradient, compute_dtype, fp32_product
from kernels.triton.inputs import tensor_reasons

_ROW_MULTIPLE = 64
# Each thread loads 16 bytes at a time. With 16 warps, the rows of all resident programs (61 KB each in bf16) fit the L2
# cache.
_WIDE = {"COLUMNS": 4096, "num_warps": 16}
_NARROW = {"COLUMNS": 1024, "num_warps": 4}


def masked_lm_loss(
    hidden_MD: Tensor,
    decoder_VD: Tensor,
    bias_V: Tensor,
    labels_M: Tensor,
    count_correct: bool = True,
    decoder_gradient_VD: Tensor | None = None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of the masked tokens' cross-entropies, fp32 [], and the number of correct predictions, int64 [].

    A label outside 0 to V - 1, other than ``IGNORED``, makes the loss NaN. Products follow autocast. Logits have the
    type of the products, or fp32 if correct predictions are counted. The op saves the two operands and the gradient of
    the logits, [M, W] in the logits' type, for the backward pass. The decoder's gradient is added to
    ``decoder_gradient_VD`` without rounding it to 16 bits first.
    """
    dtype = compute_dtype(hidden_MD)
    hidden_MD, decoder_VD = hidden_MD.to(dtype), decoder_VD.to(dtype)
    with_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (hidden_MD, decoder_VD, bias_V))
    operands = hidden_MD, decoder_VD, bias_V, labels_M
    sums = decoder_gradient_VD, overwrite
    loss, correct, _ = _masked_lm_loss(*operands, with_gradient, count_correct, *sums)
    return loss, correct if count_correct else None


def unsupported_reasons(hidden_MD: Tensor, decoder_VD: Tensor, bias_V: Tensor, *_: Any, **__: Any) -> list[str]:
    return tensor_reasons(hidden_MD, decoder_VD, bias_V)


@triton.jit
def _load(logits, bias, column, vocabulary, width):
    """Load logits and add their bias, in fp32. Columns past the vocabulary become -inf.

    Loads of logits bypass the L1 cache, so that it keeps the bias for the next rows.
    """
    inside = column < width
    x = tl.load(logits + column, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    x += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(column < vocabulary, x, float("-inf"))


@triton.jit
def _kernel(
    logits, bias, labels, losses, correct, vocabulary, width, ignore_index,
    WITH_GRADIENT: tl.constexpr, COUNT_CORRECT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store a row's loss and whether its prediction is correct. Overwrite its logits with their gradient."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * width
    label = tl.load(labels + row).to(tl.int32)
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        if COUNT_CORRECT:
            tl.store(correct + row, 0)
        if WITH_GRADIENT:
            for start in range(0, width, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                tl.store(logits + column, tl.zeros([COLUMNS], tl.float32), mask=column < width)
    else:
        known = (label >= 0) & (label < vocabulary)
        # A label outside of the vocabulary makes ``label_logit`` NaN, which makes the loss NaN.
        label_logit = tl.load(logits + label, mask=known, other=float("nan")).to(tl.float32)
        label_logit += tl.load(bias + label, mask=known, other=0.0).to(tl.float32)
        largest = label_logit
        # Keep a separate sum for each column of a tile. The columns are added once after the loop, so that threads need
        # not exchange sums in each iteration.
        total = tl.zeros([COLUMNS], tl.float32)
        beaten = tl.zeros([COLUMNS], tl.int32)
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            x = _load(logits, bias, column, vocabulary, width)
            before = largest
            largest = tl.maximum(before, tl.max(x, axis=0))
            total = total * tl.exp(before - largest) + tl.exp(x - largest)
            if COUNT_CORRECT:
                behind = (x < label_logit) | ((x == label_logit) & (column >= label))
                beaten |= tl.where(behind, 0, 1)  # comparisons with NaN are False, so a NaN logit beats the label
        summed = tl.sum(total, axis=0)
        tl.store(losses + row, largest - label_logit + tl.log(summed))
        if COUNT_CORRECT:
            tl.store(correct + row, 1 - tl.max(beaten, axis=0))
        if WITH_GRADIENT:
            for start in range(0, width, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                x = _load(logits, bias, column, vocabulary, width)
                gradient = tl.exp(x - largest) / summed - tl.where(column == label, 1.0, 0.0)
                tl.store(logits + column, gradient, mask=column < width, cache_modifier=".cs")


@torch.library.custom_op("mlperf_bert::masked_lm_loss", mutates_args=())
def _masked_lm_loss(
    hidden_MD: Tensor,
    decoder_VD: Tensor,
    bias_V: Tensor,
    labels_M: Tensor,
    with_gradient: bool,
    count_correct: bool,
    decoder_gradient_VD: Tensor | None = None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss [] fp32, correct [] int64, and the gradient of the logits [M, W], with zeros from column V on.

    Without counting, ``correct`` has shape [0]; without a gradient, the last result has shape [0, W]. Only the backward pass
    uses the last two arguments.
    """
    rows, vocabulary = len(hidden_MD), len(decoder_VD)
    logits_MW = _empty_logits(rows, hidden_MD, decoder_VD, count_correct)
    width = logits_MW.shape[1]
    # Columns from V to W stay uninitialized; the kernel replaces them by -inf.
    if logits_MW.dtype == hidden_MD.dtype:
        torch.mm(hidden_MD, decoder_VD.t(), out=logits_MW[:, :vocabulary])
    else:
        fp32_product(hidden_MD, decoder_VD, out=logits_MW[:, :vocabulary])
    losses_M = hidden_MD.new_empty(rows, dtype=torch.float32)
    correct_M = hidden_MD.new_empty(rows if count_correct else 0, dtype=torch.int32)
    tile = _WIDE if vocabulary > _WIDE["COLUMNS"] else _NARROW
    padded_bias_W = F.pad(bias_V, (0, width - vocabulary))  # padded, so that loads of logits and bias share a mask
    _kernel[(rows,)](
        logits_MW, padded_bias_W, labels_M.contiguous(), losses_M, correct_M,
        vocabulary, width, IGNORED, WITH_GRADIENT=with_gradient, COUNT_CORRECT=count_correct,
        **tile, num_stages=1,
    )  # fmt: skip
    kept_MW = logits_MW if with_gradient else logits_MW.new_empty((0, width))
    correct = correct_M.sum() if count_correct else hidden_MD.new_empty(0, dtype=torch.int64)
    return losses_M.sum(), correct, kept_MW


@torch.library.custom_op("mlperf_bert::masked_lm_loss_backward", mutates_args=())
def _masked_lm_loss_backward(
    upstream: Tensor, logits_gradient_MW: Tensor, hidden_MD: Tensor, decoder_VD: Tensor, bias_V: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of hidden [M, D], the product ``hidden * upstream`` [M, D], and the bias gradient [V].

    The second result is an operand of the product that computes the decoder's gradient. The results have the types of
    hidden and bias; ``upstream`` is [] in fp32. The bias gradient is summed in another pass over the logits' gradient,
    which moves less memory than atomic additions in the forward kernel would.
    """
    logits_gradient_MV = logits_gradient_MW[:, : len(decoder_VD)]
    hidden_gradient_MD = _scaled(torch.mm(_factor(logits_gradient_MW, decoder_VD), decoder_VD), upstream)
    bias_gradient_V = logits_gradient_MV.sum(0, dtype=torch.float32) * upstream
    return hidden_gradient_MD, _scaled(hidden_MD, upstream), bias_gradient_V.to(bias_V.dtype)


def _factor(logits_gradient_MW: Tensor, decoder_VD: Tensor) -> Tensor:
    """Return the logits' gradient [M, V] in the type of the products. It is stored in fp32 if predictions were counted."""
    return logits_gradient_MW[:, : len(decoder_VD)].to(decoder_VD.dtype)


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    """Return ``x * factor`` in the type of ``x``, multiplied in fp32 and rounded once, in one pass.

    The factor gets a dimension, because PyTorch's type promotion ignores tensors without dimensions.
    """
    return torch.mul(x, factor.reshape(1), out=x.new_empty(x.shape))


def _empty_logits(rows: int, hidden_MD: Tensor, decoder_VD: Tensor, count_correct: bool) -> Tensor:
    """Allocate logits [rows, W]: in fp32 if predictions are counted, otherwise in the type of the products."""
    width = -(-len(decoder_VD) // _ROW_MULTIPLE) * _ROW_MULTIPLE
    return hidden_MD.new_empty((rows, width), dtype=torch.float32 if count_correct else hidden_MD.dtype)


@_masked_lm_loss.register_fake
def _(hidden_MD: Tensor, decoder_VD: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, _, with_gradient, count_correct, *_ = others
    return (
        hidden_MD.new_empty((), dtype=torch.float32),
        hidden_MD.new_empty(() if count_correct else (0,), dtype=torch.int64),
        _empty_logits(len(hidden_MD) if with_gradient else 0, hidden_MD, decoder_VD, count_correct),
    )


_masked_lm_loss_backward.register_fake(
    lambda _upstream, _gradient, hidden_MD, _decoder_VD, bias_V: tuple(
        x.new_empty(x.shape) for x in (hidden_MD, hidden_MD, bias_V)
    )
)


def _setup_context(ctx, inputs, output) -> None:
    hidden_MD, decoder_VD, bias_V, *_, decoder_gradient_VD, overwrite = inputs
    _, correct, logits_gradient_MW = output
    ctx.mark_non_differentiable(correct, logits_gradient_MW)
    ctx.set_materialize_grads(False)  # otherwise autograd would create a gradient of zeros, [M, W]
    ctx.save_for_backward(logits_gradient_MW, hidden_MD, decoder_VD, bias_V)
    # The decoder's gradient is kept outside of save_for_backward, which refuses a tensor that another backward pass has
    # changed.
    ctx.decoder_gradient, ctx.overwrite = decoder_gradient_VD, overwrite


def _backward(ctx, upstream: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if upstream is None:
        return (None,) * 8
    logits_gradient_MW, _, decoder_VD, _ = ctx.saved_tensors
    hidden_gradient_MD, scaled_MD, bias_gradient_V = _masked_lm_loss_backward(upstream, *ctx.saved_tensors)
    factor_MV, decoder_gradient_VD = _factor(logits_gradient_MW, decoder_VD), None
    if ctx.decoder_gradient is None:
        decoder_gradient_VD = torch.mm(factor_MV.t(), scaled_MD)
    else:
        accumulate_weight_gradient(ctx.decoder_gradient, factor_MV, scaled_MD, ctx.overwrite)
    return hidden_gradient_MD, decoder_gradient_VD, bias_gradient_V, *(None,) * 5


_masked_lm_loss.register_autograd(_backward, setup_context=_setup_context)


def configurations() -> list[Configuration]:
    """Return BERT-Large's configurations: logits in bf16 for training and fp32 for evaluation, bias in bf16 or fp32."""
    types = {"labels": "*i64", "losses": "*fp32", "correct": "*i32"}
    types |= dict.fromkeys(("vocabulary", "width", "ignore_index"), "i32")
    return [
        Configuration.of(
            f"masked_lm_loss, {name} vocabulary, bias {bias}, {'training' if training else 'evaluation'}",
            _kernel,
            types | {"logits": "*bf16" if training else "*fp32", "bias": f"*{bias}"},
            {"WITH_GRADIENT": training, "COUNT_CORRECT": not training, "COLUMNS": tile["COLUMNS"]},
            tile["num_warps"],
            1,
        )
        for name, tile in (("wide", _WIDE), ("narrow", _NARROW))
        for bias in ("bf16", "fp32")
        for training in (True, False)
    ]
