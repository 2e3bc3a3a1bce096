"""Matrix products by PyTorch's GPU libraries: their precision, and the op that adds one to a weight's gradient.

``torch.addmm`` has supported adding products of 16-bit operands to fp32 since PyTorch 2.10, on CUDA only. The op is not
defined in ``kernels.ops``, because Triton's loss also calls it.
"""

import torch
from torch import Tensor

from kernels.reference import ops as reference
from kernels.registry import Implementation, Op


def set_product_precision() -> None:
    """Make this process accumulate all matrix products in fp32, and multiply fp32 operands without TF32.

    * By default, PyTorch lets cuBLAS split a product along the summed dimension (split-K) and add the partial sums in the
      16-bit type of the result. A weight gradient is a sum over all tokens of a micro-batch, and its partial sums may
      largely cancel.
    * Containers that set ``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE`` turn on TF32, which keeps only 10 bits of the mantissa.

    This has no effect on a CPU.
    """
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("highest")


def add_product(gradient_NK: Tensor, output_gradient_TN: Tensor, input_TK: Tensor, overwrite: bool = False) -> Tensor:
    """Add ``output_gradient.T @ input`` to an fp32 gradient in place, or overwrite the gradient, and return it."""
    transposed_NT = output_gradient_TN.t()
    # Unlike addmm, mm does not read the old gradient, which may contain NaN.
    if overwrite:
        return torch.mm(transposed_NT, input_TK, out_dtype=torch.float32, out=gradient_NK)
    # With the gradient as ``out``, cuBLAS adds in the product's epilogue, without another pass over memory.
    return torch.addmm(gradient_NK, transposed_NT, input_TK, out_dtype=torch.float32, out=gradient_NK)


def unsupported_reasons(
    gradient_NK: Tensor, output_gradient_TN: Tensor, input_TK: Tensor, *_: object, **__: object
) -> list[str]:
    reasons = []
    if not gradient_NK.is_cuda:
        reasons.append(f"tensors on {gradient_NK.device.type}: PyTorch supports this product on CUDA only")
    dtypes = output_gradient_TN.dtype, input_TK.dtype
    if dtypes not in ((torch.bfloat16,) * 2, (torch.float16,) * 2):
        reasons.append(f"operands in {dtypes[0]} and {dtypes[1]}: expected bfloat16 or float16 twice")
    if gradient_NK.dtype != torch.float32:
        reasons.append(f"a gradient in {gradient_NK.dtype}, expected float32")
    return reasons


# A Triton kernel is not needed, because cuBLAS can add to the gradient in the epilogue of the product.
_PYTORCH = Implementation("pytorch", lambda: {"accumulate_weight_gradient": (add_product, unsupported_reasons)})
_REFERENCE = Implementation(
    "reference", lambda: {"accumulate_weight_gradient": (reference.accumulate_weight_gradient, None)}
)
# On a CPU, PyTorch does not support this product, so the reference comes first.
accumulate_weight_gradient = Op(
    reference.accumulate_weight_gradient, {"cuda": (_PYTORCH, _REFERENCE), "cpu": (_REFERENCE, _PYTORCH)}
)
