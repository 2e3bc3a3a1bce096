"""Every public op with its implementations, and what is chosen for all of them; `kernels` has them for its users."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

from kernels.reference import attention_fp8, fp8, lamb, layer_norm_fp8
from kernels.reference import ops as reference
from kernels.reference.fp8 import new_scales
from kernels.reference.lamb import LambHyperparameters, LambSegments, LambState, WeightCast
from kernels.reference.ops import compute_dtype, cross_entropy_sum, masked_lm_logits
from kernels.reference.random import Dropout
from kernels.registry import Implementation, Op

_Parameters = ParamSpec("_Parameters")
_Returned = TypeVar("_Returned")

_PYTORCH = Implementation("pytorch", "kernels.libraries.pytorch", repeatable=False)
# It reads lengths on the host, as the definition does.
_PYTORCH_ATTENTION = Implementation("pytorch", "kernels.libraries.pytorch", capturable=False, repeatable=False)
_PYTORCH_PRODUCTS = Implementation("pytorch", "kernels.libraries.pytorch_products")
_PYTORCH_FP8 = Implementation("pytorch", "kernels.libraries.pytorch_fp8")
_FLASH_ATTENTION = Implementation(
    "flash_attn", "kernels.libraries.flash_attention", requires="flash_attn", repeatable=False
)
_FLASH_ATTENTION_3 = Implementation(
    "flash_attn_3", "kernels.libraries.flash_attention_3", requires="flash_attn_interface"
)
_APEX_NORM = Implementation("apex", "kernels.libraries.apex", requires="fused_layer_norm_cuda", repeatable=False)
_APEX_LOSS = Implementation("apex", "kernels.libraries.apex", requires="xentropy_cuda")


# One order for a GPU and one for a CPU: interpreting a kernel is for tests, and takes seconds to minutes.
def _op(
    definition: Callable[_Parameters, _Returned], triton: str, *others: Implementation, capturable: bool = True
) -> Op[_Parameters, _Returned]:
    """An op with its implementations in the order of preference; on a CPU Triton's, in its interpreter, comes last.

    ``capturable``: whether the definition is.
    """
    compiled = Implementation("triton", triton, requires="triton")
    # The definition can compute anything, and comes after the libraries.
    plain = (*others, Implementation("reference", definition.__module__, capturable=capturable))
    return Op(definition, {"cuda": (compiled, *plain), "cpu": (*plain, compiled)})


_ATTENTIONS = (_FLASH_ATTENTION, _FLASH_ATTENTION_3, _PYTORCH_ATTENTION)
varlen_attention = _op(reference.varlen_attention, "kernels.triton.attention.varlen", *_ATTENTIONS, capturable=False)
varlen_self_attention = _op(
    reference.varlen_self_attention, "kernels.triton.attention.varlen", *_ATTENTIONS, capturable=False
)
dropout_add_layer_norm = _op(reference.dropout_add_layer_norm, "kernels.triton.norms.layer_norm", _APEX_NORM, _PYTORCH)
dense_gelu = _op(reference.dense_gelu, "kernels.triton.dense")
bias_gelu = _op(reference.bias_gelu, "kernels.triton.dense")
embedding_layer_norm = _op(reference.embedding_layer_norm, "kernels.triton.norms.embedding_norm", _APEX_NORM, _PYTORCH)
masked_lm_loss = _op(reference.masked_lm_loss, "kernels.triton.loss", _APEX_LOSS)
_DEFINITION = Implementation("reference", "kernels.reference.ops")
# No kernel of Triton's: cuBLAS adds to what is there in the epilogue of its product, which no pass behind it can match.
# On a CPU the definition comes first, as PyTorch has no such product there.
accumulate_weight_gradient = Op(
    reference.accumulate_weight_gradient,
    {"cuda": (_PYTORCH_PRODUCTS, _DEFINITION), "cpu": (_DEFINITION, _PYTORCH_PRODUCTS)},
)
lamb_step = _op(lamb.lamb_step, "kernels.triton.lamb")
lamb_directions = _op(lamb.lamb_directions, "kernels.triton.lamb")
lamb_apply = _op(lamb.lamb_apply, "kernels.triton.lamb")
sum_of_squares = _op(lamb.sum_of_squares, "kernels.triton.squares")
cast_fp8 = _op(fp8.cast_fp8, "kernels.triton.fp8")
cast_transpose_fp8 = _op(fp8.cast_transpose_fp8, "kernels.triton.fp8")
cast_transpose_into_fp8 = _op(fp8.cast_transpose_into_fp8, "kernels.triton.fp8")
cast_transpose_sum_fp8 = _op(fp8.cast_transpose_sum_fp8, "kernels.triton.fp8")
bias_gelu_cast_fp8 = _op(fp8.bias_gelu_cast_fp8, "kernels.triton.fp8")
bias_gelu_backward_cast_fp8 = _op(fp8.bias_gelu_backward_cast_fp8, "kernels.triton.fp8")
attention_cast_fp8 = _op(attention_fp8.attention_cast_fp8, "kernels.triton.attention.fp8", capturable=False)
attention_backward_cast_fp8 = _op(
    attention_fp8.attention_backward_cast_fp8, "kernels.triton.attention.fp8", capturable=False
)
add_norm_cast_fp8 = _op(layer_norm_fp8.add_norm_cast_fp8, "kernels.triton.norms.layer_norm_fp8")
add_norm_backward_cast_fp8 = _op(layer_norm_fp8.add_norm_backward_cast_fp8, "kernels.triton.norms.layer_norm_fp8")
_DEFINITION_FP8 = Implementation("reference", "kernels.reference.fp8")
# The definition comes first on a CPU, where PyTorch's product is right and several times as slow.
scaled_matmul = Op(fp8.scaled_matmul, {"cuda": (_PYTORCH_FP8, _DEFINITION_FP8), "cpu": (_DEFINITION_FP8, _PYTORCH_FP8)})

# Collected from the module itself, so that no op can be left out of the table.
OPS: dict[str, Op[..., Any]] = {op.name: op for op in tuple(globals().values()) if isinstance(op, Op)}
"""All of the above, in order."""


def choose(implementations: Mapping[str, str]) -> None:
    """Ask for implementations by op, such as ``{"varlen_attention": "triton"}``; ``auto`` takes an earlier choice back.

    Raises:
        ValueError: no such op, or no such implementation of it; then nothing has changed.
    """
    # All are checked before any is changed: a wrong name must leave no half of a choice.
    for op, name in implementations.items():
        if op not in OPS:
            raise ValueError(f"there is no op {op!r}; expected one of {', '.join(OPS)}")
        OPS[op].check(name)
    for op, name in implementations.items():
        OPS[op].ask_for(name)


@contextmanager
def captured(recomputed: Collection[str] = ()) -> Iterator[None]:
    """Choose for a GPU, for the length of a block, only what a CUDA graph can capture; the choices stay.

    Ops named in ``recomputed`` are also called in the backward pass, which must draw the same dropout again.

    Raises:
        ValueError: inside, from an op that has none for its inputs, with the reasons.
    """
    with ExitStack() as stack:
        for op in OPS.values():
            stack.enter_context(op.captured(op.name in recomputed))
        yield


__all__ = [
    "OPS",
    "Dropout",
    "LambHyperparameters",
    "LambSegments",
    "LambState",
    "WeightCast",
    "accumulate_weight_gradient",
    "add_norm_backward_cast_fp8",
    "add_norm_cast_fp8",
    "attention_backward_cast_fp8",
    "attention_cast_fp8",
    "bias_gelu",
    "bias_gelu_backward_cast_fp8",
    "bias_gelu_cast_fp8",
    "captured",
    "cast_fp8",
    "cast_transpose_fp8",
    "cast_transpose_into_fp8",
    "cast_transpose_sum_fp8",
    "choose",
    "compute_dtype",
    "cross_entropy_sum",
    "dense_gelu",
    "dropout_add_layer_norm",
    "embedding_layer_norm",
    "lamb_apply",
    "lamb_directions",
    "lamb_step",
    "masked_lm_logits",
    "masked_lm_loss",
    "new_scales",
    "scaled_matmul",
    "sum_of_squares",
    "varlen_attention",
    "varlen_self_attention",
]
