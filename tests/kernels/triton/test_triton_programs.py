"""All Triton ops with several orders of programs and several lengths, and tests of the test bench itself.

Every test of kernels checks memory accesses, see ``tests.kernels.interpreted``. The tests here also check that the bench
detects wrong accesses.
"""

import importlib
import pkgutil
from functools import cache
from typing import get_args

import pytest
import torch
from torch import Tensor

import kernels.triton
from benchmarks.gpu_parts.accuracy import Outcome, outcome, same_bits
from kernels.tuning.examples import Size, example_inputs
from tests.kernels import faulty_kernels
from tests.kernels.accuracy import CPU, IN_TRITON, triton
from tests.kernels.interpreted import Launch, Order, WrongAccessError, walked

# pyright: reportArgumentType=false

SEVERAL_PROGRAMS = Size((40, 0, 33, 56), 56, masked=5, hidden=64, heads=2, intermediate=576, vocabulary=90)
"""Size for which every grid has several programs on each axis."""

SAME_KERNELS = "varlen_attention"
"""Op that is skipped because it launches the same kernels as ``varlen_self_attention``."""


@cache
def one_after_another(op: str) -> tuple[Outcome, list[Launch]]:
    with walked("forward") as launches:
        return in_triton(op), launches


def in_triton(op: str) -> Outcome:
    inputs = example_inputs(op, CPU, torch.float32, SEVERAL_PROGRAMS)
    return outcome(triton(op), inputs)


@pytest.mark.parametrize("op", [op for op in IN_TRITON if op != SAME_KERNELS])
def test_results_do_not_depend_on_the_order_of_programs(op: str):
    """Results are equal bit for bit, except for the atomic sums of embedding gradients."""
    expected, launches = one_after_another(op)
    for order in get_args(Order)[1:]:
        with walked(order, seed=7) as again:
            found = in_triton(op)
        assert again == launches
        assert all(map(same_bits, found.results, expected.results)), order
        if op == "embedding_layer_norm":
            torch.testing.assert_close(found.gradients, expected.gradients)
        else:
            assert all(map(same_bits, found.gradients, expected.gradients)), order


def test_every_kernel_but_one_runs_in_several_programs():
    """A kernel with a single program would not test the order of programs."""
    modules = [each.name for each in pkgutil.walk_packages(kernels.triton.__path__, "kernels.triton.")]
    known = {
        f"{configuration.kernel.fn.__module__}.{configuration.kernel.__name__}"
        for module in map(importlib.import_module, modules)
        if hasattr(module, "configurations")
        for configuration in module.configurations()
    }
    launches = [launch for op in IN_TRITON for launch in one_after_another(op)[1]]
    assert {kernel for kernel, _ in launches} == known
    in_one = {
        "kernels.triton.lamb_passes.squares_kernel"
    }  # this kernel has one program per adapted segment, and the example has one such segment
    assert {kernel for kernel, programs in launches if programs > 1} == known - in_one


def copied(fault: str, order: Order = "forward") -> Tensor:
    """Run the faulty kernel on the input 0, 1, 2, ... and return ``y``."""
    x, y, amax = torch.arange(42.0), torch.empty(42), torch.zeros((), dtype=torch.int32)
    with walked(order, seed=1):
        faulty_kernels.copy[(6,)](x, y, amax, len(x), FAULT=fault, BLOCK=8)
    return y


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("stores past the end", r"program \(5, 0, 0\): store of element 42 of y, which has 42"),
        ("stores before the start", r"program \(0, 0, 0\): store of element -1 of y, which has 42"),
        ("loads past the end", "load of element 42 of x, which has 42"),
        ("stores what others store", r"program \(1, 0, 0\): store of element 0 of y, which program \(0, 0, 0\) wrote"),
        ("loads what others store", "store of element 8 of y, which program .* read"),
        ("loads what others add", "load of element 0 of y, which program .* updated"),
        ("loads its own stores", r"program \(0, 0, 0\): load of element 0 of y, which program \(0, 0, 0\) wrote"),
        ("stores an element twice", "store of an element of y twice"),
        ("replaces a maximum that others load", "atomic of element 0 of amax, which several read"),
    ],
)
def test_faulty_memory_accesses_raise(fault: str, message: str):
    with pytest.raises(WrongAccessError, match=f"^copy, .*{message}"):
        copied(fault)


@pytest.mark.parametrize("fault", ["leaves an element out", "uses lanes that are left out"])
def test_unwritten_elements_and_masked_lanes_become_nan(fault: str):
    assert copied(fault).isnan().any()


def test_a_store_between_a_views_elements_raises():
    """The gap between a view's elements may hold, for example, elements of another attention head."""
    x, y = torch.arange(8.0), torch.zeros(8, 2)[:, 0]
    with pytest.raises(WrongAccessError, match="store of element 1 of y, which has 15"):
        faulty_kernels.copy[(1,)](x, y, torch.zeros(()), 8, FAULT="none", BLOCK=8)


@pytest.mark.parametrize("order", get_args(Order))
def test_a_kernel_that_depends_on_the_order_of_programs_gives_different_results(order: Order):
    for right in ("none", "none, with a barrier"):
        assert torch.equal(copied(right, order), torch.arange(42.0))
    places = copied("takes places as programs come", order)
    assert torch.equal(places[:40], torch.arange(40.0)) == (order == "forward")
