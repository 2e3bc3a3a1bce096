"""Conversion of the user's text to a training set, an evaluation set of held-out documents, and a vocabulary."""

import glob
import hashlib
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from pathlib import Path

import tokenizers
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

from console.files import sha256_of, write_atomically
from dataloading.dataset.folder import index_shards, new_folder, shard_name
from dataloading.options import OwnText, PretrainingOptions
from dataloading.preparation.pretraining_data import create_samples, samples_info
from dataloading.shards.formats import write_shard
from dataloading.text.tokenization import SPECIAL_TOKENS, Tokenizer, Vocabulary, read_documents, tokenize_documents
from dataloading.text.wikipedia import sentence_splitter

FEWEST_DOCUMENTS = 20
"""Smallest number of documents that gives a meaningful evaluation set."""

_FEWEST_HELD_OUT = 5
_SHARD_CHARACTERS = 27 << 20
"""Characters of text per shard, as in a part of the benchmark's text. A shard takes 30 bytes of memory per character."""

_SEED_OF_EVALUATION = 54321

_FREQUENT = 20
"""Minimum number of occurrences of each character in a learned vocabulary's alphabet."""

Document = list[str]
"""List of sentences."""


@dataclass(frozen=True)
class TextSplit:
    """Training and evaluation documents, without duplicates."""

    train: list[Document]
    evaluation: list[Document]
    repeated: int
    """Number of documents that were dropped as duplicates."""


def write_own_text(own: OwnText, out: Path) -> TextSplit:
    """Write ``out/train``, ``out/evaluation`` and ``out/vocab.txt``, and return the documents of both data sets.

    ``out`` appears complete or not at all.
    """
    texts = text_files(own.text)
    split = split_documents([document for path in texts for document in _documents(path, own)], own.evaluation_share)
    with new_folder(out) as aside:
        # Learn the vocabulary from the training text alone, so that held-out documents stay unseen.
        vocabulary, lower = _vocabulary(own, split.train)
        write_atomically(aside / "vocab.txt", vocabulary.content)
        tokenizer = Tokenizer(vocabulary, lower)
        sources = {path.as_posix(): sha256_of(path) for path in texts}
        for name, documents, dupes, seed in (
            ("train", split.train, own.dupe_factor, own.seed),
            ("evaluation", split.evaluation, 2, own.seed + _SEED_OF_EVALUATION),
        ):
            options = PretrainingOptions(
                max_seq_length=own.max_seq_length,
                max_predictions_per_seq=max(1, int(0.15 * own.max_seq_length)),
                dupe_factor=dupes,
                random_seed=seed,
                do_lower_case=lower,
            )
            _write(aside / name, documents, tokenizer, options, sources)
    return split


def text_files(places: Sequence[Path]) -> list[Path]:
    """Return the files that ``places`` (files, folders and patterns) name, each once. Skips hidden files in folders.

    Raises ``ValueError`` if one of the places names no file.
    """
    found: dict[Path, None] = {}
    for place in places:
        if place.is_dir():
            inside = [path for path in sorted(place.rglob("*")) if path.is_file()]
            files = [path for path in inside if not any(part[0] == "." for part in path.relative_to(place).parts)]
        else:
            matches = glob.glob(str(place), recursive=True)  # noqa: PTH207 - skips hidden files, as a shell does
            files = [place] if place.exists() else [path for path in sorted(map(Path, matches)) if path.is_file()]
        if not files:
            raise ValueError(f"--text {place}: there is no such file, expected a file, a folder of files or a pattern")
        found |= dict.fromkeys(files)
    return list(found)


def split_documents(documents: Sequence[Document], share: float) -> TextSplit:
    """Drop repeated documents, and hold out the ``share`` of documents with the smallest digests.

    The choice does not depend on the order of the documents. Raises ``ValueError`` if there are fewer than 20 different
    documents.
    """
    # The dictionary removes duplicates and keeps the order.
    different = {hashlib.sha256("\n".join(document).encode()).digest(): document for document in documents}
    if len(different) < FEWEST_DOCUMENTS:
        raise ValueError(
            f"{len(different)} different documents, expected at least {FEWEST_DOCUMENTS}: put "
            "an empty line between documents, or bring more text"
        )
    count = max(_FEWEST_HELD_OUT, round(share * len(different)))
    held_out = set(sorted(different)[:count])
    return TextSplit(
        train=[document for digest, document in different.items() if digest not in held_out],
        evaluation=[document for digest, document in different.items() if digest in held_out],
        repeated=len(documents) - len(different),
    )


def learn_vocabulary(lines: Sequence[str], size: int, *, lower: bool = True) -> list[str]:
    """Learn at most ``size`` tokens. Return the special tokens, characters and learned pieces in id order.

    ``lower`` lower-cases the text and strips accents. The alphabet is passed to the trainer as sorted special tokens.
    Otherwise the trainer would number the characters differently in each run, and the learned pieces depend on the numbers.
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
    tokenizer = tokenizers.Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = BertPreTokenizer()
    # limit_alphabet is 0 because the special tokens already include the alphabet.
    trainer = WordPieceTrainer(vocab_size=size, special_tokens=fixed, limit_alphabet=0, show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def _documents(path: Path, own: OwnText) -> list[Document]:
    """Return the documents of a file. Sentences over half a sample long are split, because their ends would be lost."""
    split, most = sentence_splitter("plain"), max(1, own.max_seq_length // 2)
    documents = [
        [part for line in lines for sentence in split(line) for part in _cut(sentence, most)]
        for lines in read_documents([path])
    ]
    return documents if own.documents == "blank-lines" else [[part for document in documents for part in document]]


def _cut(sentence: str, most: int) -> list[str]:
    words = sentence.split()
    return [" ".join(words[start : start + most]) for start in range(0, len(words), most)]


def _vocabulary(own: OwnText, documents: Sequence[Document]) -> tuple[Vocabulary, bool]:
    if own.vocab is None:
        lines = [sentence for document in documents for sentence in document]
        tokens = learn_vocabulary(lines, own.vocab_size, lower=not own.cased)
        return Vocabulary.of_tokens(tokens, Path("vocab.txt")), not own.cased
    given = Vocabulary.from_folder(own.vocab) if own.vocab.is_dir() else Vocabulary.from_file(own.vocab)
    if given is None:
        raise ValueError(f"{own.vocab} holds neither vocab.txt nor tokenizer.json; set --vocab to a BERT's vocabulary")
    return given, not given.cased


def _write(
    folder: Path, documents: list[Document], tokenizer: Tokenizer, options: PretrainingOptions, sources: dict[str, str]
) -> None:
    info = samples_info(tokenizer.vocabulary, options, sources)
    folder.mkdir()
    calls = _calls(documents)
    names = [shard_name(index, len(calls)) for index in range(len(calls))]
    for name, some in zip(names, calls, strict=True):
        samples = create_samples(tokenize_documents(some, tokenizer), options, tokenizer.vocabulary)
        write_shard(folder / name, samples, info)
    index_shards(folder, names, info)


def _calls(documents: list[Document]) -> list[list[Document]]:
    """Divide the documents into consecutive groups of about equal length, one for each call of the algorithm."""
    *starts, total = accumulate((sum(map(len, document)) for document in documents), initial=0)
    count = -(-total // _SHARD_CHARACTERS)
    # A document's position in the whole text decides which call it belongs to.
    positioned = zip(starts, documents, strict=True)
    return [
        [document for _, document in call] for _, call in groupby(positioned, lambda pair: pair[0] * count // total)
    ]
