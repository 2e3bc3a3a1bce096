"""Find how much room FP8's scales should leave for the next step: what saturates, and what it costs a gradient.

    python benchmarks/training/fp8_headroom.py [--steps N] [--out FILE]

A scale follows from the largest magnitude (amax) of the step before. The default model is trained in fp32 from its
checkpoint, at twice the recipe's rate, after a shorter warm-up and with gradients clipped. At every step the same batch
also goes through FP8, with every choice of headroom in turn: scales are the largest powers of two with which 2^headroom
times the last amax fits. Printed are, by kind of tensor, how amax changes from step to step, and how often a tensor
saturates for several headrooms and if the largest amax of several steps decides; by choice, how far the gradient of the
weights is from fp32's, and of those weights alone whose output's gradient has just doubled its amax; and what headroom
costs where numbers become too small. An error is the norm of the difference over the norm; one in a hundred is above the
tail.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.conditions import write_figures
from benchmarks.inputs import global_batch
from bert.checkpoints.weights import load_weights
from bert.configuration.recipes import tiny_cpu
from bert.configuration.sections import OptimizerConfig
from bert.model import BertForPreTraining, EncoderLayer, MatrixProducts
from bert.optimizer import FlatParameters, Lamb
from bert.products.fp8 import Fp8State, enable_fp8
from dataloading.batches.loader import Batch
from dataloading.dataset.folder import open_dataset
from kernels.reference.fp8 import E4M3, E5M2, LARGEST, cast_fp8, new_scales

KINDS = {"input": E4M3, "weight": E4M3, "gradient": E5M2}
"""In the order of a dense layer's sites."""
HEADROOMS = (0, 1, 2, 3, 4)
COSTED = (0, 1, 2, 4, 6)
HISTORIES = (1, 4, 16)
CHOICES = ((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 4), (2, 2, 4), (4, 4, 8))
"""Bits of headroom of inputs, weights and gradients whose effect on a gradient is measured."""


@dataclass(frozen=True)
class Settings:
    """Settings: what to measure."""

    steps: int = 200
    sequences: int = 16
    """Of a step."""
    learning_rate: float = 1e-2
    warmup: int = 30
    """Steps."""
    data: Path = tiny_cpu().data.train
    out: Path | None = None
    """Write the figures here as JSON."""


@dataclass
class Trace:
    """Trace of what every step has shown."""

    amax_S: list[Tensor] = field(default_factory=list)
    """Of every site, by step."""
    errors: dict[str, list[Tensor]] = field(default_factory=lambda: {name_of(choice): [] for choice in CHOICES})
    """Of the gradient of every weight in FP8, by choice and step."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Of the gradient, before it is clipped."""


class PairedModel:
    """A model whose products are in fp32 or in FP8 as asked, and the gradients of either."""

    def __init__(self) -> None:
        config = tiny_cpu()
        assert config.data.initial_checkpoint is not None
        self.model = BertForPreTraining(config.model)
        load_weights(self.model, config.data.initial_checkpoint)
        self.model.train()
        self.flat = FlatParameters.of(self.model)
        self.state = enable_fp8(self.model)
        self._layers = [layer for layer in self.model.layers if isinstance(layer, EncoderLayer)]
        self._in_fp8 = [layer.products for layer in self._layers]
        self.weights = [dense.dense.weight for dense in self.state.denses]

    def gradients(self, batch: Batch, *, fp8: bool) -> tuple[float, list[Tensor]]:
        """The loss, and the gradient of every weight in FP8; that of all parameters is in ``flat``."""
        for layer, products in zip(self._layers, self._in_fp8, strict=True):
            # Exchanged in place: model and weights are the same for both.
            layer.products = products if fp8 else MatrixProducts()
        # Backward adds to the flat gradient.
        self.flat.gradients_P.zero_()
        masked_lm_loss, next_sentence_loss = self.model(batch).mean_losses(batch)
        loss = masked_lm_loss + next_sentence_loss
        loss.backward()
        return loss.item(), [weight.grad.clone() for weight in self.weights if weight.grad is not None]


def traced(settings: Settings) -> Trace:
    """Train in fp32, and at every step take the same gradients in FP8 by every choice."""
    comparison, trace = PairedModel(), Trace()
    state = comparison.state
    optimizer = Lamb(
        comparison.flat,
        OptimizerConfig(settings.learning_rate, 10 * settings.steps, num_warmup_steps=settings.warmup),
    )
    data = open_dataset(settings.data)
    first, *batches = (global_batch(data, settings.sequences, step) for step in range(settings.steps + 1))
    # Scales of the first step are found as at the start of training.
    state.calibrate_(lambda: comparison.gradients(first, fp8=True))
    comparison.gradients(first, fp8=True)
    amax_S = state.amax_S.clone()
    for step, batch in enumerate(batches):
        loss, expected = comparison.gradients(batch, fp8=False)
        # FP8's passes overwrite the flat gradient, by which the model is to go on.
        kept = comparison.flat.gradients_P.clone()
        for choice in CHOICES:
            # Scales follow from the step before, which is what headroom is about.
            set_scales_(state, amax_S, choice)
            _, found = comparison.gradients(batch, fp8=True)
            pairs = zip(found, expected, strict=True)
            trace.errors[name_of(choice)].append(torch.stack([(a - b).norm() / b.norm() for a, b in pairs]))
        amax_S = state.amax_S.clone()
        trace.amax_S.append(amax_S)
        # Training itself stays in fp32: all choices see the same weights.
        comparison.flat.gradients_P.copy_(kept)
        trace.losses.append(loss)
        trace.norms.append(float(optimizer.step()))
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss:.3f}, norm {trace.norms[-1]:.2f}", file=sys.stderr, flush=True)
    return trace


