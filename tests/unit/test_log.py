import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compliance import artefact
from compliance.log import MAX_RECORD_CHARACTERS, TOKEN, Log, read_log

Reader = Callable[[str | bytes], Log]


def record(key: object = "seed", value: object = 1, **changes: object) -> str:
    """A line with a record; `...` as a field leaves it out."""
    fields: dict[str, object] = {
        "namespace": "",
        "time_ms": 5,
        "event_type": "POINT_IN_TIME",
        "key": key,
        "value": value,
    }
    fields |= {"metadata": {"file": "a.py", "lineno": 3}} | changes
    return TOKEN + json.dumps({name: field for name, field in fields.items() if field is not ...})


@pytest.fixture
def read(tmp_path: Path) -> Reader:
    def read_text(text: str | bytes) -> Log:
        path = tmp_path / "result_0.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_log(path)

    return read_text


def test_records_keep_their_file_lines_and_prefixes_are_dropped(read: Reader) -> None:
    log = read(f"# recipe: x\nplain\n{record()}\n\n0: {record('global_batch_size', 4)}\n")
    assert [(entry.line, entry.key, entry.value) for entry in log.records] == [
        (3, "seed", 1),
        (5, "global_batch_size", 4),
    ]
    assert log.token_lines == (3, 5)
    assert log.header == {"recipe": "x"}
    assert not log.problems
    assert log.records[0].logged_at == "a.py:3"


def test_first_and_last_of_a_key(read: Reader) -> None:
    log = read("\n".join(record("eval_accuracy", value) for value in (0.1, 0.2)))
    first, last = log.first("eval_accuracy"), log.last("eval_accuracy")
    assert first
    assert last
    assert (first.value, last.value) == (0.1, 0.2)
    assert log.first("seed") is None
    assert log.last("seed") is None


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_are_those_of_the_official_parser(read: Reader, end: str) -> None:
    log = read(f"a\x0bb\x0cc\u2028d{end}{record()}{end}")
    assert log.token_lines == (2,)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (record() + " trailing", "text after the record"),
        (record()[:-5], "broken JSON"),
        (record() + record(), "2 records on one line"),
        (TOKEN + "[1]", "a JSON list"),
        (TOKEN, "broken JSON"),
        (TOKEN + "[" * 10_000, "broken JSON"),
        (TOKEN + '{"time_ms": 1' + "0" * 5000 + "}", "broken JSON"),
        (record(value=float("nan")), "the value NaN"),
        (record(value=float("inf")), "the value Infinity"),
        (record(value="x" * MAX_RECORD_CHARACTERS), "a line of"),
        (record(time_ms=1.5), "time_ms 1.5"),
        (record(time_ms=True), "time_ms True"),
        (record(event_type="POINT"), "event_type 'POINT'"),
        (record(event_type=[]), "event_type []"),
        (record(key=7), "key 7"),
        (record(metadata=None), "metadata None"),
        (record(metadata=...), "without metadata"),
        (record(value=...), "without value"),
    ],
)
def test_bad_lines_are_problems_with_their_line_and_do_not_stop_the_reading(
    read: Reader, line: str, found: str
) -> None:
    log = read(f"text\n{line}\n{record()}\n")
    assert [problem.line for problem in log.problems] == [2]
    assert found in log.problems[0].found
    assert log.problems[0].expected
    assert [entry.line for entry in log.records] == [3]
    assert log.token_lines == (2, 3)


def test_bytes_that_are_no_text_are_read(read: Reader) -> None:
    log = read(b"\xff\xfe\x00\n" + record().encode() + b"\n\xc3\x28 " + record().encode())
    assert len(log.records) == 2


@given(st.binary(max_size=400))
def test_any_bytes_are_read_without_an_exception(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("log") / "result_0.txt"
    path.write_bytes(TOKEN.encode() + content)
    log = read_log(path)
    assert len(log.records) + len(log.problems) == len(log.token_lines) == 1


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@given(json_values.filter(lambda value: TOKEN not in json.dumps(value)))
def test_every_json_value_comes_back(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    path = tmp_path_factory.mktemp("log") / "result_0.txt"
    path.write_text(record(value=value) + "\n")
    log = read_log(path)
    assert not log.problems
    assert log.records[0].value == value


def test_source_position_that_could_steer_a_terminal_is_left_out(read: Reader) -> None:
    assert read(record(metadata={"file": "a\x1b[2J.py", "lineno": 3})).records[0].logged_at is None
    assert read(record(metadata={"file": "a.py"})).records[0].logged_at is None


def test_missing_file_folder_and_device_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        read_log(tmp_path / "none.txt")
    with pytest.raises(ValueError, match="a folder"):
        read_log(tmp_path)


def test_oversized_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artefact, "MAX_FILE_BYTES", 2**20)
    path = tmp_path / "result_0.txt"
    path.write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(ValueError, match="larger than 1 MiB"):
        read_log(path)
