"""Matrix products that add weight gradients directly to the flat gradient, and that read 16-bit copies of the weights.

Autograd makes three passes over a weight's gradient in every micro-batch: it writes the gradient in 16 bits, casts it to
fp32, and adds it to the flat gradient. Here the product's epilogue does all three. The first micro-batch of a step
overwrites the previous step's gradients, so that they need not be set to zero. If the optimizer writes 16-bit copies of the
weights, the products need no casts.

This applies to autocast on a GPU; otherwise the model multiplies as PyTorch does. ``bert.products.fp8`` also accumulates
its gradients here.

Shape legend: T tokens, N outputs and K inputs of a dense layer, D hidden, P elements of all parameters with their padding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bert.configuration.sections import ModelConfig, Precision
from bert.model import BertForPreTraining, Dense, MatrixProducts, parameter_shapes
from bert.optimizer import padded, places_of
from kernels import accumulate_weight_gradient, bias_gelu, compute_dtype, masked_lm_loss

Add = Callable[[Tensor | None, bool], Tensor]
"""Function that adds a product to the given gradient, or overwrites the gradient if the second argument is True. It returns
the result, which is a new tensor if the gradient is None."""


def accumulates_products(device: torch.device, precision: Precision) -> bool:
    """Tell whether matrix products add weight gradients directly to the flat gradient: on a GPU, except in fp32."""
    return device.type == "cuda" and precision != "fp32"


class WeightGradients:
    """Accumulation of weight gradients by the products themselves. Autograd still runs the parameters' hooks."""

    def __init__(self) -> None:
        self.overwrite = False
        """Whether the next backward pass overwrites gradients instead of adding to them. The first one of a step does."""

    def add(self, weight: nn.Parameter, add: Add) -> Tensor | None:
        """Accumulate a gradient, and return it only if autograd must store it because the weight has no gradient yet."""
        if weight.grad is None:
            return add(None, True)
        add(weight.grad, self.overwrite)
        return None


@dataclass(frozen=True)
class WeightCopies:
    """bf16 copies of a whole model's weights. The optimizer writes them in every step, and matrix products read them."""

    copies_P: Tensor | None = None
    """Copies in the order of ``FlatParameters``, or None if the optimizer makes no copies."""
    by_name: Mapping[str, Tensor] = field(default_factory=dict)
    """View of each parameter's copy, in the parameter's shape."""

    @classmethod
    def of(cls, config: ModelConfig, device: torch.device) -> "WeightCopies":
        """Allocate the copies of a model that is not built yet. The optimizer fills them."""
        shapes = parameter_shapes(config)
        places = dict(zip(shapes, places_of(shapes.values()), strict=True))
        size = sum(padded(place.stop - place.start) for place in places.values())
        copies_P = torch.zeros(size, dtype=torch.bfloat16, device=device)
        return cls(copies_P, {name: copies_P[place].view(shapes[name]) for name, place in places.items()})


class AccumulatingProducts(MatrixProducts):
    """Matrix products under autocast that accumulate weight gradients and read copies of the weights if there are any."""

    def __init__(self, gradients: WeightGradients, copies: WeightCopies, *, with_table: bool) -> None:
        """``with_table`` tells whether decoder and embeddings also add directly to the gradient of the word table."""
        self._gradients = gradients
        self._copies = copies.by_name
        self._with_table = with_table

    def dense(self, layer: int, name: str, inputs: int, outputs: int) -> Dense:
        return Dense(inputs, outputs, self._copies.get(f"layers.{layer}.{name}.weight"))

    def product(self, x: Tensor, dense: Dense, bias: Tensor | None) -> Tensor:
        dtype = compute_dtype(x)
        # Convert the operands before calling the autograd function, so that it saves 16-bit tensors for the backward pass.
        weight_NK = _cast(dense.weight, dense.copy_NK, dtype)
        output_TN = _AccumulatingProduct.apply(x.to(dtype), dense.weight, bias, weight_NK, self._gradients)
        assert isinstance(output_TN, Tensor)
        return output_TN

    def feed_forward(self, x_TD: Tensor, wide: Dense, narrow: Dense) -> Tensor:
        return self.product(bias_gelu(self.product(x_TD, wide, None), wide.bias), narrow, None)

    def masked_lm_loss(
        self, hidden_MD: Tensor, word_VD: Tensor, bias_V: Tensor, labels_M: Tensor, count_correct: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return ``kernels.masked_lm_loss``, whose backward pass writes the decoder's part of the word table's gradient.

        The backward pass of the embeddings comes later and adds the rest. The table's hooks run only after that.
        """
        if not self._with_table:
            return super().masked_lm_loss(hidden_MD, word_VD, bias_V, labels_M, count_correct)
        return masked_lm_loss(
            hidden_MD,
            _cast(word_VD, self._copies.get("embeddings.word"), compute_dtype(hidden_MD)),
            bias_V,
            labels_M,
            count_correct=count_correct,
            decoder_gradient_VD=word_VD.grad,
            overwrite=self._gradients.overwrite,
        )

    def table_gradient(self, word_VD: Tensor) -> Tensor | None:
        """Return the word table's gradient. The decoder has already written its part, so the embeddings can add theirs."""
        return word_VD.grad if self._with_table else None


class _AccumulatingProduct(torch.autograd.Function):
    """Product that accumulates its weight's gradient; the weight is an argument so that autograd calls ``backward``."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        parameter_NK: nn.Parameter,
        bias_N: Tensor | None,
        weight_NK: Tensor,
        gradients: WeightGradients,
    ) -> Tensor:
        ctx.parameter, ctx.gradients = parameter_NK, gradients
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        ctx.save_for_backward(x_TK, weight_NK)
        return F.linear(x_TK, weight_NK, None if bias_N is None else bias_N.to(x_TK.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient_TN: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, weight_NK = ctx.saved_tensors

        def add(gradient_NK: Tensor | None, overwrite: bool) -> Tensor:
            # If no gradient exists yet, make a tensor for it. ``overwrite`` is True in this case.
            gradient_NK = torch.empty_like(ctx.parameter) if gradient_NK is None else gradient_NK
            return accumulate_weight_gradient(gradient_NK, output_gradient_TN, x_TK, overwrite)

        x_gradient_TK = output_gradient_TN @ weight_NK if ctx.needs_input_grad[0] else None
        # Sum over all tokens in the parameter's dtype (fp32). In 16 bits, so long a sum would be inaccurate.
        bias_gradient_N = None if ctx.bias_dtype is None else output_gradient_TN.sum(0, dtype=ctx.bias_dtype)
        return x_gradient_TK, ctx.gradients.add(ctx.parameter, add), bias_gradient_N, None, None


def _cast(weight: Tensor, copy: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight in ``dtype``: its copy, if there is one in that dtype, or else a cast."""
    return weight.detach().to(dtype) if copy is None or copy.dtype != dtype else copy


def product_weights(model: BertForPreTraining, table: bool) -> list[nn.Parameter]:
    """Return the weights that encoder layers multiply through ``products``, and the word table if ``table`` is set.

    The last layer's query-key-value weight is omitted, because it is multiplied in parts, without ``products``. The word
    table may be in the list, because the decoder overwrites its gradient before the embeddings add to it.
    """
    last = model.layers[-1].query_key_value
    denses = [module for module in model.layers.modules() if isinstance(module, Dense) and module is not last]
    return [dense.weight for dense in denses] + [model.embeddings.word] * table
