"""FP8 encoder layers, with casts in separate passes, or in the kernels that compute the tensors.

A ``FusedLayer`` gives the results of ``EncoderLayer`` with ``Fp8Products``, in fewer passes over memory. Its norms also
write their output in FP8 for the products that read it next, and they write the gradient of the preceding product only in
FP8. Attention does both, too, if its implementation can. A norm returns its output twice: one tensor for the residual
connection and one for the products. Its backward pass reads the gradients of both.

Shape legend in ``bert.products.fp8``.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bert.configuration.sections import ModelConfig, Recompute
from bert.model import Dense, EncoderLayer, MatrixProducts, Placement
from bert.products.fp8 import FeedForward, Fp8Dense, Fp8Scales, Passes, Product, Scaling, apply_passes
from bert.products.weight_gradients import WeightGradients
from kernels import (
    Dropout,
    add_norm_backward_cast_fp8,
    add_norm_cast_fp8,
    attention_backward_cast_fp8,
    attention_cast_fp8,
    bias_gelu_cast_fp8,
    cast_fp8,
    compute_dtype,
    varlen_self_attention,
)
from kernels.reference.fp8 import E4M3


class HiddenStates(NamedTuple):
    """Hidden states [T, D] as two tensors in the same memory, for the residual and for the products that read them."""

    residual_TD: Tensor
    input_TD: Tensor
    """Input of the products. They read the casts instead of its values, and return the gradient through this tensor."""
    quantized_TD: Tensor | None
    quantized_DT: Tensor | None

    def casts(self, consumer: Fp8Dense) -> tuple[Tensor, Tensor]:
        """Return the casts that the product ``consumer`` reads, and make them if they do not exist yet."""
        if self.quantized_TD is None:
            return consumer.cast_input(self.input_TD)
        assert self.quantized_DT is not None
        return self.quantized_TD, self.quantized_DT


class _ProductAttention(torch.autograd.Function):
    """Product for queries, keys and values, followed by self-attention."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        quantized_TD: Tensor,
        input_DT: Tensor,
        _weight_ND: Tensor,
        bias_N: Tensor,
        fp8: Fp8Dense,
        output_scaling: Scaling,
        heads: int,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout: Dropout | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv_T3HE = fp8.product(quantized_TD, compute_dtype(x_TD), bias_N).unflatten(-1, (3, heads, -1))
        context_THE, context_TD, context_DT, *others = attention_cast_fp8(
            qkv_T3HE, cu_seqlens, max_seqlen, dropout, output_scaling.scale, output_scaling.amax
        )
        ctx.fp8, ctx.dtype = fp8, x_TD.dtype
        ctx.cu_seqlens, ctx.max_seqlen, ctx.dropout = cu_seqlens, max_seqlen, dropout
        # Only the first output gets a gradient: the product that reads the casts passes its input's gradient there.
        ctx.mark_non_differentiable(context_TD, context_DT)
        ctx.set_materialize_grads(False)
        # The last tensor is saved only so that autograd notices if it is overwritten, as in ``bert.products.fp8``.
        ctx.save_for_backward(qkv_T3HE, context_THE, *others, input_DT, fp8.weight_KN)
        return context_THE.flatten(1), context_TD, context_DT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TD: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        scaling = ctx.fp8.gradient_scaling
        qkv_T3HE, context_THE, lse_HT, kept, input_DT, _ = ctx.saved_tensors
        inputs = gradient_TD.view_as(context_THE), qkv_T3HE, ctx.cu_seqlens, context_THE, lse_HT, kept
        quantized_TN, quantized_NT, bias_gradient_N = attention_backward_cast_fp8(
            *inputs, ctx.max_seqlen, ctx.dropout, scaling.scale, scaling.amax
        )
        gradients = Product(ctx.fp8).backward(quantized_TN, quantized_NT, input_DT, (), ctx.dtype)
        input_gradient_TD, weight_gradient_ND = gradients
        return input_gradient_TD, None, None, weight_gradient_ND, bias_gradient_N, *[None] * 6


