"""Timelines of computation and communication, compared with calculations by hand."""

import pytest

from cluster.model.timeline import Message, Piece, run


def test_a_message_hides_behind_what_is_computed_after_it_began() -> None:
    ends = run([Piece(1.0), Piece(2.0)], [Message(1.5, after=1)], demand=0.0)
    assert (ends.computed, ends.arrived) == (3.0, 3.0)
    ends = run([Piece(1.0), Piece(2.0)], [Message(2.5, after=1), Message(1.0, after=2)], demand=0.0)
    assert (ends.computed, ends.arrived) == (3.0, 4.5)


def test_a_piece_waits_for_the_messages_that_it_needs() -> None:
    ends = run([Piece(0.0, needs=1), Piece(1.0, needs=1), Piece(1.0, needs=2)], [Message(2.0, 0), Message(3.0, 0)], 0.0)
    assert (ends.computed, ends.waited) == (6.0, 2.0)


def test_on_shared_processors_nothing_comes_for_nothing() -> None:
    # Message and computation both demand all processors, so each gets half of them until one is done.
    ends = run([Piece(1.0), Piece(1.0)], [Message(1.0, after=1, share=1.0)], demand=1.0)
    assert (ends.computed, ends.arrived) == (pytest.approx(3.0), pytest.approx(3.0))
    # A message that needs a quarter of the processors gets them at once and slows computing down accordingly.
    ends = run([Piece(1.0), Piece(1.5)], [Message(1.0, after=1, share=0.25)], demand=1.0)
    assert ends.computed == pytest.approx(2.75)
