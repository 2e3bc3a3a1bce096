"""All public ops with their implementations, and functions that choose the implementations of several ops at once.

Users import the ops from ``kernels``. Each of the functions ``_pytorch``, ``_apex``, ``_flash_attn`` and ``_triton``
imports one library and returns its implementations. It is called only when one of these implementations is first needed.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from kernels.products import accumulate_weight_gradient  # noqa: F401  for users of ``kernels``
from kernels.reference import fp8, lamb
from kernels.reference import ops as reference
from kernels.reference.fp8 import new_scales  # noqa: F401  for users of ``kernels``
from kernels.reference.lamb import LambHyperparameters, LambSegments, LambState, WeightCast  # noqa: F401  for users of ``kernels``
from kernels.reference.ops import compute_dtype, cross_entropy_sum, masked_lm_logits  # noqa: F401  for users of ``kernels``
from kernels.reference.random import Dropout  # noqa: F401  for users of ``kernels``
from kernels.registry import Functions, Implementation, Op, Parameters, Returned


def _pytorch() -> Functions:
    from kernels.libraries import pytorch

    return {
        "varlen_attention": (pytorch.varlen_attention, None),
        "varlen_self_attention": (pytorch.varlen_self_attention, None),
        "dropout_add_layer_norm": (pytorch.dropout_add_layer_norm, None),
        "embedding_layer_norm": (pytorch.embedding_layer_norm, None),
        "scaled_matmul": (pytorch.scaled_matmul, pytorch.scaled_matmul_unsupported_reasons),
    }


def _apex() -> Functions:
    from kernels.libraries import apex

    return {
        "dropout_add_layer_norm": (apex.dropout_add_layer_norm, apex.norm_unsupported_reasons),
        "embedding_layer_norm": (apex.embedding_layer_norm, apex.norm_unsupported_reasons),
        "masked_lm_loss": (apex.masked_lm_loss, apex.loss_unsupported_reasons),
    }


def _flash_attn() -> Functions:
    from kernels.libraries import flash_attention as flash

    return {
        "varlen_attention": (flash.varlen_attention, flash.unsupported_reasons),
        "varlen_self_attention": (flash.varlen_self_attention, flash.unsupported_reasons),
    }


def _triton() -> Functions:
    from kernels.triton import dense, fp8, lamb, loss, squares
    from kernels.triton.attention import fp8 as attention_fp8
    from kernels.triton.attention import varlen
    from kernels.triton.inputs import tensor_reasons, vector_reasons
    from kernels.triton.norms import embedding_norm, layer_norm, layer_norm_fp8

    norm_cast, norm_backward_cast = layer_norm_fp8.add_norm_cast_fp8, layer_norm_fp8.add_norm_backward_cast_fp8
    return {
        "varlen_attention": (varlen.varlen_attention, varlen.unsupported_reasons),
        "varlen_self_attention": (varlen.varlen_self_attention, varlen.self_attention_unsupported_reasons),
        "dropout_add_layer_norm": (layer_norm.dropout_add_layer_norm, layer_norm.unsupported_reasons),
        "dense_gelu": (dense.dense_gelu, tensor_reasons),
        "bias_gelu": (dense.bias_gelu, tensor_reasons),
        "embedding_layer_norm": (embedding_norm.embedding_layer_norm, embedding_norm.unsupported_reasons),
        "masked_lm_loss": (loss.masked_lm_loss, loss.unsupported_reasons),
        "lamb_step": (lamb.lamb_step, vector_reasons),
        "lamb_directions": (lamb.lamb_directions, vector_reasons),
        "lamb_apply": (lamb.lamb_apply, vector_reasons),
        "sum_of_squares": (squares.sum_of_squares, vector_reasons),
        "cast_fp8": (fp8.cast_fp8, fp8.unsupported_reasons),
        "cast_transpose_fp8": (fp8.cast_transpose_fp8, fp8.unsupported_reasons),
        "cast_transpose_into_fp8": (fp8.cast_transpose_into_fp8, fp8.unsupported_reasons),
        "cast_transpose_sum_fp8": (fp8.cast_transpose_sum_fp8, fp8.unsupported_reasons),
        "bias_gelu_cast_fp8": (fp8.bias_gelu_cast_fp8, fp8.unsupported_reasons),
        "bias_gelu_backward_cast_fp8": (fp8.bias_gelu_backward_cast_fp8, fp8.unsupported_reasons),
        "attention_cast_fp8": (attention_fp8.attention_cast_fp8, attention_fp8.unsupported_reasons),
        "attention_backward_cast_fp8": (
            attention_fp8.attention_backward_cast_fp8,
            attention_fp8.backward_unsupported_reasons,
        ),
        "add_norm_cast_fp8": (norm_cast, layer_norm_fp8.unsupported_reasons),
        "add_norm_backward_cast_fp8": (norm_backward_cast, layer_norm_fp8.backward_unsupported_reasons),
    }


_TRITON = Implementation("triton", _triton, requires="triton")
_FLASH_ATTN = Implementation("flash_attn", _flash_attn, requires="flash_attn", repeatable=False)
_APEX_NORM = Implementation("apex", _apex, requires="fused_layer_norm_cuda", repeatable=False)
_APEX_LOSS = Implementation("apex", _apex, requires="xentropy_cuda")
_PYTORCH_PRODUCT = Implementation("pytorch", _pytorch)
_PYTORCH_NORM = Implementation("pytorch", _pytorch, repeatable=False)
# Like the reference, PyTorch's attention reads the sequence lengths on the host, so a CUDA graph cannot capture it.
_PYTORCH_ATTENTION = Implementation("pytorch", _pytorch, capturable=False, repeatable=False)


def _op(
    definition: Callable[Parameters, Returned], *fast: Implementation, capturable: bool = True
) -> Op[Parameters, Returned]:
    """Create an op from its definition and faster implementations, in their order of preference on a GPU.

    ``capturable`` tells whether a CUDA graph can capture the definition. On a CPU, two implementations come last: Triton's,
    because interpreting a kernel takes seconds to minutes, and PyTorch's FP8 product, which is several times slower than
    the definition.
    """
    plain = Implementation("reference", lambda: {definition.__name__: (definition, None)}, capturable=capturable)
    slow = tuple(each for each in fast if each in (_TRITON, _PYTORCH_PRODUCT))
    others = tuple(each for each in fast if each not in slow)
    return Op(definition, {"cuda": (*fast, plain), "cpu": (*others, plain, *slow)})


_ATTENTIONS = _TRITON, _FLASH_ATTN, _PYTORCH_ATTENTION
varlen_attention = _op(reference.varlen_attention, *_ATTENTIONS, capturable=False)
varlen_self_attention = _op(reference.varlen_self_attention, *_ATTENTIONS, capturable=False)
dropout_add_layer_norm = _op(reference.dropout_add_layer_norm, _TRITON, _APEX_NORM, _PYTORCH_NORM)
dense_gelu = _op(reference.dense_gelu, _TRITON)
bias_gelu = _op(reference.bias_gelu, _TRITON)
embedding_layer_norm = _op(reference.embedding_layer_norm, _TRITON, _APEX_NORM, _PYTORCH_NORM)
masked_lm_loss = _op(reference.masked_lm_loss, _TRITON, _APEX_LOSS)
lamb_step = _op(lamb.lamb_step, _TRITON)
lamb_directions = _op(lamb.lamb_directions, _TRITON)
lamb_apply = _op(lamb.lamb_apply, _TRITON)
sum_of_squares = _op(lamb.sum_of_squares, _TRITON)
cast_fp8 = _op(fp8.cast_fp8, _TRITON)
cast_transpose_fp8 = _op(fp8.cast_transpose_fp8, _TRITON)
cast_transpose_into_fp8 = _op(fp8.cast_transpose_into_fp8, _TRITON)
cast_transpose_sum_fp8 = _op(fp8.cast_transpose_sum_fp8, _TRITON)
bias_gelu_cast_fp8 = _op(fp8.bias_gelu_cast_fp8, _TRITON)
bias_gelu_backward_cast_fp8 = _op(fp8.bias_gelu_backward_cast_fp8, _TRITON)
attention_cast_fp8 = _op(fp8.attention_cast_fp8, _TRITON, capturable=False)
attention_backward_cast_fp8 = _op(fp8.attention_backward_cast_fp8, _TRITON, capturable=False)
add_norm_cast_fp8 = _op(fp8.add_norm_cast_fp8, _TRITON)
add_norm_backward_cast_fp8 = _op(fp8.add_norm_backward_cast_fp8, _TRITON)
scaled_matmul = _op(fp8.scaled_matmul, _PYTORCH_PRODUCT)

# Collect the ops from the module's globals, so that none can be forgotten.
OPS: dict[str, Op[..., Any]] = {op.name: op for op in tuple(globals().values()) if isinstance(op, Op)}
"""All ops by name, in the order of their definitions in this module."""


def choose(implementations: Mapping[str, str]) -> None:
    """Choose implementations explicitly, such as ``{"varlen_attention": "triton"}``. ``auto`` undoes an earlier choice.

    Raises ``ValueError``, and changes no choice, if an op or an implementation does not exist.
    """
    for op, name in implementations.items():
        if op not in OPS:
            raise ValueError(f"there is no op {op!r}; expected one of {', '.join(OPS)}")
        OPS[op].check(name)
    for op, name in implementations.items():
        OPS[op].ask_for(name)


@contextmanager
def captured(recomputed: Collection[str] = ()) -> Iterator[None]:
    """Restrict choices on a GPU to implementations that a CUDA graph can capture, inside a ``with`` block.

    Choices made inside the block remain in effect afterwards. The ops named in ``recomputed`` are called again in the
    backward pass, so only implementations that then draw the same dropout mask are chosen for them. An op that is
    called inside the block raises ``ValueError`` with the reasons if no such implementation can handle its inputs.
    """
    with ExitStack() as stack:
        for op in OPS.values():
            stack.enter_context(op.captured(op.name in recomputed))
        yield