class _PassesNorm(torch.autograd.Function):
    """Products, followed by dropout, residual and norm. The forward pass returns the fields of ``HiddenStates``."""

    @staticmethod
    def forward(
        ctx: Any,
        residual_TD: Tensor,
        x_TD: Tensor,
        quantized_TD: Tensor,
        input_DT: Tensor,
        passes: Passes,
        output_scaling: Scaling | None,
        dropout: Dropout | None,
        eps: float,
        bias_D: Tensor,
        norm_weight_D: Tensor,
        norm_bias_D: Tensor,
        *_parameters: nn.Parameter,
    ) -> tuple[Tensor | None, ...]:
        product_TD, kept = passes.forward(quantized_TD, compute_dtype(x_TD))
        # The norm casts its output for the FP8 product that consumes it. If there is none, ``output_scaling`` is None.
        scaling = (None, None) if output_scaling is None else (output_scaling.scale, output_scaling.amax)
        vectors = norm_weight_D, norm_bias_D, eps, dropout
        output_TD, statistics_2T, *casts = add_norm_cast_fp8(product_TD, bias_D, residual_TD, *vectors, *scaling)
        # With this setting, the gradient of an output that nothing reads is None, not zeros of shape [T, D].
        ctx.set_materialize_grads(False)
        # FP8 is a floating point type, so autograd would otherwise consider the casts differentiable.
        ctx.mark_non_differentiable(*(cast for cast in casts if cast is not None))
        ctx.passes, ctx.dropout, ctx.dtype = passes, dropout, x_TD.dtype
        of_norm = product_TD, bias_D, residual_TD, norm_weight_D, statistics_2T
        # The last tensor is saved only so that autograd notices if it is overwritten, as in ``bert.products.fp8``.
        ctx.save_for_backward(*of_norm, input_DT, *kept, passes.first.weight_KN)
        # The second output is a view, so that autograd passes the gradients of both outputs to ``backward`` separately.
        return output_TD, output_TD.view_as(output_TD), *casts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read only once, because recomputation allows no second read
        product_TD, bias_D, residual_TD, norm_weight_D, statistics_2T, input_DT, *kept, _ = saved
        # After the last fused layer, only the output for the residual is used, so the other one has no gradient.
        output_gradient_TD, *other = (gradient for gradient in gradients if gradient is not None)
        upstream = output_gradient_TD, other[0] if other else None
        of_norm = product_TD, bias_D, residual_TD, norm_weight_D, statistics_2T
        scaling = ctx.passes.last.gradient_scaling
        gradient_TD, gradient_DT, residual_gradient_TD, *of_vectors = add_norm_backward_cast_fp8(
            *upstream, *of_norm, ctx.dropout, scaling.scale, scaling.amax
        )
        input_gradient_TD, *others = ctx.passes.backward(gradient_TD, gradient_DT, input_DT, kept, ctx.dtype)
        # The two casts, and the four inputs that are not tensors, have no gradient.
        return residual_gradient_TD, input_gradient_TD, *[None] * 6, *of_vectors, *others


@torch.no_grad()  # as in the forward pass of an autograd function
def _makes_casts(
    name: str, qkv_T3HE: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: Dropout | None, scaling: Scaling
) -> bool:
    """Return whether the implementation ``name`` of attention is also chosen for attention with casts, in both passes.

    The call also shows attention with casts to ``kernels.tuning.autotune``, which times attention with and without casts.
    """
    forward = qkv_T3HE, cu_seqlens, max_seqlen, dropout, scaling.scale, scaling.amax
    attention_cast_fp8.show(*forward)
    context_THE, heads = qkv_T3HE[:, 0], qkv_T3HE.shape[2]
    kept = context_THE, qkv_T3HE.new_empty(heads, 0), qkv_T3HE.new_empty(0)
    backward = context_THE, qkv_T3HE, cu_seqlens, *kept, max_seqlen, dropout, scaling.scale, scaling.amax
    return attention_cast_fp8.takes(name, *forward) and attention_backward_cast_fp8.takes(name, *backward)


class Fp8Products(MatrixProducts):
    """FP8 products of encoder layers. Passes without gradients use the scales but do not change the state."""

    def __init__(self, scales: Fp8Scales, gradients: WeightGradients, *, fused: bool) -> None:
        """``gradients`` accumulates weight gradients. ``fused`` layers make the casts in the kernels before them."""
        self.scales = scales
        self._gradients = gradients
        self._fused = fused

    def layer(self, config: ModelConfig, index: int, placement: Placement, recompute: Recompute) -> EncoderLayer:
        if self._fused:
            return FusedLayer(config, index, placement, self, recompute)
        return EncoderLayer(config, index, placement, self, recompute)

    def dense(self, layer: int, name: str, inputs: int, outputs: int) -> Fp8Dense:
        return Fp8Dense(inputs, outputs, self.scales.of_dense(layer, name), self._gradients)

    def product(self, x: Tensor, dense: Dense, bias: Tensor | None) -> Tensor:
        assert isinstance(dense, Fp8Dense)
        if torch.is_grad_enabled():
            return apply_passes(Product(dense), x, *dense.cast_input(x), bias)
        # An evaluation needs no transpose, which only the backward pass reads, and records no magnitudes.
        quantized_TK = cast_fp8(x, dense.input_scaling.scale, torch.zeros_like(dense.input_scaling.amax), E4M3)
        return dense.product(quantized_TK, compute_dtype(x), bias)

    def feed_forward(self, x_TD: Tensor, wide: Dense, narrow: Dense) -> Tensor:
        assert isinstance(wide, Fp8Dense)
        assert isinstance(narrow, Fp8Dense)
        if torch.is_grad_enabled():
            return apply_passes(FeedForward(wide, narrow), x_TD, *wide.cast_input(x_TD))
        # An evaluation must not change the scales of training.
        unrecorded = torch.zeros_like(wide.input_scaling.amax)
        quantized_TD = cast_fp8(x_TD, wide.input_scaling.scale, unrecorded, E4M3)
        product_TF = wide.product(quantized_TD, compute_dtype(x_TD))
        wide_TF, _ = bias_gelu_cast_fp8(product_TF, wide.bias, narrow.input_scaling.scale, unrecorded)
        return narrow.product(wide_TF, product_TF.dtype)


