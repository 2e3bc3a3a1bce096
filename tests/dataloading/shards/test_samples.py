"""Blocks of samples: choosing, cutting, joining, digests."""

import dataclasses

import numpy as np
import pytest

from dataloading.shards.samples import Samples, concatenate
from tests.dataloading.made_up import make_samples


def test_take_gives_the_rows_asked_for() -> None:
    samples = make_samples(7)
    taken = samples.take(np.array([5, 0, 5]))
    for row, source in enumerate([5, 0, 5]):
        tokens = slice(*samples.sequence_offsets[source : source + 2])
        masked = slice(*samples.masked_lm_offsets[source : source + 2])
        own_tokens = slice(*taken.sequence_offsets[row : row + 2])
        own_masked = slice(*taken.masked_lm_offsets[row : row + 2])
        assert taken.input_ids[own_tokens].tolist() == samples.input_ids[tokens].tolist()
        assert taken.segment_ids[own_tokens].tolist() == samples.segment_ids[tokens].tolist()
        assert taken.masked_lm_positions[own_masked].tolist() == samples.masked_lm_positions[masked].tolist()
        assert taken.masked_lm_ids[own_masked].tolist() == samples.masked_lm_ids[masked].tolist()
        assert taken.next_sentence_labels[row] == samples.next_sentence_labels[source]


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (2, 5), (3, 3), (7, 7)])
def test_a_slice_is_the_rows_in_between(start: int, stop: int) -> None:
    samples = make_samples(7)
    assert samples.slice(start, stop).digest() == samples.take(np.arange(start, stop)).digest()


def test_slices_join_to_the_whole() -> None:
    samples = make_samples(7)
    parts = [samples.slice(0, 3), samples.slice(3, 3), samples.slice(3, 7)]
    assert concatenate(parts).digest() == samples.digest()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Samples)])
def test_every_array_counts_in_the_digest(field: str) -> None:
    samples = make_samples(7)
    changed = getattr(samples, field).copy()
    changed[1] ^= 1
    assert dataclasses.replace(samples, **{field: changed}).digest() != samples.digest()


def test_sample_digests_are_equal_for_equal_rows_only() -> None:
    samples = make_samples(7)
    digests = concatenate([samples, samples.take(np.array([6, 2]))]).sample_digests()
    assert digests.shape == (9,)
    assert len(np.unique(digests)) == 7
    assert digests[7] == digests[6]
    assert digests[8] == digests[2]


@pytest.mark.parametrize(
    "field", ["input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels"]
)
def test_every_array_counts_in_the_sample_digests(field: str) -> None:
    samples = make_samples(3)
    assert samples.masked_counts[0] > 0
    changed = getattr(samples, field).copy()
    changed[0] ^= 1
    differs = dataclasses.replace(samples, **{field: changed}).sample_digests() != samples.sample_digests()
    assert differs.tolist() == [True, False, False]
