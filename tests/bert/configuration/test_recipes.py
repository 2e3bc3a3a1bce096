"""Every recipe is checked for its number of GPUs. The checks need no GPUs."""

import math
import os
from pathlib import Path

import numpy as np
import pytest

from bert.checkpoints.weights import model_metadata, safetensors_header
from bert.configuration.config import Config
from bert.configuration.recipes import RECIPES
from bert.configuration.sections import ModelConfig
from bert.guards.preflight import batch_sampler, check
from bert.model import parameter_shapes
from bert.train import parse
from dataloading.shards.samples import synthetic_samples
from tests.conftest import MAX_SEQ_LENGTH, REPOSITORY, write_small_dataset

GPU_RECIPES = sorted(set(RECIPES) - {"tiny_cpu", "own_text_cpu", "bert_3_9b_8x8"})


def gpus(recipe: str) -> int:
    """Return a recipe's number of GPUs. Its name ends in NODESxGPUS_PER_NODE, such as 8x8."""
    nodes, per_node = recipe.rpartition("_")[2].split("x")
    return int(nodes) * int(per_node)


@pytest.fixture(scope="module")
def wikipedia(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a few synthetic samples as a data set with a vocabulary of BERT's size, and a checkpoint of BERT-Large.

    The checkpoint is a sparse file, which uses disk space only for its header.
    """
    folder = tmp_path_factory.mktemp("wikipedia")
    size = RECIPES["h100_1x1"]().model.vocab_size
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*tokens, *(f"word{i}" for i in range(size - len(tokens)))]) + "\n")
    lengths = np.random.default_rng(3).integers(3, MAX_SEQ_LENGTH + 1, 150)
    for part, some in (("train", lengths[:100]), ("evaluation", lengths[100:])):
        write_small_dataset(folder / part, synthetic_samples(some, size, seed=1), folder / "vocab.txt")
    header, weights = safetensors_header(parameter_shapes(ModelConfig()), model_metadata(ModelConfig()))
    (folder / "phase1").write_bytes(header)
    os.truncate(folder / "phase1", len(header) + weights)
    return folder


def arguments(recipe: str, wikipedia: Path, results: Path) -> list[str]:
    places = {"train": "train", "evaluation": "evaluation", "vocab": "vocab.txt", "initial-checkpoint": "phase1"}
    return [
        recipe,
        *(f"--data.{name}={wikipedia / place}" for name, place in places.items()),
        f"--log.results={results}",
    ]


@pytest.mark.parametrize("recipe", GPU_RECIPES)
def test_a_recipe_fits_its_number_of_gpus_but_not_5_gpus(recipe: str, wikipedia: Path, tmp_path: Path) -> None:
    config = parse(arguments(recipe, wikipedia, tmp_path))
    assert config.recipe == recipe
    inputs, training = check(config, gpus(recipe)), config.training
    steps = training.gradient_accumulation_steps
    micro_batches = batch_sampler(config, inputs.train, gpus(recipe), seed=1).rank_batches(0, gpus(recipe) - 1)
    assert [len(micro.indices) for micro in micro_batches] == (
        [training.global_batch_size // (gpus(recipe) * steps)] * steps
    )
    assert config.optimizer.learning_rate_training_steps * training.global_batch_size < training.max_samples
    with pytest.raises(ValueError, match=rf"does not divide over 5 copies .* make it a multiple of {5 * steps}"):
        check(config, 5)  # no recipe's batch is divisible by 5
    assert not any(tmp_path.iterdir())


def test_the_largest_model_has_3_9_billion_parameters_and_8_copies_of_8_gpus() -> None:
    """A layer has 12 D^2 + 13 D parameters. Embeddings, pooler and heads have 2 D^2 + (V + P + 10) D + V + 2."""
    config, words = RECIPES["bert_3_9b_8x8"](), 30522
    model = config.model
    for each, layers, width in ((model, 48, 2560), (ModelConfig(), 24, 1024)):
        rest = 2 * width**2 + (words + 512 + 10) * width + words + 2
        assert sum(map(math.prod, parameter_shapes(each).values())) == layers * (12 * width**2 + 13 * width) + rest
    assert model.hidden_size / model.num_attention_heads == 64
    assert (config.parallel.copy_ranks, gpus(config.recipe) // config.parallel.copy_ranks) == (8, 8)


HEAD = "| recipe | GPUs | global batch | per GPU x accumulation | learning rate | steps | precision |"
OTHERS = {
    "h100_1x1": ((0.9, 0.999), 0.01, (0, 0), 4_500_000),
    "h100_1x8": ((0.60466, 0.85437), 0.1, (0, 0), 4_500_000),
    "h100_8x8": ((0.6, 0.7), 0.1, (200_330, -200_000), 4_500_000),
    "h100_64x8": ((0.62, 0.9), 0.01, (10_000, -9_500), 4_500_000),
    "h100_384x8": ((0.8, 0.925), 0.0166629, (300, -100), 12_000_000),
    "b200_1x8": ((0.60466, 0.85437), 0.1, (0, 0), 4_500_000),
    "gb200_18x4": ((0.6, 0.7), 0.1, (200_330, -200_000), 4_500_000),
    "dgxa100_1x1": ((0.9, 0.999), 0.01, (0, 0), 4_500_000),
    "dgxa100_1x4": ((0.9, 0.999), 0.01, (0, 0), 4_500_000),
    "dgxa100_1x8": ((0.9, 0.999), 0.01, (0, 0), 4_500_000),
    "dgxa100_8x8": ((0.60466, 0.85437), 0.1, (0, 0), 4_500_000),
    "dgxa100_16x8": ((0.60466, 0.85437), 0.1, (0, 0), 4_500_000),
    "dgxa100_128x8": ((0.71, 0.88), 0.0166629, (256, -76), 7_000_000),
    "dgxa100_512x8": ((0.75, 0.9), 0.0166629, (290, -100), 12_000_000),
}
"""Settings that the documented table omits: betas, weight decay, warm-up steps, their start, and maximum samples."""


def row(config: Config) -> str:
    """Return a recipe's line of the table in docs/training.md."""
    training, optimizer = config.training, config.optimizer
    accumulation = training.gradient_accumulation_steps
    share = training.global_batch_size // (gpus(config.recipe) * accumulation)
    return (
        f"| `{config.recipe}` | {gpus(config.recipe):,} | {training.global_batch_size:,} | {share} x {accumulation} "
        f"| {optimizer.base_learning_rate:g} | {optimizer.learning_rate_training_steps:,} | {training.precision} |"
    )


def test_the_table_in_the_documentation_lists_the_recipes_settings() -> None:
    page = (REPOSITORY / "docs/training.md").read_text(encoding="utf-8")
    table = page[page.index("| recipe | GPUs |") :].split("\n\n")[0].splitlines()
    rows = [row(RECIPES[name]()) for name in RECIPES if name in GPU_RECIPES]
    assert table == [HEAD, "|---" * HEAD.count(" | ") + "|---|", *rows]


def test_settings_that_the_table_omits_have_the_recorded_values() -> None:
    found = {}
    for name in GPU_RECIPES:
        optimizer, training = RECIPES[name]().optimizer, RECIPES[name]().training
        warmup = (optimizer.num_warmup_steps, optimizer.start_warmup_step)
        betas = (optimizer.beta_1, optimizer.beta_2)
        found[name] = (betas, optimizer.weight_decay_rate, warmup, training.max_samples)
    assert found == OTHERS
