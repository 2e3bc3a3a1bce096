"""The comparison with Hugging Face's Trainer: equal evaluations, training text without masks, and the figures."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.training import own_text
from benchmarks.training.hugging_face import new_model
from benchmarks.training.own_text import Point, Training, Trainings, best_of, compare, recipe_arguments
from bert.checkpoints.hugging_face import to_hugging_face
from bert.evaluation import Evaluator
from bert.parallel.mesh import Mesh
from bert.train import parse
from dataloading.dataset.folder import open_dataset
from dataloading.options import OwnText
from dataloading.preparation.own_text import write_own_text
from dataloading.text.vocabulary import Vocabulary
from tests.bert.small_models import drawn_model


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    documents = [" ".join(words[place % 10 :] + words[: place % 7]) + f" item {place}." for place in range(60)]
    path = tmp_path_factory.mktemp("own") / "text.txt"
    path.write_text("\n\n".join(f"{document}\nThe end of {document}" for document in documents))
    return path


def test_a_target_is_reached_at_its_first_evaluation_and_the_best_training_reaches_it_first() -> None:
    slow = Training(0, 1e-3, [Point(32, 1.0, 0.1), Point(64, 2.0, 0.3), Point(96, 3.0, 0.2), Point(128, 4.0, 0.4)])
    fast = Training(0, 2e-3, [Point(32, 0.5, 0.1), Point(64, 1.5, 0.3)])
    assert slow.seconds_to(0.3) == 2.0
    assert fast.seconds_to(0.35) == math.inf
    assert best_of([slow, fast], 0.25) is fast
    assert best_of([slow, fast], 0.35) is slow
    assert best_of([fast, slow], 0.5) is slow


class KnownTimes(Trainings):
    """Trainings with known curves. With only one learning rate, the Trainer reaches half of the recipe's accuracy."""

    def ours(self, repeat: int) -> Training:
        return Training(repeat, None, [Point(32, 1.0 + repeat, 0.1), Point(64, 2.0 + repeat, 0.5)])

    def theirs(self, repeat: int, rate: float | None) -> Training:
        return Training(repeat, rate, [Point(32, 2.0, 0.1), Point(64, 6.0, 0.25 if rate == 1e-3 else 0.2)])


def test_later_repeats_use_the_best_learning_rate_and_a_missed_target_gives_a_lower_bound() -> None:
    trainings = KnownTimes(Path(), 64, 32, warmup_steps=1)
    found: Any = compare(trainings, (5e-5, 1e-3), target_share=0.5, repeats=3)
    ratios = {"time_to_target": [3.0, 2.0, 1.5], "samples_per_s": [3.0, 2.0, 1.5]}
    medians = {"time_to_target": 2.0, "samples_per_s": 2.0}
    assert found["ratios"] == compare(trainings, (5e-5,), target_share=1.0, repeats=3)["ratios"] == ratios
    assert (found["target"], found["best_rate"], found["medians"]) == (0.25, 1e-3, medians)
    theirs = [(each["repeat"], each["rate"], each["seconds_to_target"]) for each in found["theirs"]]
    assert theirs == [(0, 5e-5, None), (0, 1e-3, 6.0), (1, 1e-3, 6.0), (2, 1e-3, 6.0)]
    bounds = [compare(trainings, (5e-5,), share, repeats=1)["is_lower_bound"] for share in (0.4, 0.5)]
    assert bounds == [False, True]


def test_the_error_lists_all_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_text, "PEER_PACKAGES", ("torch", "no_such_one", "no_such_two"))
    with pytest.raises(ValueError, match="no_such_one, no_such_two"):
        own_text.main()


@pytest.mark.slow
def test_both_programs_get_the_same_evaluation_and_training_examples_are_unmasked(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    from benchmarks.training.hugging_face_trainer import accuracy, evaluation_batches, training_examples

    write_own_text((text,), OwnText(vocab_size=100, max_seq_length=48, dupe_factor=3), data := tmp_path / "data")
    train, evaluation = open_dataset(data / "train"), open_dataset(data / "evaluation")
    config = parse(recipe_arguments(data))
    unknown = Vocabulary.from_file(data / "vocab.txt").ids["[UNK]"]

    ours, theirs = drawn_model(config.model, seed=1), new_model(config.model, "AutoModelForMaskedLM")
    with torch.no_grad():
        # With such embeddings, the model predicts its input token, which some masked positions keep.
        ours.embeddings.word.mul_(30)
    assert theirs.load_state_dict(to_hugging_face(ours.state_dict()), strict=False).missing_keys == []
    mesh = Mesh(0, 1, 0, torch.device("cpu"))
    found = Evaluator(evaluation, mesh, 64, unknown)(ours, torch.autocast("cpu", enabled=False))
    assert 0 < found.correct < found.count
    assert accuracy(theirs, evaluation_batches(evaluation, unknown, size=7)) == found.value

    examples = training_examples(train, [0])
    for index, example in enumerate(examples):
        sample = train.take(np.array([index]))
        expected = sample.input_ids.tolist()
        for position, original in zip(sample.masked_lm_positions.tolist(), sample.masked_lm_ids.tolist(), strict=True):
            expected[position] = original
        assert example["input_ids"] == expected
        assert example["token_type_ids"] == sample.segment_ids.tolist()
    assert len(examples) == len(train)


@pytest.mark.slow
def test_main_writes_the_curves_of_both_programs(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    monkeypatch.setattr(own_text, "EVALUATIONS", 2)
    out = tmp_path / "own_text.json"
    own_text.main(text=(text,), rates=(1e-3,), samples=40, repeats=1, out=out)
    figures = json.loads(out.read_text())
    [ours], [theirs] = figures["ours"], figures["theirs"]
    assert (ours["repeat"], theirs["rate"]) == (0, 1e-3)
    assert [training["curve"][-1]["samples"] for training in (ours, theirs)] == [64, 64]
    assert figures["target"] == pytest.approx(0.95 * ours["curve"][-1]["accuracy"])
    for training in (ours, theirs):
        assert all(one["seconds"] < other["seconds"] for one, other in pairwise(training["curve"]))
        reached = [point["seconds"] for point in training["curve"] if point["accuracy"] >= figures["target"]]
        assert training["seconds_to_target"] == (reached[0] if reached else None)
