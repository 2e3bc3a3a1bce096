"""A learned vocabulary is the same every time and usable as it is."""

from pathlib import Path

import pytest

from dataloading.text.tokenization import Tokenizer
from dataloading.text.vocabulary import SPECIAL_TOKENS, learn_vocabulary

LINES = ["The loader reads the sample, and the reader loads it again.", "Loading and reading are both work."] * 30


def test_two_trainings_agree() -> None:
    assert learn_vocabulary(LINES, 70) == learn_vocabulary(LINES, 70)


def test_the_vocabulary_encodes_its_text_without_unknowns(tmp_path: Path) -> None:
    tokens = learn_vocabulary(LINES, 70)
    assert tokens[:5] == list(SPECIAL_TOKENS)
    assert len(tokens) == len(set(tokens)) == 70
    path = tmp_path / "vocab.txt"
    path.write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    tokenizer = Tokenizer.from_vocab(path)
    ids, _ = tokenizer.encode_lines(LINES)
    assert tokenizer.vocabulary.unk_id not in ids
    assert "the" in tokens


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="bring more text"):
        learn_vocabulary(LINES, 500)


def test_a_size_without_room_for_the_alphabet_is_refused() -> None:
    with pytest.raises(ValueError, match="no room"):
        learn_vocabulary(LINES, 20)
