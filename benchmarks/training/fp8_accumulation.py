"""Measure what FP8 products lose when the tensor cores add them up themselves, beside what rounding to FP8 loses anyway.

    python benchmarks/training/fp8_accumulation.py [--steps N] [--tokens N] [--out FILE]

Hopper's tensor cores keep about 14 bits of a running sum: 32 products and the sum are aligned to the largest of them, cut
off and added (DeepSeek-V3, arXiv 2412.19437, on the precision of accumulation). That is ``use_fast_accum``. Without it
every 128 products the sum is added to an fp32 number outside. Both are emulated here on a CPU with 13 and 14 bits after the
first, for a sample of the elements of every product of an encoder layer, from the activations, weights and gradients of a
model of BERT-Large's width that has been trained for a while on the default's data. An error is the norm of the difference
over the norm of the product.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.conditions import write_figures
from benchmarks.inputs import global_batch
from bert.configuration.recipes import tiny_cpu
from bert.configuration.sections import ModelConfig, OptimizerConfig
from bert.model import BertForPreTraining, Dense, EncoderLayer, MatrixProducts, initialize_
from bert.optimizer import FlatParameters, Lamb
from dataloading.batches.loader import Batch
from dataloading.dataset.folder import open_dataset
from kernels.reference.fp8 import E4M3, E5M2, LARGEST, cast_fp8, new_scales

TERMS = 32
"""Products that one instruction adds up."""
PROMOTED = 128
"""Products after which the sum goes to fp32 where it does."""


@dataclass(frozen=True)
class Settings:
    """Settings: what to measure."""

    steps: int = 60
    """Of training, from random weights, before the products are taken."""
    tokens: int = 12_288
    """About so many in the batch whose products are taken: what a weight's gradient sums over."""
    sample: int = 96
    """Rows and columns of each product that are computed."""
    hidden: int = 1024
    """BERT-Large's; four times it in the feed-forward half."""
    data: Path = tiny_cpu().data.train
    out: Path | None = None
    """Write the figures here as JSON."""


class Recording(MatrixProducts):
    """A layer's products as they are, and of each its name, input [T, K], weight [N, K] and gradient [T, N]."""

    def __init__(self) -> None:
        self.operands: dict[str, tuple[Tensor, Dense]] = {}
        self.gradients: dict[str, Tensor] = {}

    def with_bias(self, x: Tensor, dense: Dense) -> Tensor:
        """The queries, keys and values."""
        return self._kept("QKV", x, dense, dense(x))

    def without_bias(self, x: Tensor, dense: Dense) -> Tensor:
        """The attention's output."""
        return self._kept("attention output", x, dense, F.linear(x, dense.weight))

    def feed_forward(self, x_TD: Tensor, wide: Dense, narrow: Dense) -> Tensor:
        """Apply both layers."""
        wide_TF = F.gelu(self._kept("FC1", x_TD, wide, wide(x_TD)), approximate="tanh")
        return self._kept("FC2", wide_TF, narrow, F.linear(wide_TF, narrow.weight))

    def _kept(self, name: str, x: Tensor, dense: Dense, output: Tensor) -> Tensor:
        self.operands[name] = x.detach(), dense
        # Hooks see the gradient of the output, which the layer's products take.
        output.register_hook(lambda gradient: self.gradients.update({name: gradient}))
        return output


@dataclass(frozen=True)
class Product:
    """``a @ b.T``, which sums over the second axis of both."""

    name: str
    kind: str
    a_MK: Tensor
    b_NK: Tensor
    formats: tuple[torch.dtype, torch.dtype]


def products(recorded: Recording) -> Iterator[Product]:
    """The three products of every dense layer."""
    for name, (x_TK, dense) in recorded.operands.items():
        weight_NK, gradient_TN = dense.weight.detach(), recorded.gradients[name]
        # Formats as in training: gradients in E5M2, everything else in E4M3.
        yield Product(name, "forward", x_TK, weight_NK, (E4M3, E4M3))
        yield Product(name, "input gradient", gradient_TN, weight_NK.t(), (E5M2, E4M3))
        yield Product(name, "weight gradient", gradient_TN.t(), x_TK.t(), (E5M2, E4M3))


def losses(product: Product, sample: int) -> dict[str, float | int | str]:
    """The errors of one product's sampled elements."""
    # The same elements each time.
    generator = torch.Generator().manual_seed(0)
    exact, rounded = [], []
    for operand, dtype in zip((product.a_MK, product.b_NK), product.formats, strict=True):
        # Emulating all of a product would take too long.
        chosen = torch.randperm(len(operand), generator=generator)[:sample]
        exact.append(operand[chosen].double())
        rounded.append(fp8_of(operand, dtype)[chosen])
    # Sums of the rounded operands in fp64, so that the error of adding up stands alone.
    whole, of_fp8 = exact[0] @ exact[1].t(), rounded[0].double() @ rounded[1].double().t()
    found: dict[str, float | int | str] = {
        "product": product.name,
        "kind": product.kind,
        "terms": product.a_MK.shape[1],
        "largest, of a's deviation": largest_of(product.a_MK),
        "largest, of b's deviation": largest_of(product.b_NK),
        "rounding to FP8": error(of_fp8, whole),
    }
    for name, promoted in (("tensor cores alone", None), ("fp32 every 128", PROMOTED)):
        # Published measurements say about 14.
        for bits in (13, 14):
            sums = accumulated(rounded[0], rounded[1], bits, promoted).double()
            found[f"{name}, {bits} bits"] = error(sums, of_fp8)
            # A regression through the origin: cutting off makes sums too small in magnitude.
            found[f"{name}, {bits} bits, shrinks by"] = 1 - ((sums * of_fp8).sum() / of_fp8.square().sum()).item()
    return found


