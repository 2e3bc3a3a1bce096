"""Products that PyTorch adds to what is there, that is cuBLAS on a GPU: operands in 16 bits, sums in fp32.

Same contract as in ``kernels.reference.ops``. ``torch.addmm`` takes fp32 to add to since PyTorch 2.10, on CUDA only.
"""

import torch
from torch import Tensor


def accumulate_weight_gradient(
    gradient_NK: Tensor, output_gradient_TN: Tensor, input_TK: Tensor, overwrite: bool = False
) -> Tensor:
    """Add ``output_gradient.T @ input`` to an fp32 gradient in the product's epilogue, or write it there."""
    # A view: cuBLAS takes the transposed operand as it lies.
    transposed_NT = output_gradient_TN.t()
    # mm writes without reading what is there, which may be NaN.
    if overwrite:
        return torch.mm(transposed_NT, input_TK, out_dtype=torch.float32, out=gradient_NK)
    # `out` is the gradient itself: the sum is made in the epilogue, without a pass of its own.
    return torch.addmm(gradient_NK, transposed_NT, input_TK, out_dtype=torch.float32, out=gradient_NK)


def unsupported_reasons(
    gradient_NK: Tensor, output_gradient_TN: Tensor, input_TK: Tensor, overwrite: bool = False
) -> list[str]:
    """Say why these cannot be taken; empty when they can."""
    del overwrite
    reasons = []
    if not gradient_NK.is_cuda:
        reasons.append(f"tensors on {gradient_NK.device.type}: PyTorch has such a product on CUDA only")
    if output_gradient_TN.dtype != input_TK.dtype or input_TK.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(
            f"operands in {output_gradient_TN.dtype} and {input_TK.dtype}: expected bfloat16 or float16 twice"
        )
    if gradient_NK.dtype != torch.float32:
        reasons.append(f"a gradient in {gradient_NK.dtype}, expected float32")
    if not gradient_NK.is_contiguous():
        reasons.append("a gradient that is not contiguous")
    return reasons
