"""Precision of the products of PyTorch's libraries on a GPU: set in one place for training, measuring and benchmarks."""

import torch


def set_product_precision() -> None:
    """Make this process accumulate all matrix products in fp32 and multiply fp32 operands as fp32.

    * By default PyTorch lets cuBLAS split a product along the summed dimension and add the parts in the 16 bits of the
      result. The parts of a weight's gradient, a sum over all tokens of a micro-batch, may largely cancel.
    * TF32, which keeps 10 bits of an operand, is on in containers that set ``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE``.

    Nothing changes on a CPU.
    """
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("highest")
