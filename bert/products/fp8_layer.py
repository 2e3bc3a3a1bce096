"""FP8 encoder layers, which convert tensors to FP8 in separate passes or in the kernels that compute the tensors.

A "cast" is an FP8 copy of a tensor: the products read it as quantized [T, D] and transposed [D, T].

A ``FusedLayer`` gives the results of ``EncoderLayer`` with ``Fp8Products``, in fewer passes over memory. Its norms also
write their output in FP8 for the products that read it next, and they write the gradient of the preceding product only in
FP8. Attention does both, too, if its implementation can. A norm returns its output twice: one tensor for the residual
connection and one for the products. Its backward pass reads the gradients of both.

``bert.products.fp8`` explains the letters of the shapes.
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
    """Hidden states [T, D] as two tensors in the same memory: one for the residual connection, one for the next product."""

    residual_TD: Tensor
    input_TD: Tensor
    """Input of the next product. The product returns its gradient here, but reads the FP8 copies below, if they exist."""
    quantized_TD: Tensor | None
    quantized_DT: Tensor | None

    def casts(self, consumer: Fp8Dense) -> tuple[Tensor, Tensor]:
        """Return the FP8 copies that the product ``consumer`` reads, and make them if they do not exist yet."""
        if self.quantized_TD is None:
            return consumer.cast_input(self.input_TD)
        assert self.quantized_DT is not None
        return self.quantized_TD, self.quantized_DT


class _ProductAttention(torch.autograd.Function):
    """Autograd function of the product for queries, keys and values and the self-attention that follows it."""

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
        # Only the first output gets a gradient. The product that reads the FP8 outputs returns its gradient there.
        ctx.mark_non_differentiable(context_TD, context_DT)
        ctx.set_materialize_grads(False)
        # The FP8 weight is saved only so that autograd raises an error if it is overwritten before the backward pass.
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
    """Autograd function of products and the dropout, residual and norm after them. Returns fields of ``HiddenStates``."""

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
        # The norm also writes its output in FP8 if an FP8 product reads it. Otherwise ``output_scaling`` is None.
        scaling = (None, None) if output_scaling is None else (output_scaling.scale, output_scaling.amax)
        vectors = norm_weight_D, norm_bias_D, eps, dropout
        output_TD, statistics_2T, *casts = add_norm_cast_fp8(product_TD, bias_D, residual_TD, *vectors, *scaling)
        # With this setting, the gradient of an output that nothing reads is None, not zeros of shape [T, D].
        ctx.set_materialize_grads(False)
        # FP8 is a floating point type, so autograd would otherwise consider the casts differentiable.
        ctx.mark_non_differentiable(*(cast for cast in casts if cast is not None))
        ctx.passes, ctx.dropout, ctx.dtype = passes, dropout, x_TD.dtype
        of_norm = product_TD, bias_D, residual_TD, norm_weight_D, statistics_2T
        # The FP8 weight is saved only so that autograd raises an error if it is overwritten before the backward pass.
        ctx.save_for_backward(*of_norm, input_DT, *kept, passes.first.weight_KN)
        # The second output is a view, so that autograd passes the gradients of both outputs to ``backward`` separately.
        return output_TD, output_TD.view_as(output_TD), *casts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read only once: recomputation allows no second access
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
        # The None values are for the two FP8 inputs and the four inputs that are not tensors, which have no gradient.
        return residual_gradient_TD, input_gradient_TD, *[None] * 6, *of_vectors, *others


@torch.no_grad()  # the choice is for an autograd function, whose forward pass runs without gradients
def _makes_casts(
    name: str, qkv_T3HE: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: Dropout | None, scaling: Scaling
) -> bool:
    """Return whether attention should write its output in FP8 too (make casts).

    This is so if the implementation ``name`` of plain attention is also chosen for attention with casts, in both passes.
    The call also shows attention with casts to ``kernels.tuning.autotune``, which times attention with and without casts.
    """
    forward = qkv_T3HE, cu_seqlens, max_seqlen, dropout, scaling.scale, scaling.amax
    attention_cast_fp8.show(*forward)
    context_THE, heads = qkv_T3HE[:, 0], qkv_T3HE.shape[2]
    kept = context_THE, qkv_T3HE.new_empty(heads, 0), qkv_T3HE.new_empty(0)
    backward = context_THE, qkv_T3HE, cu_seqlens, *kept, max_seqlen, dropout, scaling.scale, scaling.amax
    return attention_cast_fp8.takes(name, *forward) and attention_backward_cast_fp8.takes(name, *backward)


class Fp8Products(MatrixProducts):
    """FP8 products of encoder layers. An evaluation uses the scales, but records no magnitudes that would change them."""

    def __init__(self, scales: Fp8Scales, gradients: WeightGradients, *, fused: bool) -> None:
        """``gradients`` accumulates weight gradients. ``fused`` selects ``FusedLayer`` for the encoder layers."""
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
        # This is an evaluation. It needs no transposed copy, which only backward passes read. It must record no magnitudes.
        quantized_TK = cast_fp8(x, dense.input_scaling.scale, torch.zeros_like(dense.input_scaling.amax), E4M3)
        return dense.product(quantized_TK, compute_dtype(x), bias)

    def feed_forward(self, x_TD: Tensor, wide: Dense, narrow: Dense) -> Tensor:
        assert isinstance(wide, Fp8Dense)
        assert isinstance(narrow, Fp8Dense)
        if torch.is_grad_enabled():
            return apply_passes(FeedForward(wide, narrow), x_TD, *wide.cast_input(x_TD))
        # Record no magnitudes, because an evaluation must not change the scales of training.
        unrecorded = torch.zeros_like(wide.input_scaling.amax)
        quantized_TD = cast_fp8(x_TD, wide.input_scaling.scale, unrecorded, E4M3)
        product_TF = wide.product(quantized_TD, compute_dtype(x_TD))
        wide_TF, _ = bias_gelu_cast_fp8(product_TF, wide.bias, narrow.input_scaling.scale, unrecorded)
        return narrow.product(wide_TF, product_TF.dtype)


class FusedLayer(EncoderLayer):
    """FP8 encoder layer whose input is plain hidden states, or hidden states with FP8 copies from the previous layer.

    Without recomputation, each fused layer but the last also passes FP8 casts of its output to the next layer. With
    recomputation it passes none: memory then holds little but the tensors between layers, and FP8 copies would double these.
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
        # Evaluate as a plain layer, which records no magnitudes. Recorded magnitudes would change the scales of training.
        if not torch.is_grad_enabled():
            assert isinstance(hidden, Tensor)
            return super().compute(hidden, cu_seqlens, max_seqlen, dropout_state)
        if isinstance(hidden, Tensor):
            # The input comes without casts. It serves as both tensors, and autograd adds up the gradients of both uses.
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
        """Return the residual and the attention output. If attention makes FP8 copies of its output, return them too."""
        dense, x_TD, bias_N = self.query_key_value, hidden.input_TD, self.query_key_value.bias
        casts, heads = hidden.casts(dense), self.config.num_attention_heads
        # Choose the implementation with an empty tensor, because the choice does not depend on values.
        shape = len(x_TD), 3, heads, x_TD.shape[1] // heads
        stand_in = x_TD.new_empty(shape, dtype=compute_dtype(x_TD)).requires_grad_()
        # ``decide`` shows the call to the autotuner, which would not see it otherwise: with casts, another op is called.
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
