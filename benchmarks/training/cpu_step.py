"""Measure a training step on a CPU (forward, backward, optimizer): this model on real tokens, Hugging Face's on padded rows.

    python benchmarks/training/cpu_step.py [--workload tiny] [--repeats N] [--out FILE]

Both sides take the same step on the same samples and begin with the same weights: this model with LAMB, and Hugging Face's
``BertForPreTraining`` with attention mask, scaled-dot-product attention and PyTorch's fused AdamW. Before the clock they
must agree on the loss. A processor that multiplies bf16 adds a third side: this model with products in bf16. Each repeat
draws new samples and runs the sides in turn. Times are medians; ratios are medians over repeats. Collating is not timed.
"""

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import write_figures
from benchmarks.training.hugging_face import new_model, padded
from bert.checkpoints.hugging_face import to_hugging_face
from bert.configuration.sections import ModelConfig, OptimizerConfig
from bert.model import BertForPreTraining, initialize_
from bert.optimizer import FlatParameters, Lamb
from cluster.model.histogram import drawn_lengths
from dataloading.batches.loader import batch_of
from dataloading.batches.synthetic import synthetic_samples
from dataloading.shards.samples import Samples

Prepare = Callable[[Samples], Callable[[], None]]
"""Collates samples, and returns the step to time."""

SEQUENCES = 32
OURS, HUGGING_FACE, OURS_BF16 = "ours", "Hugging Face, padded", "ours, bf16"


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    workload: Literal["wikipedia", "tiny"] = "wikipedia"
    """wikipedia: 6 layers of 256, 30,522 words, Wikipedia's lengths, 2 threads; tiny: the built-in default, 1 thread."""
    repeats: int = 7
    out: Path | None = None
    """Write the figures here as JSON."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"--repeats is {self.repeats}: expected at least 1")


@dataclass(frozen=True)
class Workload:
    """A model, the lengths that it meets, and the threads that it runs on."""

    model: ModelConfig
    draw_lengths: Callable[[np.random.Generator, int], NDArray[np.int64]]
    threads: int

    def samples(self, seed: int) -> Samples:
        """``SEQUENCES`` synthetic samples, longest first as the loader has them."""
        lengths = self.draw_lengths(np.random.default_rng(seed), SEQUENCES)
        return synthetic_samples(-np.sort(-lengths), self.model.vocab_size, seed)


def workload(settings: Settings) -> Workload:
    """Return the workload that the settings name."""
    if settings.workload == "tiny":
        return Workload(ModelConfig(2, 128, 4, 512, 1024, 128), tiny_lengths, threads=1)
    return Workload(ModelConfig(6, 256, 4, 1024, 30522, 512), drawn_lengths, threads=2)


def tiny_lengths(generator: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Lengths [count] like the built-in default's: two in five full at 128, the rest short; mean 90."""
    short = generator.integers(8, 121, count)
    return np.where(generator.random(count) < 0.4, 128, short)


def multiplies_bf16() -> bool:
    """Tell whether this processor has instructions for products in bf16: AVX-512 BF16 or AMX."""
    # PyTorch itself would also compute in bf16 without such instructions.
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


def our_side(model: BertForPreTraining, *, bf16: bool = False) -> Prepare:
    """Return this repository's step."""
    optimizer = Lamb(FlatParameters.of(model), OptimizerConfig(1e-4, 100_000))

    def prepare(samples: Samples) -> Callable[[], None]:
        batch = batch_of(samples)

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                output = model(batch)
            masked_lm_loss, next_sentence_loss = output.mean_losses(batch)
            (masked_lm_loss + next_sentence_loss).backward()
            optimizer.step()

        return step

    return prepare


def hugging_face_side(model: torch.nn.Module, max_length: int) -> Prepare:
    """Return the usual step on the padded batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def prepare(samples: Samples) -> Callable[[], None]:
        inputs = padded(samples, max_length)

        def step() -> None:
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return prepare


def hugging_face_model(model: BertForPreTraining) -> torch.nn.Module:
    """Return Hugging Face's model with the same architecture and weights."""
    theirs = new_model(model.config)
    theirs.load_state_dict(to_hugging_face(model.state_dict()))
    return theirs


