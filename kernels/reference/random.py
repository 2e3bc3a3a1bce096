"""Dropout with a counter-based generator: each random bit is a function of a seed, a step, a call site and a position.

A captured graph draws a new mask at each replay, because it reads the seed and the step from the device. The backward pass
can recompute the mask of the forward pass, and all implementations draw the same mask bit for bit. The generator is Philox
4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Seven rounds are the fewest that
pass the randomness tests of BigCrush in that paper. More rounds would slow dropout, whose main cost is drawing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7

PLACES_A_DRAW = 16
"""Number of adjacent columns that share one draw. Each column uses 8 of the draw's 128 bits."""

TIE_MULTIPLIER = 0x9E3779B9
"""2^32 divided by the golden ratio. Multiplying by it makes the highest bits depend on all bits of the other factor."""


@dataclass(frozen=True)
class Dropout:
    """Dropout parameters of one call. ``mask`` defines which elements are kept."""

    p: float
    """Probability of dropping an element, exact to within 1 / 131072."""
    state: Tensor
    """int64 [2] on the device of the data: the run's seed, and a step number that changes with every micro-batch."""
    stream: int
    """Number of the call site in the model."""

    def __post_init__(self) -> None:
        if not 0 <= self.p < 1:
            raise ValueError(f"the dropout probability is {self.p}; use at least 0 and less than 1")

    @property
    def threshold(self) -> int:
        """Probability of dropping an element, in units of 1 / 65536.

        An element is kept if its 8 bits, followed by the 8 bits of the draw's tie (see ``mask``), are at least this number.
        """
        # At 65536 no element would be kept, so rounding must not reach it.
        return min(round(self.p * 65536), 65535)

    @property
    def scale(self) -> float:
        return 1 / (1 - self.p)

    def mask(self, rows: Tensor, columns: int) -> Tensor:
        """Return which elements are kept in the rows with these numbers (int64), bool [len(rows), columns].

        Element (r, c) uses an 8-bit number from the draw with counter (c // 16, stream, r, step mod 2^32) and the seed
        as key. A draw has four 32-bit words. From low to high, the number consists of bit 16 + c % 16 of each word and
        then bit c % 16 of each word. The element is kept if the number is above threshold // 256, and dropped if it is
        below.

        If the number equals threshold // 256, the element is kept if the draw's tie is at least threshold % 256. The
        tie is an 8-bit number that depends on all 128 bits of the draw. It makes the probability exact. All elements of
        a draw share the tie, but it decides two of them only if both of their numbers equal threshold // 256: for one
        pair in 65,536.
        """
        draws = torch.arange(-(-columns // PLACES_A_DRAW), device=rows.device)
        seed, step = self.state.to(rows.device).unbind()
        words = philox(
            seed, [draws[None, :], torch.full_like(draws, self.stream)[None, :], rows[:, None], step & _WORD]
        )
        # The product overflows int64, but its lower 32 bits are correct, and the highest 8 of them depend on all bits of
        # the word.
        tie = (((words[0] ^ words[1] ^ words[2] ^ words[3]) * TIE_MULTIPLIER & _WORD) >> 24)[..., None]
        least = (self.threshold // 256 + (tie < self.threshold % 256)).to(torch.int16)
        lanes = torch.arange(PLACES_A_DRAW, dtype=torch.int16, device=rows.device)
        numbers = torch.zeros((), dtype=torch.int16, device=rows.device)
        halves = [word >> first for first in (16, 0) for word in words]
        for place, half in enumerate(halves):  # uses int16, because this loop moves the most memory
            numbers = numbers | ((half.to(torch.int16)[..., None] >> lanes) & 1) << place
        return (numbers >= least).flatten(1)[:, :columns]


def philox(seed: Tensor, counter: list[Tensor]) -> list[Tensor]:
    """Return four 32-bit random words for each counter of four words. ``seed`` is int64 []; the counter's words broadcast.

    All words are stored as int64, because PyTorch lacks unsigned 32-bit arithmetic on some devices. The product of two
    words may overflow int64. Its 64 bits are still correct, but a right shift then fills in a wrong sign, which the code
    masks.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*(word & _WORD for word in counter))
    k0, k1 = seed, seed >> 32
    for _ in range(ROUNDS):
        product_0, product_1 = (c * multiplier for c, multiplier in zip((c0, c2), MULTIPLIERS, strict=True))
        c0, c2 = ((product_1 >> 32) ^ c1 ^ k0) & _WORD, ((product_0 >> 32) ^ c3 ^ k1) & _WORD
        c1, c3 = product_1 & _WORD, product_0 & _WORD
        k0, k1 = (key + step for key, step in zip((k0, k1), KEY_STEPS, strict=True))
    return [c0, c1, c2, c3]
