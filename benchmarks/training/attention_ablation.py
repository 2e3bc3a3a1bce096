"""Test what the default's target asks for: the same run with its attention switched off does not get there.

    python benchmarks/training/attention_ablation.py [--seed N] [--max-samples N] [--out FILE]

Trains tiny_cpu from its shipped checkpoint to the recipe's sample limit twice, in one process and from one seed: as it is,
and with every token attending to itself alone. Prints both accuracy curves and, last, the best of each against the target.
Without attention a masked token can be told from its position and segment only; what is left is the frequency of tokens and
the tenth of the masked tokens that stand there unchanged.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import tyro
from torch import Tensor

import bert.model
from benchmarks.conditions import write_figures
from bert.checkpoints.initial_model import build_model
from bert.checkpoints.weights import load_weights
from bert.configuration.config import Config
from bert.configuration.recipes import tiny_cpu
from bert.evaluation.evaluator import Evaluator
from bert.model import BertForPreTraining
from bert.parallel.mesh import join_mesh
from bert.step import TrainingStep
from bert.timing.stopwatch import Stopwatch
from dataloading.batches.loader import Batch, NumpyLoader
from dataloading.batches.sampler import BatchPlan
from dataloading.dataset.folder import open_dataset


@dataclass(frozen=True)
class Settings:
    """Settings of a comparison."""

    seed: int = 0
    max_samples: int = 96_000
    """Training samples of each side; by default the recipe's limit."""
    out: Path | None = None
    """Write the curves here as JSON."""


def main(settings: Settings) -> None:
    """Run both and compare."""
    config = tiny_cpu()
    config = replace(config, training=replace(config.training, max_samples=settings.max_samples))
    curves = {"attention": _accuracies(config, settings.seed)}
    # The name in the model's module is replaced: that is what its layers call.
    bert.model.varlen_self_attention = lambda qkv_T3HE, *_: qkv_T3HE[:, 2]  # who sees nobody else gets its own value
    BertForPreTraining.head_inputs = _head_inputs_of_all_rows
    curves["no attention"] = _accuracies(config, settings.seed)
    if settings.out:
        facts = {"recipe": config.recipe, "target": config.evaluation.target, "seed": settings.seed}
        write_figures(settings.out, facts | {"accuracy": curves})
    for name, curve in curves.items():
        print(f"{name:>12}: " + " ".join(f"{accuracy:.4f}" for accuracy in curve))
    with_attention, without = (max(curve) for curve in curves.values())
    print(f"best with attention {with_attention:.4f}, without {without:.4f}, target {config.evaluation.target:.4f}")


def _head_inputs_of_all_rows(self: BertForPreTraining, batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute the heads' inputs without the last-layer subset, where queries and values belong to different rows."""
    hidden_TD = self.encode(batch)
    return hidden_TD[batch.cu_seqlens[:-1].long()], hidden_TD[batch.masked_lm_positions]


def _accuracies(config: Config, seed: int) -> list[float]:
    """Accuracy before training and at every evaluation up to the sample limit."""
    mesh = join_mesh("cpu")
    # Dropout draws from PyTorch's generator: the same draws on both sides.
    torch.manual_seed(seed)
    training, interval = config.training, config.evaluation.interval_samples
    assert config.data.initial_checkpoint is not None
    assert interval is not None
    model = build_model(config, mesh, seed)
    load_weights(model, config.data.initial_checkpoint)
    step = TrainingStep(model, config, mesh, Stopwatch())
    evaluator = Evaluator(open_dataset(config.data.evaluation), mesh, config.evaluation.batch_size)
    train = open_dataset(config.data.train)
    plan = BatchPlan(train.lengths, train.masked_counts, training.global_batch_size, 1, 1, seed)
    loader = NumpyLoader(train, lambda number: plan.rank_batches(number, 0), mesh.device)
    accuracies = [evaluator(model, step.autocast()).value]
    # To the recipe's sample limit, whatever the accuracy is: both curves have equal length.
    for samples in range(training.global_batch_size, training.max_samples + 1, training.global_batch_size):
        step(next(loader))
        if samples % interval == 0:
            accuracies.append(evaluator(model, step.autocast()).value)
    loader.close()
    return accuracies


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
