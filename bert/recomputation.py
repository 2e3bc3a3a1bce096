"""Recomputation in the backward pass: an encoder layer computes again the activations that its forward pass did not keep.

``torch.utils.checkpoint`` is applied to a function that the layer's ``forward`` calls. If it were applied to the module, the
backward pass would also repeat the module's hooks, which wait for gathered weights.

The result is the same bit for bit. Kernels derive dropout from a counter that is an input of the layer. For ops that draw
from PyTorch's generator, the generator's state in the forward pass is restored. This is not possible while a CUDA graph is
captured, so the implementations of ``RECOMPUTED_OPS`` must not use the generator then (``kernels.only_capturable``).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from bert.configuration.sections import Recompute
from bert.execution.stopwatch import is_capturing

RECOMPUTED_OPS = ("varlen_self_attention", "dropout_add_layer_norm")
"""Ops of ``kernels`` that apply dropout in a recomputed layer."""

# PyTorch computes products with weights by these ops on 2D operands. Attention's products use other ops: batched or fused.
_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default]


def recomputed(mode: Recompute, function: Callable[..., Any], *inputs: Any) -> Any:
    """Call a function of an encoder layer. In training, the backward pass calls it again, unless the mode is none.

    The mode selective keeps the results of the layer's four products with weights. It recomputes attention, GELU, norms and
    dropout, which take much of the memory and little of the time. The mode full keeps only the inputs.
    """
    if mode == "none" or not torch.is_grad_enabled():  # without gradients, this is an evaluation
        return function(*inputs)
    contexts = partial(create_selective_checkpoint_contexts, _PRODUCTS) if mode == "selective" else noop_context_fn
    # During a capture, the generator's state can be neither read nor set. It need not be, because no op draws from it.
    preserve = not is_capturing()
    # The checkpoint must be non-reentrant, because PyTorch accepts ``context_fn`` only then.
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts, preserve_rng_state=preserve)
