import json
import math
import os
import re
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlperf_logging.compliance_checker.mlp_parser import ruleset_500

from compliance.log import reader as log_module
from compliance.log.reader import Log, read_log
from compliance.log.record import MAX_RECORD_BYTES, TOKEN

Reader = Callable[[str | bytes], Log]


def record(key: object = "seed", value: object = 1, **changes: object) -> str:
    """Return a log line with one record. Omit a field whose value is `...`."""
    fields: dict[str, object] = {"namespace": "", "time_ms": 5, "event_type": "POINT_IN_TIME", "key": key}
    fields |= {"value": value, "metadata": {"file": "a.py", "lineno": 3}} | changes
    return TOKEN + json.dumps({name: field for name, field in fields.items() if field is not ...})


@pytest.fixture
def read(tmp_path: Path) -> Reader:
    def read_text(text: str | bytes) -> Log:
        path = tmp_path / "result_0.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_log(path)

    return read_text


def test_the_reader_returns_records_with_line_numbers_and_the_header(read: Reader) -> None:
    head = f"# a: 1\n# a: 2\n#b: 3\n# c\n# \xe9: \xfc\n# d: {record()}\nplain\n"
    log = read(f"{head}\n0: {record('global_batch_size', 4)}\n")
    entries = [(entry.line, entry.key, entry.value) for entry in log.records]
    assert entries == [(6, "seed", 1), (9, "global_batch_size", 4)]
    assert (log.token_lines, log.problems, log.header) == (2, [], {"a": "1", "\xe9": "\xfc"})
    assert log.records[0].logged_at == "a.py:3"
    assert list(log.run.first.values()) == [*log.records]


DEEP = '{"time_ms": 1, "key": "seed", "value": ' + "[" * 100_000 + "]" * 100_000 + ', "metadata": {}}'


BAD: list[str | bytes] = [
    *(record() + " trailing", record()[:-5], TOKEN + "\x0b" + record()[len(TOKEN) :], TOKEN + "[1]"),
    *(TOKEN + "[" * 10_000, TOKEN + DEEP, TOKEN + '{"time_ms": 1' + "0" * 5000 + "}"),
    record(value="\0").replace("\\u0000", "\0"),
    *(record(time_ms=odd) for odd in (True, "5", 10**400, math.inf)),
    *(record(key=7), record(metadata=[]), record(metadata=...)),
    # The official parser accepts the following records.
    *(record(value=math.nan), record(value=[-math.inf]), record(time_ms=1.5), record(metadata=None)),
    *(record(event_type="POINT"), record(event_type=...)),
    record(value="x" * (MAX_RECORD_BYTES + 1 - len(record(value="")))),
    record(value="\u00ff").encode("latin-1").replace(b"\\u00ff", b"\xff"),
]


def test_invalid_lines_are_reported_and_the_following_lines_are_read(read: Reader) -> None:
    said = []
    for line in BAD:
        log = read(b"text\n%b\n%b\n" % (line if isinstance(line, bytes) else line.encode(), record().encode()))
        [problem] = log.problems
        assert (problem.line, log.token_lines) == (2, 2)
        assert [entry.line for entry in log.records] == ([3] if problem.severity == "error" else [2, 3])
        found = re.sub(r"MLLOG \(.*\)", "MLLOG (...)", problem.found)  # without Python's own message
        said.append(f"{problem.severity}: {found}; expected {problem.expected}\n")
    assert "".join(said) == Path(__file__).with_name("bad_lines.txt").read_text()
    assert read(record(value="x" * (MAX_RECORD_BYTES - len(record(value=""))))).problems == []


def test_hostile_source_positions_and_header_lines_beyond_the_limits_are_dropped(read: Reader) -> None:
    for metadata in ({"file": "a\x1b[2J.py", "lineno": 3}, {"file": "a.py"}):
        assert read(record(metadata=metadata)).records[0].logged_at is None
    most, long = log_module.MAX_HEADER_LINES, log_module.MAX_HEADER_BYTES
    header = read("".join(f"# {number}: x\n" for number in range(most + 1)) + record()).header
    assert [*header] == [str(number) for number in range(most)]
    assert [*read(f"# a: {'x' * (long - 5)}\n# b: {'x' * (long - 4)}\n{record()}").header] == ["a"]


def test_the_reader_rejects_anything_but_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # reading must not block
    reasons = {
        "none.txt": "No such file",
        ".": "Is a directory",
        "pipe": "a pipe or a device",
        "a\0b": "embedded null byte",
    }
    for name, reason in reasons.items():
        with pytest.raises(ValueError, match=reason):
            read_log(tmp_path / name)


# Comparison with the official parser


def official_records(path: Path) -> list[tuple[Any, ...]] | None:
    """Return the records as the official parser reads them, or None if it reports an error."""
    try:
        lines, errors = ruleset_500.parse_file(str(path))
    except Exception:
        return None
    return None if errors else [(line.key, line.value, line.timestamp) for line in lines]


