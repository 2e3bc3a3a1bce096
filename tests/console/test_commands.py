"""Programs with several commands: error messages for a wrong command line."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import tyro

from console.commands import Commands
from console.program import parsed

app = Commands()


@dataclass(frozen=True)
class Text:
    max_length: int = 8


@app.command(name="plan")
def _plan(out: Path = Path("plan.json"), gpus: int | None = None) -> None:
    """Plan something."""


@app.command
def show(folder: Path, text: Annotated[Text, tyro.conf.arg(name="")]) -> None:
    """Show something."""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("plam", "no command plam, expected one of plan, show; did you mean plan?"),
        ("plam --out x", "no command plam, expected one of plan, show; did you mean plan?"),
        ("xyz", "no command xyz, expected one of plan, show"),
        ("plan --outt x", "plan has no option --outt; did you mean --out?"),
        ("plan --gpus many", "--gpus is 'many', expected a whole number or None"),
        ("plan more", "unexpected argument more"),
        ("plan more --outt x", "plan has no option --outt; did you mean --out?"),
        ("--hlep", "there is no option --hlep, expected one of --help, --version; did you mean --help?"),
        ("plan --hlep", "plan has no option --hlep; did you mean --help?"),
        # Without --folder, which is required, tyro would complain about it alone.
        ("show --hlep", "show has no option --hlep; did you mean --help?"),
        ("show --max_lenght=3", "show has no option --max-lenght; did you mean --max-length?"),
        ("show --folder x --max-length many", "--max-length is 'many', expected a whole number"),
        ("show --folder x -- --max-lenght 3", "unexpected argument --max-lenght"),
    ],
)
def test_a_wrong_command_line_says_what_may_have_been_meant(
    arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["program", *arguments.split()])
    assert app.main("program") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.endswith(f"{said}\n")


def test_a_signal_while_options_are_parsed_is_no_wrong_option() -> None:
    with pytest.raises(SystemExit, match="143"):
        parsed(lambda: sys.exit(143))
    with pytest.raises(ValueError, match=r"^$"):
        parsed(lambda: sys.exit(2))
