"""FP8 encoder layers in which the kernels that compute a tensor also cast it to FP8.

The results equal ``EncoderLayer.forward`` with ``bert.products.fp8.Fp8Products``, in fewer passes over memory. A layer's
norms also write their output in FP8 for the products that read it next, and they write the gradient of the preceding
product only in FP8. Attention does the same if its implementation can. The norm's output is passed on twice, because the
residual and the products each return a gradient for it. The norm's backward pass reads both gradients, which autograd
would otherwise add in a pass of its own.

Only for layers that are not shared among ranks: with tensor parallelism, sums and copies between ranks come between
products and norms (``bert.parallel.tensor.placement``). Passes without gradients run as in ``EncoderLayer``.

Shape legend in ``bert.products.fp8``.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bert.configuration.sections import ModelConfig
from bert.layers import DropoutSites, LayerNorm, Placement, Recomputation, compute_once
from bert.products.fp8 import FeedForward, Fp8Dense, Fp8Layer, Fp8State, Site, product_of_casts
from kernels import (
    Dropout,
    add_norm_backward_cast_fp8,
    add_norm_cast_fp8,
    attention_backward_cast_fp8,
    attention_cast_fp8,
    compute_dtype,
    varlen_self_attention,
)


class HiddenStates(NamedTuple):
    """Hidden states for their two readers: the same memory twice, as [T, D]."""

    residual_TD: Tensor
    input_TD: Tensor
    """Input of the products, which read the casts and return their gradient through this tensor."""
    quantized_TD: Tensor | None
    quantized_DT: Tensor | None

    def casts(self, reader: Fp8Dense) -> tuple[Tensor, Tensor]:
        """Return the casts for ``reader``, and make them if they do not exist yet."""
        if self.quantized_TD is None or self.quantized_DT is None:
            return reader.cast_input(self.input_TD)
        return self.quantized_TD, self.quantized_DT


@dataclass(frozen=True)
class _AddNorm:
    """Dropout, residual and norm after a product. The product's output gradient has the site ``gradient``."""

    eps: float
    dropout: Dropout | None
    gradient: Site
    reader: Site | None
    """The site of the product that reads the output, or None if the output is not cast."""

    def forward(
        self, ctx: Any, product_TD: Tensor, bias_D: Tensor, residual_TD: Tensor, weight_D: Tensor, norm_bias_D: Tensor
    ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]:
        """Return the fields of ``HiddenStates``, and the tensors that ``backward`` needs."""
        # Without a reader's scale the norm makes no casts.
        reader = (None, None) if self.reader is None else (self.reader.scale, self.reader.amax)
        output_TD, statistics_2T, *casts = add_norm_cast_fp8(
            product_TD, bias_D, residual_TD, weight_D, norm_bias_D, self.eps, self.dropout, *reader
        )
        # An output without a reader gets None as its gradient, not zeros of shape [T, D].
        ctx.set_materialize_grads(False)
        # FP8 is a floating point type, so autograd would consider the casts differentiable.
        ctx.mark_non_differentiable(*(cast for cast in casts if cast is not None))
        kept = product_TD, bias_D, residual_TD, weight_D, statistics_2T
        # A view, so that autograd sees two outputs and passes the gradients of their two readers separately.
        return (output_TD, output_TD.view_as(output_TD), *casts), kept

    def backward(self, gradients: tuple[Tensor | None, ...], kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the gradients of the product (quantized, and transposed), of the residual, and of the three vectors."""
        # In the last fused layer, only the residual output has a reader.
        output_gradient_TD, *other = (gradient for gradient in gradients if gradient is not None)
        shortcut_TD = other[0] if other else None
        product_TD, bias_D, residual_TD, weight_D, statistics_2T = kept
        inputs = product_TD, bias_D, residual_TD, weight_D, statistics_2T, self.dropout
        return add_norm_backward_cast_fp8(
            output_gradient_TD, shortcut_TD, *inputs, self.gradient.scale, self.gradient.amax
        )


@dataclass(frozen=True)
class _SelfAttention:
    """Attention between the query-key-value product and the product that reads the attention output."""

    heads: int
    cu_seqlens: Tensor
    max_seqlen: int
    dropout: Dropout | None

    def plain(self, qkv_TN: Tensor) -> Tensor:
        """Return the attention output [T, D], by any implementation."""
        qkv_T3HE = qkv_TN.unflatten(-1, (3, self.heads, -1))
        return varlen_self_attention(qkv_T3HE, self.cu_seqlens, self.max_seqlen, self.dropout).flatten(1)

    def casts(self, input_TD: Tensor) -> bool:
        """Tell whether the implementation chosen for such inputs also makes casts."""
        tokens, width = input_TD.shape
        shape = tokens, 3, self.heads, width // self.heads
        # The choice depends only on shape, dtype, device and whether there is a backward pass; no value is read.
        stand_in = input_TD.new_empty(shape, dtype=compute_dtype(input_TD)).requires_grad_()
        # Not ``chosen``, which would show the autotuner a call that is never made if attention makes casts.
        chosen = varlen_self_attention.decided(stand_in, self.cu_seqlens, self.max_seqlen, self.dropout)
        return chosen.name in attention_cast_fp8.implementations


class _ProductAttention(torch.autograd.Function):
    """Product that computes queries, keys and values, then self-attention."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        quantized_TD: Tensor,
        input_DT: Tensor,
        _weight_ND: Tensor,
        bias_N: Tensor,
        fp8: Fp8Dense,
        attention: _SelfAttention,
        reader: Site,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv_T3HE = fp8.product(quantized_TD, dtype, bias_N).unflatten(-1, (3, attention.heads, -1))
        context_THE, context_TD, context_DT, *others = attention_cast_fp8(
            qkv_T3HE, attention.cu_seqlens, attention.max_seqlen, attention.dropout, reader.scale, reader.amax
        )
        ctx.fp8, ctx.attention, ctx.dtype = fp8, attention, x_TD.dtype
        # The product that reads the casts returns its gradient to the first output.
        ctx.mark_non_differentiable(context_TD, context_DT)
        ctx.set_materialize_grads(False)
        # The last tensor is saved for autograd's check, as in ``bert.products.fp8``.
        ctx.save_for_backward(qkv_T3HE, context_THE, *others, input_DT, fp8.weight_KN)
        return context_THE.flatten(1), context_TD, context_DT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TD: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        fp8: Fp8Dense = ctx.fp8
        attention: _SelfAttention = ctx.attention
        qkv_T3HE, context_THE, lse_HT, kept, input_DT, _ = ctx.saved_tensors
        quantized_TN, quantized_NT, bias_gradient_N = attention_backward_cast_fp8(
            gradient_TD.view_as(context_THE),
            qkv_T3HE,
            attention.cu_seqlens,
            context_THE,
            lse_HT,
            kept,
            attention.max_seqlen,
            attention.dropout,
            fp8.gradient.scale,
            fp8.gradient.amax,
        )
        weight_gradient_ND = fp8.weight_gradient(quantized_NT, input_DT)
        input_gradient_TD = fp8.input_gradient(quantized_TN, ctx.dtype)
        return input_gradient_TD, None, None, weight_gradient_ND, bias_gradient_N, None, None, None, None


class _ProjectionNorm(torch.autograd.Function):
    """Product, followed by dropout, residual and norm."""

    @staticmethod
    def forward(
        ctx: Any,
        residual_TD: Tensor,
        context_TD: Tensor,
        quantized_TD: Tensor,
        context_DT: Tensor,
        _weight_DD: Tensor,
        bias_D: Tensor,
        norm_weight_D: Tensor,
        norm_bias_D: Tensor,
        fp8: Fp8Dense,
        norm: _AddNorm,
        dtype: torch.dtype,
    ) -> tuple[Tensor | None, ...]:
        product_TD = fp8.product(quantized_TD, dtype)
        outputs, kept = norm.forward(ctx, product_TD, bias_D, residual_TD, norm_weight_D, norm_bias_D)
        ctx.fp8, ctx.norm, ctx.dtype = fp8, norm, context_TD.dtype
        ctx.save_for_backward(*kept, context_DT, fp8.weight_KN)  # the last tensor is for autograd's check
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        fp8: Fp8Dense = ctx.fp8
        *kept, context_DT, _ = ctx.saved_tensors
        gradient_TD, gradient_DT, residual_gradient_TD, *vector_gradients = ctx.norm.backward(gradients, kept)
        weight_gradient_DD = fp8.weight_gradient(gradient_DT, context_DT)
        context_gradient_TD = fp8.input_gradient(gradient_TD, ctx.dtype)
        inputs = residual_gradient_TD, context_gradient_TD, None, None
        return *inputs, weight_gradient_DD, *vector_gradients, None, None, None


class _FeedForwardNorm(torch.autograd.Function):
    """Feed-forward products, followed by dropout, residual and norm."""

    @staticmethod
    def forward(
        ctx: Any,
        residual_TD: Tensor,
        x_TD: Tensor,
        quantized_TD: Tensor,
        input_DT: Tensor,
        _wide_weight_FD: Tensor,
        bias_F: Tensor,
        _narrow_weight_DF: Tensor,
        bias_D: Tensor,
        norm_weight_D: Tensor,
        norm_bias_D: Tensor,
        passes: FeedForward,
        norm: _AddNorm,
        dtype: torch.dtype,
    ) -> tuple[Tensor | None, ...]:
        narrow_TD, product_TF, wide_FT = passes.forward(quantized_TD, bias_F, dtype)
        outputs, kept = norm.forward(ctx, narrow_TD, bias_D, residual_TD, norm_weight_D, norm_bias_D)
        ctx.passes, ctx.norm, ctx.dtype = passes, norm, x_TD.dtype
        ctx.save_for_backward(*kept, input_DT, product_TF, bias_F, wide_FT, passes.wide.weight_KN)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        passes: FeedForward = ctx.passes
        *kept, input_DT, product_TF, bias_F, wide_FT, _ = ctx.saved_tensors
        gradient_TD, gradient_DT, residual_gradient_TD, *vector_gradients = ctx.norm.backward(gradients, kept)
        input_gradient_TD, *weight_gradients = passes.backward(
            gradient_TD, gradient_DT, input_DT, product_TF, bias_F, wide_FT, ctx.dtype
        )
        # The casts are inputs too, and have no gradient.
        inputs = residual_gradient_TD, input_gradient_TD, None, None
        return *inputs, *weight_gradients, *vector_gradients, None, None, None


class FusedLayer(Fp8Layer):
    """FP8 encoder layer that takes plain hidden states, or hidden states with casts from the previous layer.

    The last fused layer returns a plain tensor.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        placement: Placement,
        state: Fp8State,
        recomputation: Recomputation = compute_once,
        casts_between_layers: bool = True,
    ) -> None:
        """Without ``casts_between_layers``, each layer casts its own input.

        With recomputation, only the tensors between layers are kept, and passing casts along would double their memory.
        """
        super().__init__(config, index, placement, state, recomputation)
        self._query_key_value, self._attention_output, *halves = self.denses
        self._feed_forward = FeedForward(*halves)
        following = state.input_of(index + 1)
        self._is_last = following is None
        # The layer after the last fused layer does not multiply in FP8 and reads no casts.
        self._reader = following if casts_between_layers else None

    def compute(self, hidden: Tensor | HiddenStates, cu_seqlens: Tensor, max_seqlen: int, sites: DropoutSites) -> Any:
        """Return the hidden states [T, D] of all tokens, with their casts except after the last fused layer."""
        # An evaluation must not change the magnitudes of training.
        if not torch.is_grad_enabled():
            assert isinstance(hidden, Tensor)
            return super().compute(hidden, cu_seqlens, max_seqlen, sites)
        if isinstance(hidden, Tensor):
            # The embeddings make no casts; autograd adds the gradients of both readers.
            hidden = HiddenStates(hidden, hidden, None, None)
        index, heads = self.index, self.config.num_attention_heads
        attention = _SelfAttention(heads, cu_seqlens, max_seqlen, sites.attention(index))
        context = self._attention(hidden, attention)
        attended = self._attended(*context, hidden.residual_TD, sites.after_attention(index))
        output = self._after_feed_forward(attended, sites.after_feed_forward(index))
        return output.residual_TD if self._is_last else output

    def _attention(self, hidden: HiddenStates, attention: _SelfAttention) -> tuple[Tensor, Tensor, Tensor]:
        """Return the attention output [T, D] and its casts."""
        dense, x_TD, bias_N = self._query_key_value, hidden.input_TD, self.query_key_value.bias
        # If the implementation makes no casts, they take a pass of their own.
        if not attention.casts(x_TD):
            context_TD = attention.plain(product_of_casts(x_TD, *hidden.casts(dense), dense, bias_N))
            return context_TD, *self._attention_output.cast_input(context_TD)
        # Attention makes the casts for the next product, with that product's scale.
        site, weight_ND = self._attention_output.input, self.query_key_value.weight
        casts = hidden.casts(dense)
        return _ProductAttention.apply(x_TD, *casts, weight_ND, bias_N, dense, attention, site, compute_dtype(x_TD))

    def _attended(
        self,
        context_TD: Tensor,
        quantized_TD: Tensor,
        quantized_DT: Tensor,
        residual_TD: Tensor,
        dropout: Dropout | None,
    ) -> HiddenStates:
        dense = self._attention_output
        # The norm makes the casts for FC1, which reads its output next.
        norm = self._add_norm(dropout, dense, self._feed_forward.wide.input)
        outputs = _ProjectionNorm.apply(
            residual_TD,
            context_TD,
            quantized_TD,
            quantized_DT,
            self.attention_output.weight,
            self.attention_output.bias,
            *_vectors(self.attention_norm),
            dense,
            norm,
            compute_dtype(context_TD),
        )
        return HiddenStates(*outputs)

    def _after_feed_forward(self, attended: HiddenStates, dropout: Dropout | None) -> HiddenStates:
        passes = self._feed_forward
        # The norm makes the casts for the next layer if that layer takes casts.
        norm = self._add_norm(dropout, passes.narrow, self._reader)
        outputs = _FeedForwardNorm.apply(
            attended.residual_TD,
            attended.input_TD,
            *attended.casts(passes.wide),
            self.intermediate.weight,
            self.intermediate.bias,
            self.output.weight,
            self.output.bias,
            *_vectors(self.output_norm),
            passes,
            norm,
            compute_dtype(attended.input_TD),
        )
        return HiddenStates(*outputs)

    def _add_norm(self, dropout: Dropout | None, before: Fp8Dense, reader: Site | None) -> _AddNorm:
        return _AddNorm(self.config.layer_norm_eps, dropout, before.gradient, reader)


def _vectors(norm: LayerNorm) -> tuple[Tensor, Tensor]:
    return norm.weight, norm.bias
