"""Timeline of a rank: computing in order, messages in order beside it, each waiting for the other where it must.

Both want processors: where there are too few for both, messages get what they ask for up to half of them, as the kernel
gives whoever sleeps now and then, and computing the rest. On a GPU messages ask for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """A piece of computing: seconds when nothing goes on beside it. It begins when so many messages have arrived.

    One of no seconds is a wait for messages.
    """

    seconds: float
    needs: int = 0


@dataclass(frozen=True)
class Message:
    """A collective: seconds when nothing is computed beside it. It begins after so many pieces.

    Attributes:
        share: of the processors that it keeps busy meanwhile.
    """

    seconds: float
    after: int
    share: float = 0.0


@dataclass(frozen=True)
class Ends:
    """Seconds at which all pieces are computed, and all messages are there; and seconds of waits."""

    computed: float
    arrived: float
    waited: float


def run(pieces: Sequence[Piece], messages: Sequence[Message], demand: float) -> Ends:
    """Let pieces and messages go on side by side. ``demand``: share of the processors that computing keeps busy alone."""
    now = computed = waited = 0.0
    # `message` counts those that have arrived: messages are waited for by their number, not by name.
    piece = message = 0
    left_piece = pieces[0].seconds if pieces else 0.0
    left_message = messages[0].seconds if messages else 0.0
    while piece < len(pieces) or message < len(messages):
        # Only the next piece and the next message can be under way: both queues are in order.
        computing = piece < len(pieces) and pieces[piece].needs <= message
        sending = message < len(messages) and messages[message].after <= piece
        # A cycle between the two would loop forever with infinite times.
        assert computing or sending, "pieces and messages wait for each other"
        # Go on to where the piece, or the message, ends next: until then speeds are the same.
        speed_piece = speed_message = 1.0
        if computing and sending:
            # Both are slowed only while both run; alone each has the speed it was measured at.
            speed_piece, speed_message = _speeds(demand, messages[message].share)
        until_piece = left_piece / speed_piece if computing else float("inf")
        until_message = left_message / speed_message if sending else float("inf")
        step = min(until_piece, until_message)
        now += step
        # A piece without seconds is a wait: what passes before it may start is counted as waiting, not computing.
        if not computing and piece < len(pieces) and pieces[piece].seconds == 0:
            waited += step
        if computing:
            left_piece -= step * speed_piece
        if sending:
            left_message -= step * speed_message
        # Both may end at the same instant, hence two ifs: an else would leave a zero remainder and cost another turn.
        if computing and until_piece <= until_message:
            piece, computed = piece + 1, now
            left_piece = pieces[piece].seconds if piece < len(pieces) else 0.0
        if sending and until_message <= until_piece:
            message += 1
            left_message = messages[message].seconds if message < len(messages) else 0.0
    return Ends(computed, now, waited)


def _speeds(demand: float, share: float) -> tuple[float, float]:
    """Speeds of computing and of a message that go on at once, over those of each alone."""
    # Share 0 is a GPU's collective, or one member's: nothing to compete for.
    if demand + share <= 1 or share == 0:
        return 1.0, 1.0
    # At least half of the processors if it asks for them, or whatever computing leaves over.
    given = min(share, max(0.5, 1 - demand))
    return min(1.0, (1 - given) / demand), given / share
