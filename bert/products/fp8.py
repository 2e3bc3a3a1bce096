"""FP8 for the matrix products of the encoder: delayed scaling, FP8 copies of the weights, forward and backward.

In every encoder layer except the last one, four products use FP8: QKV, attention output, FC1 and FC2. The products that
compute the gradients of their inputs and weights also use FP8. The forward pass multiplies E4M3 by E4M3, and the
backward pass E5M2 by E4M3 (formats: Micikevicius et al. 2022, arXiv 2209.05433). The last layer has 1 % of the work and
keeps autocast's precision, as do attention, heads, norms, embeddings and the residual stream. The master weights stay
fp32.

Each quantized tensor has its own scale: the largest power of two that keeps the previous step's largest magnitude within
the format, with some headroom (``kernels.reference.fp8.HEADROOM_BITS``). Scales stay on the device and the host reads none
in a step, so that a captured step can be replayed. Each copy of the model has its own scales for activations and gradients.
Ranks of a tensor group hold parts of the same tensors, so they use the same scales.

Shape legend: T tokens, N outputs and K inputs of a dense layer, D hidden, F intermediate, S quantized tensors. The
columns of transposed tensors are padded to a multiple of 16.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bert.model import Dense
from bert.products.weight_gradients import WeightGradients
from kernels import (
    WeightCast,
    bias_gelu_backward_cast_fp8,
    bias_gelu_cast_fp8,
    cast_transpose_fp8,
    cast_transpose_into_fp8,
    cast_transpose_sum_fp8,
    compute_dtype,
    new_scales,
    scaled_matmul,
)
from kernels.reference.fp8 import E4M3, E5M2, capability_reasons, largest_scaled

DENSES = ("query_key_value", "attention_output", "intermediate", "output")
"""Names of the dense layers of an encoder layer. Their scales have the same order."""

# Two rounds find a scale for every tensor (``calibration_`` says why). The other rounds refine the scales of gradients.
_CALIBRATION_ROUNDS = 4


@dataclass(frozen=True)
class Scaling:
    """Scale, inverse scale and largest magnitude (amax) of a quantized tensor, as views [] of vectors of ``Fp8Scales``."""

    scale: Tensor
    inverse: Tensor
    amax: Tensor


class Fp8Scales:
    """Scales of all quantized tensors of a model: of each dense layer's input, weight and output gradient.

    Activations and gradients have a scale of 1 until ``Fp8State.calibration_``.
    """

    scale_S: Tensor
    """fp32, factors by which tensors are multiplied before they are rounded."""
    inverse_S: Tensor
    """fp32, exactly 1 / scale."""
    amax_S: Tensor
    """fp32, largest magnitude since the last update; for a weight, its largest magnitude at the last conversion to FP8."""
    largest_S: Tensor
    """fp32, upper limit of scale times amax for each tensor: the largest number of its format, divided by the headroom."""

    def __init__(self, layers: int, device: torch.device) -> None:
        """Raises ``ValueError`` if ``device`` is a GPU without FP8 support."""
        require_fp8(device)
        self.layers = layers
        largest = [
            largest_scaled(dtype) for dtype in (E4M3, E4M3, E5M2)
        ]  # formats of input, weight and output gradient
        self.largest_S = torch.tensor(largest * len(DENSES) * layers, device=device)
        self.scale_S = torch.ones_like(self.largest_S)
        self.inverse_S = torch.ones_like(self.largest_S)
        self.amax_S = torch.zeros_like(self.largest_S)

    def of_dense(self, layer: int, dense: str) -> list[Scaling]:
        """Return the scaling of a dense layer's input, of its weight and of its output gradient."""
        first = 3 * (len(DENSES) * layer + DENSES.index(dense))
        # These are views, so that one update changes all scales, and captured graphs find each scale at a fixed address.
        vectors = self.scale_S, self.inverse_S, self.amax_S
        return [Scaling(*(vector.select(0, at) for vector in vectors)) for at in range(first, first + 3)]


