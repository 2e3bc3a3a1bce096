"""Compile-time configuration of a Triton kernel.

Each module of ``kernels/triton/`` lists its configurations, so that they can be compiled ahead of time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SHARED_MEMORY_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Maximum bytes of shared memory per block, by compute capability (CUDA C++ Programming Guide, appendix on compute
capabilities)."""


@dataclass(frozen=True)
class Configuration:
    """A kernel with all values that are fixed at compile time."""

    name: str
    """Description of the configuration's use, such as ``forward, bf16, D = 1024``."""
    kernel: Any
    """The ``triton.jit`` function."""
    signature: dict[str, str]
    """Type of every parameter by name, in order, such as ``*bf16``, ``i32`` or ``constexpr``."""
    constexprs: dict[str, object]
    """Values of the parameters of type ``constexpr``."""
    num_warps: int
    num_stages: int
    capabilities: tuple[int, ...] = tuple(SHARED_MEMORY_LIMITS)
    """Compute capabilities of the devices for which the configuration is meant."""
    max_registers: int | None = None
    """Maximum number of registers per thread, or None for no limit."""

    @classmethod
    def of(
        cls,
        name: str,
        kernel: Any,
        types: Mapping[str, str],
        fixed: Mapping[str, object],
        *options: Any,
        **others: Any,
    ) -> "Configuration":
        """Create a configuration from the parameter types in ``types`` and the constexpr values in ``fixed``.

        Entries that are not parameters of the kernel are ignored.
        """
        constexprs = {name: fixed[name] for name in kernel.arg_names if name in fixed}
        signature = {name: "constexpr" if name in fixed else types[name] for name in kernel.arg_names}
        return cls(name, kernel, signature, constexprs, *options, **others)
