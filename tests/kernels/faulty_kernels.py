# ruff: noqa: ARG001  all have the same parameters
"""Kernels with one fault each, to test that ``tests.kernels.interpreted`` detects it.

Each program processes a block of ``x`` and ``y``, vectors of ``size`` elements; ``amax`` is an int32.
"""

import triton
import triton.language as tl

# pyright: reportArgumentType=false


@triton.jit
def faultless(x, y, amax, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, tl.load(x + place, mask=place < size, other=0.0), mask=place < size)


@triton.jit
def stores_past_the_end(x, y, amax, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, tl.load(x + place, mask=place < size, other=0.0), mask=place <= size)


@triton.jit
def stores_before_the_start(x, y, amax, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) - 1
    tl.store(y + place, 1.0, mask=place < size)


@triton.jit
def loads_past_the_end(x, y, amax, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, tl.load(x + place), mask=place < size)


@triton.jit
def stores_what_others_store(x, y, amax, size, BLOCK: tl.constexpr):
    tl.store(y, tl.load(x + tl.program_id(0)))


@triton.jit
def loads_what_others_store(x, y, amax, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    after = place + BLOCK
    tl.store(y + place, tl.load(y + after, mask=after < size, other=0.0), mask=place < size)


@triton.jit
def loads_what_others_add(x, y, amax, size, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.atomic_add(y + place, tl.load(y + place))


@triton.jit
def loads_its_own_stores(x, y, amax, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, 1.0, mask=place < size)
    tl.store(y + place, tl.load(y + place, mask=place < size, other=0.0) + 1.0, mask=place < size)


@triton.jit
def loads_its_own_stores_behind_a_barrier(x, y, amax, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, tl.load(x + place, mask=place < size, other=0.0), mask=place < size)
    tl.debug_barrier()
    tl.store(y + place, tl.load(y + place, mask=place < size, other=0.0), mask=place < size)


@triton.jit
def stores_an_element_twice(x, y, amax, size, BLOCK: tl.constexpr):
    tl.store(y + tl.program_id(0) + tl.arange(0, BLOCK) // 2, 1.0)


@triton.jit
def leaves_an_element_out(x, y, amax, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, tl.load(x + place, mask=place < size, other=0.0), mask=place < size - 1)


@triton.jit
def uses_lanes_that_are_left_out(x, y, amax, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.sum(tl.load(x + place, mask=inside))
    tl.store(y + place, tl.load(x + place, mask=inside) + total * 0.0, mask=inside)


@triton.jit
def takes_places_as_programs_come(x, y, amax, size, BLOCK: tl.constexpr):
    first = tl.atomic_add(amax, BLOCK)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    to = first + tl.arange(0, BLOCK)
    tl.store(y + to, tl.load(x + place, mask=place < size, other=0.0), mask=to < size)


@triton.jit
def replaces_a_maximum_that_others_load(x, y, amax, size, BLOCK: tl.constexpr):
    """The maximum is wrong if two programs load it before either of them replaces it."""
    largest = tl.program_id(0)
    tl.atomic_xchg(amax, largest, mask=largest >= tl.load(amax))
