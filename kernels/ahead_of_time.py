"""Compile every Triton kernel without a GPU, and print its registers, spilled bytes and shared memory.

    python -m kernels.ahead_of_time

The function ``configurations()`` of each module in ``kernels/triton/`` lists the configurations that the module can choose.
The numbers come from the compiler and cuobjdump that ship with Triton. ``TRITON_INTERPRET`` must not be set, because Triton
would then interpret the kernels instead of compiling them.
"""

import argparse
import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import kernels.triton
from kernels.configuration import SHARED_MEMORY_LIMITS, Configuration

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

INSTRUCTIONS = {
    "mma": r"mma\.sync",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "cp.async": r"cp\.async\.c[ag]",
    "TMA": r"cp\.async\.bulk",
    "vectors": r"(?:ld|st)\.global\S*\.v4\.b32",
    "f64": r"(?:add|sub|mul|fma|div|sqrt|min|max)\.\S*f64",
}
"""Kinds of instructions that determine a kernel's speed, with their patterns in PTX: matrix products by the tensor cores of
sm_80, sm_90 and sm_100, asynchronous copies, 16-byte accesses, and operations in double precision, which are slow."""

NEGLIGIBLE_SPILL = 16
"""Number of bytes that a thread may spill. Triton 3.6 spills this many in one kernel for sm_80; Triton 3.7 spills none."""
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

    def __str__(self) -> str:
        kernel = f"{self.module}: {self.kernel}, {self.configuration}, sm_{self.capability}, {self.num_warps} warps"
        return f"{kernel}: {self.registers} registers, {self.spilled} B spilled, {self.shared / 1024:.1f} KiB shared"

    @property
    def fits(self) -> bool:
        """Whether the device can run the kernel without significant register spills."""
        return self.spilled <= NEGLIGIBLE_SPILL and self.shared <= SHARED_MEMORY_LIMITS[self.capability]


def all_configurations() -> dict[str, list[Configuration]]:
    """Return the configurations of all modules below ``kernels/triton/``, by the module's name.

    Raises:
        ValueError: Triton is not installed, or ``TRITON_INTERPRET`` is set.
    """
    if importlib.util.find_spec("triton") is None:
        raise ValueError("triton is not installed: pip install triton")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise ValueError("TRITON_INTERPRET is set, and Triton compiles nothing then: unset it")
    prefix = "kernels.triton."
    names = [found.name.removeprefix(prefix) for found in pkgutil.walk_packages(kernels.triton.__path__, prefix)]
    modules = {name: importlib.import_module(prefix + name) for name in names}
    return {name: module.configurations() for name, module in modules.items() if hasattr(module, "configurations")}


def costs_of(
    configurations: dict[str, list[Configuration]], capabilities: Iterable[int] = tuple(SHARED_MEMORY_LIMITS)
) -> list[Cost]:
    """Compile all configurations in parallel, each for those of the ``capabilities`` that it supports."""
    work = [
        (module, configuration, capability)
        for module, its_own in configurations.items()
        for configuration in its_own
        for capability in capabilities
        if capability in configuration.capabilities
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda item: cost(*item), work))


def cost(module: str, configuration: Configuration, capability: int) -> Cost:
    """Compile one configuration for one compute capability and return its resources.

    Triton compiles separate versions of a kernel for integer arguments that are multiples of 16, with other vector widths
    and pipelines. This function compiles both versions and returns the worse value of each number. Pointers are aligned in
    both versions, because PyTorch's pointers are.
    """
    both = [compiled(configuration, capability, aligned) for aligned in (("*",), ("*", "i", "u"))]
    registers, spilled, shared, in_flight = zip(*map(figures, both), strict=True)
    names = module, configuration.kernel.__name__, configuration.name
    worst = max(registers), max(spilled), max(shared), min(in_flight)
    ptx = "".join(each.asm["ptx"] for each in both)
    # An instruction may be preceded by a predicate.
    kinds = (kind for kind, pattern in INSTRUCTIONS.items() if re.search(rf"^\s*(?:@!?%p\d+ )?{pattern}", ptx, re.M))
    return Cost(*names, capability, configuration.num_warps, *worst, " ".join(kinds))


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


def figures(compiled: "CompiledKernel") -> tuple[int, int, int, int]:
    """Return a kernel's registers per thread, spilled bytes, bytes of shared memory, and asynchronous copies in flight."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", binary.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"cuobjdump failed: {done.stderr.strip()}")
    waits = re.findall(r"async_wait.*\bnum = (\d+)", compiled.asm["ttgir"])
    # Triton keeps no arrays on the stack, so everything on the stack is a spilled register.
    used = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    if used is None:
        raise RuntimeError(f"cuobjdump printed no registers and stack: {done.stdout[:500]}")
    return int(used[1]), int(used[2]), compiled.metadata.shared, max(map(int, waits), default=0)


def main(arguments: Sequence[str]) -> int:
    """Compile all configurations, print their resources and return the exit status.

    The status is 1 if a configuration spills registers or does not fit, and 2 for a wrong setting.
    """
    if arguments[:1] == ["--version"]:
        from console.version import version_line

        print(version_line())
        return 0
    parser = argparse.ArgumentParser("python -m kernels.ahead_of_time", description=(__doc__ or "").partition("\n")[0])
    parser.parse_args(arguments)
    try:
        costs = costs_of(all_configurations())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for cost in costs:
        print(cost)
    unfit = [cost for cost in costs if not cost.fits]
    for cost in unfit:
        print(f"does not fit: {cost}", file=sys.stderr)
    return 1 if unfit else 0


if __name__ == "__main__":
    from console.interruption import in_one_line

    sys.excepthook = in_one_line
    # Run the module under the name by which other modules import it, so that its classes exist only once.
    sys.exit(importlib.import_module("kernels.ahead_of_time").main(sys.argv[1:]))
