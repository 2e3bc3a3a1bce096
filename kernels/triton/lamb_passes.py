# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false
"""The kernels of ``kernels.triton.lamb``. Each program processes one chunk.

Parameters and directions are read again soon. Data that is not read again soon has the hint ``evict_first``, so that it
leaves the L2 cache first.
"""

import triton
import triton.language as tl

# Pointers whose alignment varies. By default, Triton would compile a second kernel for pointers aligned to 16 bytes.
_TABLES = ["table", "traits", "spans", "squares"]


@triton.jit(do_not_specialize_on_alignment=_TABLES)
def direction_kernel(
    parameters, gradients, momentum, variance, update, skipped, partial_sums, table, traits, norm, root_correction,
    epsilon_correction, weight_1, weight_2, epsilon, weight_decay, max_grad_norm,
    CHUNK: tl.constexpr, ALIGNMENT: tl.constexpr, FAST_1: tl.constexpr, FAST_2: tl.constexpr,
):  # fmt: skip
    """Write the moments and the direction of a chunk, and the sums of its squared parameters and squared directions.

    The gradient is set to zero unless the next step overwrites it.
    """
    segment, offsets, own, first, stop = _chunk(table, tl.program_id(0), CHUNK, ALIGNMENT)
    size = tl.load(norm)
    taken = _finite(size)
    if tl.program_id(0) == 0 and tl.load(table + 1) == 0:  # only the program of the first chunk counts skipped steps
        tl.store(skipped, tl.load(skipped) + tl.where(taken, 0, 1))
    # Triton's operator / divides approximately. The reference implementation rounds to nearest, like div_rn.
    clip = tl.div_rn(max_grad_norm, tl.maximum(size, max_grad_norm))
    root_factor = tl.load(root_correction).to(tl.float32)
    epsilon *= tl.load(epsilon_correction).to(tl.float32)
    decay = tl.where(tl.load(traits + 2 * segment) >= 0, weight_decay, 0.0)
    overwritten = tl.load(traits + 2 * segment + 1)
    # Read a whole chunk without a mask, because masked elements would be read one by one.
    if stop - first == CHUNK:
        _directions(
            parameters, gradients, momentum, variance, update, partial_sums, taken, clip, root_factor,
            weight_1, weight_2, epsilon, decay, overwritten, offsets, own, None, FAST_1, FAST_2,
        )  # fmt: skip
    else:
        _directions(
            parameters, gradients, momentum, variance, update, partial_sums, taken, clip, root_factor,
            weight_1, weight_2, epsilon, decay, overwritten, offsets, own, _inside(first, stop, CHUNK), FAST_1, FAST_2,
        )  # fmt: skip


@triton.jit
def _directions(
    parameters, gradients, momentum, variance, update, partial_sums, taken, clip, root_factor, weight_1, weight_2,
    epsilon, decay, overwritten, offsets, own, mask,
    FAST_1: tl.constexpr, FAST_2: tl.constexpr,
):  # fmt: skip
    weight = _load(parameters + offsets, mask, "")
    gradient = _load(gradients + offsets, mask, "evict_first") * clip
    mean, square = _load(momentum + offsets, mask, "evict_first"), _load(variance + offsets, mask, "evict_first")
    # In a skipped step, select the old moments. A gradient that is not finite would stay NaN if it were multiplied by 0.
    mean = tl.where(taken, _interpolated(mean, gradient, weight_1, FAST_1), mean)
    square = tl.where(taken, _interpolated(square, gradient * gradient, weight_2, FAST_2), square)
    tl.store(momentum + offsets, mean, mask=mask, eviction_policy="evict_first")
    tl.store(variance + offsets, square, mask=mask, eviction_policy="evict_first")
    if overwritten == 0:
        tl.store(gradients + offsets, tl.zeros_like(gradient), mask=mask, eviction_policy="evict_first")
    direction = tl.div_rn(mean, tl.sqrt_rn(square) * root_factor + epsilon) + decay * weight
    tl.store(update + own, direction, mask=mask)
    partial_sum = partial_sums + tl.program_id(0)
    tl.store(partial_sum, tl.sum(weight * weight))
    tl.store(partial_sum + tl.num_programs(0), tl.sum(direction * direction))


