"""A WordPiece vocabulary learned from text."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

from dataloading.text.tokenization import SPECIAL_TOKENS

_FREQUENT = 20
"""Fewest occurrences of a character of the alphabet."""


def learn_vocabulary(lines: Sequence[str], size: int, *, lower: bool = True, exactly: bool = True) -> list[str]:
    """Return ``size`` tokens in id order: special tokens, every character both ways, then the learned pieces by rank.

    ``lower`` removes capital letters and accents from the text. With ``exactly``, fewer tokens are an error. The
    alphabet is given as special tokens in sorted order, because the trainer numbers an alphabet differently in every
    run, and merges depend on the numbers.
    """
    normalizer = BertNormalizer(lowercase=lower)
    text = [normalizer.normalize_str(line) for line in lines]
    alphabet = sorted(_frequent_characters(text))
    # Each character also as a continuation, so that no word of known characters is [UNK].
    fixed = [*SPECIAL_TOKENS, *alphabet, *(f"##{character}" for character in alphabet)]
    if size <= len(fixed):
        raise ValueError(f"a vocabulary of {size} has no room for more than its {len(fixed)} characters: ask for more")
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = BertPreTokenizer()
    # limit_alphabet: the alphabet is among the special tokens.
    trainer = WordPieceTrainer(vocab_size=size, special_tokens=fixed, limit_alphabet=0, show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    ids = tokenizer.get_vocab()
    if exactly and len(ids) < size:
        raise ValueError(f"the text gives a vocabulary of {len(ids)}, not {size}: bring more text or ask for less")
    return sorted(ids, key=ids.__getitem__)


def _frequent_characters(lines: Iterable[str]) -> list[str]:
    counts = Counter(chain.from_iterable(lines))
    return [
        character
        for character, count in counts.items()
        if count >= _FREQUENT and not character.isspace() and unicodedata.category(character) != "Cc"
    ]
