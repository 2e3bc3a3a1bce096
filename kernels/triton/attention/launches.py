"""Launches of the attention kernels: block sizes by device, arguments and results.

Shape legend in ``kernels/__init__.py``.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.configuration import SHARED_MEMORY_LIMITS, Configuration
from kernels.reference.random import PLACES_A_DRAW
from kernels.triton.attention.backward import attention_backward_keys, attention_backward_queries
from kernels.triton.attention.forward import attention_forward
from kernels.triton.attention.tiles import KEYS_A_GROUP


@dataclass(frozen=True)
class _Launch:
    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Maximum number of registers per thread, set so that a multiprocessor holds one more block. None means no limit."""

    def options(self) -> dict[str, int]:
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}


@dataclass(frozen=True)
class Casts:
    """Tensors to which a kernel writes its results in FP8, and the scale of the results."""

    scale: Tensor
    amax: Tensor
    """Largest magnitude so far, stored as the bits of an fp32 number in int32."""
    rows: Tensor
    """The cast [T, columns], with a stride of 1 along the columns."""
    transposed: Tensor
    """The transpose of the cast, [columns, padded(T)]."""
    sums: Tensor | None = None
    """Sums of columns, fp32 [blocks, columns], initially zero. Each block writes a row."""

    def split(self, columns: int) -> tuple["Casts", "Casts"]:
        """Split the tensors by columns: return views of the first ``columns`` columns and of the remaining columns."""
        assert self.sums is not None
        first, others = (
            Casts(self.scale, self.amax, self.rows[:, part], self.transposed[part], self.sums[:, part])
            for part in (slice(columns), slice(columns, None))
        )
        return first, others


NARROW: dict[int, int] = dict.fromkeys((16, 32), 184)
"""Register limit per thread of the forward kernel with casts, by head size. Without a limit, the compiler uses even
fewer registers on a B200, and spills values to memory."""

# Launches by the lowest compute capability for which they are meant. The block sizes were not chosen by timing. Among the
# sizes that spill no registers, these let the most warps reside on a multiprocessor. Blocks are short because sequences are
# short. With three stages, the next tile is loaded while one is computed. With two stages, the kernel would wait for it.
_LAUNCHES = {
    80: {"forward": _Launch(64, 64, 4, 3, 168), "dq": _Launch(64, 32, 4, 3), "dkv": _Launch(64, 32, 4, 3)},
    90: {"forward": _Launch(64, 64, 4, 3), "dq": _Launch(64, 64, 4, 3), "dkv": _Launch(64, 64, 4, 3)},
}
# fp32 is for tests only.
_FP32_LAUNCHES = {"forward": _Launch(32, 32, 4, 2), "dq": _Launch(32, 32, 4, 1), "dkv": _Launch(32, 32, 4, 1)}


