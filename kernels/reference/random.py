"""Dropout from a counter: every random bit is a function of a seed, a step, a call site and a place.

A captured graph draws anew at each replay because seed and step are read from the device, the backward pass can draw again
what the forward pass drew, and any implementation can reproduce the mask of any other bit for bit. The generator is Philox
4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), as ``triton.language.philox`` computes it: with
seven rounds, the fewest that pass its authors' battery of tests (BigCrush), since drawing is much of what dropout costs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
"""Of the generator, for its two halves."""
ROUNDS = 7
"""Of the generator."""

PLACES_A_DRAW = 16
"""A draw is 128 bits, of which each of 16 neighbouring columns takes 8."""

TIE_MULTIPLIER = 0x9E3779B9
"""2^32 over the golden ratio: spreads what it multiplies over the highest bits."""


@dataclass(frozen=True)
class Dropout:
    """Choice of the elements that one call drops; ``mask`` is the definition."""

    p: float
    """Probability of dropping an element, hit to within 1 / 131072."""
    state: Tensor
    """int64 [2] on the device of the data: the run's seed and the step, which changes from one micro-batch to the next."""
    stream: int
    """Number of the call site in the model, different for each."""

    def __post_init__(self) -> None:
        if not 0 <= self.p < 1:
            raise ValueError(f"a dropout probability of {self.p}; expected at least 0 and less than 1")

    @property
    def threshold(self) -> int:
        """An element is kept when its 8 bits, with the draw's tie for a fraction, are no less than this / 256."""
        # At most 65535: p is below 1, and rounding must not make it so.
        return min(round(self.p * 65536), 65535)

    @property
    def scale(self) -> float:
        """Factor that kept elements are multiplied by."""
        return 1 / (1 - self.p)

    def mask(self, rows: Tensor, columns: int) -> Tensor:
        """bool [len(rows), columns]: what is kept in the rows with these numbers (int64).

        Element (r, c) takes 8 bits of the draw with counter (c // 16, stream, r, step mod 2^32) and the seed as key: bit
        16 + c % 16 of each of its four words, then bit c % 16 of each, from low to high. The number that they are is kept
        above threshold // 256 and dropped below. Where it is that very number, all of the draw are kept together, if its
        tie is no less than threshold % 256. The tie is of all 128 bits, so that it depends on those of one element no more
        than on another's: it makes the probability exact, and two elements alike in one pair of 65,536.
        """
        draws = torch.arange(-(-columns // PLACES_A_DRAW), device=rows.device)
        seed, step = self.state.to(rows.device).unbind()
        words = philox(
            seed, [draws[None, :], torch.full_like(draws, self.stream)[None, :], rows[:, None], step & _WORD]
        )
        # int64 has no room for the product of two words, and wraps: its lower 32 bits are right all the same.
        # The highest 8 bits of the product depend on all bits of the word.
        tie = (((words[0] ^ words[1] ^ words[2] ^ words[3]) * TIE_MULTIPLIER & _WORD) >> 24)[..., None]
        # int16 holds numbers of 8 bits and a threshold of 256.
        least = (self.threshold // 256 + (tie < self.threshold % 256)).to(torch.int16)
        lanes = torch.arange(PLACES_A_DRAW, dtype=torch.int16, device=rows.device)
        numbers = torch.zeros((), dtype=torch.int16, device=rows.device)
        halves = [word >> first for first in (16, 0) for word in words]
        for place, half in enumerate(halves):  # 16 bits of them, in 16 bits, as this moves more memory than all else
            numbers = numbers | ((half.to(torch.int16)[..., None] >> lanes) & 1) << place
        return (numbers >= least).flatten(1)[:, :columns]


def philox(seed: Tensor, counter: list[Tensor]) -> list[Tensor]:
    """Four words of 32 bits, in int64, for each counter of four words (broadcast against one another); ``seed`` int64 []."""
    # All words in int64: PyTorch has no arithmetic of unsigned 32-bit numbers on every device.
    c0, c1, c2, c3 = torch.broadcast_tensors(*(word & _WORD for word in counter))
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(ROUNDS):
        (high_0, low_0), (high_1, low_1) = (
            _product(multiplier, word) for multiplier, word in zip(MULTIPLIERS, (c0, c2), strict=True)
        )
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = ((key + step) & _WORD for key, step in zip((k0, k1), KEY_STEPS, strict=True))
    return [c0, c1, c2, c3]


def _product(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product of 32-bit words, without a 64-bit unsigned type: in halves of 16 bits."""
    low = (word & 0xFFFF) * multiplier
    high = (word >> 16) * multiplier
    total = high + (low >> 16)
    return (total >> 16) & _WORD, ((total & 0xFFFF) << 16) | (low & 0xFFFF)
