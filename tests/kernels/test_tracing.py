"""Traces of ops: which kernels, what they load and store."""

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kernels import OPS, cast_transpose_fp8, dense_gelu, dropout_add_layer_norm, lamb_step
from kernels.reference.fp8 import E4M3
from kernels.reference.lamb import LambHyperparameters, LambSegments, LambState
from kernels.tracing import KernelLaunch, accesses, traced

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def test_accesses_of_every_kernel_are_read_off_its_source() -> None:
    from kernels.triton import fp8, lamb_passes, loss
    from kernels.triton.attention import backward, forward
    from kernels.triton.norms import embedding_norm, layer_norm

    expected = {
        fp8._cast_kernel: ("amax scale x", "amax partials q transposed"),
        fp8._gelu_backward_kernel: ("amax bias output_gradient product scale", "amax partials q transposed"),
        layer_norm._add_norm_forward: ("bias norm_bias residual state weight x", "statistics y"),
        layer_norm._add_norm_backward: ("bias dy residual state statistics weight x", "dresidual dx partials"),
        embedding_norm._embedding_norm_backward: (
            "dposition dword dy input_ids position position_ids segment segment_ids state statistics weight word",
            "dposition dword partials",
        ),
        loss._kernel: ("bias labels logits", "correct logits losses"),
        lamb_passes.apply_kernel: ("learning_rate norm parameters squares table update", "parameters"),
        forward.attention_forward: (
            "cu_seqlens_k cu_seqlens_q key query state value",
            "kept lse output",
        ),
        backward.attention_backward_keys: (
            "cu_seqlens_k cu_seqlens_q delta kept key lse output_gradient query value",
            "key_gradient value_gradient",
        ),
    }
    for kernel, (loads, stores) in expected.items():
        loaded, stored, _ = accesses(kernel.fn)
        pointers = {*loads.split(), *stores.split()}
        assert (loaded & pointers, stored & pointers) == ({*loads.split()}, {*stores.split()}), kernel.fn.__name__


def trace(function: Callable[[], object]) -> list[KernelLaunch]:
    launches: list[KernelLaunch] = []
    with FakeTensorMode(), traced(launches.append, multiprocessors=10):
        function()
    return launches


def test_a_cast_with_its_transpose_reads_two_bytes_an_element_and_writes_two() -> None:
    def cast() -> None:
        x = torch.empty(512, 256, dtype=torch.bfloat16)
        cast_transpose_fp8(x, torch.ones(()), torch.zeros(()), E4M3)

    ones, zeros, launch = trace(cast)
    assert (ones.kernel, zeros.kernel, ones.written) == ("aten.ones", "aten.zeros", 4)
    assert (launch.kernel, launch.operator) == ("_cast_kernel", "mlperf_bert::cast_transpose_fp8")
    assert (launch.read, launch.written) == (2 * 512 * 256 + 8, 2 * 512 * 256 + 4)
    assert launch.shapes["transposed"] == (256, 512)


def test_backward_and_partial_sums_are_traced() -> None:
    def both() -> None:
        x, residual = (torch.empty(64, 32, requires_grad=True) for _ in range(2))
        bias, weight, norm_bias = (torch.empty(32, requires_grad=True) for _ in range(3))
        dropout_add_layer_norm(x, bias, residual, weight, norm_bias, 1e-6).backward(torch.empty(64, 32))

    launches = {launch.kernel: launch for launch in trace(both)}
    assert launches.keys() >= {"_add_norm_forward", "_add_norm_backward", "sum_partials"}
    programs = launches["_add_norm_backward"].shapes["partials"][0]
    assert 1 < programs <= 64


def test_matrix_products_say_how_much_they_multiply_and_views_are_free() -> None:
    def product() -> None:
        dense_gelu(torch.empty(48, 16), torch.empty(32, 16), torch.empty(32)).view(-1).unflatten(0, (2, -1))

    multiplied, gelu = trace(product)
    assert (multiplied.kernel, multiplied.multiply_adds) == ("aten.mm", 48 * 16 * 32)
    assert (gelu.read, gelu.written) == (4 * (48 * 32 + 32), 4 * 48 * 32)


def test_lamb_moves_what_its_page_says_and_leaves_no_table_without_values() -> None:
    size = 4096 * 16
    segments, numbers = LambSegments((size,), (True,)), LambHyperparameters(0.9, 0.999, 1e-6, 0.01, 1.0)

    def update() -> None:
        weights, gradients = torch.zeros(size), torch.zeros(size)
        state, step = LambState.zeros_like(weights), torch.ones((), dtype=torch.int64)
        lamb_step(weights, gradients, state, segments, numbers, step=step, learning_rate=torch.ones(()))

    launches = [each for each in trace(update) if not each.kernel.startswith("aten.")]  # those make the buffers
    assert sum(each.read + each.written for each in launches) / size == pytest.approx(48, rel=0.01)
    update()


def test_an_op_asks_nothing_inside_and_as_before_outside() -> None:
    with FakeTensorMode():
        with traced(lambda _: None, multiprocessors=1):
            assert OPS["varlen_attention"].chosen().name == "triton"
        assert OPS["dense_gelu"].chosen(*(torch.empty(16, 16) for _ in range(2)), torch.empty(16)).name != "triton"
