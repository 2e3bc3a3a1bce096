"""Precision of the products of PyTorch's libraries on a GPU: set in one place for training, measuring and benchmarks."""

import torch


def set_product_precision() -> None:
    """Have every matrix product of this process added up in fp32, and that of fp32 operands multiplied as fp32.

    * PyTorch lets cuBLAS split a product along what it sums over, and add up the parts in the 16 bits of the result. A
      weight's gradient sums over all tokens of a micro-batch, and its parts may be larger than what remains of them: parts
      are added in fp32. Splitting itself stays allowed.
    * TF32, which keeps 10 bits of an operand, is off in PyTorch unless the environment says otherwise, as in containers that
      set ``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE``. The precision ``fp32`` and the definitions mean fp32.

    Changes nothing on a CPU.
    """
    # Settings of the process, not of a call: they hold for every product that follows.
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("highest")
