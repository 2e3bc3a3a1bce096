"""Learning of a WordPiece vocabulary from text."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import tokenizers
from tokenizers.models import WordPiece
from tokenizers.trainers import WordPieceTrainer

from dataloading.options import Normalization
from dataloading.text.tokenization import MAX_CHARACTERS_PER_WORD, split_words
from dataloading.text.vocabulary import SPECIAL_TOKENS

_FREQUENT = 1 / 20_000
"""A character that makes up at least this share of the text takes precedence over every longer piece."""


def learn_vocabulary(lines: Iterable[str], size: int, normalization: Normalization) -> list[str]:
    """Learn at most ``size`` tokens. Return the special tokens, characters and longer pieces in id order.

    The most frequent characters come first. They take up to half of the vocabulary, or more if more characters exceed the
    share ``_FREQUENT``, because a word with an unknown character becomes [UNK]. Longer pieces fill the rest. If the text
    has too few pieces, rarer characters follow. A character counts separately at the beginning of a word and, with "##"
    before it, inside a word. Raises ``ValueError`` if there is no room for any character.
    """
    room = size - len(SPECIAL_TOKENS)
    if room < 1:
        raise ValueError(
            f"--vocab-size is {size}, which leaves no room beside the {len(SPECIAL_TOKENS)} special tokens; expected at "
            f"least {len(SPECIAL_TOKENS) + 1}"
        )
    words = Counter(chain.from_iterable(split_words(line, normalization) for line in lines))
    words = Counter({word: count for word, count in words.items() if len(word) <= MAX_CHARACTERS_PER_WORD})
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for form in _forms(word):
            counts[form] += count
    forms = sorted(counts, key=lambda form: (-counts[form], form))
    enough = _FREQUENT * counts.total()
    kept = min(room, max(size // 2, sum(count >= enough for count in counts.values())))
    known = [*SPECIAL_TOKENS, *sorted(forms[:kept])]
    return [*known, *_longer_pieces(words, known, size), *forms[kept:]][:size]


def _forms(word: str) -> list[str]:
    return [word[0], *(f"##{character}" for character in word[1:])]


def _longer_pieces(words: Counter[str], known: Sequence[str], size: int) -> list[str]:
    """Learn pieces from words that have only ``known`` characters, until there are ``size`` tokens or no more pieces."""
    forms = set(known)
    learnable = Counter({word: count for word, count in words.items() if forms.issuperset(_forms(word))})
    # Add missing forms without "##", because the trainer skips a character if its form without "##" is no token.
    extra = sorted({form[2:] for form in known if form.startswith("##")} - forms)
    # Pass the characters as special tokens, with an empty alphabet. Otherwise the trainer would number them differently in
    # each run, and the learned pieces depend on these numbers.
    fixed = [*known, *extra]
    trainer = WordPieceTrainer(
        vocab_size=size + len(extra), special_tokens=fixed, limit_alphabet=0, show_progress=False
    )
    tokenizer = tokenizers.Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.train_from_iterator(learnable.elements(), trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)[len(fixed) :]
