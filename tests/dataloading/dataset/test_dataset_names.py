"""Hostile file names, passed to the dataloading commands: the output is harmless and the exit status is right."""

import sys
from pathlib import Path

import pytest

from dataloading.__main__ import main
from tests.dataloading.made_up import TEXT, TOKENS
from tests.hostile import LONG, NAME, assert_harmless


def assert_said(
    status: int, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], *arguments: object
) -> None:
    """Check that a command ends with this status and that its output is harmless."""
    monkeypatch.setattr(sys, "argv", ["dataloading", *map(str, arguments)])
    found = main()
    output = b"".join(capfdbinary.readouterr()).decode()
    assert_harmless(output)
    assert (arguments[0], found) == (arguments[0], status), output
    assert not status or (output.startswith("error: ") and output.count("\n") == 1)


def test_every_command_that_reads_and_writes_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    text, vocab, out = tmp_path / f"{NAME}.txt", tmp_path / f"{NAME}.vocab", tmp_path / NAME
    text.write_text(TEXT)
    vocab.write_text("\n".join(TOKENS))
    made = out / "made"
    for step in (
        ["prepare", "--text", text, "--vocab", vocab, "--out", made, "--max_seq_length", 32, "--dupe_factor=3"],
        ["verify", made],
        ["shuffle", made, "--out", out / "shuffled", "--shards", "2"],
        ["convert", made, "--out", out / "other", "--to", "packed", "--max-sequences", 2],
        ["dump", made / "part_00000_of_00001.hdf5", "--out", out / f"{LONG[:200]}.npz"],
    ):
        assert_said(0, monkeypatch, capfdbinary, *step)
