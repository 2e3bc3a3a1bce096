"""Test bench in Triton's interpreter that runs a launch's programs in any order and checks every memory access.

Even if its results are right, a launch fails if one of its programs

* reads or writes memory outside of its tensor arguments, at any distance from them;
* reads or writes an element that another program writes or updates by atomics, except for the arguments named in
  ``READ_WHILE_UPDATED``: on a GPU programs run concurrently in any order, so the results would be right only by luck;
* reads an element that it wrote itself without a barrier in between, or writes an element twice with one store: the
  threads of a program also run in any order.

If a load has no ``other`` value, its masked lanes are NaN or the largest integer. Triton's own interpreter uses 0.
"""

import inspect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportArgumentType=false

Order = Literal["forward", "reversed", "shuffled"]

READ_WHILE_UPDATED = {"amax"}
"""Arguments that may be read while an atomic maximum updates them, because an outdated value is only too small."""

_NOBODY, _SEVERAL = -1, -2
_TAG_SHIFT = np.uint64(48)
"""All addresses of a process fit below this bit. The bits above hold the number of a pointer's argument."""
_ADDRESS = np.uint64((1 << 48) - 1)


class WrongAccessError(AssertionError):
    """Memory access that breaks a rule of this module."""


Launch = tuple[str, int]
"""Name of a kernel with its module, and the number of its programs."""


class _Storage:
    """Memory of a tensor, and for each element the programs that read or wrote it."""

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self.written = False
        """Whether a program has written. Memory that is only read, as most memory is, needs no record per element."""
        self._reads: list[tuple[int, np.ndarray]] = []

    def read(self, program: int, cells: np.ndarray) -> None:
        self._reads.append((program, cells))

    def will_be_written(self) -> None:
        """Start recording accesses per element, beginning with the reads so far."""
        if not self.written:
            self.written = True
            self.writer, self.updater, self.reader, self.barriers = np.full((4, self._elements), _NOBODY, np.int32)
            """``barriers`` has the number of barriers that the writer had passed when it wrote the element."""
        for program, cells in self._reads:
            readers = self.reader[cells]
            self.reader[cells] = np.where((readers == program) | (readers == _NOBODY), program, _SEVERAL)
        self._reads.clear()


class _Argument:
    def __init__(self, name: str, tensor: Tensor, storage: _Storage) -> None:
        self.name, self.storage = name, storage
        self.start, self.doublings = tensor.data_ptr(), tensor.element_size().bit_length() - 1
        self.offset = tensor.storage_offset()
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        self.reach = reach if tensor.numel() else 0
        self.has: np.ndarray | None = None
        """For a strided tensor with gaps: which positions from its first to its last element belong to it."""
        if tensor.numel() not in (0, reach):
            has = torch.zeros(reach, dtype=torch.bool)
            has.as_strided(tensor.shape, tensor.stride()).fill_(True)
            self.has = has.numpy()

    def lacks(self, elements: np.ndarray) -> np.ndarray | None:
        """Return the indices that lie outside of the tensor, or None if all are inside. Its first element has index 0."""
        if elements.min() < 0 or elements.max() >= self.reach:
            return elements[(elements < 0) | (elements >= self.reach)]
        return None if self.has is None or self.has[elements].all() else elements[~self.has[elements]]


