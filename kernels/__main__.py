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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from console.interruption import in_one_line, reader_has_gone
from console.version import version_line

if TYPE_CHECKING:
    import torch

    from kernels.tuning.examples import Size

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
"""PyTorch's names, which is imported when a command runs."""
_MEAN_LENGTH, _MASKED_PER_SEQUENCE = 256, 38
"""Wikipedia's means."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(arguments: Sequence[str]) -> int:
    """Run a command; 2 with one line on stderr for wrong input."""
    command = _COMMANDS.get(arguments[0]) if arguments else None
    try:
        if arguments[:1] == ["--version"]:
            print(version_line())
        elif command is None:
            _table(arguments)
        else:
            command(arguments[1:])
        sys.stdout.flush()  # not first when Python ends, where nobody could catch that the reader has gone
    except BrokenPipeError:
        return reader_has_gone()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _table(arguments: Sequence[str]) -> None:
    parser = _with_device(_Parser(prog="python -m kernels", description=__doc__, formatter_class=_AS_WRITTEN))
    chosen = parser.parse_args(arguments)
    from kernels import OPS
    from kernels.tuning.cache import Cache
    from kernels.tuning.examples import example_inputs

    device, dtype = _device_and_dtype(chosen)
    pins = Cache().pins()
    print(f"{'op':28}{'implementation':20}{'auto':6}on {device}, {_short(dtype)}, with gradients and dropout")
    for name, op in OPS.items():
        args, kwargs = example_inputs(name, device, dtype)
        taken = pins.get(name) or op.chosen(*args, **kwargs).name
        for index, implementation in enumerate(op.order(device.type)):
            reasons = "; ".join(implementation.unsupported_reasons(name, *args, **kwargs)) or "usable"
            mark = ("pin" if name in pins else "<-") if implementation.name == taken else ""
            print(f"{name if index == 0 else '':28}{implementation.name:20}{mark:6}{reasons}")
    if lines := _measured_lines():
        print("\n".join(["", "measured, and taken for such calls in training:", *lines]))


def _autotune(arguments: Sequence[str]) -> None:
    parser = _with_device(_Parser(prog="python -m kernels autotune"))
    parser.add_argument("ops", nargs="*", metavar="OP", help="by default all")
    parser.add_argument("--sequences", type=int, nargs="+", metavar="N", help="by default 96 on a GPU, 1 on a CPU")
    chosen = parser.parse_args(arguments)
    from kernels import OPS
    from kernels.precision import set_product_precision
    from kernels.tuning import autotune
    from kernels.tuning.examples import Size

    device, dtype = _device_and_dtype(chosen)
    set_product_precision()
    for op in chosen.ops:
        autotune.check_names(op)
    counts = chosen.sequences or [96 if device.type == "cuda" else 1]
    if min(counts) < 1:
        raise ValueError(f"--sequences {min(counts)}, expected at least 1")
    for count in counts:
        size = Size(lengths=(_MEAN_LENGTH,) * count, masked=_MASKED_PER_SEQUENCE * count)
        print(f"{count} sequences of {_MEAN_LENGTH} tokens on {device}, {_short(dtype)}")
        for op in chosen.ops or OPS:
            _measure(op, device, dtype, size)


def _measure(op: str, device: torch.device, dtype: torch.dtype, size: Size) -> None:
    from kernels.tuning import autotune
    from kernels.tuning.examples import example_inputs
    from kernels.tuning.request import Request

    args, kwargs = example_inputs(op, device, dtype, size)
    request = Request.of(op, args, kwargs)
    del args, kwargs
    choice = autotune.measure(request)
    if choice is None:
        print(f"{op:28}nothing ran")
        return
    autotune.keep(request, choice)
    best = choice.milliseconds[choice.taken]
    for index, (name, milliseconds) in enumerate(choice.milliseconds.items()):
        mark = "<-" if name == choice.taken else ""
        print(f"{op if index == 0 else '':28}{name:20}{milliseconds:12.3f} ms{milliseconds / best:8.2f} x  {mark}")
    for name, error in choice.errors.items():
        print(f"{'':28}{name:20}failed: {error}")


def _show(arguments: Sequence[str]) -> None:
    _Parser(prog="python -m kernels show").parse_args(arguments)
    from kernels.tuning.cache import Cache

    cache = Cache()
    lines = [f"{op}: {name}, pinned" for op, name in cache.pins().items()] + _measured_lines()
    print("\n".join(lines) or f"nothing is measured or pinned in {cache.folder}")


def _pin(arguments: Sequence[str]) -> None:
    parser = _with_device(_Parser(prog="python -m kernels pin"))
    parser.add_argument("op", metavar="OP")
    parser.add_argument("name", metavar="NAME")
    chosen = parser.parse_args(arguments)
    from kernels import OPS
    from kernels.tuning import autotune
    from kernels.tuning.cache import Cache
    from kernels.tuning.examples import example_inputs

    autotune.check_names(chosen.op, chosen.name)
    device, dtype = _device_and_dtype(chosen)
    args, kwargs = example_inputs(chosen.op, device, dtype)
    implementation = OPS[chosen.op].implementations[chosen.name]
    if reasons := implementation.unsupported_reasons(chosen.op, *args, **kwargs):
        raise ValueError(
            f"{chosen.op}={chosen.name} is not pinned: on {device} in {_short(dtype)} it cannot be used: "
            f"{'; '.join(reasons)}"
        )
    Cache().pin(chosen.op, chosen.name)


def _clear(arguments: Sequence[str]) -> None:
    parser = _Parser(prog="python -m kernels clear")
    parser.add_argument("op", metavar="OP", nargs="?")
    chosen = parser.parse_args(arguments)
    from kernels.tuning import autotune
    from kernels.tuning.cache import Cache

    if chosen.op is not None:
        autotune.check_names(chosen.op)
    print(f"{Cache().clear(chosen.op)} forgotten")


def _measured_lines() -> list[str]:
    from kernels.tuning import autotune
    from kernels.tuning.cache import Cache

    lines: list[str] = []
    for key, value in Cache().entries():
        try:
            lines.append(f"{autotune.Choice.of(value)} [{key.get('device')}]")
        except ValueError:  # of an op or a version that is no more
            continue
    return lines


def _with_device(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default cuda where PyTorch sees a GPU")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), help="by default bf16 on cuda, fp32 on cpu")
    return parser


def _device_and_dtype(chosen: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """Return what the options, or the machine, say. Raises ``ValueError`` where there is no GPU and one is asked for."""
    import torch

    device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, and PyTorch sees no GPU")
    default = "bf16" if device == "cuda" else "fp32"
    return torch.device(device), getattr(torch, _DTYPES[chosen.dtype or default])


def _short(dtype: torch.dtype) -> str:
    """Return the name that `--dtype` has for a type."""
    return next(short for short, name in _DTYPES.items() if str(dtype) == f"torch.{name}")


_AS_WRITTEN = argparse.RawDescriptionHelpFormatter
_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "autotune": _autotune,
    "show": _show,
    "pin": _pin,
    "clear": _clear,
}

if __name__ == "__main__":
    sys.excepthook = in_one_line
    sys.exit(main(sys.argv[1:]))
