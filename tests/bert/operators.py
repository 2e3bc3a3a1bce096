"""Record of the operators that PyTorch runs in a block."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Operators that ran in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []
        """Each operator with its positional arguments."""

    @property
    def names(self) -> list[str]:
        return [operator.overloadpacket.__name__ for operator, _ in self.calls]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls.append((func, args))
        return func(*args, **kwargs or {})
