"""Matrix products of 16-bit operands that cuBLAS adds to an fp32 tensor on a GPU.

The contract is the same as in ``kernels.reference.ops``. ``torch.addmm`` has supported adding to fp32 since PyTorch 2.10, on
CUDA only.
"""

import torch
from torch import Tensor


def accumulate_weight_gradient(
    gradient_NK: Tensor, output_gradient_TN: Tensor, input_TK: Tensor, overwrite: bool = False
) -> Tensor:
    """Add ``output_gradient.T @ input`` to an fp32 gradient in place, or overwrite the gradient, and return it."""
    transposed_NT = output_gradient_TN.t()
    # mm does not read the old gradient, which may be NaN.
    if overwrite:
        return torch.mm(transposed_NT, input_TK, out_dtype=torch.float32, out=gradient_NK)
    # With the gradient as ``out``, cuBLAS adds in the product's epilogue, without another pass over memory.
    return torch.addmm(gradient_NK, transposed_NT, input_TK, out_dtype=torch.float32, out=gradient_NK)


def unsupported_reasons(
    gradient_NK: Tensor, output_gradient_TN: Tensor, input_TK: Tensor, *_: object, **__: object
) -> list[str]:
    """Return the reasons why PyTorch cannot compute this product; empty if it can."""
    reasons = []
    if not gradient_NK.is_cuda:
        reasons.append(f"tensors on {gradient_NK.device.type}: PyTorch supports this product on CUDA only")
    dtypes = output_gradient_TN.dtype, input_TK.dtype
    if dtypes not in ((torch.bfloat16,) * 2, (torch.float16,) * 2):
        reasons.append(f"operands in {dtypes[0]} and {dtypes[1]}: expected bfloat16 or float16 twice")
    if gradient_NK.dtype != torch.float32:
        reasons.append(f"a gradient in {gradient_NK.dtype}, expected float32")
    return reasons
