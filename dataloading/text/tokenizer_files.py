"""Read a Hugging Face tokenizer's files, which state its vocabulary and how it normalizes text."""

from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from console.documents import read_typed
from console.files import shown

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
"""Files that state the normalization. tokenizer.json also holds the vocabulary."""

MAX_TOKENS = 1 << 16
"""Largest number of tokens. Ids are stored in 16 bits."""

_MAX_BYTES = 64 << 20
_REMEDY = "expected the files of a Hugging Face BERT tokenizer"
_OTHERWISE = "To split text as BERT does anyway, copy vocab.txt to another folder and name the copy"

_BERT_TOKENIZERS = (
    "BertTokenizer",
    "DistilBertTokenizer",
    "ElectraTokenizer",
    "PreTrainedTokenizer",
    "TokenizersBackend",
)
"""Classes of transformers that split text as BERT's tokenizer does. Each may have the suffix Fast."""


class _Model(msgspec.Struct):
    type: str
    vocab: dict[str, int]
    continuing_subword_prefix: str = "##"


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Normalizer(
    msgspec.Struct, rename={"do_lower_case": "lowercase", "tokenize_chinese_chars": "handle_chinese_chars"}
):
    type: str
    clean_text: bool | None = None
    do_lower_case: bool | None = None
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool | None = None


class _PreTokenizer(msgspec.Struct):
    type: str


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []
    normalizer: _Normalizer | UnsetType | None = UNSET
    pre_tokenizer: _PreTokenizer | None = None


class _Configuration(msgspec.Struct):
    tokenizer_class: str | None = None
    do_basic_tokenize: bool | None = None
    do_lower_case: bool | None = None
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool | None = None


def read_tokens(path: Path) -> tuple[list[str], list[str]]:
    """Return the tokens of a ``tokenizer.json`` in id order, and the added tokens with ids after them.

    Ids without a token get an empty token. Raises ``ValueError`` if the tokenizer is not WordPiece or an id is invalid.
    """
    tokenizer = read_typed(path, _Tokenizer, _MAX_BYTES, _REMEDY)
    model = tokenizer.model
    if (model.type, model.continuing_subword_prefix) != ("WordPiece", "##"):
        found = f"{model.type} with pieces like {model.continuing_subword_prefix}ing"
        raise ValueError(f"{path}: {shown(found)}; expected WordPiece with pieces like ##ing, as in BERT's tokenizer")
    added = {token.content: token.id for token in tokenizer.added_tokens if token.content not in model.vocab}
    rows = _ordered(model.vocab, 0, path)
    return rows, _ordered(added, len(rows), path)


def _ordered(ids: Mapping[str, int], first: int, path: Path) -> list[str]:
    """Return the tokens in the order of their ids, which start at ``first``, without blanks around the tokens."""
    if wrong := [f"{token!r} has the id {index}" for token, index in ids.items() if not first <= index < MAX_TOKENS]:
        raise ValueError(f"{path}: {shown(wrong[0])}, outside the range {first} to {MAX_TOKENS - 1:,}; {_REMEDY}")
    if len(set(ids.values())) < len(ids):
        raise ValueError(f"{path}: two tokens have the same id; {_REMEDY}")
    rows = [""] * (1 + max(ids.values(), default=first - 1) - first)
    for token, index in ids.items():
        rows[index - first] = token.strip()  # drop blanks, as for vocab.txt
    return rows


def stated_normalization(folder: Path, decided: Collection[str] = ()) -> tuple[dict[str, bool], str]:
    """Return the fields of ``Normalization`` that a tokenizer's files in a folder state, and the names of these files.

    Raises ``ValueError`` if the files describe a tokenizer that splits text in another way than BERT's, or if they disagree
    about a field. They may disagree about the fields in ``decided``, because options set these.
    """
    stated: dict[str, bool] = {}
    names = [name for name in (TOKENIZER, TOKENIZER_CONFIG) if (folder / name).is_file()]
    for name in names:
        path = folder / name
        # If there is a tokenizer.json, it states how text is split, and the class in the configuration is ignored.
        found = _normalizer(path) if name == TOKENIZER else _configuration(path, is_described=TOKENIZER in names)
        fields = {} if found is None else msgspec.structs.asdict(found)
        for field in ("do_lower_case", "strip_accents", "tokenize_chinese_chars"):
            if (value := fields.get(field)) is None:
                continue
            if stated.setdefault(field, value) != value and field not in decided:
                option = field.replace("_", "-")
                raise ValueError(f"{folder}: {' and '.join(names)} disagree about {field}; set --{option}")
    return stated, " and ".join(names) if stated else ""


def _normalizer(path: Path) -> _Normalizer | None:
    tokenizer = read_typed(path, _Tokenizer, _MAX_BYTES, _REMEDY)
    normalizer, words = tokenizer.normalizer, tokenizer.pre_tokenizer
    if isinstance(normalizer, UnsetType):
        return None
    kinds = [part.type if part else "nothing" for part in (normalizer, words)]
    if normalizer is None or kinds != ["BertNormalizer", "BertPreTokenizer"] or normalizer.clean_text is False:
        raise ValueError(
            f"{path}: the normalizer and the pre-tokenizer are {shown(' and '.join(kinds))}; expected BertNormalizer with "
            f"clean_text on, and BertPreTokenizer. {_OTHERWISE}"
        )
    return normalizer


def _configuration(path: Path, is_described: bool) -> _Configuration:
    found = read_typed(path, _Configuration, _MAX_BYTES, _REMEDY)
    kind = found.tokenizer_class or "BertTokenizer"
    is_other = kind.removesuffix("Fast") not in _BERT_TOKENIZERS or found.do_basic_tokenize is False
    if is_other and not is_described:
        basic = ", with do_basic_tokenize false" if found.do_basic_tokenize is False else ""
        raise ValueError(f"{path}: the tokenizer is a {shown(kind)}{basic}; expected a BertTokenizer. {_OTHERWISE}")
    return found
