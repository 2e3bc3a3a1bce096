"""Registers, spilled bytes, shared memory and instructions of every Triton kernel, compiled without a GPU.

    python -m tests.kernels.compiled        # prints them

The exit status is 1 if a kernel spills, does not fit, or overwrites a register that a matrix product still uses, for which
``tests.kernels.wgmma`` searches.

The function ``configurations()`` of each module in ``kernels/triton/`` lists the configurations that the module can choose.
The numbers come from the compiler and cuobjdump that ship with Triton. Compiling everything takes minutes, so a file stores
the numbers under Triton's version and a digest of everything that affects a compilation. Both the command and the tests
compile configurations that the file lacks, but only the command adds them to the file.
"""

import ast
import functools
import hashlib
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import kernels.triton
from kernels.configuration import SHARED_MEMORY_LIMITS, Configuration
from tests.kernels import wgmma

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

FILE = Path(__file__).with_name("compiled.json")
INSTRUCTIONS = {
    "mma": r"mma\.sync",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "cp.async": r"cp\.async\.c[ag]",
    "TMA": r"cp\.async\.bulk",
    "vectors": r"(?:ld|st)\.global\S*\.v4\.b32",
    "satfinite": r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f32",
    "f64": r"(?:add|sub|mul|fma|div|sqrt|min|max)\.\S*f64",
}
"""Kinds of instructions that determine a kernel's speed, with their patterns in PTX: matrix products by the tensor cores of
sm_80, sm_90 and sm_100, asynchronous copies, 16-byte accesses, conversions to FP8 that saturate, and operations in double
precision, which are slow."""

NEGLIGIBLE_SPILL = 16
"""Number of bytes that a thread may spill. Triton 3.6 spills up to this many in four kernels; Triton 3.7 spills none."""
_ALIGNED = ["tt.divisibility", 16]


@dataclass(frozen=True)
class Cost:
    """GPU resources that a compiled configuration uses."""

    module: str
    kernel: str
    configuration: str
    capability: int
    """Compute capability, for example 90 for sm_90."""
    num_warps: int
    registers: int
    """Number of registers per thread."""
    spilled: int
    """Bytes of registers that each thread spills to local memory."""
    shared: int
    """Bytes of shared memory per block, static and dynamic."""
    in_flight: int
    """Number of asynchronous copies that may still be pending when the kernel waits for earlier copies; 0 if the kernel
    makes no asynchronous copies."""
    instructions: str
    """Keys of ``INSTRUCTIONS`` that occur in the kernel, separated by spaces."""
    products: int
    """Number of asynchronous matrix products of sm_90 checked for hazards in both versions that ``cost`` compiles."""
    hazards: list[str]
    """Writes to registers that a product still needs."""

    def __str__(self) -> str:
        kernel = f"{self.module}: {self.kernel}, {self.configuration}, sm_{self.capability}, {self.num_warps} warps"
        return f"{kernel}: {self.registers} registers, {self.spilled} B spilled, {self.shared / 1024:.1f} KiB shared"

    @property
    def fits(self) -> bool:
        """Whether the device can run the kernel without significant register spills."""
        return self.spilled <= NEGLIGIBLE_SPILL and self.shared <= SHARED_MEMORY_LIMITS[self.capability]


Item = tuple[str, Configuration, int]
"""A module, a configuration of one of its kernels, and the compute capability to compile it for."""


def name_of(module: str, configuration: Configuration, capability: int) -> str:
    return f"{module}: {configuration.kernel.__name__}, {configuration.name}, sm_{capability}"


def digest(item: Item) -> str:
    """Return a digest of the kernel, its callees, its configuration, and the functions that compile and measure it."""
    _, chosen, _ = item
    settings = chosen.signature, chosen.constexprs, chosen.num_warps, chosen.num_stages, chosen.max_registers
    parts = name_of(*item), chosen.kernel.cache_key, settings, INSTRUCTIONS, *_measuring()
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def known_costs() -> tuple[dict[str, Cost], list[str]]:
    """Return the costs of all configurations by digest, and the names of configurations that the file lacks.

    The list of names is empty if the file has no section for this version of Triton.
    """
    kept = _read().get(_version(), {})
    items = {digest(item): item for item in _items()}
    lacking = {key: item for key, item in items.items() if key not in kept}
    found = dict(zip(lacking, costs_of(lacking.values()), strict=True))
    costs = {key: found[key] if key in found else Cost(**kept[key]) for key in items}
    return costs, [name_of(*item) for item in lacking.values()] if kept else []


def specialized() -> list[str]:
    """Return the kernels' integer arguments for which Triton specializes on the value 1 and on multiples of 16."""
    return sorted({f"{module}: {name}" for module, chosen, _ in _items() for name in _specialized(chosen)})


def items_of(module: str, configurations: Iterable[Configuration], capabilities: Iterable[int]) -> list[Item]:
    """Return an item for each configuration and each of the ``capabilities`` that the configuration supports."""
    return [
        (module, configuration, capability)
        for configuration in configurations
        for capability in capabilities
        if capability in configuration.capabilities
    ]


def costs_of(items: Iterable[Item]) -> list[Cost]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda item: cost(*item), items))


