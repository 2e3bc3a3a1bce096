"""Faulty kernels. ``tests.kernels.interpreted`` must detect each fault of the first kernel, and
``tests.kernels.compiled`` must detect that the second kernel needs too many registers.
"""

import triton
import triton.language as tl

from kernels.configuration import Configuration

# pyright: reportArgumentType=false, reportOperatorIssue=false


@triton.jit
def copy(x, y, amax, size, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a block of ``x`` to ``y``, vectors of ``size`` elements, with the fault. ``amax`` is an int32."""
    lane = tl.arange(0, BLOCK)
    place = tl.program_id(0) * BLOCK + lane
    inside = place < size
    value = tl.load(x + place, mask=inside, other=0.0)
    if FAULT == "none":
        tl.store(y + place, value, mask=inside)
    elif FAULT == "stores past the end":
        tl.store(y + place, value, mask=place <= size)
    elif FAULT == "stores before the start":
        tl.store(y + place - 1, value, mask=inside)
    elif FAULT == "loads past the end":
        tl.store(y + place, tl.load(x + place), mask=inside)
    elif FAULT == "stores what others store":
        tl.store(y, tl.load(x + tl.program_id(0)))
    elif FAULT == "loads what others store":
        after = place + BLOCK
        tl.store(y + place, tl.load(y + after, mask=after < size, other=0.0), mask=inside)
    elif FAULT == "loads what others add":
        tl.atomic_add(y + lane, tl.load(y + lane))
    elif FAULT == "loads its own stores":
        tl.store(y + place, value, mask=inside)
        tl.store(y + place, tl.load(y + place, mask=inside, other=0.0), mask=inside)
    elif FAULT == "none, with a barrier":
        tl.store(y + place, value, mask=inside)
        tl.debug_barrier()
        tl.store(y + place, tl.load(y + place, mask=inside, other=0.0), mask=inside)
    elif FAULT == "stores an element twice":
        tl.store(y + tl.program_id(0) + lane // 2, 1.0)
    elif FAULT == "leaves an element out":
        tl.store(y + place, value, mask=place < size - 1)
    elif FAULT == "uses lanes that are left out":
        undefined = tl.load(x + place, mask=inside)
        tl.store(y + place, undefined + tl.sum(undefined) * 0.0, mask=inside)
    elif FAULT == "takes places as programs come":
        to = tl.atomic_add(amax, BLOCK) + lane
        tl.store(y + to, value, mask=to < size)
    elif FAULT == "replaces a maximum that others load":  # wrong if two programs load it before either replaces it
        largest = tl.program_id(0)
        tl.atomic_xchg(amax, largest, mask=largest >= tl.load(amax))


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
