import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert.log.mllog import MLLog
from compliance.check.checker import check_file
from compliance.log import digest
from compliance.log.reader import read_log
from tests.compliance.run_logs import initialise, write_run
from tests.conftest import at_most


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = write_run(tmp_path_factory.mktemp("open") / "result_0.txt", "open", header={"recipe": "test"})
    return path.read_text().splitlines()


def broken_stretch(folder: Path, lines: list[str], end: str = "\n") -> tuple[int, int] | None:
    path = folder / "result_0.txt"
    path.write_bytes("".join(line + end for line in lines).encode())
    return read_log(path).chain.broken


def test_each_digest_is_the_sha_256_of_the_lines_above_it(lines: list[str]) -> None:
    places = [number for number, line in enumerate(lines) if line.startswith("# digest")]
    for number in places:
        above = "".join(f"{above}\n" for above in lines[:number])
        assert lines[number].rpartition(" ")[2] == hashlib.sha256(above.encode()).hexdigest()
    assert (lines[0], places[0], places[-1]) == (digest.OPENING, digest.LINES_A_DIGEST, len(lines) - 1)
    assert lines[-1].startswith("# digest at the end: ")
    assert all(after - before <= digest.LINES_A_DIGEST + 1 for before, after in itertools.pairwise(places))
    assert '"run_stop"' in lines[places[-2] - 1]
    assert len(places) < 0.05 * len(lines) + 3
    chain = digest.Chain()
    chain.add(b"a")
    chain.add(b"b")
    assert (chain.lines, chain.pending) == (2, 2)
    assert chain.close_stretch() == b"# digest: " + hashlib.sha256(b"a\nb\n").hexdigest().encode()
    assert (chain.lines, chain.pending) == (3, 0)


def test_an_intact_digest_chain_passes_with_any_line_ends(tmp_path: Path, lines: list[str]) -> None:
    assert broken_stretch(tmp_path, lines, end="\r\n") is None  # changing line endings does not invalidate digests
    assert broken_stretch(tmp_path, lines) is None
    log = read_log(tmp_path / "result_0.txt")
    assert (log.chain.opened, log.chain.ended, log.header) == (True, True, {"recipe": "test"})
    assert check_file(log.path).findings == ()


EDITS: dict[str, Callable[[list[str], int, int], list[str]]] = {
    "change": lambda lines, place, _: [*lines[:place], lines[place] + " ", *lines[place + 1 :]],
    "remove": lambda lines, place, _: lines[:place] + lines[place + 1 :],
    "insert": lambda lines, place, other: [*lines[:place], lines[other], *lines[place:]],
    "swap": lambda lines, place, _: [*lines[: place - 1], lines[place], lines[place - 1], *lines[place + 1 :]],
}


@at_most(30)
@given(st.sampled_from(sorted(EDITS)), st.integers(1, 90), st.integers(1, 90))
def test_any_edit_is_located_between_two_digests(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], kind: str, place: int, other: int
) -> None:
    edited = EDITS[kind](lines, place, other)
    stretch = broken_stretch(tmp_path_factory.mktemp("log"), edited)
    if stretch is None:  # Only an edit of a digest line, or one without effect, may stay undetected.
        assert edited == lines or any(line.startswith("# digest") for line in {*lines} - {*edited})
        return
    first, last = stretch
    assert first - 1 <= place + 1 <= last + 1
    assert last - first <= 2 * digest.LINES_A_DIGEST + 3


DAMAGES: list[Callable[[list[str]], list[str]]] = [
    lambda lines: [*lines[:10], lines[10] + " ", *lines[11:]],
    lambda lines: [*lines[:40], lines[41], lines[40], *lines[42:]],
    lambda lines: lines[1:],
    lambda lines: [line for line in lines if not line.startswith("# digest")],
    lambda lines: [*lines, "# note"],
    lambda lines: lines[:-2],  # remove the digest at the end, and the one after run_stop
    lambda lines: lines[:-1],
]


def test_each_damaged_digest_chain_gets_the_recorded_finding(tmp_path: Path, lines: list[str]) -> None:
    said, path = "", tmp_path / "result_0.txt"
    for damage in DAMAGES:
        path.write_text("\n".join(damage(lines)) + "\n")
        (finding,) = [finding for finding in check_file(path).findings if finding.rule == "docs/compliance.md"]
        said += f"{finding}\n"
    assert said == Path(__file__).with_name("damages.txt").read_text()


def test_a_log_in_progress_has_its_records_and_digests_on_disk(tmp_path: Path) -> None:
    log = MLLog(tmp_path / "result_0.txt")
    initialise(log, "open")
    left = read_log(tmp_path / "result_0.txt")  # `log` is still being written
    assert left.chain.broken is None
    assert left.chain.digests >= 1
    assert left.run.last["run_start"]
