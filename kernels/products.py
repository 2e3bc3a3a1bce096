"""Precision of matrix products by PyTorch's GPU libraries."""

import torch


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