class _Memory:
    """Tensor arguments of a launch, and the record of accesses to their memory."""

    def __init__(self, kernel: str, grid: Sequence[int]) -> None:
        self.kernel, self.grid = kernel, grid
        self.program = 0
        """Index of the running program."""
        self.barriers = [0] * math.prod(grid)
        """Number of barriers that each program has passed so far."""
        self._arguments: list[_Argument] = []
        self._storages: dict[int, tuple[_Storage, int]] = {}

    def pointer(self, name: str, tensor: Tensor) -> Any:
        """Register a tensor argument, and return a kernel's pointer to it that is tagged with the argument's number."""
        memory, itemsize = tensor.untyped_storage(), tensor.element_size()
        known = memory.data_ptr() or -len(self._arguments)  # an empty tensor has no address, so make up a unique key
        storage, unit = self._storages.setdefault(known, (_Storage(memory.nbytes() // itemsize), itemsize))
        assert unit == itemsize, f"{self.kernel}: {name} has elements of another size in the same memory"
        self._arguments.append(_Argument(name, tensor, storage))
        tagged = np.uint64(tensor.data_ptr()) | np.uint64(len(self._arguments)) << _TAG_SHIFT
        kind = tl.str_to_ty(triton.runtime.jit.mangle_type(tensor), None)
        return tl.tensor(interpreter.TensorHandle(np.array([tagged], np.uint64), kind), kind)

    def access(
        self, kind: Literal["load", "store", "atomic", "maximum"], pointers: np.ndarray, mask: np.ndarray
    ) -> np.ndarray:
        """Check an access by tagged pointers, and return the addresses without the tags."""
        used = pointers.reshape(-1) if mask.all() else pointers[np.broadcast_to(mask, pointers.shape)]
        while used.size:
            tag = used[0] >> _TAG_SHIFT
            same = used >> _TAG_SHIFT == tag
            argument = self._arguments[int(tag) - 1]
            own = used if same.all() else used[same]
            elements = ((own & _ADDRESS) - np.uint64(argument.start)).view(np.int64) >> argument.doublings
            self._check(kind, argument, elements)
            used = used[:0] if own is used else used[~same]
        return pointers & _ADDRESS

    def _check(self, kind: str, argument: _Argument, elements: np.ndarray) -> None:
        if (lacking := argument.lacks(elements)) is not None:
            raise WrongAccessError(
                f"{self._self(kind)} element {lacking[0]} of {argument.name}, which has {argument.reach}"
            )
        cells, storage, own = elements + argument.offset, argument.storage, self.program
        if kind == "load":
            storage.read(own, cells)
            if storage.written:
                writers = storage.writer[cells]
                settled = (writers == own) & (storage.barriers[cells] < self.barriers[own])
                self._refuse(kind, argument, elements, np.where(settled, _NOBODY, writers), "wrote", allow_own=False)
                if argument.name not in READ_WHILE_UPDATED:
                    self._refuse(kind, argument, elements, storage.updater[cells], "updated")
            return
        storage.will_be_written()
        self._refuse(kind, argument, elements, storage.writer[cells], "wrote")
        if argument.name not in READ_WHILE_UPDATED or kind != "maximum":
            self._refuse(kind, argument, elements, storage.reader[cells], "read")
        if kind == "store":
            self._refuse(kind, argument, elements, storage.updater[cells], "updated")
            storage.writer[cells] = lanes = np.arange(len(cells), dtype=np.int32)
            if (storage.writer[cells] != lanes).any():
                raise WrongAccessError(f"{self._self(kind)} an element of {argument.name} twice")
            storage.writer[cells], storage.barriers[cells] = own, self.barriers[own]
        else:
            storage.updater[cells] = own

    def _refuse(
        self, kind: str, argument: _Argument, elements: np.ndarray, others: np.ndarray, did: str, allow_own: bool = True
    ) -> None:
        conflict = others != _NOBODY
        if conflict.any() and allow_own:
            conflict &= others != self.program
        if conflict.any():
            element, other = elements[conflict][0], int(others[conflict][0])
            who = "several" if other == _SEVERAL else self._named(other)
            raise WrongAccessError(f"{self._self(kind)} element {element} of {argument.name}, which {who} {did}")

    def _self(self, kind: str) -> str:
        return f"{self.kernel}, {self._named(self.program)}: {kind} of"

    def _named(self, program: int) -> str:
        return f"program {tuple(map(int, np.unravel_index(program, self.grid)))}"


class _Bench:
    """Order in which programs of launches run, and the record of launches."""

    def __init__(self) -> None:
        self.order: Order = "forward"
        self.seed = 0
        self.launches: list[Launch] = []
        self.memory = _Memory("", ())
        self._patched: set[str] = set()

    def launch(self, executor: interpreter.GridExecutor, *args: Any, **kwargs: Any) -> None:
        """Launch a kernel in place of ``GridExecutor.__call__``."""
        function = executor.fn
        self.patch(function)
        known = {name: value for name, value in kwargs.items() if name in executor.arg_names}
        given = inspect.getcallargs(function, *args, **known)
        sizes: Any = executor.grid(given) if callable(executor.grid) else executor.grid
        grid = (*sizes, *(1,) * (3 - len(sizes)))
        self.memory = memory = _Memory(function.__name__, grid)
        for name, value in given.items():
            if isinstance(value, Tensor):
                given[name] = memory.pointer(name, value)
            elif name not in executor.constexprs:
                given[name] = interpreter._implicit_cvt(value)
        interpreter.interpreter_builder.set_grid_dim(*grid)
        numbers = list(range(math.prod(grid)))
        places = list(product(*map(range, grid)))
        self.launches.append((f"{function.__module__}.{function.__name__}", len(numbers)))

        if self.order == "reversed":
            numbers.reverse()
        elif self.order != "forward":
            random.Random(self.seed).shuffle(numbers)
        for number in numbers:
            memory.program = number
            interpreter.interpreter_builder.grid_idx = places[number]
            function(**given)

    def patch(self, function: Any) -> None:
        """Patch ``triton.language`` once per module of kernels, to save time. Triton patches it at each call."""
        if function.__module__ not in self._patched:
            interpreter._patch_lang(function)
            self._patched.add(function.__module__)

    def load(self, pointers: Any, mask: Any, other: Any, *_: object) -> Any:
        kind = pointers.get_element_ty()
        dtype = interpreter._get_np_dtype(kind)
        if other is not None:
            rest = other.data
        elif pointers.data.size == 1:  # use 0, because the interpreter may have dropped an ``other`` of 0
            rest = np.zeros(pointers.data.shape, dtype)
        else:  # without ``other``, masked values are undefined on a GPU
            rest = np.full(pointers.data.shape, np.nan if dtype.kind == "f" else _largest(dtype), dtype)
        addresses = self.memory.access("load", pointers.data, mask.data)
        return interpreter.TensorHandle(interpreter._interpreter.load(addresses, mask.data, rest, dtype), kind)

    def store(self, pointers: Any, value: Any, mask: Any, *_: object) -> None:
        addresses = self.memory.access("store", pointers.data, mask.data)
        interpreter._interpreter.store(addresses, value.data, mask.data)

    def barrier(self) -> None:
        self.memory.barriers[self.memory.program] += 1

    def atomic(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a version of the interpreter's atomic operation that checks the access."""

        def update(operation: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
            kind = "maximum" if "MAX" in str(operation) else "atomic"
            addresses = self.memory.access(kind, pointers.data, mask.data)
            return plain(operation, interpreter.TensorHandle(addresses, pointers.dtype), value, mask, *others)

        return update


def _largest(dtype: np.dtype) -> Any:
    return True if dtype.kind == "b" else np.iinfo(dtype).max


_BENCH = _Bench()


@contextmanager
def walked(order: Order, seed: int = 0) -> Iterator[list[Launch]]:
    """Run the programs of each launch in the block in the given order, and yield the growing list of launches."""
    before = _BENCH.order, _BENCH.seed, _BENCH.launches
    _BENCH.order, _BENCH.seed, _BENCH.launches = order, seed, []
    try:
        yield _BENCH.launches
    finally:
        _BENCH.order, _BENCH.seed, _BENCH.launches = before


def install() -> None:
    """Make all launches of this process run on the bench, and make the interpreter twice as fast."""

    def call(function: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        _BENCH.patch(function.fn)
        return function.rewrite()(*args, **kwargs)

    builder = interpreter.interpreter_builder
    interpreter.InterpretedFunction.__call__ = call
    interpreter.GridExecutor.__call__ = lambda executor, *args, **kwargs: _BENCH.launch(executor, *args, **kwargs)
    builder.create_masked_load, builder.create_masked_store = _BENCH.load, _BENCH.store
    builder.create_barrier = _BENCH.barrier
    builder.create_atomic_rmw = _BENCH.atomic(builder.create_atomic_rmw)
    # The interpreter checks every operation for integer overflow but never reports one, so turn the check off.
    builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _keep_types()


def _keep_types() -> None:
    """Cache tensor types and the checks of their shapes, which the interpreter would repeat for every operation."""
    np_dtype, init = interpreter._get_np_dtype, tl.block_type.__init__
    dtypes: dict[str, np.dtype] = {}
    types: dict[tuple[object, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def kept_np_dtype(kind: Any) -> np.dtype:
        kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return dtypes.get(kind.name) or dtypes.setdefault(kind.name, np_dtype(kind))

    def block_type(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        key = element_ty.name, tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if key not in types:
            init(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        sizes = tuple(kind.shape) if kind.is_block() else ()
        if sizes not in shapes:
            shapes[sizes] = tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))
        self.shape, self.numel = shapes[sizes]

    def broadcast(
        self: Any, left: Any, right: Any, plain: Callable[..., Any] = TritonSemantic.broadcast_impl_value
    ) -> Any:
        return (left, right) if left.shape is right.shape else plain(self, left, right)

    interpreter._get_np_dtype = kept_np_dtype
    TritonSemantic.broadcast_impl_value = broadcast
    tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor
