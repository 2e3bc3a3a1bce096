"""Arguments for every op as in training, and the least work that a call must do.

Parameters are fp32, even if autocast runs the matrix products in 16 bits. All other arguments have the types that the model
passes. Shape legend in ``kernels/__init__.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_parts.report import NotUsableError
from bert.configuration.sections import ModelConfig
from kernels import OPS, Dropout, LambSegments, LambState
from kernels.reference.fp8 import E4M3, E5M2
from kernels.registry import Implementation
from kernels.tuning.examples import Size, example_inputs

SEGMENTS = 400
"""Number of segments of LAMB's vector, a few more than BERT-Large has tensors. Two of three segments have a trust ratio."""
_TOKENS = 64
"""All shape bucket sizes, and therefore the row counts of matrix products in training, are multiples of this."""


@dataclass(frozen=True)
class LeastWork:
    """The least work that a call must do. Each field is a pair: for the forward pass alone, and for both passes."""

    flop: tuple[float, float] = (0.0, 0.0)
    """FLOP of the matrix products."""
    moved: tuple[float, float] = (0.0, 0.0)
    """Bytes that must be read and written."""


@dataclass(frozen=True)
class Case:
    """Arguments of one call. If the op has gradients, floating-point tensors require them."""

    op: str
    arguments: tuple[object, ...]
    dtype: torch.dtype
    """Type of matrix products and of the residual stream."""
    work: LeastWork = LeastWork()
    named: Mapping[str, object] = field(default_factory=dict)
    autocast: bool = False
    """Whether the op is called under autocast to ``dtype``."""
    gradients: bool = False
    variant: str = ""
    """Label that distinguishes cases of the same op."""

    @property
    def title(self) -> str:
        return f"{self.op}{self.variant}"

    @property
    def leaves(self) -> list[Tensor]:
        return [value for value in self.arguments if isinstance(value, Tensor) and value.requires_grad]

    def without_dropout(self) -> "Case":
        return replace(self, arguments=tuple(None if isinstance(x, Dropout) else x for x in self.arguments))

    def call_as_in_training(self, function: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Call a function under the case's autocast, which determines the types that the op receives, and autograd."""
        device = next(value.device.type for value in self.arguments if isinstance(value, Tensor))
        with (
            torch.autocast(device, self.dtype if self.autocast else None, enabled=self.autocast),
            torch.set_grad_enabled(self.gradients and torch.is_grad_enabled()),
        ):
            return function(*args, **kwargs)

    def outputs(self, function: Callable[..., object]) -> list[Tensor]:
        """Call a function with the arguments, and return its results except None."""
        returned = self.call_as_in_training(function, *self.arguments, **self.named)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        return [cast("Tensor", output) for output in outputs if output is not None]

    def upstream(self, function: Callable[..., object]) -> Tensor:
        """Draw a random gradient for the first output."""
        with torch.no_grad():
            return torch.randn_like(self.outputs(function)[0])

    def forward_and_gradients(self, function: Callable[..., object], upstream: Tensor) -> None:
        torch.autograd.grad(self.outputs(function)[0], self.leaves, upstream)


def _leaf(value: object) -> object:
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return value
    return value if isinstance(value, nn.Parameter) else value.detach().requires_grad_()


def _parameter(generator: torch.Generator, *shape: int, mean: float = 0.0) -> nn.Parameter:
    """Draw a parameter on the generator's device. Only vectors have a ``mean``, which is 1 for the weights of norms."""
    drawn = torch.randn(shape, generator=generator, device=generator.device)
    # This scale keeps activations near 1, so that errors are measured on values of ordinary size.
    return nn.Parameter(drawn * shape[-1] ** -0.5 if len(shape) > 1 else mean + drawn)


def size_of(model: ModelConfig, lengths: Sequence[int], masked: int) -> Size:
    """Return the sizes of a micro-batch with ``masked`` masked tokens. A length may be 0."""
    heads, wide = model.num_attention_heads, model.intermediate_size
    return Size(tuple(lengths), max(lengths), masked, model.hidden_size, heads, wide, model.vocab_size)


def cases(size: Size, device: torch.device, dtype: torch.dtype, *, counting: bool = False) -> list[Case]:
    """Return a case for each op with gradients as the model calls it in training.

    ``dtype`` is the type of matrix products and of the residual stream. The labels of the last two masked tokens are -1,
    which marks unused slots. With ``counting``, correct predictions are also counted, as in evaluation.
    """
    autocast = dtype.itemsize < 4
    tokens, hidden, wide = sum(size.lengths), size.hidden, size.intermediate
    generator = torch.Generator(device).manual_seed(0)
    # The output type of a norm under autocast differs between devices and types, so find it by calling a norm.
    with torch.autocast(device.type, dtype, enabled=autocast):
        row_1D = torch.zeros(1, hidden, dtype=dtype, device=device)
        after_norm = F.layer_norm(row_1D, (hidden,), torch.ones(hidden, device=device)).dtype
    # A multiply-add counts as two operations. The backward pass has two products for each product of the forward pass.
    feed_forward, decoder = 2.0 * tokens * hidden * wide, 2.0 * size.masked * hidden * size.vocabulary
    scores = 4.0 * hidden * sum(length**2 for length in size.lengths)
    # The embedding tables are fp32 parameters, independent of the type of the matrix products.
    row, row_of_tables = (tokens * hidden * width for width in (dtype.itemsize, torch.float32.itemsize))
    wide_row = tokens * wide * dtype.itemsize
    # The forward pass moves query, key, value and output.
    attention = LeastWork((scores, 3 * scores), (4 * row, 12 * row))

    def case(op: str, work: LeastWork, means: Mapping[int, float]) -> Case:
        """Return a case with example inputs, in which parameters replace the inputs at the positions in ``means``."""
        # `example_inputs` returns the arguments in the order of the op's parameters.
        drawn, _ = example_inputs(op, device, dtype, size)
        arguments = tuple(
            _parameter(generator, *value.shape, mean=means[place]) if place in means else _leaf(value)
            for place, value in enumerate(drawn)
        )
        return Case(op, arguments, dtype, work, autocast=autocast, gradients=True)

    loss = case("masked_lm_loss", LeastWork((decoder, 3 * decoder)), {1: 0, 2: 0})
    states, *parameters, labels, _ = cast("tuple[Tensor, ...]", loss.arguments)
    labels[-2:] = -1
    return [
        case("varlen_attention", attention, {}),
        case("varlen_self_attention", attention, {}),
        case("dropout_add_layer_norm", LeastWork(moved=(3 * row, 7 * row)), {1: 0, 3: 1, 4: 0}),
        case(
            "embedding_layer_norm",
            LeastWork(moved=(2 * row_of_tables, 6 * row_of_tables)),
            {3: 0, 4: 0, 5: 0, 6: 1, 7: 0},
        ),
        case("dense_gelu", LeastWork((feed_forward, 3 * feed_forward)), {1: 0, 2: 0}),
        case("bias_gelu", LeastWork(moved=(2 * wide_row, 5 * wide_row)), {1: 0}),
        # The masked-LM head's input is the output of a norm, whose type may differ from the residual stream's.
        replace(loss, arguments=(_leaf(states.to(after_norm)), *parameters, labels, counting)),
    ]


def fp8_cases(size: Size, device: torch.device) -> list[Case]:
    """Return cases for the FP8 ops as an encoder layer calls them: bf16 activations, fp32 parameters, small gradients."""
    tokens, hidden, wide = sum(size.lengths), size.hidden, size.intermediate
    generator = torch.Generator(device).manual_seed(0)
    weight = _parameter(generator, wide, hidden).detach()  # bert.products.fp8 also passes a detached weight
    bias = _parameter(generator, wide)
    norm = {place: _parameter(generator, hidden, mean=mean) for place, mean in ((1, 0), (3, 1), (4, 0))}

    def case(
        op: str,
        placed: Mapping[int, object],
        moved: float = 0.0,
        flop: float = 0.0,
        variant: str = "",
        size: Size = size,
    ) -> Case:
        """Return a case with example inputs, but replace the inputs at the positions in ``placed``, such as scales."""
        drawn, _ = example_inputs(op, device, torch.bfloat16, size)
        arguments = tuple(placed.get(place, value) for place, value in enumerate(drawn))
        return Case(op, arguments, torch.bfloat16, LeastWork((flop, 0), (moved, 0)), variant=variant)

    def scalar(value: float) -> Tensor:
        return torch.full((), value, device=device)

    def gradient(*shape: int) -> Tensor:
        # Gradients have this size if the loss is divided by the global batch size.
        return (1e-6 * torch.randn(shape, generator=generator, device=device)).bfloat16()

    def in_fp8(rows: int, dtype: torch.dtype) -> Tensor:
        # A weight's gradient is a product that sums over the tokens, so the columns of its operands are tokens.
        return torch.randn(rows, of_products, generator=generator, device=device).to(dtype)

    # This scale brings the small gradients into the range of E5M2.
    upward = scalar(2.0**30)
    halves = {2: scalar(0.5), 3: scalar(0.25)}
    of_products = -(-tokens // _TOKENS) * _TOKENS
    aligned = replace(size, lengths=(of_products,))
    of_a_weight = {**halves, 0: in_fp8(wide, E5M2), 1: in_fp8(hidden, E4M3), 4: torch.float32, 6: False}
    cells, wide_cells, flop = tokens * hidden, tokens * wide, 2.0 * of_products * hidden * wide
    backward = {0: gradient(tokens, wide), 2: bias, 3: upward}
    heads_THE = tokens, size.heads, hidden // size.heads
    attention_backward = {0: gradient(*heads_THE), 7: Dropout(0.1, torch.tensor([1, 2], device=device), 3), 8: upward}
    norm_backward = {0: gradient(tokens, hidden), 1: gradient(tokens, hidden), 8: upward}
    norm_backward |= {3: norm[1], 5: norm[3]}
    return [
        # A pass reads 2 or 4 bytes for each element, and writes 1 byte for each FP8 copy of the element.
        case("cast_fp8", {1: scalar(64.0)}, 3 * cells),
        case("cast_transpose_fp8", {1: scalar(64.0)}, 4 * cells),
        case("cast_transpose_into_fp8", {0: weight, 1: scalar(256.0)}, 6 * wide * hidden),
        case("cast_transpose_sum_fp8", {0: gradient(tokens, 3 * hidden), 1: upward}, 12 * cells),
        case("bias_gelu_cast_fp8", {1: bias, 2: scalar(32.0)}, 4 * wide_cells),
        case("bias_gelu_backward_cast_fp8", backward, 6 * wide_cells),
        case("attention_cast_fp8", {4: scalar(64.0)}),
        case("attention_backward_cast_fp8", attention_backward),
        case("add_norm_cast_fp8", {**norm, 7: scalar(32.0)}, 8 * cells),
        case("add_norm_backward_cast_fp8", norm_backward, 12 * cells),
        case("scaled_matmul", halves, flop=flop, size=aligned),
        case("scaled_matmul", of_a_weight, flop=flop, variant=" of a weight's gradient", size=aligned),
    ]


def lamb_cases(size: Size, device: torch.device) -> list[Case]:
    """Return cases for LAMB with moments as in the middle of a training, on a vector with many segments."""
    generator, made = torch.Generator(device).manual_seed(0), []
    for op in ("sum_of_squares", "lamb_step", "lamb_directions", "lamb_apply"):
        drawn, named = example_inputs(op, device, torch.float32, size)
        arguments = [_in_the_middle(value, generator) for value in drawn]
        if op == "lamb_apply":
            adapted = sum(arguments[2].adapted)
            arguments[3] = 1 + torch.rand(2, adapted, generator=generator, dtype=torch.float64, device=device)
        made.append(Case(op, tuple(arguments), torch.float32, named=named))
    return made


def weight_gradient_cases(size: Size, device: torch.device) -> list[Case]:
    """Return a case that adds a weight's gradient to a sum, and one that overwrites the sum, as in a step's first batch."""
    total, *operands = example_inputs("accumulate_weight_gradient", device, torch.bfloat16, size)[0]
    total.normal_(generator=torch.Generator(device).manual_seed(0))
    work = LeastWork((2.0 * sum(size.lengths) * size.hidden * size.intermediate, 0))
    added = Case("accumulate_weight_gradient", (total, *operands), torch.bfloat16, work)
    # The old values are NaN, so a kernel that reads them has a wrong result.
    written = torch.full_like(total, torch.nan), *operands, True
    return [added, replace(added, arguments=written, variant=" of the first batch")]


def _in_the_middle(value: Any, generator: torch.Generator) -> Any:
    """Fill LAMB's moments as in the middle of a training, and cut its vector into `SEGMENTS` segments."""
    if isinstance(value, LambState):
        filled = LambState.zeros_like(value.momentum_P)
        filled.momentum_P.normal_(generator=generator)
        filled.variance_P.uniform_(generator=generator)
        filled.update_P.normal_(generator=generator)
        return filled
    if isinstance(value, LambSegments):
        size = sum(value.sizes)
        places = torch.randperm(size - 1, generator=torch.Generator().manual_seed(0))[: SEGMENTS - 1]
        cuts = places.add(1).sort().values.tolist()
        sizes = tuple(after - before for before, after in pairwise([0, *cuts, size]))
        return LambSegments(sizes, tuple(index % 3 > 0 for index in range(len(sizes))))
    return value


def call(op: str, name: str, *arguments: object, **settings: object) -> Any:
    """Call one implementation of an op. Raises ``NotUsableError`` if it cannot take these arguments."""
    chosen = OPS[op].implementations[name]
    if reasons := chosen.unsupported_reasons(*arguments, **settings):
        raise NotUsableError("; ".join(reasons))
    if op == "attention_backward_cast_fp8":
        return _attention_both_ways(chosen, *arguments)
    return chosen.function(op)(*arguments, **settings)


def _attention_both_ways(chosen: Implementation, *arguments: Any) -> Any:
    """Run an implementation's forward pass, and then its backward pass with the tensors that the forward pass saved."""
    gradient, qkv, bounds, _context, _lse, _kept, *others = arguments
    longest, dropout, scale, amax = others
    forward = chosen.function("attention_cast_fp8")
    context, _cast, _transposed, *saved = forward(qkv, bounds, longest, dropout, scale, torch.zeros_like(amax))
    return chosen.function("attention_backward_cast_fp8")(gradient, qkv, bounds, context, *saved, *others)
