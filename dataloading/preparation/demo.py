"""The built-in default's data sets, made in seconds from English prose that ships with CPython.

The sources are the language reference in ``pydoc_data.topics`` and the docstrings of the standard library, whose modules
are parsed and never imported. The text differs slightly between Python versions, so its digest is recorded with the data.
The name of a document's module or topic, which is stable across versions, decides whether it is held out for evaluation.
"""

import ast
import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dataloading.dataset.folder import open_dataset, write_dataset
from dataloading.options import PretrainingOptions
from dataloading.preparation.pretraining_data import samples_of
from dataloading.shards.shard import DatasetInfo
from dataloading.text.tokenization import Tokenizer
from dataloading.text.vocabulary import Vocabulary

TRAIN_OPTIONS = PretrainingOptions(max_seq_length=128, max_predictions_per_seq=19, dupe_factor=10)
EVALUATION_OPTIONS = replace(TRAIN_OPTIONS, dupe_factor=2, random_seed=54321)
SHARDS = 4

EXCLUDED_PACKAGES = frozenset(
    {"distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "site-packages", "dist-packages", "test", "tests"}
    | {"tkinter", "turtledemo"}
)
"""Packages to exclude, because some distributions lack them or because their docstrings are not prose."""

HELD_OUT_PERCENT = 8
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(`\[])")
_WORD = re.compile(r"[A-Za-z]{2,}")
_MARKUP = re.compile(r"^(>>>|\.\. |:\w+|[-=~^*+|]{3,})")


@dataclass(frozen=True)
class Document:
    """A document: a topic of the language reference, or a module's top-level object with its methods."""

    name: str
    """Module or topic. The name decides whether the document is held out."""
    sentences: tuple[str, ...]

    @property
    def held_out(self) -> bool:
        # Python's hash() of a string differs between processes, so use SHA-256.
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def write_demo(folder: Path, vocab: Path) -> bool:
    """Write ``folder/train`` and ``folder/evaluation``, unless this version of Python already made them.

    Returns False if both exist and are intact. Raises ``ValueError`` if this Python lacks the text, the vocabulary is
    invalid, or the folder holds other files.
    """
    tokenizer = Tokenizer(Vocabulary.from_file(vocab), TRAIN_OPTIONS.normalization)
    splits = (("train", False, TRAIN_OPTIONS), ("evaluation", True, EVALUATION_OPTIONS))
    missing = [split for split in splits if not _is_current(folder / split[0], tokenizer, split[2])]
    documents = demo_documents() if missing else []
    for name, held_out, options in missing:
        chosen = [document for document in documents if document.held_out == held_out]
        sizes = options.max_seq_length, options.max_predictions_per_seq
        text = "\n\n".join("\n".join(document.sentences) for document in chosen)
        sources = {f"standard library, {name}": hashlib.sha256(text.encode()).hexdigest()}
        info = DatasetInfo.of(tokenizer.vocabulary, *sizes, _recorded(options), sources)
        samples, counts = samples_of([document.sentences for document in chosen], tokenizer, options)
        write_dataset(folder / name, samples, shards=SHARDS, info=replace(info, text=counts))
    return bool(missing)


def _recorded(options: PretrainingOptions) -> dict[str, int | float | bool | str]:
    return options.recorded | {"python": platform.python_version()}  # its version determines the text


def _is_current(folder: Path, tokenizer: Tokenizer, options: PretrainingOptions) -> bool:
    """Return whether the data set exists. Raises ``ValueError`` if it is damaged, or if the folder holds anything else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    dataset = open_dataset(folder)
    dataset.verify()
    recorded, found = _recorded(options), dataset.info.options
    # Accept data of earlier versions of this program, which recorded fewer settings.
    is_same = "python" in found and recorded | found == recorded
    if not is_same or dataset.info.vocabulary_sha256 != tokenizer.vocabulary.sha256:
        raise ValueError(f"{folder} holds other data than the demo of this Python: delete it, or name another --out")
    return True


def demo_documents(standard_library: Path | None = None) -> list[Document]:
    """Return the documents of the demo corpus in a fixed order, without repeated paragraphs.

    ``standard_library`` is the folder to read (default: the running interpreter's). Raises ``ValueError`` if it lacks
    ``pydoc_data/topics.py``, as in Debian's python3-minimal.
    """
    folder = standard_library or Path(sysconfig.get_paths()["stdlib"])
    topics = folder / "pydoc_data" / "topics.py"
    if not topics.is_file():
        raise ValueError(f"no {topics}: the demo corpus needs the full standard library (Debian: install python3)")
    # Paragraphs are compared across all documents, so that no text is in both data sets.
    seen: set[str] = set()
    documents = []
    for name, text in [*_topics(topics), *_docstrings(folder)]:
        sentences = tuple(sentence for paragraph in _prose(text, seen) for sentence in _SENTENCE_END.split(paragraph))
        if sentences:
            documents.append(Document(name, sentences))
    return documents


def _topics(path: Path) -> Iterator[tuple[str, str]]:
    # Parse bytes, so that the encoding declaration of a source file is respected.
    tree = ast.parse(path.read_bytes())
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            yield from sorted((f"topic {name}", text) for name, text in ast.literal_eval(node.value).items())


def _docstrings(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, text) for the docstring of each module, and for the docstrings of each top-level object in it."""
    for path in sorted(_modules(folder), key=lambda path: path.relative_to(folder).parts):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        module = ".".join(path.relative_to(folder).with_suffix("").parts)
        for node in [tree, *tree.body]:
            text = "\n\n".join(_documented(node, deep=node is not tree))
            if text:
                yield module, text


def _modules(folder: Path) -> Iterator[Path]:
    """Yield the modules to read. Excluded folders hold most of the files, so their contents are not even listed."""
    for place, folders, files in os.walk(folder):
        excluded = EXCLUDED_PACKAGES | {"pydoc_data"} if place == str(folder) else EXCLUDED_PACKAGES
        folders[:] = [name for name in folders if name not in excluded]
        yield from (Path(place, name) for name in files if name.endswith(".py"))


def _documented(node: ast.AST, deep: bool) -> Iterator[str]:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    if text := ast.get_docstring(node):
        yield text
    if deep:
        for child in node.body:
            yield from _documented(child, deep=True)


def _prose(text: str, seen: set[str]) -> Iterator[str]:
    """Yield the new paragraphs of ``text`` that look like English prose, each on one line, and add them to ``seen``."""
    for block in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in block.splitlines()]
        # One line of markup is enough to treat the whole block as code, a list or a table.
        if any(_MARKUP.match(line) for line in lines):
            continue
        paragraph = " ".join(" ".join(lines).split())
        letters = sum(character.isalpha() or character.isspace() for character in paragraph)
        if len(_WORD.findall(paragraph)) < 4 or letters < 0.75 * len(paragraph) or paragraph in seen:
            continue
        seen.add(paragraph)
        yield paragraph
