"""Layer norm and cross-entropy by NVIDIA's apex, if its compiled extensions are installed.

The package named apex on PyPI is a different one. Only NVIDIA's package contains the extensions ``fused_layer_norm_cuda``
and ``xentropy_cuda``. The functions have the same contracts as in ``kernels.reference.ops``, except that PyTorch's generator
draws the dropout mask. This adapter has not run on a GPU as part of this project.
"""

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.libraries.pytorch import drop
from kernels.reference.ops import (
    IGNORED,
    adding_gradient,
    compute_dtype,
    correct_predictions,
    masked_lm_logits,
    summed_embeddings,
)
from kernels.reference.random import Dropout


def dropout_add_layer_norm(
    x_TD: Tensor,
    bias_D: Tensor,
    residual_TD: Tensor,
    weight_D: Tensor,
    norm_bias_D: Tensor,
    eps: float,
    dropout: Dropout | None = None,
) -> Tensor:
    # apex requires all operands to have the same type.
    summed_TD = residual_TD.to(x_TD.dtype) + drop(x_TD + bias_D.to(x_TD.dtype), dropout)
    return _layer_norm(summed_TD, weight_D, norm_bias_D, eps)


def embedding_layer_norm(
    input_ids_T: Tensor,
    position_ids_T: Tensor,
    segment_ids_T: Tensor,
    word_VD: Tensor,
    position_LD: Tensor,
    segment_2D: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    dropout: Dropout | None = None,
    word_gradient_VD: Tensor | None = None,
) -> Tensor:
    word_VD = adding_gradient(word_VD, word_gradient_VD)
    summed_TD = summed_embeddings(input_ids_T, position_ids_T, segment_ids_T, word_VD, position_LD, segment_2D)
    return drop(_layer_norm(summed_TD, weight_D, bias_D, eps), dropout)


def masked_lm_loss(
    hidden_MD: Tensor,
    decoder_VD: Tensor,
    bias_V: Tensor,
    labels_M: Tensor,
    count_correct: bool = True,
    decoder_gradient_VD: Tensor | None = None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor | None]:
    decoder_VD = adding_gradient(decoder_VD, decoder_gradient_VD, overwrite)
    library = importlib.import_module("apex.contrib.xentropy.softmax_xentropy")
    # Counting correct predictions requires logits that have never been rounded to 16 bits.
    logits_of = masked_lm_logits if count_correct else F.linear
    logits_MV = logits_of(hidden_MD, decoder_VD, bias_V)
    ignored_M = labels_M == IGNORED
    # apex also reads the logits of ignored labels, so these labels are set to class 0, and their losses are set to 0 below.
    classes_M = labels_M.masked_fill(ignored_M, 0)
    to_float = logits_MV.dtype != torch.float32
    losses_M = library.SoftmaxCrossEntropyLoss.apply(logits_MV, classes_M, 0.0, IGNORED, to_float)
    loss = losses_M.masked_fill(ignored_M, 0.0).sum()
    return loss, correct_predictions(logits_MV, labels_M) if count_correct else None


def _layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    library = importlib.import_module("apex.normalization.fused_layer_norm")
    weight_D, bias_D = weight_D.to(x_TD.dtype), bias_D.to(x_TD.dtype)
    with torch.autocast(x_TD.device.type, enabled=False):  # under autocast, apex would cast its operands again
        return library.fused_layer_norm_affine(x_TD, weight_D, bias_D, list(weight_D.shape), eps)


def norm_reasons(*inputs: Any, **_: Any) -> list[str]:
    first = next(x for x in inputs if isinstance(x, Tensor) and x.is_floating_point())
    return _reasons(first, first.dtype)


def loss_reasons(hidden_MD: Tensor, decoder_VD: Tensor, *_: Any, **__: Any) -> list[str]:
    """Return the known reasons why apex cannot take these arguments. Old releases also raise an error for bfloat16."""
    reasons = _reasons(hidden_MD, compute_dtype(hidden_MD))
    # apex's kernels use 32-bit element indices.
    if len(hidden_MD) * len(decoder_VD) >= 2**32:
        reasons.append(f"{len(hidden_MD)} x {len(decoder_VD)} logits, expected fewer than 2^32")
    return reasons


def _reasons(x: Tensor, dtype: torch.dtype) -> list[str]:
    reasons = [] if x.is_cuda else [f"the tensors are on {x.device.type}, expected a GPU"]
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        reasons.append(f"{dtype}, expected float32, float16 or bfloat16")
    return reasons