class Fp8Dense(Dense):
    """Dense layer with its weight in FP8, in two layouts. Captured graphs read the FP8 tensors, so they never move."""

    def __init__(self, inputs: int, outputs: int, scalings: Sequence[Scaling], gradients: WeightGradients) -> None:
        super().__init__(inputs, outputs)
        self._gradients = gradients
        self.input_scaling, self.weight_scaling, self.gradient_scaling = scalings
        # FP8 products contract over the last dimension of both operands: K in the forward pass, N in the backward pass.
        self.weight_NK = torch.zeros(outputs, inputs, dtype=E4M3)
        self.weight_KN = torch.zeros(inputs, outputs, dtype=E4M3)

    def refresh_(self) -> None:
        weight_NK, scaling = self.weight.detach(), self.weight_scaling
        cast_transpose_into_fp8(weight_NK, scaling.scale, scaling.amax, self.weight_NK, self.weight_KN)

    def cast(self, place: slice) -> WeightCast:
        return WeightCast(
            place.start, self.weight_scaling.scale, self.weight_scaling.amax, self.weight_NK, self.weight_KN
        )

    def cast_input(self, x_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize an input; return it as [T, K] and transposed as [K, T]."""
        # Detach the input: its gradient comes from the product that reads the FP8 copies, not from this conversion.
        return cast_transpose_fp8(x_TK.detach(), self.input_scaling.scale, self.input_scaling.amax, E4M3)

    def product(self, input_TK: Tensor, dtype: torch.dtype, bias_N: Tensor | None = None) -> Tensor:
        """Multiply the quantized input by the weight; return [T, N]."""
        inverses = self.input_scaling.inverse, self.weight_scaling.inverse
        # Fast accumulation, in which Hopper keeps 13 bits of a sum, is accurate enough: its error was below 0.25 %, here
        # and for the input's gradient, when emulated on a trained layer. Rounding to FP8 causes an error above 1 %.
        return scaled_matmul(input_TK, self.weight_NK, *inverses, dtype, bias_N, use_fast_accum=True)

    def input_gradient(self, gradient_TN: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the input's gradient [T, K], given the quantized output gradient."""
        inverses = self.gradient_scaling.inverse, self.weight_scaling.inverse
        return scaled_matmul(gradient_TN, self.weight_KN, *inverses, dtype, use_fast_accum=True)

    def weight_gradient(self, gradient_NT: Tensor, input_KT: Tensor) -> Tensor | None:
        """Accumulate the weight's gradient, fp32 [N, K], and return it only if autograd must store it.

        The gradient is a sum over all tokens, in which large terms of opposite signs cancel. Accumulation in the tensor
        cores alone would therefore lose precision.
        """

        def add(sum_NK: Tensor | None, overwrite: bool) -> Tensor:
            # Fast accumulation would cause an error of 1.4 to 2.8 % here. Rounding to FP8 already causes 2.1 to 4.3 %.
            inverses = self.gradient_scaling.inverse, self.input_scaling.inverse
            written_NK = sum_NK if overwrite else None  # to add, write a new tensor first: products only overwrite
            product_NK = scaled_matmul(
                gradient_NT, input_KT, *inverses, torch.float32, use_fast_accum=False, out_MN=written_NK
            )
            return product_NK if overwrite or sum_NK is None else sum_NK.add_(product_NK)

        return self._gradients.add(self.weight, add)


class Fp8State:
    """Scales and FP8 weights of a model.

    Call ``update_scales_`` before every optimizer step. After the step, call ``refresh_weights_``, unless the optimizer has
    written the FP8 weights itself (``casts``). If anything else changes the weights, also call ``refresh_weights_``. If the
    weights or the data are entirely new, as in a new run, call ``calibration_``, which finds scales from a few batches.
    """

    def __init__(self, scales: Fp8Scales, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        """Convert the weights of ``model`` to FP8. Its FP8 products must have been built with ``scales``.

        ``group`` consists of the ranks that hold parts of the same tensors. All of them must call this at the same time.
        """
        self.scale_S, self.inverse_S, self.amax_S = scales.scale_S, scales.inverse_S, scales.amax_S
        self._largest_S, self._group = scales.largest_S, group
        self.denses = [module for module in model.modules() if isinstance(module, Fp8Dense)]
        # This conversion only measures magnitudes. The update computes scales from them and converts the weights again.
        self.refresh_weights_()
        self.update_()

    def update_(self) -> None:
        """Update the scales from the magnitudes measured so far, and then convert the weights to FP8."""
        # Update the scales first, because the FP8 weights must have the new scales.
        self.update_scales_()
        self.refresh_weights_()

    def casts(self, places: Mapping[nn.Parameter, slice]) -> tuple[WeightCast, ...]:
        """Describe the FP8 copies of the weights, so that an optimizer can write them when it updates the weights.

        ``places`` maps each parameter to its place in the optimizer's flat vector.
        """
        return tuple(dense.cast(places[dense.weight]) for dense in self.denses)

    @torch.no_grad()
    def refresh_weights_(self) -> None:
        """Convert the weights to FP8 again, with the current scales."""
        for dense in self.denses:
            dense.refresh_()

    def calibration_(self) -> Iterator[None]:
        """Find initial scales in a few rounds. In each round, the caller computes a loss and its gradients.

        With a scale of 1, gradients of about 1e-7 vanish in E5M2. The residual stream still carries a gradient to every
        layer, so the first round yields the scales of FC2 and the attention output. The second round yields the scales of
        FC1 and QKV. Further rounds refine the scales, using gradients with little rounding error.

        Call it before the clock starts. The batches may be synthetic, because scales are not learned: they only describe
        ranges, affect the result only by rounding, and are replaced after the first step. The caller must restore gradients
        and random states; weights are not touched.
        """
        # The last update has reset the weights' magnitudes to zero. Converting the weights to FP8 measures them again.
        self.refresh_weights_()
        for _ in range(_CALIBRATION_ROUNDS):
            self.update_()
            yield
        self.update_()

    @torch.no_grad()
    def set_scales_(self, scale_S: Tensor) -> None:
        """Overwrite the scales with an earlier run's scales. The caller must then convert the weights to FP8 again."""
        self.scale_S.copy_(scale_S)
        torch.reciprocal(self.scale_S, out=self.inverse_S)
        self.amax_S.zero_()

    @torch.no_grad()
    def update_scales_(self) -> None:
        """Update scales from the largest magnitudes of the last step. Then the weights must be converted to FP8 again."""
        if self._group is not None:  # all parts of a tensor must have the same scale
            dist.all_reduce(self.amax_S, dist.ReduceOp.MAX, self._group)
        self.scale_S.copy_(new_scales(self.amax_S, self.scale_S, self._largest_S))
        torch.reciprocal(self.scale_S, out=self.inverse_S)
        self.amax_S.zero_()


@dataclass(frozen=True)
class Product:
    """Forward and backward pass of a single product."""

    first: Fp8Dense

    @property
    def last(self) -> Fp8Dense:
        return self.first

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Parameters whose gradients ``backward`` returns."""
        return (self.first.weight,)

    def forward(
        self, input_TK: Tensor, dtype: torch.dtype, bias_N: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the product [T, N], and an empty tuple, because ``backward`` needs no tensor except the input."""
        return self.first.product(input_TK, dtype, bias_N), ()

    def backward(
        self, gradient_TN: Tensor, gradient_NT: Tensor, input_KT: Tensor, _kept: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor | None, ...]:
        """Return the input's gradient in ``dtype``, and the gradients of ``parameters``. The given gradient is quantized."""
        weight_gradient_NK = self.first.weight_gradient(gradient_NT, input_KT)
        return self.first.input_gradient(gradient_TN, dtype), weight_gradient_NK


@dataclass(frozen=True)
class FeedForward:
    """FC1, bias, GELU and FC2. They form one unit so that GELU writes its output only in FP8, which FC2 reads."""

    first: Fp8Dense
    last: Fp8Dense

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return self.first.weight, self.first.bias, self.last.weight

    def forward(
        self, input_TD: Tensor, dtype: torch.dtype, bias_D: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output [T, D], and the tensors that ``backward`` needs in addition to the input.

        These are FC1's product (in 16 bits under autocast), FC1's bias, and FC2's input (transposed and quantized).
        """
        product_TF = self.first.product(input_TD, dtype)
        scaling, bias_F = self.last.input_scaling, self.first.bias
        wide_TF, wide_FT = bias_gelu_cast_fp8(product_TF, bias_F, scaling.scale, scaling.amax)
        return self.last.product(wide_TF, dtype, bias_D), (product_TF, bias_F, wide_FT)

    def backward(
        self, gradient_TD: Tensor, gradient_DT: Tensor, input_DT: Tensor, kept: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor | None, ...]:
        """Return the input's gradient in ``dtype``, and the gradients of ``parameters``. The given gradient is quantized."""
        product_TF, bias_F, wide_FT = kept
        narrow_weight_gradient_DF = self.last.weight_gradient(gradient_DT, wide_FT)
        wide_gradient_TF = self.last.input_gradient(gradient_TD, product_TF.dtype)
        scaling = self.first.gradient_scaling
        gradient_TF, gradient_FT, bias_gradient_F = bias_gelu_backward_cast_fp8(
            wide_gradient_TF, product_TF, bias_F, scaling.scale, scaling.amax
        )
        wide_gradients = Product(self.first).backward(gradient_TF, gradient_FT, input_DT, (), dtype)
        return *wide_gradients, bias_gradient_F, narrow_weight_gradient_DF


Passes = Product | FeedForward
"""Forward and backward passes of FP8 products. The caller quantizes and transposes their input and output gradient."""


def apply_passes(
    passes: Passes, x_TK: Tensor, quantized_TK: Tensor, quantized_KT: Tensor, bias_N: Tensor | None = None
) -> Tensor:
    """Apply the products of ``passes`` to an input that is already quantized and transposed; return [T, N].

    ``x_TK`` is the input before quantization. Autograd returns the gradient to it; its values are not read.
    """
    output_TN = _Fp8Function.apply(x_TK, quantized_TK, quantized_KT, passes, bias_N, *passes.parameters)
    assert isinstance(output_TN, Tensor)
    return output_TN


class _Fp8Function(torch.autograd.Function):
    """Autograd function that applies ``Passes``, quantizes the output's gradient and saves one byte per input element.

    Parameters are arguments so that they get gradients. An FP8 weight is saved only so that autograd raises an error if the
    backward pass comes after ``update_``, which overwrites the weight and the scales.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        quantized_TK: Tensor,
        input_KT: Tensor,
        passes: Passes,
        bias_N: Tensor | None,
        *_parameters: nn.Parameter,
    ) -> Tensor:
        # Autograd needs the input's gradient in the dtype of the input.
        ctx.passes, ctx.dtype, ctx.biased = passes, x_TK.dtype, bias_N is not None
        output_TN, kept = passes.forward(quantized_TK, compute_dtype(x_TK), bias_N)
        ctx.save_for_backward(input_KT, *kept, passes.first.weight_KN)
        return output_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient_TN: Tensor) -> tuple[Tensor | None, ...]:
        input_KT, *kept, _ = ctx.saved_tensors
        scaling = ctx.passes.last.gradient_scaling
        # One pass over the gradient writes both FP8 copies, and sums the bias gradient from the values before rounding.
        cast = cast_transpose_sum_fp8 if ctx.biased else cast_transpose_fp8
        gradient_TN, gradient_NT, *bias_gradient_N = cast(output_gradient_TN, scaling.scale, scaling.amax, E5M2)
        input_gradient_TK, *gradients = ctx.passes.backward(gradient_TN, gradient_NT, input_KT, kept, ctx.dtype)
        return input_gradient_TK, None, None, None, *(bias_gradient_N or [None]), *gradients


def require_fp8(device: torch.device) -> None:
    """Raise ``ValueError`` if ``device`` is a GPU without FP8 support. Ada and Hopper were the first to have it."""
    if reasons := capability_reasons(device):
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"training.precision is fp8, but {name} has {reasons[0]}: set training.precision to bf16")
