"""``Samples``, a block of samples: selection, slicing, concatenation and digests."""

import dataclasses

import numpy as np
import pytest

from dataloading.shards.samples import Samples, concatenate
from tests.dataloading.made_up import make_samples


def test_slices_are_the_rows_in_between_and_join_to_the_whole() -> None:
    samples = make_samples(7)
    for start, stop in ((0, 7), (2, 5), (3, 3), (7, 7)):
        assert samples.slice(start, stop).digest() == samples.take(np.arange(start, stop)).digest()
    parts = [samples.slice(0, 3), samples.slice(3, 3), samples.slice(3, 7)]
    assert concatenate(parts).digest() == samples.digest()
    digests = concatenate([samples, samples.take(np.array([6, 2]))]).sample_digests()
    assert (digests.shape, len(np.unique(digests))) == ((9,), 7)
    assert digests[7:].tolist() == digests[[6, 2]].tolist()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Samples)])
def test_every_array_counts_in_the_digests(field: str) -> None:
    samples = make_samples(3)
    assert samples.masked_counts[0] > 0
    changed = getattr(samples, field).copy()
    changed[1 if "offsets" in field else 0] ^= 1
    other = dataclasses.replace(samples, **{field: changed})
    assert other.digest() != samples.digest()
    if "offsets" not in field:
        assert (other.sample_digests() != samples.sample_digests()).tolist() == [True, False, False]
