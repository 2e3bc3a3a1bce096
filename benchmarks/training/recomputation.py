"""Measure what recomputation saves and costs: bytes that a layer of BERT-Large keeps, and time of its passes.

    python benchmarks/training/recomputation.py [--repeats N] [--out FILE]

Bytes are counted, a token: an inner layer's input, and storages that are alive after its forward pass and were not before,
for three sequences less those for two, so that 16-bit copies of weights drop out. For the CPU's implementations they are
counted while these compute, and for the GPU's kernels on tensors without content, which needs Triton and no GPU. Times
are of forward and backward pass of 1,024 tokens on this machine: all modes in turn, as often as ``--repeats`` says;
medians, and ratios as medians of the ratios of a repeat.
"""

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.conditions import write_figures
from bert.configuration.sections import ModelConfig, Precision, Recompute
from bert.model import BertForPreTraining, DropoutSites
from bert.products.fp8 import enable_fp8
from bert.recompute import recompute_layers
from kernels import OPS

Kernels = Literal["cpu", "gpu"]

MODES: tuple[Recompute, ...] = get_args(Recompute)
LENGTHS = (128, 512)
# The layer in the middle is measured: the last one computes few rows, and the first one's input is the embeddings'.
LARGE = ModelConfig(num_hidden_layers=3, vocab_size=64)
"""BERT-Large with one layer between the first and the last."""

_TOKENS = 1024
_GPU_IMPLEMENTATIONS = {"scaled_matmul": "pytorch", "accumulate_weight_gradient": "pytorch"}


@dataclass(frozen=True)
class Settings:
    """Settings: what to measure."""

    repeats: int = 7
    out: Path | None = None
    """Write the figures here as JSON."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"--repeats is {self.repeats}: expected at least 1")


class Storages(TorchDispatchMode):
    """Storages that operators make in the body, but for that of what the body is given, of which some return views."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        # What the body is given is no result of it, though operators may return views of it.
        self._given = [StorageWeakRef(tensor.untyped_storage()).cdata for tensor in given]
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator and note what it returns."""
        returned = func(*args, **(kwargs or {}))
        storages = [each.untyped_storage() for each in tree_leaves(returned) if isinstance(each, Tensor)]
        # Weak references: counting must not keep alive what it counts.
        self._made += [(StorageWeakRef(storage), storage.nbytes()) for storage in storages]
        return returned

    # By storage: several tensors may be views of one.
    def alive(self) -> int:
        """Bytes of those that are still there."""
        sizes = {made.cdata: size for made, size in self._made if not made.expired()}
        return sum(size for cdata, size in sizes.items() if cdata not in self._given)


class Layer:
    """The layer in the middle, with the input that it gets from the layer before it."""

    def __init__(self, config: ModelConfig, mode: Recompute, precision: Precision, length: int, count: int) -> None:
        model = BertForPreTraining(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-0.02, 0.02)
        if precision == "fp8":
            enable_fp8(model)
        if mode != "none":
            recompute_layers(model, mode)
        self.layer, self._bf16 = model.layers[1], precision != "fp32"
        state = torch.zeros(2, dtype=torch.int64)
        self.cu_seqlens = torch.arange(0, (count + 1) * length, length, dtype=torch.int32)
        self._shape = self.cu_seqlens, length, DropoutSites(config, state)
        hidden_TD = torch.randn(count * length, config.hidden_size)
        # The input that the layer really gets, in the type in which it gets it.
        with self._autocast(), torch.no_grad():
            self.input_TD = model.layers[0](hidden_TD.bfloat16() if self._bf16 else hidden_TD, *self._shape)
        self.input_TD.requires_grad_()

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self._bf16)

    def forward(self) -> Tensor:
        """[T, D] the output."""
        with self._autocast():
            return self.layer(self.input_TD, *self._shape)

    def seconds(self) -> float:
        """Time a forward and a backward pass."""
        self.layer.zero_grad()
        self.input_TD.grad = None
        begin = time.perf_counter()
        output_TD = self.forward()
        output_TD.backward(torch.ones_like(output_TD))
        return time.perf_counter() - begin


@contextmanager
def implementations(kernels: Kernels) -> Iterator[None]:
    """Choose what computes in the body; the GPU's kernels do not run, on tensors without content."""
    with ExitStack() as stack:
        if kernels == "gpu":
            from triton import knobs  # not installed everywhere

            for op in OPS.values():
                name = _GPU_IMPLEMENTATIONS.get(op.name, "triton")
                op.implementations[name].function(op.name)  # imported while kernels are what they are elsewhere
                stack.enter_context(op.using(name))
            # Undone at the end, whatever happens in between.
            stack.callback(setattr, knobs.runtime, "interpret", knobs.runtime.interpret)
            knobs.runtime.interpret = True  # else they refuse tensors that are on no GPU
            stack.enter_context(FakeTensorMode())
        yield


