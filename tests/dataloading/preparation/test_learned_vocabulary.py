"""Learned vocabularies: they contain the characters of the text, and are equal in every process."""

from itertools import product
from pathlib import Path

import pytest

from dataloading.options import Normalization
from dataloading.preparation.learned_vocabulary import learn_vocabulary
from dataloading.text.tokenization import Tokenizer
from dataloading.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from tests.programs import python

ENGLISH = ["The loader reads the sample, and the reader loads it again.", "Loading and reading are both work."] * 30
IDEOGRAPHS = [chr(code_point) for code_point in range(0x4E00, 0x4E00 + 600)]
CHINESE = [" ".join(IDEOGRAPHS[: 600 // share]) for share in range(1, 30)]
"""Lines of ideographs. The first 20 ideographs are in all lines, and half of all ideographs are in the first line only."""
HANGUL = [chr(0xAC00 + first) + chr(0xAC00 + (7 * first) % 500) for first in range(500)]
TEXTS = {
    "English": ENGLISH,
    "Chinese": CHINESE,
    "Korean": HANGUL,
    "mixed": ENGLISH + CHINESE + HANGUL + ["q\u0301 \U0001f600"],
}


def learn(lines: list[str], size: int, *, lower: bool = True) -> list[str]:
    return learn_vocabulary(lines, size, Normalization(lower, lower))


def unknown_share(tokens: list[str], lines: list[str], *, lower: bool = True) -> float:
    vocabulary = Vocabulary.of_tokens(tokens, Path("vocab.txt"))
    ids, _ = Tokenizer(vocabulary, Normalization(lower, lower)).encode_lines(lines)
    return float((ids == tokens.index("[UNK]")).mean())


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("lower", [True, False])
def test_no_word_is_unknown_with_a_large_vocabulary(name: str, lower: bool) -> None:
    tokens = learn(TEXTS[name], 5000, lower=lower)
    assert tokens[:5] == list(SPECIAL_TOKENS)
    assert len(set(tokens)) == len(tokens) <= 5000
    assert unknown_share(tokens, TEXTS[name], lower=lower) == 0
    assert ("the" in tokens) == (TEXTS[name][0] == ENGLISH[0])


def test_rare_characters_take_at_most_half_of_a_small_vocabulary() -> None:
    for size in (6, 40, 60, 400):
        assert set(learn(CHINESE, size)[5:]) == set(IDEOGRAPHS[: size - 5])
        assert len(learn(TEXTS["mixed"], size)) == size
    tokens = learn(ENGLISH, 60)
    assert unknown_share(tokens, ENGLISH) == 0
    assert {"the", "w"} < set(tokens)
    assert "##w" not in tokens  # "w" begins words only
    words = " ".join(map("".join, product("bdfgk", "aeiou", "lmnrst")))
    lines = [*[words] * 50, " ".join(IDEOGRAPHS)]
    tokens = learn(lines, 100)
    assert sum(len(token.removeprefix("##")) == 1 for token in tokens) == 50
    assert len(tokens) == 100
    assert unknown_share(learn(lines, 1000), lines) == 0


def test_too_long_words_are_not_learned_and_too_small_sizes_are_rejected() -> None:
    assert learn(["\u0416" * 200], 500)[5:7] == ["##\u0436", "\u0436"]
    assert not any("\u0436" in token for token in learn([*ENGLISH, "\u0416" * 201], 500))
    assert learn(["", " \t"], 100) == list(SPECIAL_TOKENS)
    assert learn(["a"], 6) == [*SPECIAL_TOKENS, "a"]
    for size in (0, 5):
        with pytest.raises(ValueError, match=f"--vocab-size is {size}, .* 5 special tokens; expected at least 6"):
            learn(ENGLISH, size)


@pytest.mark.slow
def test_other_processes_learn_equal_vocabularies() -> None:
    code = """
from tests.dataloading.preparation.test_learned_vocabulary import TEXTS, learn
print([learn(TEXTS[name], size) for name in TEXTS for size in (60, 300, 900)])
"""
    outputs = [python("-c", code, PYTHONHASHSEED=seed, RAYON_NUM_THREADS=seed).stdout for seed in (1, 2)]
    assert outputs[0] == outputs[1] == f"{[learn(TEXTS[name], size) for name in TEXTS for size in (60, 300, 900)]}\n"
