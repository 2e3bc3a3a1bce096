import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from compliance.watch import follow
from compliance.watch.follow import Follower


def test_a_file_that_comes_later(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "log"
    follower = Follower(path)
    assert list(follower.lines()) == []
    path.parent.mkdir()
    path.write_bytes(b"one\ntwo\nhalf")
    assert list(follower.lines()) == [b"one", b"two"]


def test_an_overlong_line_is_left_out_and_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n" + b"x" * (5 * follow.CHUNK_BYTES) + b"\ntwo\n" + b"y" * (2 * follow.CHUNK_BYTES))
    follower = Follower(path)
    assert list(follower.lines()) == [b"one", b"two"]
    with path.open("ab") as writer:
        writer.write(b"y\nthree\n")
    assert list(follower.lines()) == [b"three"]


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_pieces_of_any_size_give_the_same_lines(pieces: list[bytes]) -> None:
    path = Path(f"/dev/shm/follow-{os.getpid()}")
    path.write_bytes(b"")
    got: list[bytes] = []
    follower = Follower(path)
    try:
        with path.open("ab", buffering=0) as writer:
            for piece in pieces:
                writer.write(piece)
                got += follower.lines()
            whole = b"".join(pieces)
            assert got == [line.rstrip(b"\r") for line in whole.split(b"\n")[:-1]]
    finally:
        path.unlink()
