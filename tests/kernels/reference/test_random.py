"""Counter-based dropout: known answers, rate, independence, and masks that depend only on the arguments."""

import math

import pytest
import torch

from kernels.reference.random import Dropout, philox


def words(*values: int) -> list[torch.Tensor]:
    return [torch.tensor(value) for value in values]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, -1, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_philox_gives_the_published_words(counter: tuple[int, ...], key: int, expected: tuple[int, ...]):
    """Test vectors that the authors publish with Random123 (kat_vectors, philox 4x32-7)."""
    assert tuple(int(word) for word in philox(torch.tensor(key), words(*counter))) == expected


def mask(p: float = 0.1, rows: int = 4096, columns: int = 256, seed: int = 1, step: int = 2, stream: int = 3):
    return Dropout(p, torch.tensor([seed, step]), stream).mask(torch.arange(rows), columns)


@pytest.mark.parametrize("p", [0.0, 0.1, 25.5 / 256, 0.9])
def test_a_mask_drops_elements_at_the_given_rate(p: float):
    kept = mask(p).double()
    deviation = math.sqrt(max(p * (1 - p), 1e-12))
    assert abs(kept.mean().item() - (1 - p)) < 5 * deviation / math.sqrt(kept.numel()) + 1 / 131072
    for axis in (0, 1):
        spread = 5.5 * deviation / math.sqrt(kept.shape[axis]) + 1 / 131072
        assert (kept.mean(dim=axis) - (1 - p)).abs().max().item() < spread
    assert p or kept.all()


@pytest.mark.parametrize("other", [{"seed": 2}, {"step": 3}, {"stream": 4}, {"seed": 1 + (1 << 32)}])
def test_a_change_of_any_argument_gives_an_independent_mask(other: dict[str, int]):
    first, second = mask(0.5), mask(0.5, **other)
    agree = (first == second).double().mean().item()
    assert abs(agree - 0.5) < 5 * 0.5 / math.sqrt(first.numel())
    assert (torch.equal(first, mask(0.5)), Dropout(0.9, torch.zeros(2), 0).threshold) == (True, 58982)
    assert (mask(0.5, 1, 40).long() @ 2 ** torch.arange(40)).tolist() == [
        122377826423
    ]  # must never change, because a resumed run must draw the same masks


@pytest.mark.parametrize(("rows", "columns"), [(1, 0), (0, 1), (0, 2), (0, 7), (0, 8), (0, 16), (1, 1), (1, 16)])
def test_neighbouring_elements_are_dropped_independently(rows: int, columns: int):
    """Two neighbors are dropped as often as independent elements, even if one call of Philox yields both."""
    dropped = (~mask(0.5)).double()
    both = dropped[rows:, columns:] * dropped[: dropped.shape[0] - rows, : dropped.shape[1] - columns]
    assert abs(both.mean().item() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / both.numel())


def test_an_element_of_a_mask_depends_only_on_its_row_and_column():
    everything = mask(0.5, rows=64, columns=100)
    dropout = Dropout(0.5, torch.tensor([1, 2]), 3)
    some = torch.tensor([63, 5, 5])
    assert torch.equal(dropout.mask(some, 13), everything[some, :13])


@pytest.mark.parametrize("p", [-0.1, 1.0, 2.0])
def test_a_dropout_probability_outside_its_range_raises(p: float):
    with pytest.raises(ValueError, match="dropout probability"):
        Dropout(p, torch.zeros(2, dtype=torch.int64), 0)
