"""The vocabulary of a checkpoint, and the normalization of text that belongs to it."""

from pathlib import Path

from bert.checkpoints.sources import CheckpointSource
from console.program import complain, say
from console.text import counted
from dataloading.options import AS_STATED, Normalization, NormalizationOptions
from dataloading.text.tokenizer_files import TOKENIZER
from dataloading.text.vocabulary import FoundNormalization, Vocabulary, find_normalization


def tokenizer_of(
    found: CheckpointSource, source: Path, vocab: Path | None, given: NormalizationOptions
) -> tuple[Vocabulary, Normalization]:
    """Read a model's vocabulary, by default from the files beside its checkpoint, and find the normalization of its text.

    Prints the normalization, and a warning if it does not fit the vocabulary. Raises ``ValueError`` if the vocabulary or
    its normalization is not the one that the model was trained with.
    """
    path = (source if source.is_dir() else source.parent) if vocab is None else vocab
    if vocab is None and not any((path / name).is_file() for name in ("vocab.txt", TOKENIZER)):
        raise ValueError(
            f"there is no {path / 'vocab.txt'}: set --vocab to the vocabulary that the model was trained with"
        )
    vocabulary = Vocabulary.read(path)
    named = path / "vocab.txt" if (path / "vocab.txt").is_file() else path
    if found.vocabulary_sha256 not in (None, vocabulary.sha256):
        raise ValueError(
            f"{named} is not the vocabulary that the model was trained with (SHA-256 {found.vocabulary_sha256}): "
            "set --vocab to the model's vocabulary"
        )
    vocabulary.require_table(found.model.vocab_size, named)
    if (extra := found.model.vocab_size - vocabulary.size) > 0:
        say(f"the word embedding table has {counted(extra, 'row')} more than {named} has tokens: they are padding")
    normalization = find_normalization(vocabulary, path, given)
    if found.normalization is not None and given == AS_STATED:
        normalization = _confirmed(found.normalization, normalization, source)
    say(f"text: {normalization}")
    if not vocabulary.fits(normalization.normalization):
        remedy = "check --do-lower-case, --strip-accents"
        complain(f"many words of {named} cannot occur in the normalized text: {remedy}", "warning")
    return vocabulary, normalization.normalization


def _confirmed(trained: Normalization, beside: FoundNormalization, source: Path) -> FoundNormalization:
    """Confirm the checkpoint's normalization. Raises ``ValueError`` if the files of the vocabulary state another one."""
    if beside.is_stated and beside.normalization != trained:
        raise ValueError(
            f"{source} was trained on text with {trained}, but {beside.normalization} is {beside.source}: choose one by "
            "--do-lower-case, --strip-accents and --tokenize-chinese-chars"
        )
    return FoundNormalization(trained, f"stated by {source}", is_stated=True)
