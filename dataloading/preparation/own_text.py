"""Conversion of the user's text to a training set, an evaluation set of held-out documents, and a vocabulary."""

import glob
import hashlib
import json
import math
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, chain, groupby
from pathlib import Path

import numpy as np

from console.files import sha256_of, write_atomically
from console.text import counted
from dataloading.dataset.folder import Dataset, index_shards, new_folder, shard_name
from dataloading.options import Normalization, NormalizationOptions, OwnText, PretrainingOptions
from dataloading.preparation.learned_vocabulary import learn_vocabulary
from dataloading.preparation.pretraining_data import samples_info, samples_of
from dataloading.shards.formats import write_shard
from dataloading.text.documents import divide_lines, read_lines
from dataloading.text.losses import TextCounts
from dataloading.text.sentences import sentence_splitter
from dataloading.text.tokenization import Tokenizer
from dataloading.text.tokenizer_files import TOKENIZER_CONFIG
from dataloading.text.vocabulary import FoundNormalization, Vocabulary, find_normalization

FEWEST_DOCUMENTS = 20
"""Smallest number of documents that gives a meaningful evaluation set."""

_FEWEST_HELD_OUT = 5
_EVALUATED_TOKENS = 10_000
"""Masked tokens in the evaluation set if the held-out text is long enough. The standard error of an accuracy is then at most
0.5 %, and a run spends little time on its evaluations."""
_MOST_PASSES = 10
"""Maximum number of passes over a short held-out text. Each pass has different masks."""
_CHARACTERS_PER_TOKEN = 4
_SHARD_CHARACTERS = 27 << 20
"""Characters of text per shard, as many as in a part of the benchmark's text. Making a shard takes 30 bytes of memory for
each character."""

_SEED_OF_EVALUATION = 54321

Document = list[str]
"""List of sentences."""

_INVISIBLE = "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff" + string.whitespace + "\u00a0\u3000"
"""Invisible characters. A line that has no other characters looks empty, and therefore ends a document."""


@dataclass(frozen=True)
class TextSplit:
    """Training and evaluation documents, without duplicates."""

    train: list[Document]
    evaluation: list[Document]
    repeated: int
    """Number of documents that were dropped as duplicates."""


def write_own_text(places: Sequence[Path], own: OwnText, out: Path) -> tuple[TextSplit, Vocabulary, FoundNormalization]:
    """Make data sets from the text in ``places`` (files, folders and patterns).

    Write ``out/train``, ``out/evaluation``, ``out/vocab.txt`` and the normalization in ``out/tokenizer_config.json``.

    ``out`` appears complete or not at all. Raises ``ValueError`` if more than half of the text would be lost.
    """
    texts = text_files(places)
    split = split_documents(_documents(texts, own), own.evaluation_share)
    with new_folder(out) as aside:
        # Learn the vocabulary from the training text alone, so that held-out documents stay unseen.
        vocabulary, found = _vocabulary(own, split.train)
        normalization = asdict(found.normalization)
        write_atomically(aside / "vocab.txt", vocabulary.content)
        write_atomically(aside / TOKENIZER_CONFIG, json.dumps(normalization, indent=1).encode())
        tokenizer = Tokenizer(vocabulary, found.normalization)
        sources = {path.as_posix(): sha256_of(path) for path in texts}
        for name, documents, repeated, dupes, seed in (
            ("train", split.train, split.repeated, own.dupe_factor, own.seed),
            ("evaluation", split.evaluation, 0, _passes(split.evaluation), own.seed + _SEED_OF_EVALUATION),
        ):
            options = PretrainingOptions(
                max_seq_length=own.max_seq_length,
                max_predictions_per_seq=max(1, int(0.15 * own.max_seq_length)),
                dupe_factor=dupes,
                random_seed=seed,
                **normalization,
            )
            most = _EVALUATED_TOKENS if name == "evaluation" else None
            dataset = _write(aside / name, documents, repeated, tokenizer, options, sources, most)
            if not own.accept_losses:
                dataset.info.text.require_enough(out / name)
    return split, vocabulary, found


