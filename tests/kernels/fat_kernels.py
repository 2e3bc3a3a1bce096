"""A kernel that needs too many registers, to test that ``tests.kernels.compiled`` detects it."""

import triton
import triton.language as tl

from kernels.configuration import Configuration

# pyright: reportArgumentType=false


@triton.jit
def spilling(x, out, n, BLOCK: tl.constexpr):
    """Use 256 live values per thread, so that registers spill."""
    place = tl.arange(0, BLOCK)
    rows = tl.load(x + place[None, :] + n * tl.arange(0, 8)[:, None])
    total = tl.sum(tl.sum(rows, axis=1), axis=0)
    tl.store(out + place[None, :] + n * tl.arange(0, 8)[:, None], rows / total)


def configurations() -> list[Configuration]:
    types = {"x": "*fp32", "out": "*fp32", "n": "i32"}
    return [Configuration.of("spilling", spilling, types, {"BLOCK": 1024}, 1, 1)]
