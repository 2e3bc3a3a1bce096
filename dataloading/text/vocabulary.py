"""A WordPiece vocabulary learned from text, for data that bring none of their own."""

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
"""A character that occurs less often is left out of the alphabet."""


def learn_vocabulary(lines: Sequence[str], size: int, *, lower: bool = True, exactly: bool = True) -> list[str]:
    """``size`` tokens in id order: the special ones, every character both ways, then the learned pieces by rank.

    ``lower``: of text without capital letters and accents. ``exactly``: a text that gives fewer tokens is an error.

    The trainer numbers its alphabet in a different order every run, and merges depend on the numbers; giving the alphabet as
    special tokens in sorted order makes two runs agree.
    """
    normalizer = BertNormalizer(lowercase=lower)
    # Here and not by the trainer, as the alphabet is counted in the same text.
    text = [normalizer.normalize_str(line) for line in lines]
    alphabet = sorted(_frequent_characters(text))
    # Each character also as a continuation, so that no word of known ones is [UNK].
    fixed = [*SPECIAL_TOKENS, *alphabet, *(f"##{character}" for character in alphabet)]
    if size <= len(fixed):
        raise ValueError(f"a vocabulary of {size} has no room for more than its {len(fixed)} characters: ask for more")
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = BertPreTokenizer()
    # The alphabet stands among the special tokens.
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
