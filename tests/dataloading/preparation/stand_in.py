"""Small stand-ins for MLCommons' downloads, with real names and synthetic content, and functions that prepare them."""

import hashlib
import multiprocessing
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataloading.__main__ import main
from dataloading.dataset.folder import open_dataset
from dataloading.preparation import wikipedia
from tests.conftest import REPOSITORY

_BUNDLES = REPOSITORY / "tests" / "bert" / "checkpoints" / "tf_bundles"
_VOCAB = REPOSITORY / "bert" / "artifacts" / "tiny_cpu" / "vocab.txt"
ARTICLES = REPOSITORY / "tests" / "dataloading" / "text" / "wikipedia" / "text"
PARTS = 3
EVALUATION_DOCUMENTS = 1100
"""Number of evaluation documents. Each gives at least ten samples, and the evaluation set needs 10,000."""


@dataclass(frozen=True)
class StandIn:
    """Paths of the two replaced downloads, and of a file with the MD5 sums of all their files."""

    files: Path
    text: Path
    checksums: Path

    @property
    def part(self) -> Path:
        return self.text / f"part-00001-of-{PARTS:05d}"


def write_stand_in(folder: Path, *, checkpoints: bool = True) -> StandIn:
    files, text = folder / "bert-input-files", folder / "bert-preprocessed-wikipedia-dataset"
    files.mkdir()
    for form in ("tf1_ckpt", "tf2_ckpt") if checkpoints else ():
        (files / form).mkdir()
        for path in _BUNDLES.glob("tf1.*"):
            shutil.copy(path, files / form / path.name.replace("tf1", "model.ckpt-28252"))
        if form == "tf2_ckpt":  # only the folder's name shows that this index is for TensorFlow 2
            (files / form / "model.ckpt-28252.index").write_bytes(b"\0")
    shutil.copy(_VOCAB, files / "vocab.txt")
    (files / "bert_config.json").write_text('{"num_attention_heads": 2}\n')
    text.mkdir()
    rng = np.random.default_rng(7)
    for index in range(PARTS):
        (text / f"part-{index:05d}-of-{PARTS:05d}").write_text(documents(rng, 40, sentences=20))
    (text / "eval.txt").write_text(documents(rng, EVALUATION_DOCUMENTS, sentences=3))
    (text / "eval.md5").write_text(f"{'0' * 32}\n")  # not in md5sum's format, like the real file
    for each in (files, text):
        (each / f"{each.name}.md5").write_text(_sums(each, each))
    checksums = folder / "checksums.md5"
    checksums.write_text(_sums(files, folder) + _sums(text, folder))
    return StandIn(files, text, checksums)


def documents(rng: np.random.Generator, count: int, *, sentences: int) -> str:
    """Return distinct documents of random words."""
    words = [line for line in _VOCAB.read_text().split() if line.isalpha() and len(line) > 2]
    one = lambda: " ".join(rng.choice(words, rng.integers(4, 14))).capitalize() + ".\n"  # noqa: E731
    return "".join("".join(one() for _ in range(sentences)) + "\n" for _ in range(count))


def _sums(folder: Path, top: Path) -> str:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".md5")
    return "".join(
        f"{hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()}  ./{path.relative_to(top)}\n"
        for path in paths
    )


def arguments(given: StandIn, out: Path, *more: object) -> list[object]:
    return ["wikipedia", given.files, given.text, "--out", out, "--shards", 3, "--checksums", given.checksums, *more]


def results(out: Path) -> dict[str, object]:
    """Return the vocabulary, and for each data set its metadata and the digests of its shards and source texts."""
    found: dict[str, object] = {"vocab.txt": (out / "vocab.txt").read_bytes()}
    for name in ("train", "evaluation"):
        dataset = open_dataset(out / name)
        dataset.verify()
        digests = [(shard.name, shard.digest) for shard in dataset.shards]
        found[name] = dataset.info.without_sources(), digests, sorted(dataset.info.sources.values())
    return found


FRESH = multiprocessing.get_context("forkserver")
"""Fork server. Its children inherit neither this process's objects nor locks that its threads hold."""
FRESH.set_forkserver_preload(
    ["dataloading.preparation.wikipedia", "tests.dataloading.preparation.compiled", "tests.conftest"]
)


def child(*words: object, prepare_child: Callable[[], object] = dict) -> int:
    """Run the command in a new process and return its exit status, which is negative after a signal."""
    process = FRESH.Process(target=run_command, args=(prepare_child, [str(word) for word in words]))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def run_command(prepare_child: Callable[[], object], words: list[str]) -> None:
    prepare_child()
    wikipedia.EVALUATION_SAMPLES = 300
    sys.argv = ["dataloading", *words]
    sys.exit(main())
