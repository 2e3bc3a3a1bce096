"""Which rank the watchdog blames, given the ranks' messages and the time since then."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bert.parallel.watchdog.judge import FAULT_STATUS, Ending, Judge, encoded

SECONDS, BEAT = 60.0, 6.0


class Played(Judge):
    """Judge with simulated ranks, two per host, that send a heartbeat at every second until they fall silent."""

    def __init__(self, count: int = 3) -> None:
        super().__init__([f"rank {rank} on host h{rank // 2}" for rank in range(count)], SECONDS, BEAT)
        self.places: dict[int, dict[str, object]] = {}
        for member in self.members:
            self.greet(member)
            self.at(member.rank, "start", 0, entered=-1, limit=None)

    def at(self, rank: int, phase: str, step: int, entered: int = 1, limit: float | None = SECONDS) -> None:
        self.places[rank] = {"phase": phase, "step": step, "entered": entered, "limit": limit}
        self.say(rank, **self.places[rank])

    def say(self, rank: int, **message: object) -> None:
        self.hear(self.members[rank], encoded(message))

    def end(self, most: int = 1000) -> tuple[int, Ending] | None:
        """Let time pass, and return the verdict with the seconds until then, or None if there is none."""
        for second in range(1, most + 1):
            if verdict := self.pass_time(1.0):
                return second, verdict
            for rank, place in self.places.items():
                self.say(rank, **place)
        return None


def test_a_lost_rank_is_blamed_unless_it_said_that_it_leaves() -> None:
    ranks = Played(4)
    ranks.greet(ranks.members[1])  # connects again, and has not reported since
    ranks.lose(ranks.members[1])
    ranks.say(2, left=True)
    ranks.lose(ranks.members[2])
    del ranks.places[2]
    assert ranks.end() is None
    ranks.at(3, "reduce", 1201)
    ranks.lose(ranks.members[3])
    assert ranks.end() == (1, Ending("rank 3 on host h1: ended without a word, last in reduce of step 1201", 3, 3))
    for count, more in ((8, ""), (9, " and 1 more")):
        ranks = Played(9)
        for member in ranks.members[:count]:
            ranks.lose(member)
        names = ", ".join(f"rank {rank} on host h{rank // 2}" for rank in range(8))
        assert ranks.end() == (1, Ending(f"{names}{more}: ended without a word, last in start", 3, 0))


def test_ranks_are_blamed_together_if_they_fell_silent_together() -> None:
    """Ranks that fall silent within two heartbeats of each other count as silent together."""
    ranks = Played(5)
    ranks.at(2, "forward_backward", 7, limit=1000)
    for rank, until in ((2, 0), (3, 12), (1, 13)):
        while ranks.members[0].heard_s < until:
            assert ranks.end(1) is None
        del ranks.places[rank]
    text = "not heard of for 61 s, last in forward_backward of step 7: stopped, or cut off"
    assert ranks.end() == (61 - 13, Ending(f"rank 2 on host h1, rank 3 on host h1: {text}", FAULT_STATUS, 2))


def test_the_rank_furthest_behind_is_blamed_for_a_stall() -> None:
    """Phases are ordered as in a step, and "exchange in" a phase follows the phase. An unknown phase comes last."""
    phases = "data_wait", "forward_backward", "reduce", "update", "site_wait", "statistics", "checkpoint", "evaluation"
    order = [(each, 5) for phase in phases for each in (phase, f"exchange in {phase}")]
    for behind, ahead in pairwise([*order, ("something new", 5), ("data_wait", 6)]):
        ranks = Played()
        for rank, place in enumerate((ahead, behind, ahead)):
            ranks.at(rank, *place)
        waits = f"and the others wait for it in {ahead[0]} of step {ahead[1]}"
        text = f"rank 1 on host h0: standing still for 61 s in {behind[0]} of step 5, {waits}"
        assert ranks.end() == (61, Ending(text, FAULT_STATUS, 1))


def test_no_rank_is_blamed_if_several_ranks_all_stall_in_the_same_phase() -> None:
    ranks = Played()
    for rank in range(3):
        ranks.at(rank, "reduce", 9)
    assert ranks.end() == (61, Ending("no rank gets on: all 3 stand still for 61 s in reduce of step 9", FAULT_STATUS))
    ranks = Played(1)
    ranks.at(0, "reduce", 9)
    assert ranks.end() == (
        61,
        Ending("rank 0 on host h0: standing still for 61 s in reduce of step 9", FAULT_STATUS, 0),
    )


def test_each_new_phase_restarts_the_timeout_that_a_rank_has_requested() -> None:
    """Until the longer timeout of one rank has passed, another rank in the same phase is not blamed either."""
    ranks = Played()
    ranks.at(0, "reduce", 5)
    for entered in range(3):  # enter the same phase again, as for another micro-batch
        ranks.at(1, "data_wait", 5, entered=entered, limit=150.0)
        ranks.at(2, "data_wait", 5, limit=70.0)
        assert ranks.end(150) is None, "rank 1 may still move"
    text = "rank 1 on host h0, rank 2 on host h1: standing still for 151 s in data_wait of step 5"
    assert ranks.end() == (1, Ending(f"{text}, and the others wait for it in reduce of step 5", FAULT_STATUS, 1))


def test_before_training_a_rank_is_not_blamed_while_it_sends_heartbeats() -> None:
    ranks = Played()
    ranks.at(0, "reduce", 1, limit=1000)
    assert ranks.end(1000) is None


def test_ranks_end_with_the_first_reported_status_unless_a_rank_was_lost() -> None:
    """Under torchrun, a rank reports status 0 after a second signal, because torchrun takes any other status for a crash.

    If a rank is lost, errors that this causes on other ranks may be reported before the loss.
    """
    for status, ends_with in ((0, 0), (130, 130), (255, 255), (256, 3), (-1, 3), (1 << 70, 3)):
        for lost in (False, True):
            ranks = Played()
            ranks.say(2, failed="stopped by SIGINT", status=status)
            ranks.say(0, failed="Connection closed by peer", status=7)
            assert ranks.pass_time(0.5) is None
            if lost:
                ranks.lose(ranks.members[1])
            expected = Ending("rank 2 on host h1: stopped by SIGINT", ends_with, 2)
            if lost:
                expected = Ending("rank 1 on host h0: ended without a word, last in start", FAULT_STATUS, 1)
            assert ranks.pass_time(0.1) == expected


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
NAMES = st.sampled_from(["phase", "step", "entered", "limit", "left", "failed", "status"])


@given(st.lists(st.binary(max_size=200) | st.dictionaries(NAMES, VALUES | st.lists(VALUES, max_size=2)), max_size=8))
def test_arbitrary_messages_of_a_rank_never_blame_another_rank(said: list[bytes | dict[str, object]]) -> None:
    ranks = Played()
    for line in said:
        ranks.hear(ranks.members[1], line if isinstance(line, bytes) else encoded(line))
        verdict = ranks.end(2)
        assert verdict is None or verdict[1].rank == 1
