"""Compare a training step (forward, backward, optimizer) on a CPU: our model without padding, Hugging Face's with padding.

    python benchmarks/training/cpu_step.py [--workload tiny] [--repeats N] [--out FILE]

Both models start with the same weights and take a step on the same samples. Our model uses LAMB; Hugging Face's
``BertForPreTraining`` uses an attention mask, scaled-dot-product attention and PyTorch's fused AdamW. Before timing starts,
both must compute the same loss. Each repeat draws new samples and runs the models in turn. Times and ratios are medians over
repeats. Collating is not timed.
"""

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import tyro

from benchmarks.conditions import write_figures
from benchmarks.training.hugging_face import model_with_weights_of, padded
from bert.configuration.sections import ModelConfig, OptimizerConfig
from bert.model import BertForPreTraining, initialize_
from bert.optimizer import FlatParameters, Lamb
from cluster.model.histogram import drawn_lengths
from dataloading.batches.loader import batch_of
from dataloading.batches.synthetic import synthetic_samples
from dataloading.shards.samples import Samples

Prepare = Callable[[Samples], Callable[[], None]]
"""Function that collates samples and returns the step to time."""

SEQUENCES = 32
OURS, HUGGING_FACE = "ours", "Hugging Face, padded"
MODELS = {"wikipedia": ModelConfig(6, 256, 4, 1024, 30522, 512), "tiny": ModelConfig(2, 128, 4, 512, 1024, 128)}


def main(workload: Literal["wikipedia", "tiny"] = "wikipedia", repeats: int = 7, out: Path | None = None) -> None:
    """Print the times of each side, then the ratios.

    Args:
        workload: wikipedia is 6 layers of 256 with 30,522 words; tiny is 2 layers of 128. Lengths are Wikipedia's.
        repeats: Steps of each side.
        out: Write the figures here as JSON.
    """
    if repeats < 1 or importlib.util.find_spec("transformers") is None:
        sys.exit(f"error: --repeats is {repeats}, expected at least 1; transformers must be installed")
    torch.set_num_threads(2)
    seconds, tokens = measure(MODELS[workload], repeats)
    for name, times in seconds.items():
        median = statistics.median(times)
        print(
            f"{name}: median {1e3 * median:.1f} ms, fastest {1e3 * min(times):.1f} ms, {SEQUENCES / median:.1f} sequences/s"
        )
    # Ratios are taken within a repeat, because the load of the machine changes between repeats.
    ratios = {
        name: statistics.median(theirs / ours for ours, theirs in zip(seconds[OURS], times, strict=True))
        for name, times in seconds.items()
    }
    print(f"mean length {statistics.mean(tokens) / SEQUENCES:.1f} of {MODELS[workload].max_position_embeddings} tokens")
    print(f"sequences/s of ours against {HUGGING_FACE}: {ratios[HUGGING_FACE]:.2f}x")
    if out:
        figures = {"workload": workload, "sequences": SEQUENCES, "tokens": tokens, "seconds": seconds, "ratios": ratios}
        write_figures(out, figures)


def measure(config: ModelConfig, repeats: int) -> tuple[dict[str, list[float]], list[int]]:
    """Return the seconds of each side's steps, and the number of real tokens in each repeat."""
    torch.manual_seed(0)
    ours = BertForPreTraining(config)
    initialize_(ours, torch.Generator().manual_seed(0))
    theirs = model_with_weights_of(ours)
    check_same_loss(ours, theirs, samples_of(config, 0))
    sides = {OURS: our_side(ours), HUGGING_FACE: hugging_face_side(theirs, config.max_position_embeddings)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens: list[int] = []
    for repeat in range(-1, repeats):  # the first repeat warms up
        samples = samples_of(config, 1 + repeat)
        names = list(sides)
        turn = repeat % len(names)  # a different side goes first in each repeat
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


def samples_of(config: ModelConfig, seed: int) -> Samples:
    """Draw ``SEQUENCES`` synthetic samples, longest first as the loader returns them."""
    lengths = drawn_lengths(np.random.default_rng(seed), SEQUENCES).clip(max=config.max_position_embeddings)
    return synthetic_samples(-np.sort(-lengths), config.vocab_size, seed)


def our_side(model: BertForPreTraining) -> Prepare:
    """Return a function that prepares a step of our model."""
    optimizer = Lamb(FlatParameters.of(model), OptimizerConfig(1e-4, 100_000))

    def prepare(samples: Samples) -> Callable[[], None]:
        batch = batch_of(samples)

        def step() -> None:
            masked_lm_loss, next_sentence_loss = model(batch).mean_losses(batch)
            (masked_lm_loss + next_sentence_loss).backward()
            optimizer.step()

        return step

    return prepare


def hugging_face_side(model: torch.nn.Module, max_length: int) -> Prepare:
    """Return a function that prepares a step of Hugging Face's model on a padded batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def prepare(samples: Samples) -> Callable[[], None]:
        inputs = padded(samples, max_length)

        def step() -> None:
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return prepare


@torch.no_grad()
def check_same_loss(ours: BertForPreTraining, theirs: torch.nn.Module, samples: Samples) -> None:
    """Raise ``RuntimeError`` unless both models compute the same loss, without dropout."""
    ours.eval()
    theirs.eval()
    batch = batch_of(samples)
    masked_lm_loss, next_sentence_loss = ours(batch).mean_losses(batch)
    loss = masked_lm_loss + next_sentence_loss
    reference = theirs(**padded(samples, ours.config.max_position_embeddings)).loss
    # The sides sum in different orders. The resulting difference is far below this tolerance.
    if not torch.isclose(loss, reference, rtol=1e-4):
        raise RuntimeError(f"the sides do different work: loss {loss:.6f} against {reference:.6f}")
    ours.train()
    theirs.train()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
