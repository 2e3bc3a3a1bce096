"""List the implementations of each op on this machine.

    python -m kernels [--device cpu|cuda] [--dtype bf16|fp32]

For every op, the table shows which implementations can be used on this machine, the reasons why others cannot, and which
implementation ``auto`` takes without measurements.
"""

import argparse
import sys
from collections.abc import Sequence

import torch

from console.interruption import abandon_stdout, in_one_line
from console.program import RaisingParser, answer_version, complain
from kernels import OPS
from kernels.tuning.examples import example_inputs


def main(arguments: Sequence[str]) -> int:
    """Print the table of implementations. Return 0, or 2 with one line on stderr for wrong input."""
    parser = RaisingParser(
        prog="python -m kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default cuda if PyTorch sees a GPU")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="by default bf16 on cuda, fp32 on cpu")
    try:
        answer_version(arguments)
        chosen = parser.parse_args(arguments)
        _print_table(chosen.device, chosen.dtype)
        sys.stdout.flush()  # flush here, so that a broken pipe raises inside this block
    except BrokenPipeError:
        return abandon_stdout()
    except (ValueError, OSError) as error:
        complain(error)
        return 2
    return 0


def _print_table(device: str | None, dtype: str | None) -> None:
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but PyTorch sees no GPU: use --device cpu")
    dtype = dtype or ("bf16" if device == "cuda" else "fp32")
    print(f"{'op':28}{'implementation':20}{'auto':6}on {device}, {dtype}, with gradients and dropout")
    for name, op in OPS.items():
        args, kwargs = example_inputs(
            name, torch.device(device), {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        )
        taken = op.chosen(*args, **kwargs)
        for index, implementation in enumerate(op.orders[device]):
            reasons = "; ".join(implementation.unsupported_reasons(*args, **kwargs)) or "usable"
            mark = "<-" if implementation is taken else ""
            print(f"{name if index == 0 else '':28}{implementation.name:20}{mark:6}{reasons}")


if __name__ == "__main__":
    sys.excepthook = in_one_line
    sys.exit(main(sys.argv[1:]))