class FusedLayer(EncoderLayer):
    """FP8 encoder layer that takes plain hidden states, or hidden states with casts from the previous layer.

    Without recomputation, each fused layer but the last also passes FP8 casts of its output to the next layer. With
    recomputation it passes none: only the tensors between layers are kept, and casts would double their memory.
    """

    query_key_value: Fp8Dense
    attention_output: Fp8Dense
    intermediate: Fp8Dense
    output: Fp8Dense

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        placement: Placement,
        products: Fp8Products,
        recompute: Recompute = "none",
    ) -> None:
        super().__init__(config, index, placement, products, recompute)
        self._feed_forward = FeedForward(self.intermediate, self.output)
        self._is_last = index + 1 == products.scales.layers
        # The last fused layer makes no casts, because the next layer, the model's last, does not multiply in FP8.
        reads_casts = recompute == "none" and not self._is_last
        self._output_scaling = products.scales.of_dense(index + 1, "query_key_value")[0] if reads_casts else None

    def compute(
        self, hidden: Tensor | HiddenStates, cu_seqlens: Tensor, max_seqlen: int, dropout_state: Tensor | None
    ) -> Any:
        """Return the hidden states [T, D] of all tokens, with their casts except after the last fused layer."""
        # Evaluate as a plain layer: without gradients it records no magnitudes, which would change the scales of training.
        if not torch.is_grad_enabled():
            assert isinstance(hidden, Tensor)
            return super().compute(hidden, cu_seqlens, max_seqlen, dropout_state)
        if isinstance(hidden, Tensor):
            # The embeddings make no casts. Autograd adds the gradients of the residual and of the product.
            hidden = HiddenStates(hidden, hidden, None, None)
        attention_dropout, attended_dropout, output_dropout = self.dropouts(dropout_state)
        context = self._attention(hidden, cu_seqlens, max_seqlen, attention_dropout)
        # The norm makes the casts for the product that reads its output next: FC1, or the next layer's QKV.
        projection, wide_scaling = Product(self.attention_output), self.intermediate.input_scaling
        attended = self._normed(projection, context, self.attention_norm, wide_scaling, attended_dropout)
        output = self._normed(self._feed_forward, attended, self.output_norm, self._output_scaling, output_dropout)
        return output.residual_TD if self._is_last else output

    def _attention(
        self, hidden: HiddenStates, cu_seqlens: Tensor, max_seqlen: int, dropout: Dropout | None
    ) -> HiddenStates:
        """Return the residual and the attention output, with casts of the output if attention makes them."""
        dense, x_TD, bias_N = self.query_key_value, hidden.input_TD, self.query_key_value.bias
        casts, heads = hidden.casts(dense), self.config.num_attention_heads
        # An empty tensor suffices to choose an implementation: the choice does not depend on values.
        shape = len(x_TD), 3, heads, x_TD.shape[1] // heads
        stand_in = x_TD.new_empty(shape, dtype=compute_dtype(x_TD)).requires_grad_()
        # ``decide`` shows this call to the autotuner, because the op itself is not called if attention makes the casts.
        chosen = varlen_self_attention.decide(stand_in, cu_seqlens, max_seqlen, dropout)
        scaling = self.attention_output.input_scaling
        # If attention makes no casts, the next product makes them in a separate pass.
        if not _makes_casts(chosen.name, stand_in.detach(), cu_seqlens, max_seqlen, dropout, scaling):
            qkv_T3HE = apply_passes(Product(dense), x_TD, *casts, bias_N).unflatten(-1, (3, heads, -1))
            context_TD = varlen_self_attention(qkv_T3HE, cu_seqlens, max_seqlen, dropout).flatten(1)
            return HiddenStates(hidden.residual_TD, context_TD, None, None)
        # Attention makes the casts for the next product, with that product's scale.
        product = x_TD, *casts, dense.weight, bias_N, dense, scaling
        outputs = _ProductAttention.apply(*product, heads, cu_seqlens, max_seqlen, dropout)
        return HiddenStates(hidden.residual_TD, *outputs)

    def _normed(
        self,
        passes: Passes,
        hidden: HiddenStates,
        norm: nn.LayerNorm,
        output_scaling: Scaling | None,
        dropout: Dropout | None,
    ) -> HiddenStates:
        outputs = _PassesNorm.apply(
            hidden.residual_TD,
            hidden.input_TD,
            *hidden.casts(passes.first),
            passes,
            output_scaling,
            dropout,
            norm.eps,
            passes.last.bias,
            norm.weight,
            norm.bias,
            *passes.parameters,
        )
        return HiddenStates(*outputs)
