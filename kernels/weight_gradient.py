"""The op that adds a matrix product to a weight's gradient.

It is defined apart from the other ops because Triton's loss also calls it.
"""

from kernels.libraries import pytorch_products
from kernels.reference import ops as reference
from kernels.registry import Implementation, Op

_FUNCTIONS = pytorch_products.accumulate_weight_gradient, pytorch_products.unsupported_reasons
# A Triton kernel is not needed, because cuBLAS can add to the gradient in the epilogue of the product.
_PYTORCH = Implementation("pytorch", lambda: {"accumulate_weight_gradient": _FUNCTIONS})
_REFERENCE = Implementation(
    "reference", lambda: {"accumulate_weight_gradient": (reference.accumulate_weight_gradient, None)}
)
# On a CPU, PyTorch does not support this product, so the reference comes first.
accumulate_weight_gradient = Op(
    reference.accumulate_weight_gradient, {"cuda": (_PYTORCH, _REFERENCE), "cpu": (_REFERENCE, _PYTORCH)}
)
