"""What computes each op here: ``python -m kernels [--device cpu|cuda] [--dtype bf16|fp32]``.

For every op and implementation: whether it can be used on this machine and why not, and which one ``auto`` takes.
"""

import argparse
import sys
from collections.abc import Sequence

import torch

from kernels import OPS
from kernels.examples import example_inputs

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main(arguments: Sequence[str]) -> int:
    """Prints the table; 2 where the device asked for is not there."""
    parser = argparse.ArgumentParser(prog="python -m kernels", description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="bf16" if default == "cuda" else "fp32")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("error: --device is cuda, and PyTorch sees no GPU", file=sys.stderr)
        return 2
    print(f"{'op':24}{'implementation':16}{'auto':6}on {chosen.device}, {chosen.dtype}, with gradients and dropout")
    for name, op in OPS.items():
        args, kwargs = example_inputs(name, torch.device(chosen.device), _DTYPES[chosen.dtype])
        taken = op.chosen(*args, **kwargs).name
        for index, implementation in enumerate(op.order(chosen.device)):
            reasons = "; ".join(implementation.unsupported_reasons(name, *args, **kwargs)) or "usable"
            mark = "<-" if implementation.name == taken else ""
            print(f"{name if index == 0 else '':24}{implementation.name:16}{mark:6}{reasons}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
