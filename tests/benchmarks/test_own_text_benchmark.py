"""The comparison with Hugging Face's Trainer: equal evaluations, the text before masking, and the figures."""

import json
import math
import statistics
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.training import own_text
from benchmarks.training.hugging_face import new_model
from benchmarks.training.own_text import Point, Training, best_of, recipe_arguments
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


def test_the_first_evaluation_that_reaches_the_target_counts_and_the_fastest_training_is_the_best() -> None:
    slow = Training(0, 1e-3, [Point(32, 1.0, 0.1), Point(64, 2.0, 0.3), Point(96, 3.0, 0.2), Point(128, 4.0, 0.4)])
    fast = Training(0, 2e-3, [Point(32, 0.5, 0.1), Point(64, 1.5, 0.3)])
    assert slow.seconds_to(0.3) == 2.0
    assert fast.seconds_to(0.35) == math.inf
    assert best_of([slow, fast], 0.25) is fast
    assert best_of([slow, fast], 0.35) is slow
    assert best_of([fast, slow], 0.5) is slow


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_text, "PEER_PACKAGES", ("torch", "no_such_one", "no_such_two"))
    with pytest.raises(ValueError, match="no_such_one, no_such_two"):
        own_text.main()


@pytest.mark.slow
def test_both_programs_see_the_same_samples(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    from benchmarks.training.hugging_face_trainer import accuracy, evaluation_batches, training_examples

    write_own_text((text,), OwnText(vocab_size=100, max_seq_length=48, dupe_factor=3), data := tmp_path / "data")
    train, evaluation = open_dataset(data / "train"), open_dataset(data / "evaluation")
    config = parse(recipe_arguments(data))
    unknown = Vocabulary.from_file(data / "vocab.txt").ids["[UNK]"]

    ours, theirs = drawn_model(config.model, seed=1), new_model(config.model, "AutoModelForMaskedLM")
    with torch.no_grad():
        ours.embeddings.word.mul_(30)  # the model then predicts its input, which is right for some masked tokens
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
def test_the_figures_follow_from_the_curves(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    monkeypatch.setattr(own_text, "EVALUATIONS", 2)
    out = tmp_path / "own_text.json"
    own_text.main(text=(text,), rates=(1e-3,), samples=40, schedule=2, repeats=2, out=out)
    figures = json.loads(out.read_text())
    ours, theirs = figures["ours"], figures["theirs"]
    assert [training["repeat"] for training in ours] == [0, 1]
    assert [training["rate"] for training in theirs] == [1e-3, 1e-3]
    assert [training["curve"][-1]["samples"] for training in (ours[0], theirs[0])] == [64, 128]
    assert figures["target"] == pytest.approx(0.95 * ours[0]["curve"][-1]["accuracy"])
    for training in (*ours, *theirs):
        curve = training["curve"]
        assert all(one["seconds"] < other["seconds"] for one, other in pairwise(curve))
        reached = [point["seconds"] for point in curve if point["accuracy"] >= figures["target"]]
        assert training["seconds_to_target"] == (reached[0] if reached else None)
    assert figures["medians"]["time_to_target"] == statistics.median(figures["ratios"]["time_to_target"])
