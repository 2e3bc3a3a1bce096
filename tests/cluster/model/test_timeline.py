"""Timelines of computation and communication, compared with calculations by hand."""

import pytest

from cluster.model.step import Activity, simulate


def test_messages_hide_behind_what_is_computed_and_share_its_processors() -> None:
    def message(seconds: float, share: float) -> list[Activity]:
        return [Activity(seconds, needs=1, share=share)]

    two, alone = [Activity(1.0), Activity(2.0)], [Activity(1.0)]
    waiting = [Activity(0.0, needs=1), Activity(1.0, needs=1), Activity(1.0, needs=2)]
    for computations, messages, demand, expected in (
        (two, message(1.5, 0.0), 0.0, (3.0, 3.0, 0.0)),
        (two, [*message(2.5, 0.0), Activity(1.0, needs=2)], 0.0, (3.0, 4.5, 0.0)),
        # Pieces wait for the messages that they need, the second one after it has computed.
        (waiting, [Activity(2.0), Activity(3.0)], 0.0, (6.0, 6.0, 2.0)),
        # Both demand all processors, so each gets half of them until one is done.
        ([*alone, *alone], message(1.0, 1.0), 1.0, (3.0, 3.0, 0.0)),
        # A message that needs a quarter of the processors gets them at once and slows computing down accordingly.
        ([*alone, Activity(1.5)], message(1.0, 0.25), 1.0, (2.75, 2.75, 0.0)),
        # Computing needs a quarter of the processors, so a message that could use all gets the others.
        ([*alone, Activity(4.0)], message(1.5, 1.0), 0.25, (5.0, 5.0, 0.0)),
        (alone, message(1.5, 1.0), 0.25, (1.0, 2.5, 0.0)),
    ):
        assert simulate(computations, messages, demand) == pytest.approx(expected)
