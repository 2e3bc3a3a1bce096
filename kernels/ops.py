"""The table of all ops with their implementations, and functions that choose the implementations of several ops at once.

A function in ``kernels/reference/`` defines an op. Its decorator ``op`` looks up the faster implementations in the table.
Users import the ops from ``kernels``.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from kernels.registry import Implementation, Op, Parameters, Returned


def _triton(module: str, reasons: str = "unsupported_reasons") -> Implementation:
    # On a CPU, Triton is last, because interpreting a kernel takes seconds to minutes.
    return Implementation("triton", module, reasons, requires="triton", last_on_cpu=True)


_pytorch = partial(Implementation, "pytorch", "kernels.libraries.pytorch")
_apex = partial(Implementation, "apex", "kernels.libraries.apex")
_flash_attn = partial(Implementation, "flash_attn", "kernels.libraries.flash_attention", requires="flash_attn")

_FLASH_ATTN = _flash_attn("unsupported_reasons", repeatable=False)
_APEX_NORM = _apex("norm_reasons", requires="fused_layer_norm_cuda", repeatable=False)
# PyTorch's attention, like the reference, reads the sequence lengths on the host, so no CUDA graph can capture it.
_PYTORCH_ATTENTION = _pytorch(capturable=False, repeatable=False)
_PYTORCH_NORM = _pytorch(repeatable=False)

TABLE: Mapping[str, tuple[Implementation, ...]] = {
    "varlen_attention": (_triton("kernels.triton.attention.varlen"), _FLASH_ATTN, _PYTORCH_ATTENTION),
    "varlen_self_attention": (
        _triton("kernels.triton.attention.varlen", "fused_reasons"),
        _FLASH_ATTN,
        _PYTORCH_ATTENTION,
    ),
    "dropout_add_layer_norm": (_triton("kernels.triton.norms.layer_norm"), _APEX_NORM, _PYTORCH_NORM),
    "dense_gelu": (_triton("kernels.triton.dense", "tensor_reasons"),),
    "bias_gelu": (_triton("kernels.triton.dense", "tensor_reasons"),),
    # A Triton kernel is not needed, because cuBLAS can add the product to the gradient when it writes the product.
    "accumulate_weight_gradient": (_pytorch("gradient_reasons", last_on_cpu=True),),
    "embedding_layer_norm": (_triton("kernels.triton.norms.embedding_norm"), _APEX_NORM, _PYTORCH_NORM),
    "masked_lm_loss": (_triton("kernels.triton.loss"), _apex("loss_reasons", requires="xentropy_cuda")),
    "cast_fp8": (_triton("kernels.triton.fp8"),),
    "cast_transpose_fp8": (_triton("kernels.triton.fp8"),),
    "cast_transpose_into_fp8": (_triton("kernels.triton.fp8"),),
    "cast_transpose_sum_fp8": (_triton("kernels.triton.fp8"),),
    "bias_gelu_cast_fp8": (_triton("kernels.triton.fp8"),),
    "bias_gelu_backward_cast_fp8": (_triton("kernels.triton.fp8"),),
    "attention_cast_fp8": (_triton("kernels.triton.attention.fp8"),),
    "attention_backward_cast_fp8": (_triton("kernels.triton.attention.fp8", "backward_reasons"),),
    "add_norm_cast_fp8": (_triton("kernels.triton.norms.layer_norm_fp8"),),
    "add_norm_backward_cast_fp8": (_triton("kernels.triton.norms.layer_norm_fp8", "backward_reasons"),),
    # On a CPU, PyTorch's FP8 product is several times slower than the definition.
    "scaled_matmul": (_pytorch("scaled_matmul_reasons", last_on_cpu=True),),
    "lamb_step": (_triton("kernels.triton.lamb", "vector_reasons"),),
    "lamb_directions": (_triton("kernels.triton.lamb", "vector_reasons"),),
    "lamb_apply": (_triton("kernels.triton.lamb", "vector_reasons"),),
    "sum_of_squares": (_triton("kernels.triton.squares", "vector_reasons"),),
}
"""Implementations of each op, in order of preference. ``op`` appends the definition at the end. On a CPU, implementations
with ``last_on_cpu`` come after the definition. A call takes the first implementation that supports its inputs. If the run
has measured the implementations, the call takes the fastest one."""

_READ_LENGTHS = {"varlen_attention", "varlen_self_attention", "attention_cast_fp8", "attention_backward_cast_fp8"}
"""Ops whose definition reads the sequence lengths on the host, so that a CUDA graph cannot capture it."""

OPS: dict[str, Op[..., Any]] = {}
"""All ops by name. ``op`` registers them when ``kernels`` imports the definitions."""


def op(definition: Callable[Parameters, Returned]) -> Op[Parameters, Returned]:
    """Create an op from its definition and its row in the table. Raises ``ValueError`` if there is no such row."""
    name = definition.__name__
    if name not in TABLE:
        raise ValueError(f"{name} has no row in the table of kernels/ops.py; add one")
    reference = Implementation("reference", {name: definition}, capturable=name not in _READ_LENGTHS)
    made = OPS[name] = Op(definition, (*TABLE[name], reference))
    return made


def choose(implementations: Mapping[str, str]) -> None:
    """Choose implementations explicitly, such as ``{"varlen_attention": "triton"}``. ``auto`` undoes an earlier choice.

    Raises ``ValueError``, and changes no choice, if an op or an implementation does not exist.
    """
    for name, implementation in implementations.items():
        if name not in OPS:
            raise ValueError(f"there is no op {name!r}; use one of {', '.join(OPS)}")
        OPS[name].check(implementation)
    for name, implementation in implementations.items():
        OPS[name].ask_for(implementation)


@contextmanager
def only_capturable(recomputed: Collection[str] = ()) -> Iterator[None]:
    """Restrict choices on a GPU to implementations that a CUDA graph can capture, inside a ``with`` block.

    Choices made inside the block remain in effect afterwards. The ops named in ``recomputed`` are called again in the
    backward pass, so their implementations must also draw the same dropout mask again. Inside the block, a call raises
    ``ValueError`` with the reasons if no permitted implementation supports its inputs.
    """
    with ExitStack() as stack:
        for each in OPS.values():
            stack.enter_context(each.only_capturable(each.name in recomputed))
        yield
