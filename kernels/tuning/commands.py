"""The commands of ``python -m kernels``, each of what its options say."""

from argparse import Namespace

import torch

from kernels import OPS
from kernels.precision import set_product_precision
from kernels.tuning import autotune as tuning
from kernels.tuning.cache import Cache
from kernels.tuning.examples import Size, example_inputs
from kernels.tuning.request import CallKind

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_MEAN_LENGTH, _MASKED_PER_SEQUENCE = 256, 38
"""Wikipedia's means."""


def table(chosen: Namespace) -> None:
    """Print every op with its implementations, whether they can be used and which is taken; then what was measured."""
    device, dtype, where = _device_and_dtype(chosen)
    pins = Cache().pins()
    print(f"{'op':28}{'implementation':20}{'auto':6}{where}, with gradients and dropout")
    for name, op in OPS.items():
        # Small inputs are enough to ask by: reasons depend on types, sizes' divisibility and the device.
        args, kwargs = example_inputs(name, device, dtype)
        taken = pins.get(name) or op.chosen(*args, **kwargs).name
        for index, implementation in enumerate(op.order(device.type)):
            reasons = "; ".join(implementation.unsupported_reasons(name, *args, **kwargs)) or "usable"
            mark = ("pin" if name in pins else "<-") if implementation.name == taken else ""
            print(f"{name if index == 0 else '':28}{implementation.name:20}{mark:6}{reasons}")
    if lines := _measured_lines():
        print("\n".join(["", "measured, and taken for such calls in training:", *lines]))


def autotune(chosen: Namespace) -> None:
    """Measure ops at the size of BERT-Large, keep what is found and print it."""
    device, dtype, where = _device_and_dtype(chosen)
    set_product_precision()  # as training does: it changes which products cuBLAS has
    for op in chosen.ops:
        tuning.check_names(op)
    counts = chosen.sequences or [96 if device.type == "cuda" else 1]
    if min(counts) < 1:
        raise ValueError(f"--sequences {min(counts)}, expected at least 1")
    for count in counts:
        size = Size(lengths=(_MEAN_LENGTH,) * count, masked=_MASKED_PER_SEQUENCE * count)
        print(f"{count} sequences of {_MEAN_LENGTH} tokens {where}")
        for op in chosen.ops or OPS:
            _measure(op, CallKind.of(op, *example_inputs(op, device, dtype, size)))


def _measure(op: str, request: CallKind) -> None:
    choice = tuning.measure(request)
    if choice is None:
        print(f"{op:28}nothing ran")
        return
    tuning.keep(request, choice)
    best = choice.milliseconds[choice.taken]
    for index, (name, milliseconds) in enumerate(choice.milliseconds.items()):
        mark = "<-" if name == choice.taken else ""
        print(f"{op if index == 0 else '':28}{name:20}{milliseconds:12.3f} ms{milliseconds / best:8.2f} x  {mark}")
    for name, error in choice.errors.items():
        print(f"{'':28}{name:20}failed: {error}")


def show(_: Namespace) -> None:
    """Print what is pinned and what was measured."""
    cache = Cache()
    lines = [f"{op}: {name}, pinned" for op, name in cache.pins().items()] + _measured_lines()
    print("\n".join(lines) or f"nothing is measured or pinned in {cache.folder}")


def pin(chosen: Namespace) -> None:
    """Pin an implementation that can be used here."""
    tuning.check_names(chosen.op, chosen.name)
    device, dtype, where = _device_and_dtype(chosen)
    args, kwargs = example_inputs(chosen.op, device, dtype)
    implementation = OPS[chosen.op].implementations[chosen.name]
    if reasons := implementation.unsupported_reasons(chosen.op, *args, **kwargs):
        why = "; ".join(reasons)
        where = where.replace(",", " in")
        raise ValueError(f"{chosen.op}={chosen.name} is not pinned: {where} it cannot be used: {why}")
    Cache().pin(chosen.op, chosen.name)


def clear(chosen: Namespace) -> None:
    """Forget what was measured and pinned, of one op or of all."""
    if chosen.op is not None:
        tuning.check_names(chosen.op)
    print(f"{Cache().clear(chosen.op)} forgotten")


def _measured_lines() -> list[str]:
    lines: list[str] = []
    for key, value in Cache().entries():
        try:
            lines.append(f"{tuning.KernelChoice.of(value)} [{key.get('device')}]")
        except ValueError:  # of an op or a version that is no more
            continue
    return lines


def _device_and_dtype(chosen: Namespace) -> tuple[torch.device, torch.dtype, str]:
    """Return what the options, or the machine, say, and in words. ValueError where there is no GPU and one is asked for."""
    device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, and PyTorch sees no GPU")
    short = chosen.dtype or ("bf16" if device == "cuda" else "fp32")
    return torch.device(device), _DTYPES[short], f"on {device}, {short}"