def set_scales_(state: Fp8State, amax_S: Tensor, choice: tuple[int, ...]) -> None:
    """The scales that follow from the step before by one choice, and the weights cast by them."""
    # Sites of a dense layer come in the order of `KINDS`.
    room = torch.tensor([LARGEST[dtype] / 2**bits for dtype, bits in zip(KINDS.values(), choice, strict=True)])
    state.set_scales_(new_scales(amax_S, torch.ones_like(amax_S), room.repeat(len(state.denses))))
    state.refresh_weights_()


def name_of(choice: tuple[int, ...]) -> str:
    """Name of a choice, such as ``0 0 2``."""
    return " ".join(map(str, choice))


def changes(trace: Trace) -> list[dict[str, float | str]]:
    """Tabulate by kind how often amax grows from one step to the next by how much."""
    rows: list[dict[str, float | str]] = []
    for place, kind in enumerate(KINDS):
        ratio = growth(trace, place)
        tail, largest = torch.quantile(ratio, 0.99).item(), ratio.max().item()
        more = {f"more than {times}x": (ratio > times).float().mean().item() for times in (1.5, 2, 4)}
        rows.append({"kind": kind, "tail": tail, "largest": largest, **more})
    return rows


def growth(trace: Trace, place: int) -> Tensor:
    """amax over that of the step before, of a kind's sites and all steps."""
    # Every third site is of the same kind.
    amax = torch.stack(trace.amax_S)[:, place::3]
    return (amax[1:] / amax[:-1]).flatten()


def saturations(trace: Trace) -> list[dict[str, float | str]]:
    """Tabulate by kind the share of tensors of which something saturates, by headroom and steps looked back on."""
    rows: list[dict[str, float | str]] = []
    for place, (kind, dtype) in enumerate(KINDS.items()):
        amax = torch.stack(trace.amax_S)[:, place::3]
        largest = torch.full_like(amax[0], LARGEST[dtype])
        for history in HISTORIES:
            # Of the steps before alone: a scale cannot know its own step.
            before = torch.stack([amax[max(0, step - history) : step].amax(0) for step in range(1, len(amax))])
            row: dict[str, float | str] = {"kind": kind, "steps looked back on": str(history)}
            for bits in HEADROOMS:
                # The same function as in training, so that powers of two are rounded alike.
                scale = new_scales(before, torch.ones_like(before), largest / 2**bits)
                row[f"headroom {bits}"] = (amax[1:] * scale > largest).float().mean().item()
            rows.append(row)
    return rows


def effects(trace: Trace) -> list[dict[str, float | str]]:
    """Tabulate by choice the errors of weights' gradients, and of those whose output's gradient just doubled its amax."""
    doubled = growth(trace, 2) > 2
    rows: list[dict[str, float | str]] = []
    for name, found in trace.errors.items():
        errors = torch.stack(found)[1:].flatten()  # what grew is told from the second step on
        row: dict[str, float | str] = {"inputs weights gradients": name}
        for those, some in {"": errors, ", doubled": errors[doubled]}.items():
            if len(some):
                row["median" + those] = some.median().item()
                row["tail" + those] = torch.quantile(some, 0.99).item()
                row["largest" + those] = some.max().item()
        rows.append(row)
    return rows


def costs() -> list[dict[str, float | str]]:
    """The error of rounding normal numbers to FP8, by how far the largest of a tensor lies above their deviation."""
    # Normal numbers of deviation 1.
    x = torch.randn(1, 2**16, generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, float | str]] = []
    for dtype, exponents in ((E4M3, (4, 8, 10, 12)), (E5M2, (8, 16, 20, 24))):
        largest = torch.tensor([LARGEST[dtype]])
        for exponent in exponents:
            # 1.76: as little as possible of what the powers of two leave over, which is worst here
            amax = torch.tensor([1.76 * 2.0**exponent])
            row: dict[str, float | str] = {"format": str(dtype).split("_")[1], "largest": f"1.76 x 2^{exponent}"}
            for bits in COSTED:
                scale = new_scales(amax, torch.ones(1), largest / 2**bits)[0]
                rounded = cast_fp8(x, scale, torch.zeros(()), dtype).float() / scale
                row[f"headroom {bits}"] = ((rounded - x).norm() / x.norm()).item()
            rows.append(row)
    return rows


def show(title: str, rows: list[dict[str, float | str]]) -> None:
    """A table."""
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:.4f}" for value in row.values()))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main(settings: Settings) -> None:
    """Train, compare, print."""
    trace = traced(settings)
    tables = {
        "growth of amax": changes(trace),
        "saturated": saturations(trace),
        "error of gradients": effects(trace),
        "error of rounding": costs(),
    }
    clipped = sum(norm > 1 for norm in trace.norms) / len(trace.norms)
    if settings.out:
        facts = {
            "steps": settings.steps,
            "sequences": settings.sequences,
            "learning_rate": settings.learning_rate,
            "losses": trace.losses,
            "clipped": clipped,
        }
        write_figures(settings.out, {**facts, **tables}, ("torch",))
    for title, rows in tables.items():
        show(title, rows)
    print(f"loss {trace.losses[0]:.3f} to {trace.losses[-1]:.3f} in {settings.steps} steps, {clipped:.0%} clipped")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
