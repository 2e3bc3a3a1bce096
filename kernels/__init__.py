"""The public ops, which take and return tensors. The model uses no other functions of this package.

Shape legend: T tokens of the flat stream, Q query tokens, S sequences, M masked tokens, D hidden, H heads, E head size,
F intermediate, V vocabulary, L positions, N rows, C classes, P parameters.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if find_spec("torch") is None:
    raise ModuleNotFoundError("torch is not installed: pip install '.[train]'", name="torch")

if TYPE_CHECKING:
    from kernels.ops import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """Import the ops and PyTorch on first use, because ``python -m kernels --help`` needs neither."""
        return getattr(import_module("kernels.ops"), name)
