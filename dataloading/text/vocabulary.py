"""Learning a WordPiece vocabulary from text."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import chain

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

from dataloading.text.tokenization import SPECIAL_TOKENS

_FREQUENT = 20
"""Minimum number of occurrences for a character to be part of the alphabet."""


def learn_vocabulary(lines: Sequence[str], size: int, *, lower: bool = True) -> list[str]:
    """Learn at most ``size`` tokens; return special tokens, characters and learned pieces in id order.

    ``lower`` lower-cases the text and strips accents. The alphabet is passed to the trainer as sorted special tokens: the
    trainer would number the alphabet differently in each run, and the learned pieces depend on these numbers.
    """
    normalizer = BertNormalizer(lowercase=lower)
    text = [normalizer.normalize_str(line) for line in lines]
    counts = Counter(chain.from_iterable(text))
    alphabet = sorted(
        character
        for character, count in counts.items()
        if count >= _FREQUENT and not character.isspace() and unicodedata.category(character) != "Cc"
    )
    # Include each character as a continuation as well, so that a word of known characters is never [UNK].
    fixed = [*SPECIAL_TOKENS, *alphabet, *(f"##{character}" for character in alphabet)]
    if size <= len(fixed):
        raise ValueError(f"a vocabulary of {size} has no room for more than its {len(fixed)} characters: ask for more")
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = BertPreTokenizer()
    # limit_alphabet is 0 because the special tokens already include the alphabet.
    trainer = WordPieceTrainer(vocab_size=size, special_tokens=fixed, limit_alphabet=0, show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)
