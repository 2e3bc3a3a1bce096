"""Data sets from users' own text: held-out documents, the vocabulary, and invalid options."""

from pathlib import Path

import pytest

from dataloading.dataset.folder import open_dataset
from dataloading.options import Normalization, NormalizationOptions, OwnText
from dataloading.preparation import own_text
from dataloading.preparation.own_text import split_documents, text_files, write_own_text
from dataloading.text.vocabulary import Vocabulary

WORDS = ["alpha", "beta", "gamma", "delta", "Épsilon", "zeta", "eta", "theta", "iota", "kappa"]


def document(number: int) -> list[str]:
    """Return a few sentences that occur in no other document."""
    words = [WORDS[(number + place) % 10] for place in range(8)]
    return [f"Number {number} {' '.join(words)}.", f"{' '.join(reversed(words))} {number}"]


def write_text(path: Path, documents: list[list[str]]) -> Path:
    path.write_text("\n\n".join("\n".join(sentences) for sentences in documents) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt", [document(number) for number in range(200)])


def test_held_out_documents_do_not_depend_on_the_order_of_the_documents() -> None:
    documents = [document(number) for number in range(200)]
    split = split_documents(documents, 0.05)
    assert (len(split.train), len(split.evaluation), split.repeated) == (190, 10, 0)
    assert sorted(split.train + split.evaluation) == sorted(documents)
    again = split_documents(documents[::-1] + documents[:3], 0.05)
    assert sorted(again.evaluation) == sorted(split.evaluation)
    assert again.repeated == 3
    fewest = split_documents(documents[:20], 0.05)
    assert (len(fewest.train), len(fewest.evaluation)) == (15, 5)
    more = split_documents([*documents, *(document(number) for number in range(1000, 1020))], 0.05)
    assert len([each for each in split.evaluation if each not in more.evaluation]) <= 2


def test_each_visible_file_in_folders_and_patterns_is_found_once(tmp_path: Path) -> None:
    names = ["a.txt", "b.md", "deep/c.txt", ".git/d.txt", "deep/.hidden.txt"]
    for name in names:
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text("text")
    folder = tmp_path / "texts"
    assert text_files([folder]) == [folder / name for name in names[:3]]
    assert text_files([folder / "**/*.txt", folder / "a.txt"]) == [folder / "a.txt", folder / "deep/c.txt"]


def test_both_data_sets_record_their_settings_and_are_reproducible(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_text, "_SHARD_CHARACTERS", 10)
    assert list(map(len, own_text._calls([["abcde"], ["ab", "cde"], ["abcde"], ["f"], ["ghij"]]))) == [2, 3]
    monkeypatch.setattr(own_text, "_SHARD_CHARACTERS", 5000)
    split, *_ = write_own_text((text,), OwnText(vocab_size=90, dupe_factor=3), tmp_path / "out")
    vocabulary = Vocabulary.from_file(tmp_path / "out" / "vocab.txt")
    assert (vocabulary.size, vocabulary.fits(Normalization())) == (90, True)
    for name, documents, passes, seed in (
        ("train", split.train, 3, 12345),
        ("evaluation", split.evaluation, 10, 66666),
    ):
        dataset = open_dataset(tmp_path / "out" / name)
        dataset.verify()
        dataset.check_vocabulary(vocabulary)
        info = dataset.info
        assert (info.max_seq_length, info.max_predictions_per_seq, list(info.sources)) == (128, 19, [text.as_posix()])
        assert (info.options["dupe_factor"], info.options["random_seed"]) == (passes, seed)
        assert (info.text.documents, info.text.dropped_documents) == (len(documents), 0)
        assert len(dataset) >= len(documents)
        assert len(dataset.shards) == -(-sum(len(part) for each in documents for part in each) // 5000)
    assert write_own_text((text,), OwnText(vocab_size=90, dupe_factor=3), tmp_path / "again")[0] == split
    shards = [path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("part_*")]
    for name in (*shards, "vocab.txt"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_samples_of_five_tokens_lose_no_text(text: Path, tmp_path: Path) -> None:
    write_own_text((text,), OwnText(vocab_size=90, max_seq_length=5, dupe_factor=1), tmp_path / "out")
    dataset = open_dataset(tmp_path / "out" / "train")
    assert (dataset.lengths.max(), dataset.info.max_predictions_per_seq) == (5, 1)
    assert dataset.info.text.unused_tokens == 0


def test_a_learned_cased_vocabulary_keeps_capitals_and_may_be_smaller_than_requested(
    text: Path, tmp_path: Path
) -> None:
    for name, own, options in (
        ("cased", OwnText(vocab_size=50_000, cased=True), (False, False)),
        ("set", OwnText(cased=True, normalization=NormalizationOptions(strip_accents=True)), (False, True)),
    ):
        write_own_text((text,), own, tmp_path / name)
        vocabulary = Vocabulary.from_file(tmp_path / name / "vocab.txt")
        assert vocabulary.size < 2000
        assert not vocabulary.fits(Normalization())
        assert ("Épsilon" in vocabulary.tokens) is not options[1]
        recorded = open_dataset(tmp_path / name / "train").info.options
        assert (recorded["do_lower_case"], recorded["strip_accents"]) == options


def test_a_given_vocabulary_and_its_normalization_are_used(text: Path, tmp_path: Path) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "alpha", "beta", "number", "Capital"]
    (tmp_path / "given").write_text("\n".join(tokens))
    write_own_text((text,), OwnText(vocab=tmp_path / "given", accept_losses=True), tmp_path / "out")
    assert Vocabulary.from_file(tmp_path / "out" / "vocab.txt").tokens == tuple(tokens)
    assert open_dataset(tmp_path / "out" / "train").info.options["do_lower_case"] is False  # "Capital" is a token


def test_lines_are_split_into_sentences_and_a_file_can_be_one_document(tmp_path: Path) -> None:
    long = " ".join(f"w{index}" for index in range(150))
    texts = [
        write_text(tmp_path / f"{number}.txt", [["First here. Second there", f"{number} {long}"], document(number)])
        for number in range(30)
    ]
    paragraphs = [["First here.", "Second there", f"{number} {long}"] for number in range(30)]
    others = [document(number) for number in range(30)]
    whole = [[*one, *other] for one, other in zip(paragraphs, others, strict=True)]
    for own, expected in ((OwnText(documents="files"), whole), (OwnText(), [*paragraphs, *others])):
        split, *_ = write_own_text(texts, own, tmp_path / own.documents)
        assert sorted(split.train + split.evaluation) == sorted(expected)


@pytest.mark.parametrize(("documents", "least"), [(30, 1000), (1200, 9850)])
def test_the_evaluation_set_has_at_most_ten_thousand_masked_tokens(
    documents: int, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_text, "_SHARD_CHARACTERS", 50_000)
    assert [own_text._passes([["a" * size]]) for size in (1, 30_000, 100_000, 400_000)] == [10, 9, 3, 1]
    text = write_text(tmp_path / "text.txt", [document(number) * 3 for number in range(documents)])
    write_own_text((text,), OwnText(vocab_size=120, evaluation_share=0.5, dupe_factor=1), tmp_path / "out")
    with pytest.raises(ValueError, match="name a data set in this folder: evaluation, train"):
        open_dataset(tmp_path / "out")
    dataset = open_dataset(tmp_path / "out" / "evaluation")
    assert least <= dataset.masked_counts.sum() <= 10_000
    assert len(dataset.shards) == (1 if documents == 30 else 4)
