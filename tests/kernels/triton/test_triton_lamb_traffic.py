"""Bytes of memory that a LAMB step moves a parameter: what its kernels load and store, through a model of the L2 cache.

Under Triton's interpreter every block that a program loads or stores goes through the model, by its address. The cache keeps
the blocks that were used last, but lets those go first whose access asked for it. It and what it is to hold are both a 256th
of their size: a layer has H = 64 and not 1,024.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import pytest
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter

from bert.configuration.sections import ModelConfig
from bert.model import BertForPreTraining
from bert.products.weight_gradients import product_weights
from kernels import LambSegments, LambState, WeightCast
from kernels.reference.fp8 import E4M3
from kernels.triton import fp8 as triton_fp8
from kernels.triton import lamb as triton_lamb
from tests.kernels.lamb_oracle import HYPERPARAMETERS, at

SCALE = 256
L2_BYTES = 40_000_000
"""Of an A100, the least of those that the kernels are for."""
L2_BYTES_FP8 = 50_000_000
"""Of an H100, the least of those that compute in FP8."""
HIDDEN = 64
ATTENTION = [*3 * [HIDDEN**2], 3 * HIDDEN, HIDDEN**2, *3 * [HIDDEN]]
FEED_FORWARD = [4 * HIDDEN**2, 4 * HIDDEN, 4 * HIDDEN**2, *3 * [HIDDEN]]
WORDS = 7.3 * 4 * HIDDEN**2
"""The word embedding of BERT-Large has as many elements as 7.3 of its widest weights."""


class Cache:
    """Least recently used blocks of a size, dirty or not; ``moved`` counts the bytes between it and memory."""

    BLOCK = 64

    def __init__(self, size: int) -> None:
        self._places = size // self.BLOCK
        self._kept: OrderedDict[int, bool] = OrderedDict()
        self._first_to_go: OrderedDict[int, bool] = OrderedDict()
        self.moved = 0

    def access(self, start: int, stop: int, store: bool, evict_first: bool) -> None:
        """Load or store bytes at addresses from ``start`` to ``stop``."""
        for block in range(start // self.BLOCK, -(-stop // self.BLOCK)):
            dirty = self._kept.pop(block, None)
            dirty = self._first_to_go.pop(block, None) if dirty is None else dirty
            if dirty is None and not store:
                self.moved += self.BLOCK
            (self._first_to_go if evict_first else self._kept)[block] = store or bool(dirty)
            if len(self._kept) + len(self._first_to_go) > self._places:
                self._evict()

    def _evict(self) -> None:
        _, dirty = (self._first_to_go or self._kept).popitem(last=False)
        self.moved += self.BLOCK * dirty

    def flush(self) -> None:
        """Write what is left."""
        while self._kept or self._first_to_go:
            self._evict()


@contextmanager
def through(cache: Cache) -> Iterator[None]:
    """Send what programs load and store through ``cache``; single numbers are left out."""
    builder, memory = interpreter.interpreter_builder, interpreter._interpreter
    masked_load, masked_store, plain_load, plain_store = (
        builder.create_masked_load,
        builder.create_masked_store,
        memory.load,
        memory.store,
    )
    policies = [None]

    def note(addresses: np.ndarray, mask: np.ndarray, size: int, store: bool) -> None:
        if (inside := addresses[mask]).size > 1:
            first = policies[-1] == ir.EVICTION_POLICY.EVICT_FIRST
            # Of a tile every row by itself.
            for block in np.unique(np.append(inside // Cache.BLOCK, (inside + size - 1) // Cache.BLOCK)).tolist():
                cache.access(block * Cache.BLOCK, (block + 1) * Cache.BLOCK, store, first)

    def load(addresses, mask, rest, dtype):
        note(addresses, mask, dtype.itemsize, store=False)
        return plain_load(addresses, mask, rest, dtype)

    def store(addresses, value, mask):
        note(addresses, mask, value.dtype.itemsize, store=True)
        return plain_store(addresses, value, mask)

    def load_by(pointers, mask, other, modifier, policy, volatile):
        policies.append(policy)
        return masked_load(pointers, mask, other, modifier, policy, volatile)

    def store_by(pointers, value, mask, modifier, policy):
        policies.append(policy)
        return masked_store(pointers, value, mask, modifier, policy)

    def store_all(pointers, value, modifier, policy):  # as it is, it forgets the policy
        mask = interpreter.TensorHandle(np.ones_like(pointers.data, dtype=bool), tl.int1)
        return store_by(pointers, value, mask, modifier, policy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "load", load)
        patch.setattr(memory, "store", store)
        patch.setattr(builder, "create_masked_load", load_by)
        patch.setattr(builder, "create_masked_store", store_by)
        patch.setattr(builder, "create_store", store_all)
        yield


def bytes_a_parameter(sizes: list[int], overwritten: bool, copies: bool = True, fp8: bool = False) -> float:
    """Count a step's bytes for these segments, on a GPU of a ``SCALE``-th; with ``fp8`` the weights of layers are cast."""
    segments = LambSegments(tuple(sizes), (True,) * len(sizes), (overwritten,) * len(sizes))
    flat, gradients = torch.randn(2, sum(sizes)).unbind()
    state, copies_P = LambState.zeros_like(flat), torch.zeros(len(flat), dtype=torch.bfloat16) if copies else None
    cache = Cache((L2_BYTES_FP8 if fp8 else L2_BYTES) // SCALE)
    casts = tuple(fp8_casts(sizes)) if fp8 else ()
    with through(cache):
        triton_lamb.lamb_step(
            flat, gradients, state, segments, HYPERPARAMETERS, **at(1, 0.1), copies_P=copies_P, casts=casts
        )
    cache.flush()
    return cache.moved / len(flat)


def fp8_casts(sizes: list[int]) -> Iterator[WeightCast]:
    """Cast the weights among these: vectors are shorter, and the word table is longer."""
    for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
        if HIDDEN**2 <= size <= 4 * HIDDEN**2:
            q_NK, q_KN = (
                torch.zeros(shape, dtype=E4M3) for shape in ((size // HIDDEN, HIDDEN), (HIDDEN, size // HIDDEN))
            )
            yield WeightCast(start, torch.ones(()), torch.zeros(()), q_NK, q_KN)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_lamb, "GROUP", triton_lamb.GROUP // SCALE)


def layers(count: int = 4) -> list[int]:
    return count * [*ATTENTION, *FEED_FORWARD]


def test_a_step_of_bert_large_moves_at_most_36_bytes_a_parameter() -> None:
    """Weights whose gradients products write over what is there; those that are set to zero; and the word table."""
    overwritten = bytes_a_parameter(layers(), overwritten=True)
    assert overwritten == pytest.approx(34, abs=0.7)
    cleared = bytes_a_parameter(layers(), overwritten=False)
    assert cleared == pytest.approx(38, abs=0.7)
    words = bytes_a_parameter([int(WORDS)], overwritten=True)
    assert 42 < words < 46
    with torch.device("meta"):
        model = BertForPreTraining(ModelConfig(24, 1024, 16, 4096, 30_522, 512))
    whole = sum(parameter.numel() for parameter in model.parameters())
    of_words = model.embeddings.word.numel()
    of_products = sum(weight.numel() for weight in product_weights(model, True))
    found = (overwritten * (of_products - of_words) + words * of_words + cleared * (whole - of_products)) / whole
    assert found <= 36


def test_a_step_that_casts_to_fp8_moves_no_more() -> None:
    """Casts read what the step has left in the cache, where a pass of their own reads all weights again."""
    found = bytes_a_parameter(layers(), overwritten=True, copies=False, fp8=True)
    assert found == pytest.approx(34, abs=0.7)
    assert bytes_a_parameter([int(WORDS)], overwritten=True, copies=False, fp8=True) < 44


def test_groups_and_hints_are_what_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """All segments at once move parameters and directions twice. A cast without its hint pushes the next group out."""
    assert bytes_a_parameter(layers(), overwritten=True, copies=False) == pytest.approx(32, abs=0.7)
    monkeypatch.setattr(triton_fp8, "_ONCE", "")
    assert bytes_a_parameter(layers(), overwritten=True, copies=False, fp8=True) > 36
    monkeypatch.setattr(triton_lamb, "GROUP", 1 << 30)
    assert bytes_a_parameter(layers(), overwritten=True) > 42
