"""Timelines of computation and communication, compared with calculations by hand."""

import pytest

from cluster.model.step import Activity, simulate


def test_a_message_hides_behind_what_is_computed_after_it_began() -> None:
    computed, arrived, _ = simulate([Activity(1.0), Activity(2.0)], [Activity(1.5, needs=1)], demand=0.0)
    assert (computed, arrived) == (3.0, 3.0)
    messages = [Activity(2.5, needs=1), Activity(1.0, needs=2)]
    computed, arrived, _ = simulate([Activity(1.0), Activity(2.0)], messages, demand=0.0)
    assert (computed, arrived) == (3.0, 4.5)


def test_a_piece_waits_for_the_messages_that_it_needs() -> None:
    computations = [Activity(0.0, needs=1), Activity(1.0, needs=1), Activity(1.0, needs=2)]
    computed, _, waited = simulate(computations, [Activity(2.0), Activity(3.0)], 0.0)
    assert (computed, waited) == (6.0, 2.0)


def test_on_shared_processors_nothing_comes_for_nothing() -> None:
    # Message and computation both demand all processors, so each gets half of them until one is done.
    computed, arrived, _ = simulate([Activity(1.0), Activity(1.0)], [Activity(1.0, needs=1, share=1.0)], demand=1.0)
    assert (computed, arrived) == (pytest.approx(3.0), pytest.approx(3.0))
    # A message that needs a quarter of the processors gets them at once and slows computing down accordingly.
    computed, _, _ = simulate([Activity(1.0), Activity(1.5)], [Activity(1.0, needs=1, share=0.25)], demand=1.0)
    assert computed == pytest.approx(2.75)
    # Computing needs a quarter of the processors, so a message that could use all gets the others.
    found = simulate([Activity(1.0), Activity(4.0)], [Activity(1.5, needs=1, share=1.0)], demand=0.25)
    assert found == pytest.approx((5.0, 5.0, 0.0))
    found = simulate([Activity(1.0)], [Activity(1.5, needs=1, share=1.0)], demand=0.25)
    assert found == pytest.approx((1.0, 2.5, 0.0)), "alone, a message has all processors"
