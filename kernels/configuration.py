"""Configuration of a Triton kernel. Each module of ``kernels/triton/`` lists its own for compilation ahead of time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SHARED_MEMORY_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one block may ask for, by compute capability (CUDA C++ Programming Guide, appendix on
compute capabilities)."""


@dataclass(frozen=True)
class Configuration:
    """A kernel with everything that is fixed when it is compiled."""

    name: str
    """Use of the configuration, such as ``forward, bf16, D = 1024``."""
    kernel: Any
    """The ``triton.jit`` function."""
    signature: dict[str, str]
    """Type of every parameter, in order: ``*bf16``, ``i32``, ``constexpr``."""
    constexprs: dict[str, object]
    """Values of the parameters of type ``constexpr``."""
    num_warps: int
    num_stages: int
    capabilities: tuple[int, ...] = tuple(SHARED_MEMORY_LIMITS)
    """Compute capabilities of the devices that it is for."""
    max_registers: int | None = None
    """Limit for the registers of a thread."""

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
        """Make a configuration of the kernel's parameters in ``types`` and ``fixed``, which may have others as well."""
        constexprs = {name: fixed[name] for name in kernel.arg_names if name in fixed}
        signature = {name: "constexpr" if name in fixed else types[name] for name in kernel.arg_names}
        return cls(name, kernel, signature, constexprs, *options, **others)
