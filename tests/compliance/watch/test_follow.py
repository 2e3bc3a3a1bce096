import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from compliance.watch import follow
from compliance.watch.follow import Follower


def test_lines_come_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthr")
    with Follower(path) as follower, path.open("ab", buffering=0) as writer:
        assert list(follower.lines()) == [b"one", b"two"]
        assert follower.unfinished == b"thr"
        assert list(follower.lines()) == []
        writer.write(b"ee\nfour\r\n")
        assert list(follower.lines()) == [b"three", b"four"]
        assert follower.unfinished == b""
        assert (follower.restarts, follower.bytes_read) == (0, path.stat().st_size)


def test_a_file_that_comes_later_is_cut_short_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "log"
    with Follower(path) as follower:
        assert list(follower.lines()) == []
        path.parent.mkdir()
        path.write_bytes(b"one\ntwo\nhalf")
        assert list(follower.lines()) == [b"one", b"two"]
        assert follower.restarts == 0
        path.write_bytes(b"new\n")  # the same file, truncated
        assert list(follower.lines()) == [b"new"]
        assert follower.restarts == 1
        path.unlink()
        assert list(follower.lines()) == []
        path.write_bytes(b"another\n")
        assert list(follower.lines()) == [b"another"]


def test_a_file_that_is_replaced_is_read_to_its_end_first(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    with Follower(path) as follower:
        list(follower.lines())
        with path.open("ab") as writer:
            writer.write(b"last of the old\nhalf")
        path.rename(tmp_path / "log.1")
        path.write_bytes(b"first of the new, which is longer than the old\n")
        assert list(follower.lines()) == [b"last of the old", b"first of the new, which is longer than the old"]
        assert follower.restarts == 1
        assert list(follower.lines()) == []


def test_nothing_is_lost_that_comes_just_before_the_replacement(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n")

    class Raced(Follower):
        def _was_replaced(self, status: os.stat_result) -> bool:
            if not self.restarts:
                with path.open("ab") as writer:
                    writer.write(b"late\n")
                path.rename(tmp_path / "log.1")
                path.write_bytes(b"new\n")
            return super()._was_replaced(status)

    with Raced(path) as follower:
        assert list(follower.lines()) == [b"one", b"late", b"new"]


def test_an_overlong_line_is_left_out_and_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n" + b"x" * (5 * follow.MAX_LINE_BYTES) + b"\ntwo\n" + b"y" * (2 * follow.MAX_LINE_BYTES))
    with Follower(path) as follower:
        assert list(follower.lines()) == [b"one", b"two"]
        assert follower.unfinished == b""
        with path.open("ab") as writer:
            writer.write(b"y\nthree\n")
        assert list(follower.lines()) == [b"three"]


def test_what_is_no_regular_file_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with Follower(path) as follower:
            assert list(follower.lines()) == []


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_pieces_of_any_size_give_the_same_lines(pieces: list[bytes]) -> None:
    path = Path(f"/dev/shm/follow-{os.getpid()}")
    path.write_bytes(b"")
    got: list[bytes] = []
    try:
        with Follower(path) as follower, path.open("ab", buffering=0) as writer:
            for piece in pieces:
                writer.write(piece)
                got += follower.lines()
            whole = b"".join(pieces)
            assert got == [line.rstrip(b"\r") for line in whole.split(b"\n")[:-1]]
            assert follower.unfinished == whole.split(b"\n")[-1]
            assert follower.bytes_read == len(whole)
    finally:
        path.unlink()
