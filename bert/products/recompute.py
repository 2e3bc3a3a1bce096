"""Recomputation: the backward pass of an encoder layer recomputes activations that its forward pass does not keep.

PyTorch's ``torch.utils.checkpoint`` with selective contexts does the work; this module only selects what it applies to.
PyTorch's own ways to apply it to a module are private and have side effects: its wrapper renames parameters, and its hooks
call the module again with all hooks, so that the backward pass would wait a second time for the weights that are gathered
during the forward pass. Here a layer's ``forward`` calls the recomputed part, and hooks run before and after it.

The result is the same bit for bit: kernels draw dropout by a counter, and the layer is given the counter's step. Ops that
draw from PyTorch's generator find it in the state of the forward pass. This does not work while a CUDA graph is captured,
when the generator's state can be neither read nor set, so ``RECOMPUTED_OPS`` must not draw from it there
(``kernels.captured``). In FP8, the largest magnitudes are recorded a second time. This changes nothing, because scales stay
fixed until the optimizer's step, and the same values do not increase a maximum.

The last layer is not recomputed. It keeps little, because it is computed only for the rows that the heads read, and its
backward pass comes first, before any memory has been freed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from bert.configuration.sections import Recompute
from bert.layers import Recomputation, compute_once
from bert.timing.stopwatch import is_capturing

RECOMPUTED_OPS = ("varlen_self_attention", "dropout_add_layer_norm")
"""Ops of ``kernels`` that apply dropout in a recomputed layer."""

# Products with weights have 2D operands; attention's products are batched or inside its kernel.
_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default]


def recomputation(mode: Recompute) -> Recomputation:
    """Return a function that runs an encoder layer in training, with or without recomputation.

    none: compute once. selective: keep the results of the layer's four products with weights, and recompute attention, GELU,
    norms and dropout, which take much of the memory and little of the time. full: keep only the layer's input.
    """
    if mode == "none":
        return compute_once
    contexts = partial(create_selective_checkpoint_contexts, _PRODUCTS) if mode == "selective" else noop_context_fn

    def recompute(function: Callable[..., Any], *inputs: Any) -> Any:
        if not torch.is_grad_enabled():  # an evaluation
            return function(*inputs)
        # While capturing, the generator's state can be neither read nor set, and no op draws from it.
        preserve = not is_capturing()
        # PyTorch accepts contexts only in its non-reentrant form.
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts, preserve_rng_state=preserve)

    return recompute
