"""Kernels that need too many resources, to test that ``tests.kernels.compiled`` detects them."""

import triton
import triton.language as tl

from kernels.configuration import Configuration

# pyright: reportArgumentType=false


@triton.jit
def lean(x, out, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place, mask=place < n), mask=place < n)


@triton.jit
def spilling(x, out, n, BLOCK: tl.constexpr):
    """Use 256 live values per thread, so that registers spill."""
    place = tl.arange(0, BLOCK)
    rows = tl.load(x + place[None, :] + n * tl.arange(0, 8)[:, None])
    total = tl.sum(tl.sum(rows, axis=1), axis=0)
    tl.store(out + place[None, :] + n * tl.arange(0, 8)[:, None], rows / total)


@triton.jit
def sharing(x, out, n, BLOCK: tl.constexpr):
    """Multiply tiles with more pipelined copies than fit into shared memory."""
    place = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, n, BLOCK):
        left = tl.load(x + place[:, None] * 1024 + (start + place)[None, :])
        right = tl.load(x + (start + place)[:, None] * 1024 + place[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + place[:, None] * 1024 + place[None, :], total.to(tl.float16))


def configurations() -> list[Configuration]:
    def configuration(kernel, block: int, kind: str, num_warps: int, num_stages: int) -> Configuration:
        types = {"x": kind, "out": kind, "n": "i32"}
        return Configuration.of(kernel.__name__, kernel, types, {"BLOCK": block}, num_warps, num_stages)

    return [
        configuration(lean, 1024, "*bf16", 4, 1),
        configuration(spilling, 1024, "*fp32", 1, 1),
        configuration(sharing, 128, "*fp16", 8, 6),
    ]
