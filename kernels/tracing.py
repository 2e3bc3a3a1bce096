"""Trace what a GPU would launch, kernel by kernel, on tensors that have no values: neither a GPU nor arithmetic is needed.

Inside ``traced`` every op takes the implementation that it prefers on a GPU and asks nothing of tensors or device. Bodies
of Triton's operators run, but their kernels are only noted, and so is everything of PyTorch between them. Meant for fake
tensors (``torch._subclasses.FakeTensorMode``), which follow autocast and autograd like real ones.

Bytes are those that must be moved: each tensor that a kernel loads once, and each that it stores once, whatever it takes of
them again from the cache.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.ops import OPS

# Allocation launches nothing; lift_fresh only wraps a constant.
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
# What they write they do not read, although the schema says that it is changed.
_OVERWRITES = {"copy_", "fill_", "zero_"}
_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "_scaled_mm": 0}
"""Matrix products of PyTorch, and the place of the left one among their arguments."""
_GATHERED = {"word", "position", "dword", "dposition"}
"""Parameters of kernels that are tables, of which a row is touched for each id."""
_READ_BACK = {("_add_norm_cast_forward", "q"), ("_add_norm_cast_backward", "q")}
"""Parameters of kernels whose programs load only what they have just stored, 32 KiB at a time: from the cache."""


@dataclass(frozen=True)
class KernelLaunch:
    """Kernel that a GPU would run.

    Attributes:
        kernel: name of Triton's kernel, or of PyTorch's operator after ``aten.``.
        operator: that launches it.
        shapes, dtypes: of its tensors by parameter; PyTorch's results follow as ``out``.
        read, written: bytes.
        multiply_adds: of a matrix product of PyTorch's; 0 where the shapes do not tell, as of attention.
    """

    kernel: str
    operator: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    read: int
    written: int
    multiply_adds: int = 0


@contextmanager
def traced(
    observer: Callable[[KernelLaunch], None], multiprocessors: int, touched: Mapping[str, float] | None = None
) -> Iterator[None]:
    """Show ``observer`` every launch of a block, as on a GPU of so many multiprocessors.

    ``touched``: of parameters of Triton's kernels the share that is loaded or stored, where that is not all of it.
    Needs Triton.
    """
    from triton.runtime.jit import KernelInterface

    from kernels.triton import lamb
    from kernels.triton.norms import rows

    tracer = _Tracer(observer, touched or {})
    with ExitStack() as stack:
        for op in OPS.values():
            # What a GPU prefers, usable here or not: nothing is asked of the machine.
            stack.enter_context(op.supposed(op.order("cuda")[0]))
        stack.enter_context(
            # `kernel[grid](...)` is how Triton launches: in place of it stands a note.
            patch.object(KernelInterface, "__getitem__", lambda kernel, grid: tracer.launcher(kernel, grid))
        )
        # Kernels size their grids by the device's multiprocessors.
        stack.enter_context(patch.object(rows, "multiprocessors", lambda _device: multiprocessors))
        stack.enter_context(tracer)
        # Tables that LAMB keeps between calls are real tensors; within the trace they must be fake ones.
        lamb._chunks.cache_clear()
        try:
            yield
        finally:
            lamb._chunks.cache_clear()  # tables without values are for nobody else


class _Tracer(TorchDispatchMode):
    def __init__(self, observer: Callable[[KernelLaunch], None], touched: Mapping[str, float]) -> None:
        super().__init__()
        self._observer, self._touched = observer, touched
        self._operator = ""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A custom operator is opened, so that its launches are seen and not only its call.
        if (own := OPDEFS.get(func._schema.name)) is not None:
            before, self._operator = self._operator, own._qualname
            try:
                # A mode is off in its own handler: on again, so that what the operator's body calls is seen.
                with self:
                    return own._init_fn(*args, **kwargs)
            finally:
                self._operator = before
        # For results that are there it has no stand-in, and PyTorch would multiply zeros for seconds.
        result = kwargs["out"] if func is torch.ops.aten._scaled_mm.out else func(*args, **kwargs)
        launch = _of_pytorch(func, args, kwargs, result, self._operator)
        if launch is not None:
            self._observer(launch)
        return result

    def launcher(self, kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        """Stand in for ``kernel[grid]``."""

        def run(*args: object, **options: object) -> None:
            # Positional and named arguments alike, by the names of the kernel.
            named = dict(zip(kernel.arg_names, args, strict=False)) | options
            tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
            loaded, stored, _ = accesses(kernel.fn)
            sizes = {name: round(self._touched.get(name, 1) * _size(value)) for name, value in tensors.items()}
            if "CHUNK" in options:  # of flat vectors, a chunk for each program
                chunks = grid[0] * int(str(options["CHUNK"]))
                sizes = {name: min(size, chunks * tensors[name].element_size()) for name, size in sizes.items()}
            rows = [len(value) for name, value in tensors.items() if name == "input_ids"]
            for name in _GATHERED & sizes.keys():
                # A table's row is read for each id, and no more often than there are ids.
                sizes[name] = min(sizes[name], rows[0] * tensors[name].shape[-1] * tensors[name].element_size())
            own = kernel.fn.__name__
            self._observer(
                KernelLaunch(
                    own,
                    self._operator,
                    {name: tuple(value.shape) for name, value in tensors.items()},
                    {name: value.dtype for name, value in tensors.items()},
                    sum(size for name, size in sizes.items() if name in loaded and (own, name) not in _READ_BACK),
                    sum(size for name, size in sizes.items() if name in stored),
                )
            )

        return run


def _of_pytorch(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object, operator: str
) -> KernelLaunch | None:
    """Return what an operator of PyTorch launches; None for views and for memory that is only allocated."""
    name = func._schema.name.removeprefix("aten::")
    if name in _ALLOCATIONS:
        return None
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | {**kwargs}
    read = written = 0
    owned, tensors = set(), {}
    changed = {argument.name: argument for argument in func._schema.arguments if _is_written(argument)}
    for parameter, value in named.items():
        for tensor in (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)):
            # By storage, not by tensor: a view of an argument is no result.
            owned.add(tensor.untyped_storage()._cdata)
            tensors[parameter] = tensor
            size = _size(tensor)
            written += size if parameter in changed else 0
            # An `out` argument is written and not read; one that is changed in place is both.
            overwritten = name in _OVERWRITES or (parameter in changed and changed[parameter].is_out)
            read += 0 if overwritten and parameter in changed else size
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    made = [tensor for tensor in made if tensor.untyped_storage()._cdata not in owned]
    written += sum(map(_size, made))
    if not written:
        # Nothing written means a view or a query of metadata.
        return None
    # new_zeros and zeros_like have a tensor for its shape and type alone.
    if name.startswith("new_") or name.endswith("_like"):
        read = 0
    if name == "index_select":  # rows of the table that are not asked for stay where they are
        read = written
    tensors |= {"out": made[0]} if made else {}
    products = 0
    if name in _PRODUCTS:
        left, right = args[_PRODUCTS[name] : _PRODUCTS[name] + 2]
        # Rows x inner of the left one times columns of the right one, batches included.
        products = left.numel() * right.shape[-1]
    return KernelLaunch(
        f"aten.{name}",
        operator,
        {parameter: tuple(tensor.shape) for parameter, tensor in tensors.items()},
        {parameter: tensor.dtype for parameter, tensor in tensors.items()},
        read,
        written,
        products,
    )


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _size(tensor: Tensor) -> int:
    """Bytes of what is there once, however often a stride of 0 shows it."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


