"""The tokenizer, compared with a plain-Python definition on unusual Unicode, and the vocabularies."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.data_stages import reference_prepare
from dataloading.options import Normalization
from dataloading.text import tokenization
from dataloading.text.tokenization import Tokenizer, split_words
from dataloading.text.vocabulary import SPECIAL_TOKENS, Vocabulary

LETTERS = "abcdefghijklmnopqrstuvwxyzABIS0123\u00df\u03c3\u03c2\u0142\u00e9\u00f1\u6771\u4eac\u1112"
VOCABULARY = Vocabulary(
    (*SPECIAL_TOKENS, *LETTERS, *(f"##{letter}" for letter in LETTERS), *"[]!.,-_$", "the", "ab", "##abc", "mask")
)
CONTROLS_AND_BLANKS = "\0\t\n\r\v\f\x1c\x7f\x85\xa0\xad\u1680\u200b\u2028\u2029\u202f\u3000\ufeff\ufffd\ue000\u0378"
CASES_AND_MARKS = (
    "\u0130\u0131\u00df\u017f\u03a3\u03c3\u03c2\u00c5\ufb01\u00bd\u00b2\u0301\u0307\u0345\u302e\u302f\U0001d165"
)
SCRIPTS = "\u6771\u8c48\uf900\U00020000\u30bf\u3099\ud55c\u0e33\u0915\u094d$`\u00ab\u3002\u2014"
AWKWARD = CONTROLS_AND_BLANKS + CASES_AND_MARKS + SCRIPTS
lines = st.text(st.sampled_from(AWKWARD + LETTERS + "[]!. ") | st.characters(exclude_categories=["Cs"]), max_size=40)


def encode(tokenizer: Tokenizer, line: str) -> list[str]:
    ids, offsets = tokenizer.encode_lines([line])
    assert offsets.tolist() == [0, len(ids)]
    return [tokenizer.vocabulary.tokens[index] for index in ids]


@given(st.lists(lines, max_size=5), st.booleans())
def test_ids_of_any_text_equal_the_ids_of_a_plain_python_definition(texts: list[str], do_lower_case: bool) -> None:
    tokenizer, vocab = Tokenizer(VOCABULARY, Normalization(do_lower_case, do_lower_case)), VOCABULARY.ids
    ids, offsets = tokenizer.encode_lines(texts)
    assert ids.dtype == np.uint16
    expected = [[vocab[token] for token in reference_prepare.tokenize(text, vocab, do_lower_case)] for text in texts]
    assert [ids[start:stop].tolist() for start, stop in pairwise(offsets)] == expected


@pytest.mark.parametrize("do_lower_case", [True, False])
def test_any_character_of_the_basic_plane_is_split_as_in_the_definition(do_lower_case: bool) -> None:
    class AnyWord(dict):
        def __contains__(self, word: object) -> bool:
            return True

    alike = ((0x3500, 0x4D00), (0x4F00, 0x9F00), (0xAD00, 0xD600), (0xD900, 0xDB00), (0xE100, 0xF800))
    for code_point in set(range(0x10000)).difference(*(range(*each) for each in alike)):
        line = f"A{chr(code_point)}b"
        words = split_words(line, Normalization(do_lower_case, do_lower_case))
        assert words == reference_prepare.tokenize(line, AnyWord(), do_lower_case), hex(code_point)


def test_words_of_up_to_200_characters_are_split_greedily_and_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(VOCABULARY, Normalization())
    assert encode(tokenizer, "abab the thea ab%") == ["ab", "##a", "##b", "the", "the", "##a", "ab", "[UNK]"]
    assert encode(tokenizer, "é" * 200) == ["e", *199 * ["##e"]]
    assert encode(tokenizer, "é" * 201) == ["[UNK]"]
    assert [tokenizer.count_unknown(line) for line in ("é" * 201, "ab % \u4e0b% the", "")] == [201, 3, 0]
    assert ["e" * size in tokenizer._word_ids for size in (200, 201)] == [True, False]  # longer words are not cached
    tokenizer._word_ids.clear()
    monkeypatch.setattr(tokenization, "_CACHED_WORDS", 2)
    for line, kept in (("ab the", ["ab", "the"]), ("ab", ["ab", "the"]), ("a", ["a"])):
        encode(tokenizer, line)
        assert list(tokenizer._word_ids) == kept
