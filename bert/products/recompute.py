"""Recomputation: what an encoder layer's forward pass lets go of, and its backward pass computes again.

All of it is PyTorch's ``torch.utils.checkpoint``, with its selective contexts; written here is only what it is applied to.
PyTorch's own ways to apply it to a module are private and do other things: its wrapper changes the names of parameters, and
its hooks call the module again with all its hooks, so that the backward pass would wait once more for weights that are
gathered beside the forward pass. Here a layer's ``forward`` calls what is recomputed, and hooks stand before and behind it.

The same bits come out: kernels draw dropout by a counter, whose step the layer is given. What draws by PyTorch's generator
finds it as the forward pass did; but not while a CUDA graph is captured, when its state can be neither read nor set, so
that ``RECOMPUTED_OPS`` must not draw by it there (``kernels.captured``). In FP8 the largest magnitudes are recorded a second
time, which changes nothing: scales stay until the optimizer's step, and a maximum does not grow by the same numbers.

The last layer is left as it is. It keeps little, being computed for the rows that the heads read, and its backward pass is
the first, before anything was freed.
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
"""Ops of ``kernels`` with dropout in a layer that is recomputed."""

# Products with weights have two dimensions each; those of attention are batched, or inside of its kernel.
_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default]


def recomputation(mode: Recompute) -> Recomputation:
    """Return how an encoder layer computes in training.

    none: once. selective: keep the products with weights, the four of a layer, and compute attention, GELU, norms and
    dropout again, which are much of the memory and little of the work. full: keep a layer's input alone.
    """
    if mode == "none":
        return compute_once
    contexts = partial(create_selective_checkpoint_contexts, _PRODUCTS) if mode == "selective" else noop_context_fn

    def recompute(function: Callable[..., Any], *inputs: Any) -> Any:
        if not torch.is_grad_enabled():  # an evaluation
            return function(*inputs)
        # The generator's state can be neither read nor set while capturing, and nothing draws by it there.
        preserve = not is_capturing()
        # PyTorch takes contexts in its non-reentrant form alone.
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts, preserve_rng_state=preserve)

    return recompute
