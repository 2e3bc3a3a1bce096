"""The public ops: tensors in, tensors out. The model calls these and nothing else.

Shape legend: T tokens of the flat stream, Q query tokens, S sequences, M masked tokens, D hidden, H heads, E head size,
F intermediate, V vocabulary, N rows, C classes, P parameters.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kernels import lamb, reference
from kernels.lamb import LambSegments, LambState
from kernels.random import Dropout
from kernels.reference import cross_entropy_sum
from kernels.registry import Implementation, Op

_Parameters = ParamSpec("_Parameters")
_Returned = TypeVar("_Returned")

_PYTORCH = Implementation("pytorch", "kernels.pytorch")
_FLASH_ATTENTION = Implementation("flash_attn", "kernels.flash_attention", requires="flash_attn")
_TORCH_VARLEN = Implementation("torch_varlen", "kernels.torch_varlen", requires="torch.nn.attention.varlen")


def _op(
    definition: Callable[_Parameters, _Returned], triton: str, *others: Implementation
) -> Op[_Parameters, _Returned]:
    """An op with its implementations in the order of preference; on a CPU Triton's, in its interpreter, comes last."""
    compiled = Implementation("triton", triton, requires="triton")
    plain = (*others, Implementation("reference", definition.__module__))
    return Op(definition, {"cuda": (compiled, *plain), "cpu": (*plain, compiled)})


varlen_attention = _op(
    reference.varlen_attention, "kernels.triton_attention", _FLASH_ATTENTION, _TORCH_VARLEN, _PYTORCH
)
dropout_add_layer_norm = _op(reference.dropout_add_layer_norm, "kernels.triton_layer_norm", _PYTORCH)
dense_gelu = _op(reference.dense_gelu, "kernels.triton_dense")
embedding_layer_norm = _op(reference.embedding_layer_norm, "kernels.triton_layer_norm", _PYTORCH)
masked_lm_loss = _op(reference.masked_lm_loss, "kernels.triton_loss")
lamb_step = _op(lamb.lamb_step, "kernels.triton_lamb")

OPS = {
    op.name: op
    for op in (
        varlen_attention,
        dropout_add_layer_norm,
        dense_gelu,
        embedding_layer_norm,
        masked_lm_loss,
        lamb_step,
    )
}

__all__ = [
    "OPS",
    "Dropout",
    "LambSegments",
    "LambState",
    "cross_entropy_sum",
    "dense_gelu",
    "dropout_add_layer_norm",
    "embedding_layer_norm",
    "lamb_step",
    "masked_lm_loss",
    "varlen_attention",
]