def cost(module: str, configuration: Configuration, capability: int) -> Cost:
    """Compile one configuration for one compute capability and return its resources.

    Triton compiles separate versions of a kernel for integer arguments that are multiples of 16, with other vector widths
    and pipelines. This function compiles both versions and returns the worse value of each number. Pointers are aligned in
    both versions, because PyTorch's pointers are.
    """
    both = [compiled(configuration, capability, aligned) for aligned in (("*",), ("*", "i", "u"))]
    registers, spilled, shared, in_flight, products, hazards = zip(*map(figures, both), strict=True)
    names = module, configuration.kernel.__name__, configuration.name
    worst = max(registers), max(spilled), max(shared), min(in_flight)
    walked = sum(products), [*hazards[0], *hazards[1]]
    ptx = "".join(each.asm["ptx"] for each in both)
    # An instruction may be preceded by a predicate.
    kinds = (kind for kind, pattern in INSTRUCTIONS.items() if re.search(rf"^\s*(?:@!?%p\d+ )?{pattern}", ptx, re.M))
    return Cost(*names, capability, configuration.num_warps, *worst, " ".join(kinds), *walked)


def compiled(configuration: Configuration, capability: int, aligned_types: tuple[str, ...]) -> "CompiledKernel":
    """Compile a configuration, assuming that parameters of ``aligned_types`` are multiples of 16.

    ``*`` stands for pointers, ``i`` for signed and ``u`` for unsigned integers.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = configuration.signature.values()
    aligned = {
        (place,): [_ALIGNED]
        for place, (kind, parameter) in enumerate(zip(kinds, configuration.kernel.params, strict=True))
        if kind.startswith(aligned_types) and not parameter.do_not_specialize
    }
    source = ASTSource(configuration.kernel, configuration.signature, configuration.constexprs, aligned)
    options = {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages}
    options |= {} if configuration.max_registers is None else {"maxnreg": configuration.max_registers}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def figures(compiled: "CompiledKernel") -> tuple[int, int, int, int, int, list[str]]:
    """Return a kernel's registers per thread, spilled bytes, bytes of shared memory, asynchronous copies in flight,
    asynchronous matrix products of sm_90, and their hazards."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()
        sections = ["-res-usage", *(["-sass"] if "wgmma.mma_async" in compiled.asm["ptx"] else [])]
        command = [knobs.nvidia.cuobjdump.path, *sections, binary.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"cuobjdump failed: {done.stderr.strip()}")
    waits = re.findall(r"async_wait.*\bnum = (\d+)", compiled.asm["ttgir"])
    # Triton keeps no arrays on the stack, so the stack contains only spilled registers.
    used = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    if used is None:
        raise RuntimeError(f"cuobjdump printed no registers and stack: {done.stdout[:500]}")
    in_flight = max(map(int, waits), default=0)
    return int(used[1]), int(used[2]), compiled.metadata.shared, in_flight, *wgmma.hazards(done.stdout)


def _items() -> list[Item]:
    """Return all configurations of all modules below ``kernels/triton/``, after removing comments from the kernels."""
    import triton  # imported here, because often nothing must be compiled

    prefix = "kernels.triton."
    names = [found.name.removeprefix(prefix) for found in pkgutil.walk_packages(kernels.triton.__path__, prefix)]
    modules = {name: importlib.import_module(prefix + name) for name in names}
    for module in [module for name, module in sys.modules.items() if name.startswith("kernels.triton")]:
        for function in vars(module).values():
            if isinstance(function, triton.JITFunction):
                function._unsafe_update_src(_code(function.src))
                function.starting_line_number = 0
    return [
        item
        for name, module in modules.items()
        if hasattr(module, "configurations")
        for item in items_of(name, module.configurations(), SHARED_MEMORY_LIMITS)
        + items_of(name, wgmma.variants(module.configurations()), (90,))
    ]


@functools.cache
def _measuring() -> tuple[str, ...]:
    """Return the code of the functions that compile and measure, without comments."""
    functions = (_code(inspect.getsource(each)) for each in (cost, compiled, figures))
    return *functions, ast.unparse(ast.parse(inspect.getsource(wgmma)))


def _code(source: str) -> str:
    tree = ast.parse(source)
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    if ast.get_docstring(definition) is not None:
        del definition.body[0]
    return ast.unparse(tree)


def _specialized(configuration: Configuration) -> list[str]:
    numbers = [each for each in configuration.kernel.params if configuration.signature[each.name] in ("i32", "i64")]
    return [each.name for each in numbers if not each.do_not_specialize]


def _read() -> dict[str, dict[str, dict]]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def _version() -> str:
    import triton  # imported only if something is compiled

    return triton.__version__


def main() -> int:
    """Update the installed Triton version's section of the file, print it, and return the exit status."""
    costs, _ = known_costs()
    versions = _read() | {_version(): {key: asdict(cost) for key, cost in costs.items()}}
    # One line per configuration keeps diffs readable.
    rows = {
        version: ",\n".join(f'"{key}": {json.dumps(figures)}' for key, figures in its_own.items())
        for version, its_own in sorted(versions.items())
    }
    sections = ",\n".join(f'"{version}": {{\n{its_own}\n}}' for version, its_own in rows.items())
    FILE.write_text(f"{{{sections}}}\n", encoding="utf-8")
    print(*costs.values(), sep="\n")
    walked = [cost for cost in costs.values() if cost.products]
    hazards = [f"{cost.module}: {cost.configuration}: {hazard}" for cost in walked for hazard in cost.hazards]
    products = sum(cost.products for cost in walked)
    print(*hazards, f"{len(hazards)} hazards of {products} asynchronous products in {2 * len(walked)} cubins", sep="\n")
    return int(not walked or bool(hazards) or not all(cost.fits for cost in costs.values()))


if __name__ == "__main__":
    sys.exit(main())
