"""Text that is lost on the way to samples is counted, recorded, reported, and refused if it is more than half."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dataloading.dataset.folder import open_dataset
from dataloading.dataset.rewrite import convert, shuffle
from dataloading.options import Normalization, PretrainingOptions
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


def test_lost_characters_documents_and_tokens_are_counted() -> None:
    documents = [["ab xyz\u200b", "cd"], ["\u200b\x01"], ["abc abc abc abc abc abc abc", "x"]]
    expected = TextCounts(
        **{"characters": 39, "dropped_characters": 3, "documents": 3, "dropped_documents": 1},
        **{"tokens": 2 + 1 + 2 + 21 + 1, "unknown_tokens": 2, "unknown_characters": 4},
    )
    # One sentence of 21 tokens does not fit into a sample of 16 tokens, but its pieces do.
    _, counts = samples_of(documents, Tokenizer(VOCABULARY, Normalization()), OPTIONS)
    assert counts == replace(expected, unused_tokens=counts.unused_tokens)
    assert 5 <= counts.unused_tokens < 21
    assert samples_of(documents, Tokenizer(VOCABULARY, Normalization()), OPTIONS, longest_sentence=6)[1] == expected
    for strip, marks in ((True, 4), (False, 0)):
        lines = [["\u00e9\u00e9 ab", "e\u0301a"], ["\u0e19\u0e49\u0e33 \u6771"]]
        tokenizer = Tokenizer(VOCABULARY, Normalization(strip_accents=strip))
        assert samples_of(lines, tokenizer, OPTIONS)[1].stripped_marks == marks


UNKNOWN = "of the characters, are [UNK]"
LOSSES: tuple[tuple[dict[str, int], list[str]], ...] = (
    ({}, []),
    ({"dropped_characters": 3, "stripped_marks": 3, "unknown_characters": 3, "unknown_tokens": 1}, []),
    ({"dropped_characters": 4}, ["4.0 % of the characters are dropped"]),
    ({"stripped_marks": 4}, ["4.0 % of the characters are accents or vowel signs and are stripped"]),
    ({"dropped_documents": 1}, ["10.0 % of the documents are dropped"]),
    (
        {"unknown_tokens": 2, "unused_tokens": 3},
        [f"4.0 % of the tokens, with 0.0 % {UNKNOWN}", "6.0 % of the tokens are truncated in all samples"],
    ),
    # A single unknown word can be a large part of the text.
    ({"unknown_tokens": 1, "unknown_characters": 4}, [f"2.0 % of the tokens, with 4.0 % {UNKNOWN}"]),
)


def test_losses_of_a_few_percent_are_described_and_more_than_half_are_rejected() -> None:
    for lost, expected in LOSSES:
        counts = TextCounts(characters=100, documents=10, tokens=50, **lost)
        assert [loss.partition("; ")[0] for loss in counts.losses()] == expected
        assert list(counts.losses("load it")) == [f"{description}; load it" for description in expected]
        counts.require_enough(Path("text"))
    assert str(TextCounts(*[1] * 9)).count("100.0 %") == 6, "of one character, one document and one token"
    half = {"characters": 100, "documents": 10, "tokens": 50, "unused_tokens": 25}
    TextCounts(**half).require_enough(Path("text"))
    more = "text: 52.0 % of the tokens are truncated in all samples; "
    for remedy, end in (
        ("", "longer samples (--max-seq-length), or set --accept-losses to go on"),
        ("load it", "load it"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(more)}.*{re.escape(end)}$"):
            TextCounts(**half | {"unused_tokens": 26}).require_enough(Path("text"), remedy)
    assert list(TextCounts().losses()) == []
    assert str(TextCounts()) == "0 characters, 0 documents, 0 tokens; nothing lost"
    assert [_percent(share) for share in (0, 0.0009, 0.001, 0.5)] == ["0.0 %", "less than 0.1 %", "0.1 %", "50.0 %"]


def write_text(path: Path, words: str, count: int = 30) -> Path:
    letters = "abcdefgh"
    documents = (
        f"{words} {letters[number % 8]}\n{letters[number // 8]} {letters[number % 3]}\n" for number in range(count)
    )
    path.write_text("\n".join(documents))
    return path


def test_losses_are_reported_by_verify_prepare_and_from_text(run: Run, tmp_path: Path) -> None:
    vocab, text = tmp_path / "vocab.txt", write_text(tmp_path / "text.txt", "a b c x")
    vocab.write_bytes(VOCABULARY.content)
    parts = [write_text(tmp_path / f"{count}.txt", "a b c x", count) for count in (8, 16)]
    found, own = f"14.3 % of the tokens, with 8.3 % {UNKNOWN}", tmp_path / "own" / "train"
    for command, texts, out, sets in (("prepare", parts, "prepared", 1), ("from-text", [text], "own", 2)):
        flags = ["--vocab", vocab, "--max-seq-length", "16", "--out", tmp_path / out]
        printed = run(command, "--text", *texts, *flags)
        assert printed.count(f"tokens; lost: {found}") == printed.count(f": {found}; the vocab") == sets
    assert open_dataset(tmp_path / "prepared").info.text == TextCounts(
        characters=24 * 12, documents=24, tokens=24 * 7, unknown_tokens=24, unknown_characters=24
    )
    # Converted and shuffled data sets keep the counts, whatever their number of shards.
    dataset = open_dataset(own)
    convert(dataset, tmp_path / "packed", "packed")
    shuffle(dataset, tmp_path / "shuffled", shards=3, seed=1)
    for folder in (own, tmp_path / "packed", tmp_path / "shuffled"):
        printed = run("verify", folder)
        assert open_dataset(folder).info.text == dataset.info.text
        assert f"tokens; lost: {found}" in printed
        assert f"warning: {found}" in printed


def test_mostly_lost_text_is_rejected_unless_losses_are_accepted(run: Run, tmp_path: Path) -> None:
    vocab, text = tmp_path / "vocab.txt", write_text(tmp_path / "text.txt", "x y x y x y x y x y")
    vocab.write_bytes(VOCABULARY.content)
    for command in ("prepare", "from-text"):
        arguments = [command, "--text", text, "--vocab", vocab, "--out", tmp_path / command]
        assert "--accept-losses" in run(*arguments, fails=True)
        assert not (tmp_path / command).exists()
        assert "[UNK]" in run(*arguments, "--accept-losses")


def test_lower_casing_for_a_cased_vocabulary_gives_warnings(run: Run, tmp_path: Path) -> None:
    vocab, text = tmp_path / "vocab.txt", write_text(tmp_path / "text.txt", "a B c")
    vocab.write_bytes(VOCABULARY.content + b"A\nB\nC\nAbc\n")
    arguments = ["prepare", "--text", text, "--vocab", vocab, "--max-seq-length", "16"]
    assert "is for text with capital letters kept" in run(*arguments, "--out", tmp_path / "lower")
    assert "warning: the normalization of the text does not fit the vocabulary" in run("verify", tmp_path / "lower")
    for options in ({}, {"--strip-accents": "False"}):
        out = tmp_path / f"cased{len(options)}"
        flags = [word for option in (options | {"--do-lower-case": "False"}).items() for word in option]
        assert "warning" not in run(*arguments, *flags, "--out", out)
        printed = run("verify", out)
        assert "capital letters kept, accents kept" in printed
        assert "warning" not in printed
