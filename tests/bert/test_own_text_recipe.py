"""The recipe for the user's own text derives settings from the data, and explicit settings override them."""

from pathlib import Path

import pytest

from bert.checkpoints.weights import save_weights
from bert.configuration.config import Config
from bert.guards.preflight import check
from bert.model import BertForPreTraining
from bert.train import parse
from dataloading.dataset.folder import open_dataset
from dataloading.options import OwnText
from dataloading.preparation.own_text import write_own_text
from tests.bert.checkpoints.test_initial import save_pretrained
from tests.programs import PATIENCE_S, Program


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    documents = [" ".join(words[place % 10 :] + words[: place % 7]) + f" item {place}." for place in range(60)]
    (folder / "text.txt").write_text("\n\n".join(f"{document}\nThe end of {document}" for document in documents))
    write_own_text(OwnText((folder / "text.txt",), vocab_size=100, max_seq_length=48, dupe_factor=3), folder / "data")
    return folder / "data"


def arguments(own: Path, *more: object) -> list[str]:
    places = {"train": "train", "evaluation": "evaluation", "vocab": "vocab.txt"}
    return ["own_text_cpu", *(f"--data.{name}={own / place}" for name, place in places.items()), *map(str, more)]


def schedule(config: Config) -> tuple[int, int | None, int, int]:
    optimizer = config.optimizer
    return (
        config.training.max_samples,
        config.evaluation.interval_samples,
        optimizer.learning_rate_training_steps,
        optimizer.num_warmup_steps,
    )


def test_from_random_weights_model_and_length_follow_from_the_data(own: Path) -> None:
    config = parse(arguments(own))
    assert (config.model.vocab_size, config.model.max_position_embeddings) == (100, 48)
    assert config.model.hidden_size == 128
    assert schedule(config) == (32_000, 1600, 1000, 100)
    assert config.optimizer.base_learning_rate == 5e-3


def test_what_is_given_counts_more_and_the_rest_follows_from_it(own: Path) -> None:
    config = parse(arguments(own, "--training.max-samples=960", "--model.hidden-size=64"))
    assert config.model.hidden_size == 64
    assert config.optimizer.base_learning_rate == 0.01
    assert schedule(config) == (960, 64, 30, 3)  # 30 steps in at most 15 intervals that end at the last step
    config = parse(arguments(own, "--training.max-samples=960", "--evaluation.interval-samples=320"))
    assert schedule(config) == (960, 320, 30, 3)
    config = parse(arguments(own, "--training.max-steps=17", "--optimizer.num-warmup-steps=2"))
    assert schedule(config) == (32_000, 32, 17, 2)
    config = parse(arguments(own, "--training.implementations", "dense_gelu", "reference"))
    assert config.training.implementations == {"dense_gelu": "reference"}


@pytest.mark.slow
def test_from_a_checkpoint_the_model_is_taken_and_the_data_are_seen_once(own: Path, tmp_path: Path) -> None:
    folder = save_pretrained(tmp_path / "theirs", own / "vocab.txt", rows=128)
    config = parse(arguments(own, f"--data.initial-checkpoint={folder}"))
    model = config.model
    assert (model.hidden_size, model.vocab_size, model.max_position_embeddings) == (32, 100, 48)
    assert (model.layer_norm_eps, model.hidden_dropout) == (1e-7, 0.1)
    steps = -(-len(open_dataset(own / "train")) // 32)
    assert config.training.max_samples == 32 * (steps + -steps % 20)
    assert config.optimizer.base_learning_rate == 0.02
    check(parse(arguments(own, f"--data.initial-checkpoint={folder}", f"--log.results={tmp_path}")), 1)
    save_weights(BertForPreTraining(model), tmp_path / "ours.safetensors")
    assert parse(arguments(own, f"--data.initial-checkpoint={tmp_path / 'ours.safetensors'}")).model == model


def test_without_data_nothing_follows_and_the_check_names_them(tmp_path: Path) -> None:
    config = parse(arguments(tmp_path))
    with pytest.raises(ValueError, match=r"train/manifest\.json.*from-text"):
        check(config, 1)


def test_a_closed_run_ends_at_its_target() -> None:
    with pytest.raises(ValueError, match=r"evaluation\.to_the_end is set in the closed division"):
        parse(["h100_1x1", "--evaluation.to-the-end"])


@pytest.mark.slow
def test_a_run_trains_to_the_end_and_has_succeeded(own: Path, tmp_path: Path) -> None:
    """The run continues although it reaches its target early."""
    settings = [
        "--training.max-samples=160",
        "--evaluation.target=0.001",
        "--log.results",
        tmp_path,
        "--training.seed=1",
    ]
    run = Program("bert.train", arguments(own, *settings))
    assert run.wait(PATIENCE_S) == 0, run.output
    lines = run.output.splitlines()
    evaluations = [line for line in lines if line.startswith("eval ")]
    assert len(evaluations) == 5
    assert any(line.startswith("end: success after 160 samples") for line in lines)
