"""Shuffling of data, told by the samples alone, on data of this repository's own `prepare` and `shuffle`."""

from pathlib import Path

import numpy as np
import pytest

from bert.configuration.recipes import ARTIFACTS
from dataloading.dataset import order
from dataloading.dataset.folder import Dataset
from dataloading.dataset.order import OrderCheck
from dataloading.dataset.shuffle import shuffle
from dataloading.options import PretrainingOptions
from dataloading.preparation.prepare import Job, prepare
from dataloading.text.tokenization import Vocabulary
from tests.dataloading.conftest import Run

pytestmark = pytest.mark.slow

OPTIONS = PretrainingOptions(max_seq_length=64, max_predictions_per_seq=10, dupe_factor=4)
VOCAB = ARTIFACTS / "tiny_cpu" / "vocab.txt"


def prepared(folder: Path, texts: int, one_call: bool = False) -> Dataset:
    """A data set of 400 documents, dealt to so many texts."""
    rng = np.random.default_rng(0)
    words = [token for token in Vocabulary.from_file(VOCAB).tokens if token.isalpha()]
    documents = [[" ".join(rng.choice(words, 15)) for _ in range(rng.integers(1, 25))] for _ in range(400)]
    files = [folder / f"text_{index}.txt" for index in range(texts)]
    for index, file in enumerate(files):
        file.write_text("\n\n".join("\n".join(document) for document in documents[index::texts]) + "\n")
    return prepare(Job(tuple(files), VOCAB, OPTIONS, one_call), folder / "prepared")


@pytest.fixture(scope="module")
def unshuffled(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepared(tmp_path_factory.mktemp("four"), 4)


def finding(dataset: Dataset, samples: int = 1 << 14) -> tuple[str, bool]:
    check = OrderCheck(len(dataset))
    for block in dataset.blocks(samples):
        check.add(block)
    return check.finding()


def test_shards_that_were_never_mixed_are_told_from_shuffled_ones(unshuffled: Dataset, tmp_path: Path) -> None:
    for source in (unshuffled, prepared(tmp_path, 2)):
        assert finding(source)[1], finding(source)
        mixed = shuffle(source, tmp_path / f"shuffled_{len(source.shards)}", shards=3, seed=1)
        assert not finding(mixed)[1], finding(mixed)


def test_one_call_of_the_algorithm_is_shuffled_already(tmp_path: Path) -> None:
    said, unshuffled = finding(prepared(tmp_path, 2, one_call=True))
    assert said.startswith("order: random as far as can be told")
    assert not unshuffled


def test_samples_shuffled_among_neighbours_only(unshuffled: Dataset) -> None:
    """As by a reader's buffer; and documents one after another, as if nothing had ever moved."""
    samples = unshuffled.take(np.arange(len(unshuffled)))
    rng = np.random.default_rng(0)
    for window in (1, 1000):
        places = np.argsort(np.arange(len(samples)) + rng.integers(0, window, len(samples)), kind="stable")
        check = OrderCheck(len(samples))
        check.add(samples.take(places))
        assert check.finding()[1]


def test_it_does_not_depend_on_blocks_or_masks(unshuffled: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    found = finding(unshuffled)
    assert finding(unshuffled, 37) == found
    monkeypatch.setattr(order, "_AT_A_TIME", 41)
    assert finding(unshuffled) == found


def test_of_a_large_set_a_part_of_the_texts_is_held(unshuffled: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_MOST_HELD", len(unshuffled) // 2)
    monkeypatch.setattr(order, "_FEWEST_PAIRS", 100)
    check = OrderCheck(len(unshuffled))
    for block in unshuffled.blocks():
        check.add(block)
    assert 0.3 * len(unshuffled) < sum(map(len, check._places)) < 0.6 * len(unshuffled)
    assert check.finding()[1]


def test_few_texts_say_nothing(unshuffled: Dataset) -> None:
    check = OrderCheck(100)
    check.add(unshuffled.take(np.arange(100)))
    said, found = check.finding()
    assert said.startswith("order: cannot be told of ")
    assert not found
    nothing = f"order: cannot be told of 0 repeated texts; {order._FEWEST_PAIRS} are needed"
    assert OrderCheck(0).finding() == (nothing, False)


def test_verify_warns(run: Run, unshuffled: Dataset, tmp_path: Path) -> None:
    printed = run("verify", unshuffled.folder)
    assert "multiset digest" in printed
    assert "\nwarning: order: not random: " in printed
    assert printed.endswith("run python -m dataloading shuffle\n")  # the last of what went to stderr
    printed = run("verify", shuffle(unshuffled, tmp_path / "shuffled", shards=4, seed=24).folder)
    assert "warning" not in printed
    assert "order: random as far as can be told: samples of one text lie 0." in printed
