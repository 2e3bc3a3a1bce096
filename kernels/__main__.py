"""Implementations that compute each op here.

    python -m kernels [--device cpu|cuda] [--dtype bf16|fp32]

For every op and implementation: whether it can be used on this machine and why not, and which one ``auto`` takes.

    python -m kernels autotune [OP ...] [--device cpu|cuda] [--dtype bf16|fp32] [--sequences N ...]

measures them at the size of BERT-Large with N sequences, both ways; what was measured before is measured again.

    python -m kernels show              what was measured, for these calls and in training
    python -m kernels pin OP NAME       from now on, for this checkout on this machine, this implementation or an error
    python -m kernels clear [OP]        forgets what was measured and pinned, of one op or of all
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from console.interruption import in_one_line, reader_has_gone
from console.program import RaisingParser
from console.version import version_line

COMMANDS = ("autotune", "show", "pin", "clear")


def main(arguments: Sequence[str]) -> int:
    """Run a command; 2 with one line on stderr for wrong input."""
    command = arguments[0] if arguments and arguments[0] in COMMANDS else None
    try:
        if arguments[:1] == ["--version"]:
            print(version_line())
        else:
            # One parser for each command, so that --help shows its own options alone.
            chosen = _parser(command).parse_args(arguments[1:] if command else arguments)
            from kernels.tuning import commands  # imports PyTorch, for which --help does not wait

            getattr(commands, command or "table")(chosen)
        sys.stdout.flush()  # not first when Python ends, where nobody could catch that the reader has gone
    except BrokenPipeError:
        return reader_has_gone()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser(command: str | None) -> RaisingParser:
    if command is None:
        parser = RaisingParser(
            prog="python -m kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
    else:
        parser = RaisingParser(prog=f"python -m kernels {command}")
    if command in (None, "autotune", "pin"):
        parser.add_argument("--device", choices=("cpu", "cuda"), help="by default cuda where PyTorch sees a GPU")
        parser.add_argument("--dtype", choices=("bf16", "fp32"), help="by default bf16 on cuda, fp32 on cpu")
    if command == "autotune":
        parser.add_argument("ops", nargs="*", metavar="OP", help="by default all")
        parser.add_argument("--sequences", type=int, nargs="+", metavar="N", help="by default 96 on a GPU, 1 on a CPU")
    elif command == "pin":
        parser.add_argument("op", metavar="OP")
        parser.add_argument("name", metavar="NAME")
    elif command == "clear":
        parser.add_argument("op", metavar="OP", nargs="?")
    return parser


if __name__ == "__main__":
    sys.excepthook = in_one_line
    sys.exit(main(sys.argv[1:]))
