"""Generation of the built-in default's training and evaluation sets from the standard library's prose, in seconds."""

import hashlib
import platform
from dataclasses import asdict, replace
from pathlib import Path

from dataloading.dataset.folder import open_dataset, write_dataset
from dataloading.options import PretrainingOptions
from dataloading.preparation.pretraining_data import create_samples, tokenize_documents
from dataloading.shards.shard import DatasetInfo
from dataloading.text.documents import demo_documents
from dataloading.text.tokenization import Tokenizer, Vocabulary

TRAIN_OPTIONS = PretrainingOptions(max_seq_length=128, max_predictions_per_seq=19, dupe_factor=10)
EVALUATION_OPTIONS = replace(TRAIN_OPTIONS, dupe_factor=2, random_seed=54321)
SHARDS = 4


def write_demo(folder: Path, vocab: Path) -> bool:
    """Write ``folder/train`` and ``folder/evaluation``, unless this version of Python already made them.

    Returns False if both exist and are intact. Raises ``ValueError`` if this Python lacks the text, the vocabulary is
    invalid, or the folder holds other files.
    """
    tokenizer = Tokenizer(Vocabulary.from_file(vocab))
    splits = (("train", False, TRAIN_OPTIONS), ("evaluation", True, EVALUATION_OPTIONS))
    missing = [split for split in splits if not _is_current(folder / split[0], tokenizer, split[2])]
    documents = demo_documents() if missing else []
    for name, held_out, options in missing:
        chosen = [document for document in documents if document.held_out == held_out]
        sizes = options.max_seq_length, options.max_predictions_per_seq
        text = "\n\n".join("\n".join(document.sentences) for document in chosen)
        sources = {f"standard library, {name}": hashlib.sha256(text.encode()).hexdigest()}
        info = DatasetInfo.of(tokenizer.vocabulary, *sizes, _recorded(options), sources)
        tokenized = tokenize_documents([document.sentences for document in chosen], tokenizer)
        samples = create_samples(tokenized, options, tokenizer.vocabulary)
        write_dataset(folder / name, samples, shards=SHARDS, info=info)
    return bool(missing)


def _recorded(options: PretrainingOptions) -> dict[str, int | float | bool | str]:
    return asdict(options) | {"python": platform.python_version()}  # the text changes with the version


def _is_current(folder: Path, tokenizer: Tokenizer, options: PretrainingOptions) -> bool:
    """Return whether the data set exists, intact. Raises ``ValueError`` if the folder holds anything else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    dataset = open_dataset(folder)
    dataset.verify()
    if dataset.info.options != _recorded(options) or dataset.info.vocabulary_sha256 != tokenizer.vocabulary.sha256:
        raise ValueError(f"{folder} holds other data than the demo of this Python: delete it, or name another --out")
    return True
