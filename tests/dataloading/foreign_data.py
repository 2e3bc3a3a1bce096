"""Fuzzing targets: read any shard, data set, vocabulary or article, and assert what must hold for its content."""

import hashlib
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from dataloading.dataset.folder import open_dataset, write_dataset
from dataloading.options import AS_STATED, ExtractionOptions
from dataloading.shards.formats import open_shard, write_shard
from dataloading.text.tokenization import Tokenizer
from dataloading.text.vocabulary import Vocabulary, find_normalization
from dataloading.text.wikipedia import extract
from tests.dataloading.foreign_shards import write_like_others
from tests.dataloading.made_up import INFO, TOKENS, make_samples
from tests.fuzz.attempt import made


def take_shard(path: Path) -> None:
    """Read a shard of any layout, write its samples as a native shard, and read the same samples from that."""
    samples = (shard := open_shard(path)).verify()
    write_shard(path.with_name("out"), samples, shard.info)
    assert open_shard(path.with_name("out")).verify().digest() == samples.digest()


def shards() -> list[bytes]:
    foreign = partial(write_like_others, samples=make_samples(3), info=INFO)
    forms = [("fixed", {}), ("varlength", {}), ("packed", {}), ("fixed", {"chunks": True, "compression": "gzip"})]
    own = partial(write_shard, samples=make_samples(3), info=INFO)
    return [made(own), *(made(partial(foreign, layout=layout, **storage)) for layout, storage in forms)]


write_folder = partial(write_dataset, samples=make_samples(6), shards=2, info=INFO)


def take_dataset(path: Path) -> None:
    """Use the file as the manifest of a data set, or as its length index with the right digest in the manifest."""
    folder, names = path.with_name("data"), ("manifest.json", "lengths.npy")
    content = {name: made(write_folder, name) for name in names} | {path.name: path.read_bytes()}
    if not folder.exists():
        write_folder(folder)
    if path.name == "lengths.npy":
        listed, now = hashlib.sha256(made(write_folder, path.name)), hashlib.sha256(path.read_bytes())
        digests = listed.hexdigest().encode(), now.hexdigest().encode()
        content["manifest.json"] = content["manifest.json"].replace(digests[0], digests[1])
    for name in names:
        (folder / name).write_bytes(content[name])
    dataset = open_dataset(folder)
    dataset.check_files()
    dataset.verify()
    assert len(dataset.take(np.arange(len(dataset)))) == len(dataset)


def take_vocabulary(path: Path) -> Vocabulary:
    """Read a vocabulary, or the configuration of a tokenizer, and check that text becomes ids of the vocabulary."""
    if path.name == "tokenizer_config.json":
        path.with_name("vocab.txt").write_text("\n".join(TOKENS))
    vocabulary = Vocabulary.read(path if path.name != "tokenizer_config.json" else path.parent)
    tokenizer = Tokenizer(vocabulary, find_normalization(vocabulary, path, AS_STATED).normalization)
    ids, _ = tokenizer.encode_lines(["w1 W2 \u4e2d\u6587 \u00e9 [MASK]", *vocabulary.tokens])
    assert ids.max(initial=0) < vocabulary.size
    return vocabulary


def take_articles(path: Path) -> None:
    with TemporaryDirectory(dir=path.parent) as out:
        extract([path], Path(out), ExtractionOptions("plain", evaluation_articles=1))