@cache
def accesses(function: Callable[..., Any]) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Parameters of a kernel, or of what it calls, through which it loads, stores, and of which its result is made.

    Read off the source: what a pointer is computed from by additions, assignments and calls is where it points to; what has
    been loaded points nowhere.
    """
    # Once a kernel: the arguments of a launch do not say what is loaded, and its source does.
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    roots: dict[str, set[str]] = {argument.arg: {argument.arg} for argument in tree.args.args}
    loaded: set[str] = set()
    stored: set[str] = set()
    returned: set[str] = set()

    def of(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Name):
            return roots.get(node.id, set())
        if not isinstance(node, ast.Call):
            # Any expression points wherever one of its parts does: too much is safer than too little here.
            return set().union(*map(of, ast.iter_child_nodes(node)))
        given = [of(argument) for argument in node.args]
        others = {keyword.arg: of(keyword.value) for keyword in node.keywords}
        if (
            isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "tl"
        ):
            operation = node.func.attr
            if operation == "load" or operation.startswith("atomic"):
                loaded.update(given[0])
            if operation == "store" or operation.startswith("atomic"):
                stored.update(given[0])
            # What is loaded is a value, whatever pointer it came from: it has no roots.
            if operation in ("load", "store") or operation.startswith("atomic"):
                return set()
        # A jitted function is followed; the result of any other is taken to come from all that it was given.
        called = getattr(function.__globals__.get(getattr(node.func, "id", "")), "fn", None)
        if called is None:
            return set().union(of(node.func), *given, *others.values())
        by_name = dict(zip(inspect.signature(called).parameters, given, strict=False)) | others
        through = accesses(called)
        for mine, theirs in zip((loaded, stored), through, strict=False):
            mine.update(*(by_name.get(name, set()) for name in theirs))
        return set().union(*(by_name.get(name, set()) for name in through[2]))

    # Tuples are taken apart where both sides have as many parts; otherwise each gets all.
    def assign(target: ast.expr, value: ast.expr | None, found: set[str]) -> None:
        if isinstance(target, ast.Name):
            roots[target.id] = found
        elif isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else None
            for place, each in enumerate(target.elts):
                assign(each, None, of(parts[place]) if parts else found)

    def follow(statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            found = set().union(*(of(node) for node in ast.iter_child_nodes(statement) if isinstance(node, ast.expr)))
            if isinstance(statement, ast.Assign):
                assign(statement.targets[0], statement.value, of(statement.value))
            elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
                assign(statement.target, None, found)
            elif isinstance(statement, ast.Return):
                returned.update(found)
            # Both branches and loop bodies count, in order: an assignment may move a pointer on.
            follow(getattr(statement, "body", []))
            follow(getattr(statement, "orelse", []))

    follow(tree.body)
    return frozenset(loaded), frozenset(stored), frozenset(returned)
