"""The recipe for the user's own text derives settings from the data, and explicit settings override them."""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest

from bert.checkpoints.sources import open_source
from bert.checkpoints.weights import save_weights, text_metadata
from bert.convert import convert
from bert.derived_settings import affordable_samples
from bert.guards.preflight import check
from bert.model import BertForPreTraining
from bert.train import parse
from dataloading.dataset.folder import open_dataset
from dataloading.options import Normalization, OwnText
from dataloading.preparation.own_text import write_own_text
from dataloading.text.tokenization import Tokenizer
from dataloading.text.vocabulary import Vocabulary
from tests.bert.checkpoints.test_initial import save_pretrained
from tests.bert.small_models import drawn_model


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    documents = [" ".join(words[place % 10 :] + words[: place % 7]) + f" item {place}." for place in range(60)]
    (folder / "text.txt").write_text("\n\n".join(f"{document}\nThe end of {document}" for document in documents))
    write_own_text((folder / "text.txt",), OwnText(vocab_size=100, max_seq_length=48, dupe_factor=3), folder / "data")
    return folder / "data"


def arguments(own: Path, *more: object) -> list[str]:
    places = {"train": "train", "evaluation": "evaluation", "vocab": "vocab.txt"}
    return ["own_text_cpu", *(f"--data.{name}={own / place}" for name, place in places.items()), *map(str, more)]


@pytest.mark.parametrize(
    ("given", "samples", "interval", "steps", "warmup", "hidden", "rate"),
    [
        ("", 32_000, 1600, 1000, 100, 128, 0.01),
        # All evaluations together take at most about a tenth of the time.
        ("--training.max-samples=960 --model.hidden-size=64", 960, 320, 30, 3, 64, 0.01),
        ("--training.max-samples=960 --evaluation.interval-samples=320", 960, 320, 30, 3, 128, 0.01),
        ("--training.max-samples=960 --model.hidden-size=1024", 960, 320, 30, 3, 1024, 0.000625),
        ("--training.max-steps=17 --optimizer.num-warmup-steps=2", 32_000, 544, 17, 2, 128, 0.01),
    ],
)
def test_settings_follow_from_the_data_and_from_what_is_given(
    own: Path, given: str, samples: int, interval: int, steps: int, warmup: int, hidden: int, rate: float
) -> None:
    config = parse(arguments(own, *given.split()))
    model, optimizer = config.model, config.optimizer
    assert (model.vocab_size, model.max_position_embeddings, model.hidden_size) == (100, 48, hidden)
    assert (config.training.max_samples, config.evaluation.interval_samples) == (samples, interval)
    assert (optimizer.learning_rate_training_steps, optimizer.num_warmup_steps) == (steps, warmup)
    assert optimizer.base_learning_rate == pytest.approx(rate)


@pytest.mark.slow
def test_from_a_checkpoint_the_model_is_taken_and_the_data_are_seen_once(own: Path, tmp_path: Path) -> None:
    folder = save_pretrained(tmp_path / "theirs", own / "vocab.txt", rows=128)
    config = parse(arguments(own, f"--data.initial-checkpoint={folder}"))
    model = config.model
    assert (model.hidden_size, model.vocab_size, model.max_position_embeddings) == (32, 100, 48)
    assert (model.layer_norm_eps, model.hidden_dropout) == (1e-7, 0.1)
    assert config.training.max_samples == 32 * -(-len(open_dataset(own / "train")) // 32)
    assert config.optimizer.base_learning_rate == 0.01
    check(parse(arguments(own, f"--data.initial-checkpoint={folder}", f"--log.results={tmp_path}")), 1)
    save_weights(BertForPreTraining(model), tmp_path / "ours.safetensors")
    assert parse(arguments(own, f"--data.initial-checkpoint={tmp_path / 'ours.safetensors'}")).model == model


def test_evaluations_leave_time_to_train() -> None:
    """They take a tenth of the training's time, or less if 20 of them, at 0.4 of a training sample each, take less."""
    assert [affordable_samples(2201, held_out) for held_out in (20, 25, 26, 1000)] == [2041, 2001, 2000, 2000]


def test_without_data_nothing_follows_and_the_check_names_them(tmp_path: Path) -> None:
    config = parse(arguments(tmp_path))
    with pytest.raises(ValueError, match=r"missing: data\.train .*from-text"):
        check(config, 1)


def save_text_model(path: Path, own: Path, normalization: Normalization) -> Path:
    """Save random weights as a run saves them that was trained on text with this normalization."""
    vocabulary = Vocabulary.read(own / "vocab.txt")
    model = drawn_model(parse(arguments(own)).model, seed=0)
    save_weights(model, path, text_metadata(vocabulary.sha256, normalization))
    return path


def test_the_normalization_of_data_and_checkpoint_must_agree(own: Path, tmp_path: Path) -> None:
    for normalization, refused in (
        (Normalization(), ""),
        (Normalization(do_lower_case=False), ".*capital letters kept"),
    ):
        stated = save_text_model(tmp_path / "ours.safetensors", own, normalization)
        with pytest.raises(ValueError, match=f"normalized in different ways {refused}") if refused else nullcontext():
            check(parse(arguments(own, f"--data.initial-checkpoint={stated}", f"--log.results={tmp_path}")), 1)


@pytest.mark.slow
def test_an_exported_model_splits_text_as_its_training_did(own: Path, tmp_path: Path) -> None:
    """The weights state the normalization."""
    from transformers import AutoTokenizer

    vocabulary = Vocabulary.read(own / "vocab.txt")
    for number, normalization in enumerate(
        (Normalization(), Normalization(strip_accents=False), Normalization(False, False))
    ):
        stated = save_text_model(tmp_path / f"{number}.safetensors", own, normalization)
        out = tmp_path / f"{number}"
        (tmp_path / "vocab.txt").write_bytes(vocabulary.content)
        convert(stated, "hugging-face", out, vocab=tmp_path / "vocab.txt")
        text = "One T\u00e9n s\u00e9ven, Item 9 \u6771\u4eac"
        ours = Tokenizer(vocabulary, **asdict(normalization)).encode_lines([text])[0]
        assert AutoTokenizer.from_pretrained(out)(text, add_special_tokens=False)["input_ids"] == ours.tolist()
        again = tmp_path / f"{number}-again.safetensors"
        convert(stated, "safetensors", again)
        assert open_source(again).normalization == normalization