def _rows_of_heads(x: Tensor) -> Tensor:
    """Return ``x`` [N, H, E] if the heads of each row are contiguous, as in a view of a fused tensor, or else a copy."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _groups(max_seqlen: int) -> int:
    return -(-max_seqlen // KEYS_A_GROUP)


def _written(casts: Casts | None) -> tuple[Tensor | None, ...]:
    """Return the fields of ``casts`` as a tuple. Without casts, return five Nones."""
    return (None,) * 5 if casts is None else (casts.scale, casts.amax, casts.rows, casts.transposed, casts.sums)


def empty_saved(query: Tensor, max_seqlen: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Allocate the tensors that the forward pass saves: the logarithms of softmax's sums [H, Q], and dropout's mask bits.

    The mask bits are [H, groups, Q, 4], or [0] without dropout.
    """
    queries, heads, _size = query.shape
    shape = (0,) if state is None else (heads, _groups(max_seqlen), queries, KEYS_A_GROUP // PLACES_A_DRAW)
    return query.new_empty((heads, queries), dtype=torch.float32), query.new_empty(shape, dtype=torch.int16)


def launch_forward(
    qkv: list[Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,
    state: Tensor | None,
    threshold: int,
    kept_scale: float,
    stream: int,
    casts: Casts | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output [Q, H, E], the logarithms of softmax's sums, fp32 [H, Q], and dropout's mask bits, int16."""
    qkv = [_rows_of_heads(x) for x in qkv]
    queries, heads, head_size = qkv[0].shape
    output = torch.empty((queries, heads, head_size), dtype=qkv[0].dtype, device=qkv[0].device)
    lse, kept = empty_saved(output, max_seqlen, state)
    launch, strides = _launch("forward", output), [x.stride(0) for x in qkv]
    if casts is not None and head_size in NARROW:
        launch = replace(launch, max_registers=NARROW[head_size])
    numbers = queries, _groups(max_seqlen), stream, threshold, kept_scale
    constants = _constants(attention_forward, strides, strides, heads, head_size, state is not None, launch)
    # The host does not know the lengths, so the grid fits the longest sequence. The last index on axis 2 is for the rows
    # after all sequences.
    grid = (max(1, triton.cdiv(max_seqlen, launch.block_q)), heads, len(cu_seqlens_q))
    bounds = cu_seqlens_q, cu_seqlens_k
    attention_forward[grid](
        *qkv, output, *_written(casts)[:-1], lse, kept, *bounds, state, *numbers, **constants, **launch.options()
    )
    return output, lse, kept


def launch_backward(
    output_gradient: Tensor,
    qkv: list[Tensor],
    output: Tensor,
    lse: Tensor,
    kept: Tensor,
    gradients: list[Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,
    kept_scale: float,
    casts: Casts | None = None,
) -> None:
    """Write the gradients of query, key and value to ``gradients``, or only their casts if ``casts`` is given.

    With ``casts``, only the strides of ``gradients`` are used.
    """
    qkv = [_rows_of_heads(x) for x in qkv]
    queries, heads, head_size = output.shape
    strides = [x.stride(0) for x in qkv], [x.stride(0) for x in gradients]
    d_query, d_key, d_value = gradients if casts is None else (None, None, None)
    of_queries, of_keys = (None, None) if casts is None else casts.split(heads * head_size)
    delta, upstream = torch.empty_like(lse), output_gradient.contiguous()
    drawn, sizes = kept.numel() > 0, (heads, head_size)
    bounds, numbers = (cu_seqlens_q, cu_seqlens_k), (_groups(max_seqlen), kept_scale)
    # The kernel for queries runs first, because it writes delta, which the kernel for keys reads.
    launch = _launch("dq", output)
    options = launch.options() | _constants(attention_backward_queries, *strides, *sizes, drawn, launch)
    grid = (max(1, triton.cdiv(max_seqlen, launch.block_q)), heads, len(cu_seqlens_q))
    attention_backward_queries[grid](
        upstream, *qkv, output, lse, delta, kept, d_query, *_written(of_queries), *bounds, queries, *numbers, **options
    )
    launch = _launch("dkv", output)
    options = launch.options() | _constants(attention_backward_keys, *strides, *sizes, drawn, launch)
    grid = (max(1, triton.cdiv(max_seqlen, launch.block_k)), heads, len(cu_seqlens_q))
    rows = queries, len(qkv[1])
    attention_backward_keys[grid](
        upstream, *qkv, lse, delta, kept, d_key, d_value, *_written(of_keys), *bounds, *rows, *numbers, **options
    )


def configurations() -> list[Configuration]:
    """Return the kernels' bf16 configurations for BERT-Large (H = 16, E = 64) and the default model (H = 4, E = 32)."""
    kernels = {"forward": attention_forward, "dq": attention_backward_queries, "dkv": attention_backward_keys}
    devices = {tuned: tuple(c for c in SHARED_MEMORY_LIMITS if _tuned_for(c) == tuned) for tuned in _LAUNCHES}
    chosen = []
    for capability, (model, heads, size), last_layer, dropout in product(
        _LAUNCHES, (("large", 16, 64), ("small", 4, 32)), (False, True), (False, True)
    ):
        # In the last layer, keys and values share a tensor, and the queries and all gradients are separate tensors.
        fused = (2 if last_layer else 3) * heads * size
        strides = [heads * size if last_layer else fused, fused, fused]
        gradient_strides = [heads * size] * 3 if last_layer else strides
        case = f"{model}{', last layer' if last_layer else ''}{', dropout' if dropout else ''}, from sm_{capability}"
        for name, kernel in kernels.items():
            launch = _LAUNCHES[capability][name]
            constants = _constants(kernel, strides, gradient_strides, heads, size, dropout, launch)
            constants |= dict.fromkeys(("scale", "amax", "cast", "transposed", "sums"))
            constants |= {} if dropout else {"state": None}
            types = dict.fromkeys(kernel.arg_names, "*bf16") | _TYPES
            pipeline = launch.num_warps, launch.num_stages, devices[capability], launch.max_registers
            chosen.append(Configuration.of(f"{name}, {case}", kernel, types, constants, *pipeline))
    return chosen


_TYPES = dict.fromkeys(("lse", "delta"), "*fp32") | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "*i32")
_TYPES |= dict.fromkeys(("queries", "keys", "groups", "stream", "threshold"), "i32")
_TYPES |= {"state": "*i64", "kept": "*i16", "kept_scale": "fp32"}


def _constants(
    kernel: Any,
    strides: list[int],
    gradient_strides: list[int],
    heads: int,
    head_size: int,
    dropout: bool,
    launch: _Launch,
) -> dict[str, Any]:
    """Return a kernel's compile-time constants. ``strides`` are the row strides of query, key and value."""
    names = ("QUERY", "KEY", "VALUE")
    constants = {f"{name}_STRIDE": stride for name, stride in zip(names, strides, strict=True)}
    constants |= {f"{name}_GRADIENT_STRIDE": stride for name, stride in zip(names, gradient_strides, strict=True)}
    constants |= {"HEADS": heads, "HEAD_SIZE": head_size, "DROPOUT": dropout}
    constants |= {"BLOCK_Q": launch.block_q, "BLOCK_K": launch.block_k}
    return {name: value for name, value in constants.items() if name in kernel.arg_names}


def _launch(name: str, x: Tensor) -> _Launch:
    """Return the launch of a kernel (``forward``, ``dq``, ``dkv``) for the device and dtype of ``x``."""
    if x.element_size() == 4:
        return _FP32_LAUNCHES[name]
    major, minor = torch.cuda.get_device_capability(x.device) if x.is_cuda else (9, 0)
    return _LAUNCHES[_tuned_for(10 * major + minor)][name]


def _tuned_for(capability: int) -> int:
    """Return the highest capability in ``_LAUNCHES`` that is not above this one, or the lowest one if all are above it."""
    return max((tuned for tuned in _LAUNCHES if tuned <= capability), default=min(_LAUNCHES))


def smallest_block(x: Tensor) -> int:
    """Return the number of rows in the smallest block of the backward kernels."""
    queries, keys = _launch("dq", x), _launch("dkv", x)
    return min(queries.block_q, keys.block_k)
