"""Compile every Triton kernel without a GPU, and print its registers, spilled bytes and shared memory.

    python -m kernels.ahead_of_time

Each module of ``kernels/triton/`` lists the configurations that it can choose in ``configurations()``. The figures come from
the compiler and cuobjdump that ship with Triton. ``TRITON_INTERPRET`` must not be set, because Triton then compiles nothing.
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
"""Kinds of instruction that decide a kernel's speed, with their patterns in PTX: products by the tensor cores of sm_80,
sm_90 and sm_100, asynchronous copies, accesses of 16 bytes, and operations in double precision, which are slow."""

NEGLIGIBLE_SPILL = 16
"""Bytes that a thread may spill. Triton 3.6 spills so many in one kernel for sm_80; Triton 3.7 spills none."""
_ALIGNED = ["tt.divisibility", 16]


@dataclass(frozen=True)
class Cost:
    """Resources of a GPU that a configuration uses."""

    module: str
    kernel: str
    configuration: str
    capability: int
    """Compute capability, 90 for sm_90."""
    num_warps: int
    registers: int
    """Registers of a thread."""
    spilled: int
    """Bytes of registers that a thread spills to local memory."""
    shared: int
    """Bytes of shared memory of a block, static and dynamic."""
    in_flight: int
    """Asynchronous copies that may still be pending when the kernel waits for earlier ones; 0 without such copies."""
    instructions: str
    """Kinds of ``INSTRUCTIONS`` that the kernel contains, separated by spaces."""

    def __str__(self) -> str:
        kernel = f"{self.module}: {self.kernel}, {self.configuration}, sm_{self.capability}, {self.num_warps} warps"
        return f"{kernel}: {self.registers} registers, {self.spilled} B spilled, {self.shared / 1024:.1f} KiB shared"

    @property
    def fits(self) -> bool:
        """Whether the device can run it without significant spills."""
        return self.spilled <= NEGLIGIBLE_SPILL and self.shared <= SHARED_MEMORY_LIMITS[self.capability]


def all_configurations() -> dict[str, list[Configuration]]:
    """Return the configurations of every module below ``kernels/triton/`` that has any, by the module's name.

    Raises:
        ValueError: Triton is missing or interprets kernels.
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
    """Compile all configurations for the ``capabilities`` that they are for."""
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
    """Compile one configuration for one compute capability.

    Triton compiles a kernel again if integers are multiples of 16, with other vector widths and pipelines. Each figure is
    the worse one of two compilations, one with such integers and one without. Pointers are aligned in both, as PyTorch's
    are.
    """
    both = [compiled(configuration, capability, aligned) for aligned in (("*",), ("*", "i", "u"))]
    registers, spilled, shared, in_flight = zip(*map(figures, both), strict=True)
    names = module, configuration.kernel.__name__, configuration.name
    worst = max(registers), max(spilled), max(shared), min(in_flight)
    ptx = "".join(each.asm["ptx"] for each in both)
    # Instructions may stand behind a predicate.
    kinds = (kind for kind, pattern in INSTRUCTIONS.items() if re.search(rf"^\s*(?:@!?%p\d+ )?{pattern}", ptx, re.M))
    return Cost(*names, capability, configuration.num_warps, *worst, " ".join(kinds))


def compiled(configuration: Configuration, capability: int, aligned_types: tuple[str, ...]) -> "CompiledKernel":
    """Compile a configuration with parameters of ``aligned_types`` (``*`` for pointers, ``i``, ``u``) that divide by 16."""
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
    """Return registers of a thread, spilled bytes, bytes of shared memory, and copies in flight."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", binary.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"cuobjdump failed: {done.stderr.strip()}")
    waits = re.findall(r"async_wait.*\bnum = (\d+)", compiled.asm["ttgir"])
    # Triton keeps no arrays on the stack: everything there is a spilled register.
    used = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    if used is None:
        raise RuntimeError(f"cuobjdump printed no registers and stack: {done.stdout[:500]}")
    return int(used[1]), int(used[2]), compiled.metadata.shared, max(map(int, waits), default=0)


def main(arguments: Sequence[str]) -> int:
    """Compile and print; return 1 if a configuration spills or does not fit, 2 for a wrong setting."""
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
    # Run the module under the name by which others import it, so that its classes exist once.
    sys.exit(importlib.import_module("kernels.ahead_of_time").main(sys.argv[1:]))
