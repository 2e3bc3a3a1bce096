"""Timeline of a rank: a sequence of computation pieces and a concurrent sequence of messages, which wait for one another.

Computation and messages both need processors. If there are too few for both, messages get as many as they need, but at most
half of all, and computation gets the rest. On a GPU, messages need no processors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Piece:
    """Seconds of computation that begins after ``needs`` messages have arrived. With 0 seconds, it only waits for them."""

    seconds: float
    needs: int = 0


@dataclass(frozen=True)
class Message:
    """Seconds of a collective that begins after ``after`` pieces, and the share of processors that it keeps busy."""

    seconds: float
    after: int
    share: float = 0.0


@dataclass(frozen=True)
class Ends:
    """Seconds until all pieces are computed, seconds until all messages have arrived, and seconds spent waiting."""

    computed: float
    arrived: float
    waited: float


def run(pieces: Sequence[Piece], messages: Sequence[Message], demand: float) -> Ends:
    """Simulate pieces and messages. ``demand`` is the share of processors that computation alone keeps busy."""
    now = computed = waited = 0.0
    piece = message = 0
    left_piece = pieces[0].seconds if pieces else 0.0
    left_message = messages[0].seconds if messages else 0.0
    while piece < len(pieces) or message < len(messages):
        computing = piece < len(pieces) and pieces[piece].needs <= message
        sending = message < len(messages) and messages[message].after <= piece
        assert computing or sending, "pieces and messages wait for each other"
        speed_piece = speed_message = 1.0
        if computing and sending:
            speed_piece, speed_message = _speeds(demand, messages[message].share)
        # Advance to the next end of a piece or a message. The speeds are constant until then.
        until_piece = left_piece / speed_piece if computing else inf
        until_message = left_message / speed_message if sending else inf
        step = min(until_piece, until_message)
        now += step
        if not computing and piece < len(pieces) and pieces[piece].seconds == 0:
            waited += step
        if computing:
            left_piece -= step * speed_piece
        if sending:
            left_message -= step * speed_message
        # A piece and a message may end at the same instant.
        if computing and until_piece <= until_message:
            piece, computed = piece + 1, now
            left_piece = pieces[piece].seconds if piece < len(pieces) else 0.0
        if sending and until_message <= until_piece:
            message += 1
            left_message = messages[message].seconds if message < len(messages) else 0.0
    return Ends(computed, now, waited)


def _speeds(demand: float, share: float) -> tuple[float, float]:
    """Return the speeds of a piece and of a message that run at the same time, each relative to running alone."""
    if demand + share <= 1 or share == 0:
        return 1.0, 1.0
    given = min(share, max(0.5, 1 - demand))
    return min(1.0, (1 - given) / demand), given / share