@torch.no_grad()
def check_same_loss(ours: BertForPreTraining, theirs: torch.nn.Module, samples: Samples) -> None:
    """Raise ``RuntimeError`` unless both models compute the same loss, without dropout."""
    ours.eval()
    theirs.eval()
    batch = batch_of(samples)
    masked_lm_loss, next_sentence_loss = ours(batch).mean_losses(batch)
    loss = masked_lm_loss + next_sentence_loss
    reference = theirs(**padded(samples, ours.config.max_position_embeddings)).loss
    # The sides sum in different orders, which costs far less than this tolerance.
    if not torch.isclose(loss, reference, rtol=1e-4):
        raise RuntimeError(f"the sides do different work: loss {loss:.6f} against {reference:.6f}")
    ours.train()
    theirs.train()


def measure(settings: Settings) -> tuple[dict[str, list[float]], list[int]]:
    """Return the seconds of every step by side, and the real tokens of every repeat."""
    load = workload(settings)
    torch.set_num_threads(load.threads)
    torch.manual_seed(0)
    models = [BertForPreTraining(load.model) for _ in range(2)]
    for model in models:
        initialize_(model, torch.Generator().manual_seed(0))
    theirs = hugging_face_model(models[0])
    check_same_loss(models[0], theirs, load.samples(0))
    length = load.model.max_position_embeddings
    sides = {
        OURS: our_side(models[0]),
        HUGGING_FACE: hugging_face_side(theirs, length),
    }
    if multiplies_bf16() and settings.workload == "wikipedia":  # the tiny model is too small to gain
        sides[OURS_BF16] = our_side(models[1], bf16=True)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens: list[int] = []
    for repeat in range(-1, settings.repeats):  # the first one warms up
        samples = load.samples(1 + repeat)
        names = list(sides)
        turn = repeat % len(names)  # each side goes first in its turn
        for name in names[turn:] + names[:turn]:
            step = sides[name](samples)
            start = time.perf_counter()
            step()
            elapsed = time.perf_counter() - start
            if repeat >= 0:
                seconds[name].append(elapsed)
        if repeat >= 0:
            tokens.append(int(samples.lengths.sum()))
    return seconds, tokens


def ratio(seconds: dict[str, list[float]], slow: str) -> float:
    """Return how many times as fast our step is as ``slow``: the median over ratios within a repeat."""
    return statistics.median(theirs / ours for ours, theirs in zip(seconds[OURS], seconds[slow], strict=True))


def report(settings: Settings, seconds: dict[str, list[float]], tokens: list[int]) -> None:
    """Print the table and a line for each ratio."""
    load = workload(settings)
    title = f"{settings.workload}: {load.threads} threads, fp32, {settings.repeats} repeats"
    table = Table("side", "median ms", "fastest ms", "sequences/s", title=title)
    for name, times in seconds.items():
        median = statistics.median(times)
        table.add_row(name, f"{1e3 * median:.1f}", f"{1e3 * min(times):.1f}", f"{SEQUENCES / median:.1f}")
    Console().print(table)
    print(f"mean length {statistics.mean(tokens) / SEQUENCES:.1f} of {load.model.max_position_embeddings} tokens")
    print(f"sequences/s of ours against {HUGGING_FACE}: {ratio(seconds, HUGGING_FACE):.2f}x")
    if OURS_BF16 in seconds:
        print(f"sequences/s of {OURS_BF16} against ours in fp32: {1 / ratio(seconds, OURS_BF16):.2f}x")


def figures(settings: Settings, seconds: dict[str, list[float]], tokens: list[int]) -> dict[str, Any]:
    """Return the content of the JSON file: everything that is needed to judge the ratios."""
    return {
        "workload": settings.workload,
        "sequences": SEQUENCES,
        "tokens": tokens,
        "seconds": seconds,
        "ratios": {other: ratio(seconds, other) for other in seconds if other != OURS},
        "threads": workload(settings).threads,
    }


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write if asked; returns the exit status."""
    try:
        settings = tyro.cli(Settings, args=arguments, description=__doc__)
        if importlib.util.find_spec("transformers") is None:
            raise ValueError("transformers, one of the sides, is not installed: pip install transformers")
        seconds, tokens = measure(settings)
        report(settings, seconds, tokens)
        if settings.out:
            write_figures(settings.out, figures(settings, seconds, tokens), ("torch", "numpy", "transformers"))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