def as_utf_8(value: object) -> Any:
    """Decode as UTF-8 a value that the official parser has decoded as latin-1."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        return json.loads(text.encode("latin-1").decode("utf-8"))
    except UnicodeError:
        return value


FRAGMENTS = st.sampled_from(
    [
        *(TOKEN, ":::MLLOG", " ", "\n", "\r", "\r\n", "\t", "\x0b", "\x0c", "\x1c", "\x85", "\xa0", "\u2028"),
        *("\ufeff", "\0"),
        *("text", "# a: b", "{", "}", "[1]", '"', "\\", "NaN", "1e999", "\xe9", "\U0001f600"),
        *(record(), record("global_batch_size", 1.5), record("seed", "\xe9"), record(value=None, namespace=...)),
        *(record(time_ms="7"), record(time_ms=2.5), record(key=None), record(metadata=None), record(value=...)),
        record()[:-1],
    ]
)


@given(st.lists(FRAGMENTS | st.text(max_size=3), max_size=12), st.sampled_from(["utf-8", "latin-1", "utf-16"]))
@example([record(), "\xa0"], "latin-1")
@example([record(), "\xa0"], "utf-8")
@example([record(), "\x85\n", record(), "\x1c \n"], "latin-1")
@example(["\x0b", record(), "\x0b\r", record(), "\t "], "utf-8")
def test_the_reader_finds_the_same_records_as_the_official_parser(
    tmp_path_factory: pytest.TempPathFactory, fragments: list[str], encoding: str
) -> None:
    path = tmp_path_factory.mktemp("log") / "result_0.txt"
    path.write_bytes("".join(fragments).encode(encoding, "replace" if encoding == "latin-1" else "surrogatepass"))
    log = read_log(path)
    official = official_records(path)
    errors = [problem for problem in log.problems if problem.severity == "error"]
    if official is None:
        assert errors
    elif errors:  # the official parser does not detect these errors
        assert all(re.match(r"time_ms '|key null|\d records on one line", problem.found) for problem in errors)
    else:
        own = [(entry.key, entry.value, entry.metadata) for entry in log.records]
        assert [(key, as_utf_8(v["value"]), as_utf_8(v["metadata"]) or {}) for key, v, _ in official] == own


LINE_ENDS = [b"\n", b"\r", b"\r\n"]
PIECES = st.sampled_from(
    [*LINE_ENDS, b"\x0b\x0c\xe2\x80\xa8", b"x", b"y" * 7, b"z" * 40, b":::ML", b"LOG ", TOKEN.encode()]
)


@given(st.lists(PIECES, max_size=40), st.integers(10, 50))
@example([b"LOG ", TOKEN.encode(), b"\r", b"\r\n"], 14)
@example([b"y" * 7, TOKEN.encode(), b"x\n"], 12)
@example([TOKEN.encode(), b"y" * 7, b"\n"], 15)
@example([TOKEN.encode(), b"y" * 7], 16)
def test_the_reader_splits_lines_as_the_official_parser_does_at_any_length_limit(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], limit: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "result_0.txt"
    path.write_bytes(b"".join(pieces))
    expected = {
        number: "a line of more than" if len(line) > limit else ""
        for number, line in enumerate(re.split(rb"\r\n|\n|\r", b"".join(pieces)), start=1)
        if TOKEN.encode() in line
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_module, "MAX_LINE_BYTES", limit)
        log = read_log(path)
    assert {problem.line for problem in log.problems} == expected.keys()
    assert all(problem.found.startswith(expected[problem.line]) for problem in log.problems)
    assert log.overlong == any(expected.values())


@pytest.mark.parametrize("middle", ["", TOKEN, record()])
def test_overlong_lines_are_skipped_quickly(read: Reader, middle: str) -> None:
    began = time.process_time()
    log = read(f"{record()}\n{'x' * 8_000_000}{middle}{'[' * 8_000_000}\n{record()}\n")
    assert [entry.line for entry in log.records] == [1, 3]
    assert (log.overlong, log.token_lines) == (bool(middle), 2 + bool(middle))
    assert [problem.found for problem in log.problems] == (["a line of more than 1048576 bytes"] if middle else [])
    assert time.process_time() - began < 10


def test_the_official_checker_gets_records_with_known_keys_and_broken_records(read: Reader) -> None:
    log = read(f"plain\n{record()}\n{record('tracked_stats')}\n{TOKEN}broken\n{record('run_stop')}\n")
    assert [number for number, _ in log.evidence] == [2, 4, 5]
    assert log.evidence[0][1] == record().encode()


def test_many_empty_lines_are_read_in_linear_time(read: Reader) -> None:
    began = time.process_time()
    for end in (b"\r", b"\n", b"\r\n", b"\n\r"):
        assert read(end * 100_000 + record().encode()).token_lines == 1
    assert time.process_time() - began < 10


def test_records_take_at_most_two_and_a_half_times_the_memory_of_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    metadata = {"file": "/workspace/bert/run_pretraining.py", "lineno": 812, "epoch_num": 1_000_000}
    with path.open("w") as file:
        for number in range(5000):
            print(record("tracked_stats", time_ms=1_700_000_000_000 + number, metadata=metadata), file=file)
    tracemalloc.start()
    log = read_log(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [entry.metadata for entry in log.records] == [metadata] * 5000
    assert peak < 2.5 * log.size
