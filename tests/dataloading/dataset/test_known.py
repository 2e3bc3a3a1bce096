"""Verification recognizes the benchmark's own data and detects repeated samples."""

import hashlib
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from dataloading.dataset import known
from dataloading.dataset.folder import Dataset, open_dataset, write_dataset
from dataloading.options import PretrainingOptions
from dataloading.shards.samples import concatenate, synthetic_samples
from tests.dataloading import made_up
from tests.dataloading.foreign_shards import write_like_others

INFO = replace(
    made_up.INFO,
    vocab_size=30522,
    max_seq_length=512,
    max_predictions_per_seq=76,
    vocabulary_md5=known.VOCABULARY_MD5,
    options=PretrainingOptions().recorded,
)


NEITHER = "neither the benchmark's training set (156,726,829) nor its evaluation set (10,000)"


def make(folder: Path, lengths: list[int], repeat: tuple[int, ...] = ()) -> Dataset:
    samples = synthetic_samples(np.array(lengths), 30522, seed=1)
    samples = concatenate([samples, samples.take(np.array(repeat, np.int64))])
    write_dataset(folder, samples, shards=2, info=INFO)
    return open_dataset(folder)


def test_content_md5_equals_the_published_scripts_digest(tmp_path: Path) -> None:
    """As the script does, write each row as a Python list and hash it with MD5. Then hash the list of these hashes."""
    samples = synthetic_samples(np.array([5, 30, 3, 100]), 30522)
    write_like_others(tmp_path / "file", "varlength", samples, INFO)
    with h5py.File(tmp_path / "file") as file:
        rows = file["input_ids"]
        assert isinstance(rows, h5py.Dataset)
        sums = [hashlib.md5(str(row.tolist()).encode()).hexdigest() for row in rows]
    expected = hashlib.md5(str(sums).encode()).hexdigest()
    assert known.content_md5([samples]) == expected
    assert known.content_md5([samples.slice(0, 1), samples.slice(1, 4)]) == expected


def test_the_benchmarks_settings_vocabulary_and_sizes_are_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "settings: not the benchmark's"
    unknown = "settings: not recorded; samples of at most 512 tokens, 76 of them masked"
    for options, described in (
        (INFO.options, "settings: the benchmark's"),
        (INFO.options | {"dupe_factor": 5, "strip_accents": False}, f"{other} (dupe_factor 5, strip_accents False)"),
        ({name: value for name, value in INFO.options.items() if name != "dupe_factor"}, unknown),
        ({}, unknown),
    ):
        assert known.describe_options(replace(INFO, options=options)) == described
    other = replace(INFO, vocabulary_md5="0" * 32)
    assert known.describe_vocabulary(other) == f"vocabulary: not the benchmark's; 30,522 tokens, md5 {'0' * 32}"

    def found(count: int) -> str:
        return known.describe_samples(Dataset(tmp_path, INFO, (), np.broadcast_to(np.uint16(9), (count, 2))))

    for count in (9_999, 10_001, 156_725_279, 156_726_830):
        assert found(count) == f"samples: {count:,}; {NEITHER}"
    for count in (156_725_280, 156_726_829):
        assert found(count) == f"samples: {count:,}, as many as the benchmark's training set has"
    md5 = hashlib.md5(b"[]").hexdigest()
    but = f"but other samples: content md5 is {md5}, published is 611d8bae26646145e1c33338a27ba124"
    assert found(10_000) == f"samples: 10,000 as in the benchmark's evaluation set, {but}"
    monkeypatch.setattr(known, "EVALUATION_CONTENT_MD5", md5)
    assert found(10_000) == f"samples: the benchmark's evaluation set, 10,000 samples, content md5 {md5}"


def test_verify_finds_repeated_samples_and_its_digest_ignores_the_order(tmp_path: Path) -> None:
    one = make(tmp_path / "none", [5, 70, 30])
    found = known.verify(one)
    samples = one.take(np.arange(3))
    digest = sum(samples.sample_digests().tolist()) % 2**64
    assert found == [
        f"vocabulary: the benchmark's, 30,522 tokens, md5 {known.VOCABULARY_MD5}",
        "settings: the benchmark's",
        "normalization: lower case, accents stripped, Chinese characters as separate words",
        "text: not recorded",
        f"samples: 3; {NEITHER}",
        f"next sentences: {100 * samples.next_sentence_labels.mean():.0f} % random",
        "repeats: 0 samples equal to another sample",
        f"multiset digest: {digest:016x}",
    ]
    nothing = known.verify(Dataset(tmp_path, INFO, (), np.zeros((0, 2), np.uint16)))
    assert nothing[4:6] == [f"samples: 0; {NEITHER}", "next sentences: 0 % random"]
    assert [known._describe_next_sentences(share).count("single sentence") for share in (0.9, 0.901)] == [0, 1]
    write_dataset(tmp_path / "backwards", one.take(np.array([2, 1, 0])), shards=3, info=INFO)
    assert known.verify(open_dataset(tmp_path / "backwards"))[-1] == found[-1] != "multiset digest: 0000000000000000"
    short = known.verify(make(tmp_path / "short", [5, 70, 30], repeat=(0, 0)))
    assert short[6] == "repeats: 2 samples equal to another sample, all of them short (below 64 tokens)"
    with pytest.raises(ValueError, match=r"3 samples equal to another sample, 1 of them with 64 tokens or more"):
        known.verify(make(tmp_path / "long", [5, 70, 63, 64, 80, 5], repeat=(2, 0, 4)))


@pytest.mark.parametrize(("samples", "picked"), [(3, [0, 1, 2]), (5, [0, 1, 3]), (11, [0, 3, 7])])
def test_evaluation_samples_are_picked_as_in_the_reference(tmp_path: Path, samples: int, picked: list[int]) -> None:
    dataset = Dataset(tmp_path, INFO, (), np.zeros((samples, 2), np.uint16))
    assert known.pick_evaluation(dataset, 3).tolist() == picked
