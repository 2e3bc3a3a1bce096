"""Names of files that lie, through the commands of the data stages: what is printed is harmless, the status is right."""

import os
import sys
from pathlib import Path

import pytest

from dataloading.__main__ import main
from tests.dataloading.test_dataloading_cli import FLAGS, TOKENS
from tests.hostile import LONG, NAME, assert_harmless, run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / f"{NAME}.txt"
    path.write_text("\n".join("" if line % 9 == 8 else f"w{line % 30} w3 w{line % 7}" for line in range(200)))
    return path


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    path = tmp_path / f"{NAME}.vocab"
    path.write_text("\n".join(TOKENS))
    return path


def said(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], *arguments: object
) -> tuple[int, str]:
    """Exit status and output of a command, which must be harmless."""
    monkeypatch.setattr(sys, "argv", ["dataloading", *map(str, arguments)])
    status = main()
    output = b"".join(capfdbinary.readouterr()).decode()
    assert_harmless(output)
    if status:
        assert output.startswith("error: ")
        assert output.count("\n") == 1
    return status, output


def test_every_command_that_reads_and_writes_data(
    tmp_path: Path,
    text: Path,
    vocab: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    out = tmp_path / NAME
    made, other = out / "made", out / "other"
    steps = [
        ["prepare", "--text", text, "--vocab", vocab, "--out", made, *FLAGS],
        ["verify", made],
        ["shuffle", made, "--out", out / "shuffled", "--shards", "2"],
        ["convert", made, "--out", other, "--to", "fixed"],
        ["pick-evaluation", made, "--out", out / "picked", "--samples", "5"],
        ["dump", made / "?", "--out", out / f"{LONG[:200]}.npz"],
    ]
    for step in steps:
        arguments = [next(made.glob("*.hdf5")) if argument == made / "?" else argument for argument in step]
        status, output = said(monkeypatch, capfdbinary, *arguments)
        assert (step[0], status) == (step[0], 0), output


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", f"OUT/{NAME}"],
        ["verify", f"OUT/{LONG}"],
        ["merge", f"OUT/{NAME}", "--out", "OUT/x"],
        ["index", f"OUT/{NAME}", "--vocab", f"OUT/{NAME}"],
        ["extract", f"OUT/{NAME}", "--out", "OUT/x"],
        ["prepare", "--text", f"OUT/{NAME}", "--vocab", f"OUT/{NAME}", "--out", "OUT/x"],
        ["dump", f"OUT/{NAME}", "--out", "OUT/x.npz"],
        ["verify", f"--{NAME}"],
        [NAME],
    ],
    ids=lambda arguments: " ".join(arguments).replace(LONG, "NAME").replace(NAME, "NAME"),
)
def test_what_is_refused_is_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    given = [argument.replace("OUT/", f"{tmp_path}/") for argument in arguments]
    assert said(monkeypatch, capfdbinary, *given)[0] == 2


def test_a_process_of_its_own_says_it_as_harmlessly(tmp_path: Path) -> None:
    status, output = run("dataloading", ["verify", tmp_path / NAME], os.environ)
    assert status == 2
    assert_harmless(output)
