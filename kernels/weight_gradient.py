"""The op that adds a product to a weight's gradient, apart from the other ops because Triton's loss also calls it."""

from kernels.libraries import pytorch_products
from kernels.reference import ops as reference
from kernels.registry import Implementation, Op

_FUNCTIONS = pytorch_products.accumulate_weight_gradient, pytorch_products.unsupported_reasons
# There is no Triton kernel: cuBLAS adds to the gradient in the epilogue of its product.
_PYTORCH = Implementation("pytorch", lambda: {"accumulate_weight_gradient": _FUNCTIONS})
_REFERENCE = Implementation(
    "reference", lambda: {"accumulate_weight_gradient": (reference.accumulate_weight_gradient, None)}
)
# On a CPU PyTorch has no such product.
accumulate_weight_gradient = Op(
    reference.accumulate_weight_gradient, {"cuda": (_PYTORCH, _REFERENCE), "cpu": (_REFERENCE, _PYTORCH)}
)
