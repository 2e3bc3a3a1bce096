"""Text that is lost on the way to samples is counted, recorded, reported, and refused if it is more than half."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from dataloading.dataset.folder import open_dataset
from dataloading.dataset.rewrite import convert, shuffle
from dataloading.options import OwnText, PretrainingOptions
from dataloading.preparation.own_text import write_own_text
from dataloading.preparation.prepare import Job, prepare
from dataloading.preparation.pretraining_data import samples_of
from dataloading.text.losses import TextCounts, _percent
from dataloading.text.tokenization import TokenizedDocuments, Tokenizer, cut_sentences
from dataloading.text.vocabulary import Vocabulary
from tests.dataloading.conftest import Run

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = Vocabulary((*SPECIAL, *"abcdefgh", *(f"##{letter}" for letter in "abcdefgh")))
OPTIONS = PretrainingOptions(max_seq_length=16, max_predictions_per_seq=2, dupe_factor=2)


def test_long_sentences_are_cut_into_equal_pieces() -> None:
    for length, most, cuts in ((10, 4, [4, 7]), (9, 4, [3, 6]), (8, 4, [4]), (4, 4, []), (5, 1, [1, 2, 3, 4])):
        whole = TokenizedDocuments(np.full(length, 5, np.uint16), np.array([0, length]), np.array([0, 1]))
        assert cut_sentences(whole, most, VOCABULARY).sentence_offsets.tolist() == [0, *cuts, length]
    whole = TokenizedDocuments(np.array([5, 5, 13, 13, 13, 13], np.uint16), np.array([0, 6]), np.array([0, 1]))
    assert cut_sentences(whole, 3, VOCABULARY).sentence_offsets.tolist() == [0, 1, 4, 6]


def test_what_is_lost_is_counted() -> None:
    documents = [["ab xyz\u200b", "cd"], ["\u200b\x01"], ["abc abc abc abc abc abc abc", "x"]]
    _, counts = samples_of(documents, Tokenizer(VOCABULARY), OPTIONS)
    assert (counts.characters, counts.dropped_characters) == (len("".join(chain.from_iterable(documents))), 3)
    assert (counts.documents, counts.dropped_documents) == (3, 1)
    assert (counts.tokens, counts.unknown_tokens, counts.unknown_characters) == (2 + 1 + 2 + 21 + 1, 2, 4)
    # One sentence of 21 tokens does not fit into a sample of 16 tokens, but its pieces do.
    assert counts.unused_tokens > 0
    _, counts = samples_of(documents, Tokenizer(VOCABULARY), OPTIONS, longest_sentence=6)
    assert counts.unused_tokens == 0


def test_accents_count_as_lost_if_they_are_stripped() -> None:
    documents = [["\u00e9\u00e9 ab", "e\u0301a"], ["\u0e19\u0e49\u0e33 \u6771"]]
    for strip, marks in ((True, 4), (False, 0)):
        _, counts = samples_of(documents, Tokenizer(VOCABULARY, True, strip), OPTIONS)
        assert counts.stripped_marks == marks


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ({}, []),
        ({"dropped_characters": 3, "stripped_marks": 3, "unknown_characters": 3, "unknown_tokens": 1}, []),
        ({"dropped_characters": 4}, ["are dropped"]),
        ({"stripped_marks": 4}, ["--strip-accents False"]),
        ({"dropped_documents": 1}, ["documents"]),
        ({"unknown_tokens": 2, "unused_tokens": 2}, ["[UNK]", "truncated"]),
        # A single unknown word can be a large part of the text.
        ({"unknown_tokens": 1, "unknown_characters": 4}, ["[UNK]"]),
    ],
)
def test_more_than_a_few_percent_are_warned_of(lost: dict[str, int], words: list[str]) -> None:
    counts = TextCounts(characters=100, documents=10, tokens=50, **lost)
    losses = list(counts.losses())
    assert len(losses) == len(words)
    assert all(word in loss for word, loss in zip(words, losses, strict=True))
    counts.require_enough(Path("text"))
    assert list(TextCounts().losses()) == []
    assert [_percent(share) for share in (0, 0.0009, 0.001, 0.5)] == ["0.0 %", "less than 0.1 %", "0.1 %", "50.0 %"]


def write_text(path: Path, words: str, count: int = 30) -> Path:
    letters = "abcdefgh"
    documents = (
        f"{words} {letters[number % 8]}\n{letters[number // 8]} {letters[number % 3]}\n" for number in range(count)
    )
    path.write_text("\n".join(documents))
    return path


def test_losses_are_reported_by_every_command(run: Run, tmp_path: Path) -> None:
    vocab, text = tmp_path / "vocab.txt", write_text(tmp_path / "text.txt", "a b c x")
    vocab.write_bytes(VOCABULARY.content)
    flags = ["--max-seq-length", "16", "--max-predictions-per-seq", "2"]
    printed = run("prepare", "--text", text, "--vocab", vocab, "--out", tmp_path / "prepared", *flags)
    assert "14.3 % of the tokens, with 8.3 % of the characters, are [UNK]" in printed
    assert "warning: " in printed
    for place in (tmp_path / "own", tmp_path / "own2"):
        printed = run("from-text", "--text", text, "--vocab", vocab, "--out", place, "--max-seq-length", "16")
        assert "14.3 % of the tokens, with 8.3 % of the characters, are [UNK]" in printed
    dataset = open_dataset(tmp_path / "own" / "train")
    assert dataset.info.text.unknown_tokens * 7 == dataset.info.text.tokens
    # Other forms of the data set keep the counts, however many shards they have.
    convert(dataset, tmp_path / "packed", "packed")
    shuffle(dataset, tmp_path / "shuffled", shards=3, seed=1)
    for folder in (tmp_path / "own" / "train", tmp_path / "packed", tmp_path / "shuffled"):
        printed = run("verify", folder)
        assert open_dataset(folder).info.text == dataset.info.text
        assert "14.3 % of the tokens, with 8.3 % of the characters, are [UNK]" in printed
        assert "warning: 14.3 % of the tokens" in printed


def test_text_that_is_mostly_lost_is_refused_unless_that_is_accepted(run: Run, tmp_path: Path) -> None:
    vocab, text = tmp_path / "vocab.txt", write_text(tmp_path / "text.txt", "x y x y x y x y x y")
    vocab.write_bytes(VOCABULARY.content)
    for command in ("prepare", "from-text"):
        arguments = [command, "--text", text, "--vocab", vocab, "--out", tmp_path / command]
        assert "--accept-losses" in run(*arguments, fails=True)
        assert not (tmp_path / command).exists()
        assert "[UNK]" in run(*arguments, "--accept-losses")


def test_shards_of_a_preparation_add_up(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(VOCABULARY.content)
    texts = tuple(write_text(tmp_path / f"{count}.txt", "a x", count) for count in (8, 16))
    dataset = prepare(Job(texts, tmp_path / "vocab.txt", OPTIONS), tmp_path / "out")
    assert dataset.info.text == TextCounts(
        characters=24 * 8, documents=24, tokens=24 * 5, unknown_tokens=24, unknown_characters=24
    )
    again = prepare(Job(texts, tmp_path / "vocab.txt", OPTIONS), tmp_path / "out")  # keeps the existing shards
    assert again.info == dataset.info


def test_a_cased_vocabulary_with_lower_case_is_warned_of_and_recorded(run: Run, tmp_path: Path) -> None:
    vocab, text = tmp_path / "vocab.txt", write_text(tmp_path / "text.txt", "a B c")
    vocab.write_bytes(VOCABULARY.content + b"A\nB\nC\nAbc\n")
    arguments = ["prepare", "--text", text, "--vocab", vocab, "--max-seq-length", "16"]
    assert "is for capital letters kept" in run(*arguments, "--out", tmp_path / "lower")
    assert "warning: the normalization of the text does not fit the vocabulary" in run("verify", tmp_path / "lower")
    for options in ({}, {"--strip-accents": "False"}):
        out = tmp_path / f"cased{len(options)}"
        flags = [word for option in (options | {"--do-lower-case": "False"}).items() for word in option]
        assert "warning" not in run(*arguments, *flags, "--out", out)
        printed = run("verify", out)
        assert "capital letters kept, accents kept" in printed
        assert "warning" not in printed


def test_documents_of_one_sentence_are_found_by_their_pairs(run: Run, tmp_path: Path) -> None:
    text, vocab = tmp_path / "text.txt", tmp_path / "vocab.txt"
    vocab.write_bytes(VOCABULARY.content)
    for sentences, found in ((1, "100 % random; most documents have a single sentence"), (2, "% random\n")):
        words = (f"a b {letter} {other}" for letter in "abcdefgh" for other in "abcd")
        text.write_text("\n\n".join("\n".join([line] * sentences) for line in words))
        out = tmp_path / f"{sentences}"
        run("prepare", "--text", text, "--vocab", vocab, "--out", out, "--max-seq-length", "32")
        assert found in run("verify", out)


def test_long_lines_without_spaces_lose_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    ideographs = [chr(0x4E00 + number) for number in range(40)]
    paragraphs = ["".join(rng.choice(ideographs, 400)) for _ in range(30)]
    text, vocab = tmp_path / "text.txt", tmp_path / "vocab.txt"
    text.write_text("\n\n".join(paragraphs), encoding="utf-8")
    vocab.write_text("\n".join([*SPECIAL, *ideographs]), encoding="utf-8")
    write_own_text((text,), OwnText(vocab=vocab, max_seq_length=64), tmp_path / "out")
    dataset = open_dataset(tmp_path / "out" / "train")
    assert dataset.info.text.unused_tokens < 0.01 * dataset.info.text.tokens
    labels = dataset.take(np.arange(len(dataset))).next_sentence_labels
    assert 0.3 < labels.mean() < 0.8  # a document of one sentence would have random next sentences only
