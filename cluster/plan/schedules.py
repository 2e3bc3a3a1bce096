"""Global batch sizes with hyperparameters that have reached the target, and the samples that they took.

A global batch size goes with its learning rate, decay and betas. Those here are the recipe's own, those of other recipes,
and those of published closed results that state all of theirs: no warm-up, since logs leave its start out, and a weight
decay, since some logs state 0 in place of it. LAMB's epsilon, which the table of results lacks, is the benchmark's 1e-6.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from bert.configuration.config import Config
from bert.configuration.recipes import RECIPES
from bert.configuration.sections import ModelConfig, OptimizerConfig
from cluster.published.results import SAMPLES_NOT_LOGGED, TABLE
from console.text import counted

# What a log states of a schedule, and what makes two results comparable: batch, rate, betas, steps, warm-up.
_Key = tuple[int, float, float, float, int, int]


@dataclass(frozen=True)
class BatchSchedule:
    """Hyperparameters of a global batch size.

    Attributes:
        max_samples: at which a run that has not reached the target ends.
        samples: to the target, the median of published results; None where none was published.
        source: whose they are.
    """

    global_batch_size: int
    optimizer: OptimizerConfig
    max_samples: int
    samples: float | None
    source: str


def schedules(config: Config) -> list[BatchSchedule]:
    """Return one schedule for each global batch size that a recipe can be trained with, the smallest first.

    The recipe's own batch keeps the recipe's. What is published is about BERT-Large to the closed division's target: any
    other model, data or target has its own batch alone.
    """
    published = _published()
    training = config.training
    # Samples and learning rates do not carry over to another model or target.
    if config.model != ModelConfig() or config.log.division != "closed":
        return [
            BatchSchedule(training.global_batch_size, config.optimizer, training.max_samples, None, "the recipe's own")
        ]
    found: dict[int, BatchSchedule] = {}
    for schedule in [*_of_recipes(published), *_stated(published)]:
        # Of one size, what took the fewest samples; these are all published, so that their samples are known.
        best = found.setdefault(schedule.global_batch_size, schedule)
        assert schedule.samples is not None
        assert best.samples is not None
        if schedule.samples < best.samples:
            found[schedule.global_batch_size] = schedule
    # Last of all, so that nothing published displaces the recipe's own hyperparameters at its own batch.
    samples = _samples(published, training.global_batch_size, config.optimizer)
    found[training.global_batch_size] = BatchSchedule(
        training.global_batch_size, config.optimizer, training.max_samples, samples, "the recipe's own"
    )
    return [found[batch] for batch in sorted(found)]


def _published() -> dict[_Key, list[Mapping[str, str]]]:
    """The closed results by what their logs state of the schedule."""
    found: dict[_Key, list[Mapping[str, str]]] = defaultdict(list)
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            # Open results may have changed the model or the target.
            if row["division"] == "closed" and not any(each in row["accelerator"] for each in SAMPLES_NOT_LOGGED):
                steps, warmup = (
                    round(float(row[f"opt_learning_rate_{name}_steps"])) for name in ("training", "warmup")
                )
                rate, beta_1, beta_2 = (
                    float(row[f"opt_{name}"]) for name in ("base_learning_rate", "lamb_beta_1", "lamb_beta_2")
                )
                found[int(row["global_batch_size"]), rate, beta_1, beta_2, steps, warmup].append(row)
    return found


def _samples(published: Mapping[_Key, list[Mapping[str, str]]], batch: int, optimizer: OptimizerConfig) -> float | None:
    # An exact match: recipes state the numbers that logs print.
    key = (
        batch, optimizer.base_learning_rate, optimizer.beta_1, optimizer.beta_2,
        optimizer.learning_rate_training_steps, optimizer.num_warmup_steps,
    )  # fmt: skip
    return _median_samples(published[key]) if key in published else None


def _median_samples(rows: Iterable[Mapping[str, str]]) -> float:
    return median(float(row["mean_train_samples"]) for row in rows)


def _of_recipes(published: Mapping[_Key, list[Mapping[str, str]]]) -> list[BatchSchedule]:
    found = []
    for name, recipe in RECIPES.items():
        config = recipe()
        batch = config.training.global_batch_size
        samples = _samples(published, batch, config.optimizer) if config.log.division == "closed" else None
        if samples is not None:
            found.append(BatchSchedule(batch, config.optimizer, config.training.max_samples, samples, f"recipe {name}"))
    return found


# Weight decay is no part of the key: some logs state 0 for it, and samples are counted by what all logs have.
def _stated(published: Mapping[_Key, list[Mapping[str, str]]]) -> list[BatchSchedule]:
    by_decay: dict[tuple[_Key, float], list[Mapping[str, str]]] = defaultdict(list)
    for key, rows in published.items():
        for row in rows:
            by_decay[key, float(row["opt_lamb_weight_decay_rate"])].append(row)
    found = []
    for ((batch, rate, beta_1, beta_2, steps, warmup), decay), rows in by_decay.items():
        # See the module's docstring: without its start a warm-up cannot be repeated, and decay 0 stands for unstated.
        if warmup or not steps or not decay:
            continue
        # Epsilon and the rest are the benchmark's, the defaults of `OptimizerConfig`.
        optimizer = OptimizerConfig(rate, steps, beta_1, beta_2, weight_decay_rate=decay)
        others = f" and {counted(len(rows) - 1, 'other')}" if len(rows) > 1 else ""
        source = f"{rows[0]['submitter']} {rows[0]['round']}, {rows[0]['system']}{others}"
        found.append(BatchSchedule(batch, optimizer, _max_samples(batch), _median_samples(rows), source))
    return found


def _max_samples(batch: int) -> int:
    """The limit of the recipe with the largest batch that is not larger, or of the smallest."""
    limits = {
        config.training.global_batch_size: config.training.max_samples
        for config in (recipe() for recipe in RECIPES.values())
        if config.log.division == "closed"
    }
    return limits[max((size for size in limits if size <= batch), default=min(limits))]
