"""Choice of the encoder's matrix products: PyTorch's, in FP8, or with weight gradients added where they are summed."""

from collections.abc import Callable

import torch
from torch import Tensor

from bert.configuration.sections import Precision, TrainingConfig
from bert.model import BertForPreTraining
from bert.products.fp8 import Fp8State, enable_fp8, require_fp8
from bert.products.fp8_layer import fuse_layers
from bert.products.weight_gradients import WeightGradients


def accumulates_products(device: torch.device, precision: Precision) -> bool:
    """Tell whether products add gradients of weights where these are summed: in 16 bits, on a GPU."""
    return device.type == "cuda" and precision != "fp32"


def fp8_state(
    model: BertForPreTraining,
    training: TrainingConfig,
    device: torch.device,
    agree_: Callable[[Tensor], None] | None,
    gradients: WeightGradients,
) -> Fp8State | None:
    """Let the encoder compute in FP8 if it is to. Raises ``ValueError`` on a GPU that cannot.

    ``agree_``: as of ``Fp8State``, where ranks share layers; casts of those are passes of their own.
    """
    if training.precision != "fp8":
        return None
    require_fp8(device)
    # What ranks exchange stands between products and norms, which fused layers compute in one.
    if agree_ is not None:
        return enable_fp8(model, agree_, gradients)
    state = enable_fp8(model, gradients=gradients)
    # Layers that are recomputed keep what they hand over, and casts would double that.
    fuse_layers(model, state, casts_between_layers=training.recompute == "none")
    return state
