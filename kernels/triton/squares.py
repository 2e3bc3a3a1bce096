# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
"""The sum of the squares of a long vector in Triton, in double precision.

Shape legend in ``kernels/__init__.py``; in addition, B blocks. Memory bandwidth limits the speed. There are no atomic sums,
so equal inputs give equal results.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configuration import Configuration
from kernels.triton.inputs import vector_reasons  # noqa: F401  for the table in kernels/ops.py

BLOCK = 8192
WARPS = 8


def sum_of_squares(vector_P: Tensor) -> Tensor:
    """Return the sum of the squares of an fp32 vector, fp64 []."""
    return _partial_sums(vector_P).sum()


def configurations() -> list[Configuration]:
    types = {"vector": "*fp32", "partial_sums": "*fp64", "size": "i32"}
    return [Configuration.of("fp32", _kernel, types, {"BLOCK": BLOCK}, WARPS, 1)]


@torch.library.custom_op("mlperf_bert::partial_sums_of_squares", mutates_args=())
def _partial_sums(vector_P: Tensor) -> Tensor:
    """Return the sums of squares of B blocks, fp64 [B]."""
    partial_sums_B = vector_P.new_empty(-(-len(vector_P) // BLOCK), dtype=torch.float64)
    if len(vector_P):
        _kernel[(len(partial_sums_B),)](
            vector_P, partial_sums_B, len(vector_P), BLOCK=BLOCK, num_warps=WARPS, num_stages=1
        )
    return partial_sums_B


_partial_sums.register_fake(lambda vector_P: vector_P.new_empty(-(-len(vector_P) // BLOCK), dtype=torch.float64))


@triton.jit
def _kernel(vector, partial_sums, size, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    # The gradient of BERT-Large has 1.3 GB and does not fit in the cache, so its elements need not stay there.
    x = tl.load(vector + offsets, mask=offsets < size, other=0.0, eviction_policy="evict_first").to(tl.float64)
    tl.store(partial_sums + tl.program_id(0), tl.sum(x * x))