def text_files(places: Sequence[Path]) -> list[Path]:
    """Return the files that ``places`` (files, folders and patterns) name, each once. Skips hidden files in folders.

    Raises ``ValueError`` if there are no places, or if one of them names no file.
    """
    if not places:
        raise ValueError("no text is named; name one or more files, folders or patterns")
    found: dict[Path, None] = {}
    for place in places:
        if place.is_dir():
            inside = [path for path in sorted(place.rglob("*")) if path.is_file()]
            files = [path for path in inside if not any(part[0] == "." for part in path.relative_to(place).parts)]
        else:
            matches = glob.glob(str(place), recursive=True)  # noqa: PTH207 - skips hidden files, as a shell does
            files = [place] if place.exists() else [path for path in sorted(map(Path, matches)) if path.is_file()]
        if not files:
            why = "the folder holds no files" if place.is_dir() else "there is no such file"
            raise ValueError(f"{place}: {why}; expected a text file, a folder of text files or a pattern")
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
            f"{counted(len(different), 'different document')}, expected at least {FEWEST_DOCUMENTS}: put "
            "an empty line between documents, or add more text"
        )
    count = max(_FEWEST_HELD_OUT, round(share * len(different)))
    held_out = set(sorted(different)[:count])
    return TextSplit(
        train=[document for digest, document in different.items() if digest not in held_out],
        evaluation=[document for digest, document in different.items() if digest in held_out],
        repeated=len(documents) - len(different),
    )


def _passes(held_out: list[Document]) -> int:
    """Return the number of passes over held-out text that give about ``_EVALUATED_TOKENS`` masked tokens."""
    characters = sum(len(sentence) for document in held_out for sentence in document)
    masked = PretrainingOptions.masked_lm_prob * characters / _CHARACTERS_PER_TOKEN
    return min(_MOST_PASSES, math.ceil(_EVALUATED_TOKENS / masked))


def _documents(paths: Sequence[Path], own: OwnText) -> list[Document]:
    split, texts = sentence_splitter("plain"), read_lines(paths)
    found = [divide_lines(lines, _INVISIBLE) for lines in texts]
    if own.documents == "files":
        found = [[list(chain.from_iterable(documents))] for documents in found]
    return [[sentence for line in document for sentence in split(line)] for document in chain.from_iterable(found)]


def _vocabulary(own: OwnText, documents: Sequence[Document]) -> tuple[Vocabulary, FoundNormalization]:
    given = {"do_lower_case": False} if own.cased else {}
    given |= {name: value for name, value in asdict(own.normalization).items() if value is not None}
    if own.vocab is not None:
        vocabulary = Vocabulary.read(own.vocab)
        return vocabulary, find_normalization(vocabulary, own.vocab, NormalizationOptions(**given))
    found = FoundNormalization(Normalization.of(**given), "of the learned vocabulary")
    tokens = learn_vocabulary(chain.from_iterable(documents), own.vocab_size, found.normalization)
    return Vocabulary.of_tokens(tokens, Path("vocab.txt")), found


def _write(
    folder: Path,
    documents: list[Document],
    repeated: int,
    tokenizer: Tokenizer,
    options: PretrainingOptions,
    sources: dict[str, str],
    most_masked: int | None,
) -> Dataset:
    """Write a data set. With ``most_masked``, keep samples with at most this number of masked tokens in total."""
    info = samples_info(tokenizer.vocabulary, options, sources)
    folder.mkdir()
    calls = _calls(documents)
    names = [shard_name(index, len(calls)) for index in range(len(calls))]
    text = TextCounts(documents=repeated, dropped_documents=repeated)
    for name, some in zip(names, calls, strict=True):
        # Cut sentences to half a sample. Otherwise, pairs of longer sentences would be truncated and lose text.
        samples, counts = samples_of(some, tokenizer, options, (options.max_seq_length - 3) // 2)
        if most_masked is not None:
            # The first samples are a random choice, because `samples_of` shuffles the samples.
            enough = np.searchsorted(samples.masked_lm_offsets, most_masked / len(calls), side="right") - 1
            samples = samples.take(np.arange(enough))
        write_shard(folder / name, samples, replace(info, text=counts))
        text += counts
    return index_shards(folder, names, replace(info, text=text))


def _calls(documents: list[Document]) -> list[list[Document]]:
    """Divide the documents into consecutive groups of about equal length, one for each call of the algorithm."""
    *starts, total = accumulate((sum(map(len, document)) for document in documents), initial=0)
    count = -(-total // _SHARD_CHARACTERS)
    # A document's position in the whole text decides which call it belongs to.
    positioned = zip(starts, documents, strict=True)
    return [
        [document for _, document in call] for _, call in groupby(positioned, lambda pair: pair[0] * count // total)
    ]