def fp8_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast ``x`` to FP8 with a scale of its own and return what it is then, as fp32."""
    scale = new_scales(x.abs().amax()[None], torch.ones(1), torch.tensor([LARGEST[dtype]]))[0]
    # The scale is undone exactly, as it is a power of two.
    return cast_fp8(x, scale, torch.zeros(()), dtype).float() / scale


def accumulated(a_MK: Tensor, b_NK: Tensor, bits: int, promoted: int | None) -> Tensor:
    """``a @ b.T`` with running sums of ``bits`` bits after the point, which after ``promoted`` terms go to fp32.

    A product of two FP8 numbers has at most 8 bits, and 33 numbers of up to 15 bits add up to fewer than 2^24 units: all of
    this is exact in fp32.
    """
    total = torch.zeros(len(a_MK), len(b_NK))
    running = torch.zeros_like(total)
    for start in range(0, a_MK.shape[1], TERMS):
        terms = a_MK[:, None, start : start + TERMS] * b_NK[None, :, start : start + TERMS]
        # The largest of the terms and of the running sum decides what is aligned to.
        largest = torch.maximum(terms.abs().amax(-1), running.abs())
        running = cut(torch.cat([terms, running[..., None]], dim=-1), largest[..., None], bits).sum(-1)
        # The sum itself is kept in as many bits.
        running = cut(running, running, bits)
        # Promoted to fp32 outside of the tensor cores, as without fast accumulation.
        if promoted is not None and (start + TERMS) % promoted == 0:
            total += running
            running.zero_()
    return total + running


def cut(x: Tensor, largest: Tensor, bits: int) -> Tensor:
    """``x`` without what lies more than ``bits`` bits below the first bit of ``largest``."""
    shift = bits + 1 - torch.frexp(largest).exponent  # whose first bit is worth 2^(exponent - 1)
    return torch.ldexp(torch.ldexp(x, shift).trunc_(), -shift)


def largest_of(x: Tensor) -> float:
    """The largest magnitude over the root mean square."""
    return (x.abs().max() / x.double().square().mean().sqrt()).item()


def error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return ((found - expected).norm() / expected.norm()).item()


def recorded_layer(settings: Settings) -> Recording:
    """The products of the first layer of a model that has been trained."""
    vocabulary, positions = tiny_cpu().model.vocab_size, tiny_cpu().model.max_position_embeddings
    hidden = settings.hidden
    # Few layers of full width: the width decides what products sum over.
    model = BertForPreTraining(ModelConfig(2, hidden, hidden // 64, 4 * hidden, vocabulary, positions))
    initialize_(model, torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model.train()
    optimizer = Lamb(FlatParameters.of(model), OptimizerConfig(4e-3, 2 * settings.steps + 1, num_warmup_steps=20))
    data = open_dataset(settings.data)
    for step in range(settings.steps):
        forward_backward(model, global_batch(data, 8, step))
        optimizer.step()
    recording = Recording()
    layer = model.layers[0]
    assert isinstance(layer, EncoderLayer)
    # Products are recorded in the last step alone.
    layer.products = recording
    # As many tokens as a weight's gradient of training sums over.
    forward_backward(model, global_batch(data, round(settings.tokens / float(data.lengths.mean())), settings.steps))
    return recording


def forward_backward(model: BertForPreTraining, batch: Batch) -> None:
    """Add the gradients of the mean losses."""
    masked_lm_loss, next_sentence_loss = model(batch).mean_losses(batch)
    (masked_lm_loss + next_sentence_loss).backward()


def main(settings: Settings) -> None:
    """Train, compute, print."""
    rows = [losses(product, settings.sample) for product in products(recorded_layer(settings))]
    if settings.out:
        facts = {"steps": settings.steps, "hidden": settings.hidden, "sample": settings.sample}
        write_figures(settings.out, {**facts, "products": rows}, ("torch",))
    shown = [name for name in rows[0] if "shrinks" not in name and "largest" not in name]
    table = Table(*shown, title="error, of the norm of the product")
    for row in rows:
        table.add_row(*(f"{row[name]:.3%}" if isinstance(row[name], float) else str(row[name]) for name in shown))
    Console(width=None if sys.stdout.isatty() else 180).print(table)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
