"""Global batch sizes with hyperparameters that have reached the target, and the number of samples that each needed.

Each global batch size has its own learning rate, decay and betas. They come from the recipe, from other recipes, and from
published closed results whose logs state all of them. Results with warm-up are excluded, because logs do not state when the
warm-up starts. Results with weight decay 0 are excluded, because some logs state 0 instead of the true value. LAMB's epsilon
is not in the table of results; it is the benchmark's 1e-6.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from bert.configuration.config import Config, flattened
from bert.configuration.recipes import RECIPES
from bert.configuration.sections import ModelConfig, OptimizerConfig
from cluster.published.results import SAMPLES_NOT_LOGGED, closed_rows
from compliance.log.reader import read_log
from console.text import counted

_STATED = {
    "base_learning_rate": "opt_base_learning_rate",
    "learning_rate_training_steps": "opt_learning_rate_training_steps",
    "beta_1": "opt_lamb_beta_1",
    "beta_2": "opt_lamb_beta_2",
    "num_warmup_steps": "opt_learning_rate_warmup_steps",
    "weight_decay_rate": "opt_lamb_weight_decay_rate",
}
"""Column of the table of results for each hyperparameter. `_of_recipe` relies on the weight decay being the last."""

_Published = Mapping[tuple[float, ...], Sequence[Mapping[str, str]]]
"""Rows of the table of results by global batch size and the values of `_STATED`."""


@dataclass(frozen=True)
class BatchSchedule:
    """Hyperparameters of a global batch size.

    Attributes:
        max_samples: samples at which a run that has not reached the target ends.
        samples: median number of samples to the target in published results, or in finished runs of the recipe; None if
            there are none.
        source: where the hyperparameters come from.
        note: origin of ``samples``, or of the limit that replaces them, if they are not published.
    """

    global_batch_size: int
    optimizer: OptimizerConfig
    max_samples: int
    samples: float | None
    source: str
    note: str = ""


def schedules(config: Config) -> list[BatchSchedule]:
    """Return a schedule for each global batch size that a recipe can be trained with, in ascending order.

    The recipe's own batch size keeps the recipe's hyperparameters. Published results are for BERT-Large and the closed
    division's target, so a recipe with another model or target gets only its own batch size.
    """
    if not _is_benchmark(config):
        return [_with_own_samples(config)]
    published = _published()
    own = _of_recipe(config, published, "the recipe's own")
    recipes = {name: made for name, recipe in RECIPES.items() if _is_benchmark(made := recipe())}
    limits = {each.training.global_batch_size: each.training.max_samples for each in recipes.values()}
    known = [_of_recipe(recipe, published, f"recipe {name}") for name, recipe in recipes.items()]
    known = [each for each in [*known, *_stated(published, limits)] if each.samples is not None]
    found = {own.global_batch_size: own}
    for schedule in sorted(known, key=lambda each: each.samples or 0.0):
        found.setdefault(schedule.global_batch_size, schedule)
    return [found[batch] for batch in sorted(found)]


def _is_benchmark(config: Config) -> bool:
    return config.model == ModelConfig() and config.log.division == "closed"


def _with_own_samples(config: Config) -> BatchSchedule:
    """Return a recipe's own schedule, with the median samples to the target of finished runs in the results folder."""
    # Only runs with this recipe, model, hyperparameters and target show how many samples this run needs.
    sections = ("recipe", "model.", "optimizer.", "training.global_batch_size", "evaluation.target")
    prefixes = tuple(f"config.{section}" for section in sections)
    stated = {name: str(value) for name, value in flattened("config", config) if name.startswith(prefixes)}
    finished = []
    for path in config.log.results.glob("*/bert/result_*.txt"):
        with suppress(ValueError):  # an unreadable file is no finished run
            run = read_log(path).run
            if stated.items() <= run.header.items() and (needed := run.converged_samples()):
                finished.append(needed)
    where = f"of {config.recipe} in {config.log.results}"
    samples, note = None, f"its limit, because no run {where} has reached the target"
    if finished:
        samples, note = median(finished), f"to the target, the median of {counted(len(finished), 'run')} {where}"
    training = config.training
    return BatchSchedule(
        training.global_batch_size, config.optimizer, training.max_samples, samples, "the recipe's own", note
    )


def _published() -> _Published:
    found: dict[tuple[float, ...], list[Mapping[str, str]]] = defaultdict(list)
    for row in closed_rows():
        if not any(each in row["accelerator"] for each in SAMPLES_NOT_LOGGED):
            found[tuple(float(row[column]) for column in ("global_batch_size", *_STATED.values()))].append(row)
    return found


def _of_recipe(config: Config, published: _Published, source: str) -> BatchSchedule:
    batch = config.training.global_batch_size
    own = (batch, *(getattr(config.optimizer, name) for name in _STATED))
    # Compare exactly, because recipes state the digits that logs print. Ignore the decay, because some logs wrongly state 0.
    rows = [row for key, found in published.items() if key[:-1] == own[:-1] for row in found]
    samples = _median_samples(rows) if rows else None
    return BatchSchedule(batch, config.optimizer, config.training.max_samples, samples, source)


def _stated(published: _Published, limits: Mapping[int, int]) -> list[BatchSchedule]:
    """Return the schedules that published logs state. ``limits`` has the recipes' sample limits by global batch size."""
    found = []
    for (batch, rate, steps, beta_1, beta_2, warmup, decay), rows in published.items():
        if warmup or not steps or not decay:
            continue
        optimizer = OptimizerConfig(rate, round(steps), beta_1, beta_2, weight_decay_rate=decay)
        others = f" and {counted(len(rows) - 1, 'other')}" if len(rows) > 1 else ""
        source = f"{rows[0]['submitter']} {rows[0]['round']}, {rows[0]['system']}{others}"
        # Use the limit of the next smaller (or equal) batch size that has a recipe, or else of the smallest that has one.
        limit = limits[max((size for size in limits if size <= batch), default=min(limits))]
        found.append(BatchSchedule(round(batch), optimizer, limit, _median_samples(rows), source))
    return found


def _median_samples(rows: Sequence[Mapping[str, str]]) -> float:
    return median(float(row["mean_train_samples"]) for row in rows)
