"""Record of the operators that PyTorch runs in a block."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operators(TorchDispatchMode):
    """Names of the operators that ran in the block, and the host values passed to them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.values: list[list[object]] = []
        """Host values passed to each operator."""
        self.waits: list[str] = []
        """Names of operators after which the host waits for the device."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        self.names.append(name)
        self.values.append([value for value in tree_leaves((args, kwargs)) if isinstance(value, int | float | str)])
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            self.waits.append(name)
        return func(*args, **kwargs)
