"""Logs in other formats, compressed logs, and logs from standard input."""

import bz2
import gzip
import io
import json
import lzma
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from compliance.check.checker import check_file
from compliance.log import reader
from compliance.log.findings import Finding, Verdict
from compliance.log.reader import STDIN
from compliance.log.record import TOKEN
from compliance.submission.check import accepted, check_paths
from tests.compliance.check.conftest import VerdictText
from tests.compliance.check.whole_logs import brief


def in_json(text: str) -> str:
    return "".join(json.dumps({"log": line, "stream": "stdout"}) + "\n" for line in text.splitlines())


def as_python(text: str) -> str:
    return "".join(f"{TOKEN}{json.loads(line[len(TOKEN) :])!r}\n" for line in text.splitlines())


FORMATS: dict[str, Callable[[str], str | bytes]] = {
    "no space after the token": lambda text: text.replace(TOKEN, TOKEN.strip()),
    "marker of 2018": lambda text: "one\n" + text.replace(TOKEN, ":::MLPv0.5.0 bert "),
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-16 without a mark": lambda text: text.encode("utf-16-le"),
    "a third of zeros": lambda _: b"\0ab" * 9,
    "gzip": lambda text: gzip.compress(text.encode()),
    "xz": lambda text: lzma.compress(text.encode()),
    "bzip2": lambda text: bz2.compress(text.encode()),
    "a description": lambda _: json.dumps({"submitter": "Example"}, indent=2),
    "metrics": lambda _: '{"event": "run", "recipe": "tiny"}\n',
    "nothing": lambda _: "",
    "container log": in_json,
    "Python": as_python,
}


def test_a_file_of_another_format_gets_one_finding_that_names_the_format(verdict_text: VerdictText) -> None:
    said = "".join(f"{name} => {verdict_text(change(brief()))}\n" for name, change in FORMATS.items())
    assert said == Path(__file__).with_name("formats.txt").read_text()


def tar(content: bytes) -> bytes:
    with tarfile.open(fileobj=(out := io.BytesIO()), mode="w") as archive:
        info = tarfile.TarInfo("result_0.txt")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def padded(log: bytes, size: int) -> bytes:
    return log + b"#" * (size - len(log))


UNPACKED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "plain": (lambda log: log, ""),
    "compressed": (gzip.compress, ""),
    "two members": (lambda log: gzip.compress(log[:5000]) + gzip.compress(log[5000:]), ""),
    "as large as may be": (lambda log: gzip.compress(padded(log, 2**21)), ""),
    "too large": (lambda log: gzip.compress(padded(log, 2**21 + 1)), "after unpacking, a file of more than 2 MiB"),
    "too large without": (lambda log: padded(log, 2**21 + 1), "a file of more than 2 MiB; expected at most 50 MiB"),
    "cut off": (lambda log: gzip.compress(log)[:-20], "damaged (Compressed file ended"),
    "wrong checksum": (lambda log: gzip.compress(log)[:-8] + bytes(8), "damaged (CRC check failed"),
    "rubbish behind it": (lambda log: gzip.compress(log) + b"rubbish", "damaged (Not a gzipped file"),
    "damaged": (lambda log: gzip.compress(log)[:100] + b"rubbish" * 1000, "damaged (Error"),
    "compressed twice": (lambda log: gzip.compress(gzip.compress(log)), "after unpacking, it is compressed by gzip"),
    "an archive": (lambda log: gzip.compress(tar(log)), "after unpacking, it is a tar archive"),
    "empty": (lambda _: b"", "it is empty"),
}


@pytest.mark.parametrize("form", UNPACKED)
def test_compressed_logs_are_read_from_file_and_stdin(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, words = UNPACKED[form]
    path = tmp_path / "result_0.txt.gz"
    path.write_bytes(change(brief().encode()))
    monkeypatch.setattr(reader, "MAX_LOG_BYTES", 2**21)
    for given, name in ((path, str(path)), (STDIN, "<stdin>")):
        with path.open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            verdict = check_file(given)
        assert (str(verdict.path), verdict.official) == (name, "fail" if words else "pass")
        assert [words in finding.found for finding in verdict.findings] == ([True] if words else [])


def test_standard_input_is_read_once_and_excused_by_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", None)
    for paths, words in (
        ([STDIN], "zcat"),
        ([STDIN, STDIN], "given 2 times, but standard input can be read only once"),
    ):
        with pytest.raises(ValueError, match=words):
            check_paths(paths)
    # A failing log is accepted if its folder passes. Standard input is in no folder, so its log must pass.
    folder = Verdict(Path(), "5.0.0", "pass", (), None, None, part="folder")
    error = Finding(None, "", "log format", "no record; expected the log of a run", "copy it again")
    assert not accepted([folder, Verdict(reader.STDIN_NAME, "5.0.0", "fail", (error,), None, None)])