@triton.jit
def _interpolated(old, new, weight, FAST: tl.constexpr):
    """Return ``beta * old + (1 - beta) * new``, as a correction of the nearer of the two values.

    If FAST (beta below 0.5), the nearer value is ``new`` and ``weight`` is beta; otherwise, ``weight`` is 1 - beta. A
    sum of two products would drift: fp32(0.999) + fp32(0.001) is not 1, and the variance would become 1.3e-5 too large.
    """
    if FAST:
        return new + weight * (old - new)
    else:  # noqa: RET505  Triton compiles one of the branches
        return old + weight * (new - old)


@triton.jit(do_not_specialize_on_alignment=_TABLES)
def squares_kernel(partial_sums, squares, spans, chunks, adapted, REDUCTION: tl.constexpr):
    """Write one adapted segment's sums of squared parameters and of squared directions to ``squares`` [2, adapted]."""
    place = tl.program_id(0)
    begin, end = tl.load(spans + 2 * place), tl.load(spans + 2 * place + 1)
    weights, directions = tl.zeros((REDUCTION,), tl.float64), tl.zeros((REDUCTION,), tl.float64)
    for start in range(begin, end, REDUCTION):
        places = start + tl.arange(0, REDUCTION)
        weights += tl.load(partial_sums + places, mask=places < end, other=0.0)
        directions += tl.load(partial_sums + chunks + places, mask=places < end, other=0.0)
    tl.store(squares + place, tl.sum(weights))
    tl.store(squares + adapted + place, tl.sum(directions))


@triton.jit(do_not_specialize_on_alignment=_TABLES)
def apply_kernel(
    parameters, update, copies, squares, table, traits, norm, learning_rate, adapted,
    CHUNK: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Update a chunk's parameters, and their copies unless ``copies`` is None. ``squares`` is [2, ``adapted``]."""
    # Start with the last chunks, whose directions were written last and are the most likely to be in the cache.
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    segment, offsets, own, first, stop = _chunk(table, chunk, CHUNK, ALIGNMENT)
    taken = _finite(tl.load(norm))
    step_size = tl.load(learning_rate).to(tl.float32)
    place = tl.load(traits + 2 * segment)
    if place >= 0:
        weight_norm = tl.sqrt_rn(tl.load(squares + place).to(tl.float32))
        direction_norm = tl.sqrt_rn(tl.load(squares + adapted + place).to(tl.float32))
        if (weight_norm > 0) & (direction_norm > 0):
            step_size *= tl.div_rn(weight_norm, direction_norm)
    if stop - first == CHUNK:
        _apply(parameters, update, copies, taken, step_size, offsets, own, None)
    else:
        _apply(parameters, update, copies, taken, step_size, offsets, own, _inside(first, stop, CHUNK))


@triton.jit
def _apply(parameters, update, copies, taken, step_size, offsets, own, mask):
    weight = _load(parameters + offsets, mask, "evict_first")
    weight = tl.where(taken, weight - step_size * _load(update + own, mask, ""), weight)
    tl.store(parameters + offsets, weight, mask=mask, eviction_policy="evict_first")
    if copies is not None:
        tl.store(copies + offsets, weight.to(copies.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def _finite(norm):
    return norm < float("inf")


@triton.jit
def _chunk(table, chunk, CHUNK: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Return a chunk's segment, two vectors of offsets [CHUNK], and the range of the chunk that the segment owns.

    The first offsets are positions in the flat buffers. The second offsets are positions in ``update``, where the
    group's directions start at 0.
    """
    row = table + 4 * chunk
    start = tl.load(row + 1)
    places = tl.arange(0, CHUNK)
    offsets = start.to(tl.int64) * ALIGNMENT + places
    own = (start - tl.load(table + 1)).to(tl.int64) * ALIGNMENT + places
    return tl.load(row), offsets, own, tl.load(row + 2), tl.load(row + 3)


@triton.jit
def _inside(first, stop, CHUNK: tl.constexpr):
    places = tl.arange(0, CHUNK)
    return (places >= first) & (places < stop)


@triton.jit
def _load(pointers, mask, EVICTION: tl.constexpr):
    """Load values, with 0 where the mask is False. If the mask is None, load all values."""
    if mask is None:
        return tl.load(pointers, eviction_policy=EVICTION)
    else:  # noqa: RET505  Triton compiles one of the branches
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICTION)
