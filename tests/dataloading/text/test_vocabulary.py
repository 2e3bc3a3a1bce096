"""Vocabularies and the normalization of their text: what files state is read, and ``transformers`` gives equal ids."""

import hashlib
import itertools
import json
import re
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from dataloading.options import AS_STATED, Normalization, NormalizationOptions
from dataloading.text.tokenization import Tokenizer
from dataloading.text.vocabulary import Vocabulary, find_normalization

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [*"abcdehijklmnorstuvwy.[]1", *(f"##{letter}" for letter in "abcdehijklmnorstuvwy")]
PLAIN = [*SPECIAL, *LETTERS, "house", "river", "seven"]
CASED = [*PLAIN, *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", "House", "River"]
ACCENTED = [*PLAIN, *"äöüß", "##ä", "##ö", "##ü", "schön", "für"]
IDEOGRAPHS = [*PLAIN, *"東京大学日本", "東京", "日本", "##京大"]
VOCABULARIES = {
    "plain": PLAIN,
    "repeated": [*SPECIAL, "river", *LETTERS, "d", *PLAIN[29:]],
    "blank": [*SPECIAL, "", *LETTERS, "", "", *PLAIN[29:]],
    "marked": [*PLAIN, "[E1]", "[/E1]", "COVID"],
    "cased": CASED,
    "accented": ACCENTED,
    "ideographs": IDEOGRAPHS,
}
TEXTS = (
    "The river, Seven RIVERS and [E1] a house.",
    "COVID für schön SCHÖN e\u0301t\u00e9",
    "東京大学 in 日本river",
    "a\u200bb\u00a0c \ufffd\u0130\u03a3",
)


def write(folder: Path, tokens: list[str], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", VOCABULARIES)
def test_token_ids_equal_the_ids_of_transformers(tmp_path: Path, name: str) -> None:
    import transformers

    library: Any = transformers
    for lower, strip, chinese in itertools.product([True, False], [None, True, False], [None, True, False]):
        stated = {"do_lower_case": lower, "strip_accents": strip, "tokenize_chinese_chars": chinese}
        config = {field: value for field, value in stated.items() if value is not None}
        folder = write(tmp_path / "model", VOCABULARIES[name], config)
        theirs = library.BertTokenizer.from_pretrained(folder, **config)
        vocabulary = Vocabulary.read(folder)
        found = find_normalization(vocabulary, folder, AS_STATED)
        ours = Tokenizer(vocabulary, found.normalization)
        for text in TEXTS:
            expected = theirs(text, add_special_tokens=False)["input_ids"]
            assert ours.encode_lines([text])[0].tolist() == expected, (stated, text)
        theirs.save_pretrained(tmp_path / "saved")  # saves only a tokenizer.json, without rows for repeated tokens
        saved = Vocabulary.read(tmp_path / "saved")
        assert (saved.ids, saved.sha256) == (vocabulary.ids, vocabulary.sha256)
        assert find_normalization(saved, tmp_path / "saved", AS_STATED).normalization == found.normalization


def test_line_endings_and_byte_order_marks_do_not_change_a_vocabulary_or_its_digest(tmp_path: Path) -> None:
    path, lines, vocabulary = tmp_path / "vocab.txt", "\n".join(PLAIN), Vocabulary.of_tokens(PLAIN, tmp_path)
    assert vocabulary.md5 == hashlib.md5(f"{lines}\n".encode()).hexdigest()
    for content in (lines, lines + "\n", lines + "\n\n", lines.replace("\n", "\r\n"), "\ufeff" + lines):
        path.write_bytes(content.encode())
        read = Vocabulary.from_file(path)
        assert (read.ids, read.md5, read.sha256) == (vocabulary.ids, vocabulary.md5, vocabulary.sha256)
    for tokens in VOCABULARIES.values():
        path.write_bytes(Vocabulary.of_tokens(tokens, tmp_path).content)
        assert Vocabulary.from_file(path) == Vocabulary.of_tokens(tokens, tmp_path)
    repeated, blank = ([*SPECIAL, *middle, "river", "seven"] for middle in (["river"], [""]))
    assert Vocabulary(tuple(repeated)).sha256 == Vocabulary(tuple(blank)).sha256
    assert Vocabulary(tuple(repeated)).sha256 != Vocabulary((*SPECIAL, "river", "seven")).sha256


def test_an_embedding_table_may_have_padding_rows(tmp_path: Path) -> None:
    """A table may be padded to a multiple of 8, 16 and so on, up to 1024 rows."""
    for rows, least in ((12, 12), (24, 17), (29, 29), (30, 30), (32, 1), (64, 1), (1536, 1025), (4096, 3073)):
        for count, fits in ((least - 1, False), (least, True), (rows, True), (rows + 1, False)):
            vocabulary = Vocabulary(tuple(map(str, range(count))))
            if fits:
                vocabulary.require_table(rows, tmp_path)
                Vocabulary((*vocabulary.tokens, "", "")).require_table(
                    rows, tmp_path
                )  # trailing blank lines do not count
            else:
                with pytest.raises(ValueError, match=f"has {count:,} tokens, but .* has {rows:,} rows"):
                    vocabulary.require_table(rows, tmp_path)


def test_normalizations_recorded_by_this_and_earlier_versions_are_read() -> None:
    for recorded, expected in (
        *(({}, None), ({"do_lower_case": 1, "strip_accents": True}, None)),
        *(({"do_lower_case": True}, (True, True, True)), ({"do_lower_case": False}, (False, False, True))),
        ({"do_lower_case": True, "strip_accents": False}, (True, False, True)),
        ({"do_lower_case": False, "strip_accents": True}, (False, True, True)),
        ({"do_lower_case": True, "tokenize_chinese_chars": False}, (True, True, False)),
    ):
        found = Normalization.recorded(recorded)
        assert (None if found is None else astuple(found)) == expected
        if expected is not None:
            assert Normalization.of(**recorded) == found


def test_the_normalization_is_guessed_from_a_vocabulary_without_tokenizer_files(tmp_path: Path) -> None:
    expected = dict.fromkeys(VOCABULARIES, Normalization())
    expected["cased"] = Normalization(do_lower_case=False, strip_accents=False)
    expected["accented"] = Normalization(strip_accents=False)
    expected["ideographs"] = Normalization(tokenize_chinese_chars=False)
    for name, tokens in VOCABULARIES.items():
        folder = write(tmp_path / name, tokens)
        found = find_normalization(Vocabulary.read(folder), folder / "vocab.txt", AS_STATED)
        assert found.normalization == expected[name], name
        assert not found.is_stated
        assert found.source == "guessed from the vocabulary"


def test_a_normalization_does_not_fit_if_a_twentieth_of_the_words_is_useless() -> None:
    for others, decides in ((19, True), (20, False)):
        words = [f"w{number}" for number in range(others)]
        cased, accented = (Vocabulary((*SPECIAL, "[E1]", "12", each, *words)) for each in ("Word", "für"))
        assert [each.fits(Normalization(strip_accents=False)) for each in (cased, accented)] == [not decides, True]
        assert [each.fits(Normalization()) for each in (cased, accented)] == [not decides] * 2
        together = Vocabulary((*SPECIAL, *(chr(0x4E00 + number) for number in range(others)), "##東京"))
        assert together.guess_normalization().tokenize_chinese_chars is not decides
    assert Vocabulary(tuple(SPECIAL)).fits(Normalization()), "no word is useless"


def test_options_take_precedence_over_files_and_files_over_a_guess(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", CASED, {"do_lower_case": True, "strip_accents": False})
    vocabulary = Vocabulary.read(folder)
    stated = find_normalization(vocabulary, folder, AS_STATED)
    assert stated.normalization == Normalization(strip_accents=False)
    assert stated.source == f"stated by tokenizer_config.json in {folder}"
    assert stated.is_stated
    given = find_normalization(vocabulary, folder, NormalizationOptions(do_lower_case=False))
    assert given.normalization == Normalization(do_lower_case=False, strip_accents=False)
    assert given.source == f"set by do_lower_case, {stated.source}"
    # If no file states strip_accents, accents are stripped if text is lower-cased.
    write(folder, ACCENTED, {"do_lower_case": True})
    assert find_normalization(Vocabulary.read(folder), folder, AS_STATED).normalization == Normalization()


def tokenizer(**changes: Any) -> dict[str, Any]:
    ids = {token: index for index, token in enumerate(PLAIN)}
    return {
        "model": {"type": "WordPiece", "vocab": ids},
        "normalizer": {
            "type": "BertNormalizer",
            "lowercase": False,
            "strip_accents": None,
            "handle_chinese_chars": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
    } | changes


def wordpiece(ids: dict[str, int], **changes: str) -> dict[str, Any]:
    return tokenizer(model={"type": "WordPiece", "vocab": ids} | changes)


@pytest.mark.parametrize(
    ("described", "config", "message"),
    [
        (tokenizer(normalizer={"type": "Lowercase"}), {}, "expected BertNormalizer"),
        (tokenizer(normalizer=None), {}, "expected BertNormalizer"),
        (tokenizer(normalizer={"type": "x" * 3000}), {}, "expected BertNormalizer"),
        (tokenizer(pre_tokenizer={"type": "Whitespace"}), {}, "BertPreTokenizer"),
        (tokenizer(normalizer={"type": "BertNormalizer", "lowercase": "no"}), {}, "got `str`"),
        (tokenizer(), {"do_lower_case": True}, "disagree about do_lower_case; set --do-lower-case"),
        (None, {"tokenizer_class": "BertJapaneseTokenizer"}, "expected a BertTokenizer"),
        (None, {"do_basic_tokenize": False}, "do_basic_tokenize false"),
        (None, {"do_lower_case": 1}, "got `int`"),
        (wordpiece({"a": 0}, type="BPE"), {}, "expected WordPiece"),
        (wordpiece({"a": 0}, continuing_subword_prefix="@@"), {}, "expected WordPiece"),
        (wordpiece({"a": 1 << 16}), {}, "has the id 65536, outside the range 0 to 65,535; expected the files"),
        (wordpiece({"a": -1}), {}, "has the id -1"),
        (wordpiece({"a": True}), {}, "got `bool`"),
        (wordpiece({"a": 3, "b": 3}), {}, "two tokens have the same id"),
        (wordpiece({token: place for place, token in enumerate(PLAIN[:-1])} | {"seven": 999}), {}, "differently"),
    ],
)
def test_unsupported_or_contradictory_tokenizer_files_are_rejected(
    tmp_path: Path, described: dict[str, Any] | None, config: dict[str, Any], message: str
) -> None:
    folder = write(tmp_path / "model", PLAIN, config)
    if described is not None:
        (folder / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=message) as caught:
        find_normalization(Vocabulary.read(folder), folder, AS_STATED)
    assert len(str(caught.value).replace(str(tmp_path), "")) < 500


def test_a_tokenizer_json_can_be_named_as_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(wordpiece({"a": (1 << 16) - 1})))
    with pytest.raises(ValueError, match="65,536 tokens without"):
        Vocabulary.read(path)
    path.write_text(json.dumps(tokenizer()))
    assert Vocabulary.read(path).tokens == tuple(PLAIN)
    assert not find_normalization(Vocabulary.read(path), path, AS_STATED).normalization.do_lower_case
    path.rename(path.with_name("other.json"))
    with pytest.raises(ValueError, match=r"holds neither vocab\.txt nor tokenizer\.json"):
        Vocabulary.read(tmp_path)


def test_added_tokens_and_tokens_of_odd_characters_keep_their_ids(tmp_path: Path) -> None:
    """Published vocabularies have Unicode's line separators and control characters as tokens."""
    odd = ["\u2028", "\x85", "\u3000", "\x1c", "\u2029a"]
    folder = write(tmp_path / "model", [*PLAIN, *odd, "last"])
    vocabulary = Vocabulary.read(folder)
    assert vocabulary.ids["last"] == len(PLAIN) + len(odd)
    ids = {token: index for index, token in enumerate([*PLAIN, *odd, "last"])}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(model={"type": "WordPiece", "vocab": ids})))
    assert Vocabulary.read(folder).sha256 == vocabulary.sha256
    write(folder, PLAIN)
    added = [{"id": 1, "content": "[UNK]"}, {"id": len(PLAIN) + 1, "content": " [E1]"}]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(added_tokens=added)))
    assert Vocabulary.read(folder).tokens == (*PLAIN, "", "[E1]")


def test_incomplete_undecodable_and_too_large_vocabularies_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    many = "\n".join([*SPECIAL, *map(str, range((1 << 16) - 5))]).encode()
    for content, message in (
        (b"", "0 tokens without [PAD], [UNK], [CLS], [SEP], [MASK]; a BERT"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n", "4 tokens without [MASK]; a BERT"),
        (b"[PAD]\nthe\xff\n", "line 2, byte 9: not UTF-8; convert"),
        (many + b"\nmore", "65,537 tokens; ids are stored in 16 bits, so at most 65,536 fit"),
        ("\n".join(["", *PLAIN, "a\rb"]).encode(), f"line {len(PLAIN) + 2} holds a carriage return; end"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
            Vocabulary.from_file(path)
    path.write_bytes(many)
    assert Vocabulary.from_file(path).size == 1 << 16
    with pytest.raises(ValueError, match=r"the token 'a\\nb' holds a line feed"):
        Vocabulary.of_tokens([*SPECIAL, "a\nb"], path)
