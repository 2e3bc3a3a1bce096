"""Which rank the watchdog blames, given the ranks' messages and the time since then."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert.parallel.watchdog.judge import FAULT_STATUS, Ending, Judge, encoded

SECONDS, BEAT = 60.0, 6.0


class Played(Judge):
    """Judge with simulated ranks, two per host, that send a heartbeat at every beat until they fall silent."""

    def __init__(self, count: int = 3) -> None:
        super().__init__([""] * count, SECONDS, BEAT)
        self.places: dict[int, dict[str, object]] = {}
        for member in self.members:
            self.greet(member, f"h{member.rank // 2}")
            self.at(member.rank, "start", 0, entered=-1, limit=None)

    def at(self, rank: int, phase: str, step: int, entered: int = 1, limit: float | None = SECONDS) -> None:
        self.places[rank] = {"phase": phase, "step": step, "entered": entered, "limit": limit}
        self.say(rank, **self.places[rank])

    def say(self, rank: int, **message: object) -> None:
        self.hear(self.members[rank], encoded(message))

    def after(self, seconds: float) -> Ending | None:
        """Let time pass, and return the verdict if there is one."""
        for _ in range(int(4 * seconds / BEAT)):
            if verdict := self.pass_time(BEAT / 4):
                return verdict
            for rank, place in self.places.items():
                self.say(rank, **place)
        return None

    def text(self, seconds: float = SECONDS + BEAT) -> str:
        verdict = self.after(seconds)
        assert verdict is not None
        return verdict.text


def test_an_end_without_a_word_is_blamed_and_a_good_bye_is_not() -> None:
    ranks = Played(4)
    ranks.say(2, left=True)
    ranks.lose(ranks.members[2])
    del ranks.places[2]
    assert ranks.after(2 * SECONDS) is None
    ranks.at(3, "reduce", 1201)
    ranks.lose(ranks.members[3])
    expected = "rank 3 on host h1: ended without a word, last in reduce of step 1201"
    assert ranks.after(BEAT) == Ending(expected, FAULT_STATUS, 3)


def test_silence_is_an_end_in_its_time_and_names_all_who_fell_silent_together() -> None:
    ranks = Played(5)
    ranks.at(2, "forward_backward", 7, limit=1000)
    del ranks.places[2]
    ranks.after(BEAT)
    del ranks.places[3]
    ranks.after(SECONDS - 2 * BEAT)
    del ranks.places[1]
    text = ranks.text(2 * BEAT)
    assert text.startswith("rank 2 on host h1, rank 3 on host h1: not heard of for 6")
    assert "last in forward_backward of step 7" in text


@pytest.mark.parametrize(
    ("behind", "ahead"),
    [
        (("data_wait", 5), ("forward_backward", 5)),
        (("forward_backward", 5), ("exchange in forward_backward", 5)),
        (("exchange in forward_backward", 5), ("reduce", 5)),
        (("exchange in evaluation", 5), ("data_wait", 6)),
        (("update", 5), ("statistics", 5)),
        (("statistics", 5), ("evaluation", 5)),
    ],
)
def test_who_stands_still_furthest_behind_is_named(behind: tuple[str, int], ahead: tuple[str, int]) -> None:
    ranks = Played()
    ranks.at(0, *ahead)
    ranks.at(2, *ahead)
    ranks.at(1, *behind)
    assert ranks.after(SECONDS) is None
    text = ranks.text(2 * BEAT)
    assert text.startswith("rank 1 on host h0: standing still for 6")
    assert text.endswith(f"in {behind[0]} of step 5, and the others wait for it in {ahead[0]} of step {ahead[1]}")


def test_all_in_the_same_place_blames_nobody() -> None:
    ranks = Played()
    for rank in range(3):
        ranks.at(rank, "reduce", 9)
    verdict = ranks.after(SECONDS + 2 * BEAT)
    assert verdict is not None
    assert verdict.text.startswith("no rank gets on: all 3 stand still")
    assert verdict.rank is None


def test_a_rank_has_the_time_that_it_asks_for_and_starts_anew_when_it_moves() -> None:
    """A rank may request a longer timeout, and a new phase restarts it. Ranks that wait for it are not blamed."""
    ranks = Played()
    ranks.at(0, "reduce", 5)
    ranks.at(2, "reduce", 5)
    for entered in range(3):  # enter the same phase again, as for another micro-batch
        ranks.at(1, "data_wait", 5, entered=entered, limit=2.5 * SECONDS)
        assert ranks.after(2.4 * SECONDS) is None
    assert "standing still for 15" in ranks.text()


def test_before_training_only_signs_of_life_count() -> None:
    ranks = Played()
    ranks.at(0, "reduce", 1, limit=1000)
    assert ranks.after(2 * SECONDS) is None


@pytest.mark.parametrize(
    ("status", "ends_with"),
    [(0, 0), (130, 130), (255, 255), (256, FAULT_STATUS), (-1, FAULT_STATUS), (1 << 70, FAULT_STATUS)],
)
def test_ranks_end_with_the_reported_status_if_a_process_can_have_it(status: int, ends_with: int) -> None:
    ranks = Played()
    # Under torchrun, a rank reports a second signal with status 0, because torchrun takes any other status for a crash.
    ranks.say(1, failed="stopped by SIGINT", status=status)
    verdict = ranks.after(SECONDS)
    assert verdict is not None
    assert (verdict.rank, verdict.status) == (1, ends_with)


def test_an_error_ends_all_with_its_status_unless_a_lost_rank_explains_it() -> None:
    for lost in (False, True):
        ranks = Played()
        ranks.say(2, failed="no such file", status=2)
        ranks.say(0, failed="Connection closed by peer", status=FAULT_STATUS)
        assert ranks.pass_time(0.4) is None
        if lost:
            ranks.lose(ranks.members[1])
        verdict = ranks.pass_time(0.2)
        assert verdict is not None
        assert (verdict.rank, verdict.status) == ((1, FAULT_STATUS) if lost else (2, 2))


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.dictionaries(
                st.sampled_from(["phase", "step", "entered", "limit", "left", "failed", "status"]),
                st.recursive(
                    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
                    lambda inner: st.lists(inner, max_size=2),
                ),
            ).map(lambda message: encoded(dict(message))),
        ),
        max_size=8,
    )
)
def test_whatever_a_rank_says_no_other_rank_is_blamed(said: list[bytes]) -> None:
    ranks = Played()
    for line in said:
        ranks.hear(ranks.members[1], line)
        verdict = ranks.after(BEAT)
        assert verdict is None or verdict.rank == 1