def kept_bytes(
    config: ModelConfig, mode: Recompute, precision: Precision, length: int, kernels: Kernels = "cpu"
) -> int:
    """Count the bytes a token that a layer keeps for its backward pass, with sequences of one length."""
    counts = []
    with implementations(kernels):
        # Two sizes: what does not grow with the sequences, such as casts of weights, drops out.
        for count in (2, 3):
            layer = Layer(config, mode, precision, length, count)
            with Storages(layer.input_TD) as storages:
                output_TD = layer.forward()
                # The output is the next layer's input, and counts there.
                counts.append(storages.alive() - output_TD.nbytes + layer.input_TD.nbytes)
    fewer, more = counts
    return (more - fewer) // length


def times(precision: Precision, length: int, repeats: int, config: ModelConfig = LARGE) -> dict[Recompute, list[float]]:
    """Seconds of both passes of each mode, a repeat."""
    sides: dict[Recompute, Layer] = {mode: Layer(config, mode, precision, length, _TOKENS // length) for mode in MODES}
    found: dict[Recompute, list[float]] = {mode: [] for mode in MODES}
    for _ in range(1 + repeats):
        for mode, side in sides.items():
            found[mode].append(side.seconds())
    return {mode: seconds[1:] for mode, seconds in found.items()}  # the first make what stays


def main(settings: Settings) -> None:
    """Count, time, and print a table of each."""
    figures: list[dict[str, object]] = []
    counted = Table("kernels", "precision", "length", *MODES, title="bytes a token and layer")
    cases: list[tuple[Kernels, Precision]] = [
        ("gpu", "fp32"),
        ("gpu", "bf16"),
        ("gpu", "fp8"),
        ("cpu", "fp32"),
        ("cpu", "bf16"),
    ]
    for kernels, precision in cases:
        for length in LENGTHS:
            kept = {mode: kept_bytes(LARGE, mode, precision, length, kernels) for mode in MODES}
            figures.append({"kernels": kernels, "precision": precision, "length": length, "kept_bytes": kept})
            counted.add_row(kernels, precision, str(length), *(f"{each:,}" for each in kept.values()))
    timed = Table("precision", "length", *MODES, title="forward and backward pass of a layer")
    for kernels, precision in cases:
        # The GPU's kernels are counted on fake tensors, whose times mean nothing.
        for length in LENGTHS if kernels == "cpu" else ():
            found = times(precision, length, settings.repeats)
            ms = {mode: 1e3 * statistics.median(seconds) for mode, seconds in found.items()}
            ratios = {
                # Ratios within a repeat, as load on the machine changes between repeats.
                mode: statistics.median(map(float.__truediv__, seconds, found["none"]))
                for mode, seconds in found.items()
            }
            figures.append({"precision": precision, "length": length, "ms": ms, "ratio": ratios})
            timed.add_row(precision, str(length), *(f"{ms[mode]:.0f} ms, {ratios[mode]:.3f}" for mode in MODES))
    if settings.out:
        write_figures(settings.out, {"tokens": _TOKENS, "repeats": settings.repeats, "figures": figures})
    console = Console()
    console.print(counted)
    console.print(timed)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
