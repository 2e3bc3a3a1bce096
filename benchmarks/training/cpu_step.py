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
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import tyro
from torch import Tensor

from benchmarks.conditions import write_figures
from benchmarks.training.hugging_face import model_with_weights_of, padded
from bert.checkpoints.initial_model import initialize_
from bert.configuration.sections import ModelConfig, OptimizerConfig
from bert.model import BertForPreTraining
from bert.optimizer import FlatParameters, Lamb
from cluster.model.histogram import drawn_lengths
from dataloading.batches.loader import batch_of
from dataloading.shards.samples import Samples, synthetic_samples

SEQUENCES = 32
OURS, HUGGING_FACE = "ours", "Hugging Face, padded"
MODELS = {"wikipedia": ModelConfig(6, 256, 4, 1024, 30522, 512), "tiny": ModelConfig(2, 128, 4, 512, 1024, 128)}


def main(workload: Literal["wikipedia", "tiny"] = "wikipedia", repeats: int = 7, out: Path | None = None) -> None:
    """Print the times of each model, then the ratios.

    Args:
        workload: wikipedia has 6 layers, hidden size 256 and 30,522 words; tiny has 2 layers and hidden size 128. Both use
            Wikipedia's sequence lengths.
        repeats: Number of timed steps of each model.
        out: Write the figures here as JSON.
    """
    if repeats < 1 or importlib.util.find_spec("transformers") is None:
        sys.exit(f"error: --repeats (now {repeats}) must be at least 1, and the package transformers must be installed")
    torch.set_num_threads(2)
    seconds, tokens = measure(MODELS[workload], repeats)
    for name, times in seconds.items():
        median = statistics.median(times)
        print(
            f"{name}: median {1e3 * median:.1f} ms, fastest {1e3 * min(times):.1f} ms, {SEQUENCES / median:.1f} sequences/s"
        )
    # The ratio is taken within a repeat, because the load of the machine changes between repeats.
    ratio = statistics.median(theirs / ours for ours, theirs in zip(seconds[OURS], seconds[HUGGING_FACE], strict=True))
    print(f"mean length {statistics.mean(tokens) / SEQUENCES:.1f} of {MODELS[workload].max_position_embeddings} tokens")
    print(f"sequences/s of ours against {HUGGING_FACE}: {ratio:.2f}x")
    if out:
        figures = {"workload": workload, "sequences": SEQUENCES, "tokens": tokens, "seconds": seconds}
        write_figures(out, figures | {"ratios": {HUGGING_FACE: ratio}})


def measure(config: ModelConfig, repeats: int) -> tuple[dict[str, list[float]], list[int]]:
    """Return the seconds of each model's steps, and the number of real tokens in each repeat."""
    torch.manual_seed(0)
    ours = BertForPreTraining(config)
    initialize_(ours, seed=0)
    theirs = model_with_weights_of(ours)
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-4, fused=True)

    def their_update() -> None:
        adamw.step()
        adamw.zero_grad()

    lamb = Lamb(FlatParameters.of(ours), OptimizerConfig(1e-4, 100_000))
    # Each loss function collates the samples, untimed, and returns the function that is timed.
    sides = {
        OURS: (partial(our_loss, ours), lamb.step),
        HUGGING_FACE: (partial(their_loss, theirs, config.max_position_embeddings), their_update),
    }
    check_same_loss(ours, theirs, samples_of(config, 0))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens: list[int] = []
    for repeat in range(-1, repeats):  # repeat -1 is the warm-up
        samples = samples_of(config, 1 + repeat)
        # The models take turns in going first.
        for name in reversed(sides) if repeat % 2 else sides:
            loss_of, update = sides[name]
            loss = loss_of(samples)
            start = time.perf_counter()
            loss().backward()
            update()
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


def our_loss(model: BertForPreTraining, samples: Samples) -> Callable[[], Tensor]:
    batch = batch_of(samples)

    def loss() -> Tensor:
        masked_lm_loss, next_sentence_loss = model(batch).mean_losses(batch)
        return masked_lm_loss + next_sentence_loss

    return loss


def their_loss(model: torch.nn.Module, length: int, samples: Samples) -> Callable[[], Tensor]:
    """Collate samples into a padded batch, and return a function that computes the loss of Hugging Face's model."""
    inputs = padded(samples, length)
    return lambda: model(**inputs).loss


@torch.no_grad()
def check_same_loss(ours: BertForPreTraining, theirs: torch.nn.Module, samples: Samples) -> None:
    """Raise ``RuntimeError`` unless both models compute the same loss, without dropout."""
    ours.eval()
    theirs.eval()
    loss, reference = our_loss(ours, samples)(), their_loss(theirs, ours.config.max_position_embeddings, samples)()
    # The models sum in different orders. The resulting difference is far below this tolerance.
    if not torch.isclose(loss, reference, rtol=1e-4):
        raise RuntimeError(f"the models compute different losses: {loss:.6f} and {reference:.6f}")
    ours.train()
    theirs.train()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
