"""Generation of the built-in default's training and evaluation sets from the standard library's prose, in seconds."""

import hashlib
import platform
from dataclasses import asdict, replace
from pathlib import Path

from dataloading.dataset.folder import open_dataset, write_dataset
from dataloading.dataset.manifest import LENGTHS_NAME, MANIFEST_NAME, read_manifest, shard_name
from dataloading.options import PretrainingOptions
from dataloading.preparation.pretraining_data import create_samples, tokenize_documents
from dataloading.shards.samples import Samples
from dataloading.shards.shard import DatasetInfo
from dataloading.text.documents import Document, demo_documents
from dataloading.text.tokenization import Tokenizer

TRAIN_OPTIONS = PretrainingOptions(max_seq_length=128, max_predictions_per_seq=19, dupe_factor=10)
EVALUATION_OPTIONS = replace(TRAIN_OPTIONS, dupe_factor=2, random_seed=54321)
SHARDS = 4


def write_demo(folder: Path, vocab: Path) -> bool:
    """Write ``folder/train`` and ``folder/evaluation``; return False if both exist intact and this Python made them.

    Raises ``ValueError`` if this Python lacks the text, the vocabulary is invalid, or the folder holds other files.
    """
    tokenizer = Tokenizer.from_vocab(vocab)
    splits = (("train", False, TRAIN_OPTIONS), ("evaluation", True, EVALUATION_OPTIONS))
    if all(_is_current(folder / name, tokenizer, options) for name, _, options in splits):
        return False
    # Check both folders before deleting anything.
    for name, _, _ in splits:
        _require_ours(folder / name, name)
    documents = demo_documents()
    for name, held_out, options in splits:
        chosen = [document for document in documents if document.held_out == held_out]
        sizes = options.max_seq_length, options.max_predictions_per_seq
        sources = {_source(name): text_digest(chosen)}
        info = DatasetInfo.of(tokenizer.vocabulary, *sizes, _recorded(options), sources)
        samples = demo_samples(chosen, tokenizer, options)
        _clear(folder / name)
        write_dataset(folder / name, samples, shards=SHARDS, info=info)
    return True


def demo_samples(documents: list[Document], tokenizer: Tokenizer, options: PretrainingOptions) -> Samples:
    """Make pretraining samples from documents with the reference algorithm."""
    tokenized = tokenize_documents([document.sentences for document in documents], tokenizer)
    return create_samples(tokenized, options, tokenizer.vocabulary)


def text_digest(documents: list[Document]) -> str:
    """Return the SHA-256 of the documents' text. The text differs between Python versions."""
    text = "\n\n".join("\n".join(document.sentences) for document in documents)
    return hashlib.sha256(text.encode()).hexdigest()


def _source(name: str) -> str:
    return f"standard library, {name}"


def _require_ours(folder: Path, name: str) -> None:
    """Raise ``ValueError`` if the folder holds anything that this command has not made."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    own = {MANIFEST_NAME, LENGTHS_NAME, *(shard_name(index, SHARDS) for index in range(SHARDS))}
    try:
        made_here = set(read_manifest(folder).info.sources) == {_source(name)}
    except ValueError:
        made_here = False
    if not made_here or not own.issuperset(path.name for path in folder.iterdir()):
        raise ValueError(f"{folder} holds other files than the demo's data: move it away, or name another --out")


def _clear(folder: Path) -> None:
    """Remove the files of an older demo. The manifest goes last, because it identifies the files as a demo's."""
    found = folder.iterdir() if folder.is_dir() else ()
    for path in sorted(found, key=lambda path: path.name == MANIFEST_NAME):
        path.unlink()


def _recorded(options: PretrainingOptions) -> dict[str, int | float | bool | str]:
    return asdict(options) | {"python": platform.python_version()}  # the text changes with the version


def _is_current(folder: Path, tokenizer: Tokenizer, options: PretrainingOptions) -> bool:
    try:
        dataset = open_dataset(folder)
        dataset.verify()
    except ValueError:
        return False
    made_so = dataset.info.options == _recorded(options)
    return made_so and dataset.info.vocabulary_sha256 == tokenizer.vocabulary.sha256
