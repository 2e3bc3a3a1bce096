"""Programs with several commands: error messages for an invalid command line."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import tyro

from console.commands import Commands, run_program
from console.extras import needed, require_extra
from console.program import RaisingParser, parsed, say
from console.version import version_line

app = Commands()


@dataclass(frozen=True)
class Style:
    bold: bool = False


@dataclass(frozen=True)
class Text:
    max_length: int = 8
    style: tyro.conf.OmitArgPrefixes[Style] = Style()


@app.command
def _plan(out: Path = Path("plan.json"), gpus: int | None = None) -> None:
    """Plan something."""


@app.command
def show(folder: Path, text: Annotated[Text, tyro.conf.arg(name="")]) -> None:
    """Show something."""


WRONG = {
    "plam": "there is no command plam, expected one of plan, show; did you mean plan?",
    "xyz": "there is no command xyz, expected one of plan, show",
    "plan --outt x": "plan has no option --outt; did you mean --out?",
    "plan --gpus many": "--gpus is 'many', expected a whole number or None",
    "plan more": "unexpected argument more",
    "plan more --outt x": "plan has no option --outt; did you mean --out?",
    "plan --return x": "plan has no option --return",
    "--hlep": "there is no option --hlep, expected one of --help, --version; did you mean --help?",
    "plan --hlep": "plan has no option --hlep; did you mean --help?",
    "show --max_lenght=3": "show has no option --max-lenght; did you mean --max-length?",
    "show --folder x --max-length many": "--max-length is 'many', expected a whole number",
    "show --folder x -- --max-lenght 3": "unexpected argument --max-lenght",
    "show --bold": "Missing from program show: --folder PATH (required)",
    "show --no-bold": "Missing from program show: --folder PATH (required)",
}
"""Error message for each command line. tyro reports the missing --folder, which is required, and no unknown option."""


def test_an_invalid_command_line_gives_an_error_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    for line, said in WRONG.items():
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            app.run("program", line.split())
    assert capsys.readouterr() == ("", "")


def greet(text: str) -> None:
    """Print a text."""
    say(text)


def end(how: str) -> int:
    """End with a status or an error."""
    errors = [ValueError("wrong"), OSError(28, "No space left", "out"), ModuleNotFoundError(name="absent.part")]
    if how == "well":
        return 3
    raise {"wrong": errors[0], "full": errors[1], "absent": errors[2], "odd": ModuleNotFoundError(name="json.x")}[how]


def test_main_returns_the_commands_status_or_2_after_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Commands()
    program.command(end)
    program.command(greet)
    install = "absent is not installed: pip install '.[train]' in the repository's root"
    for arguments, status, out, err in (
        (["end", "--how", "well"], 3, "", ""),
        (["greet", "--text", "a"], 0, "a\n", ""),
        (["end", "--how", "wrong"], 2, "", "error: wrong\n"),
        (["end", "--how", "full"], 2, "", "error: out: No space left\n"),
        (["end", "--how", "absent"], 2, "", f"error: {install}\n"),
        (["greet", ""], 2, "", "error: an argument is empty; is a variable in the calling script unset?\n"),
    ):
        monkeypatch.setattr("sys.argv", ["program", *arguments])
        assert (program.main("program"), *capsys.readouterr()) == (status, out, err)
    monkeypatch.setattr("sys.argv", ["program", "--text", ""])
    assert run_program(greet, "program") == 2
    assert "error: an argument is empty" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError):  # the package is installed, but lacks a module
        program.run("program", ["end", "--how", "odd"])
    with pytest.raises(SystemExit, match="0"):
        program.run("program", ["--version"])
    assert capsys.readouterr().out == f"{version_line()}\n"


def test_the_parser_for_programs_without_tyro_raises_errors_with_a_suggestion() -> None:
    parser = RaisingParser()
    parser.add_argument("--text")
    with pytest.raises(ValueError, match=r"^there is no option --txet; did you mean --text\?$"):
        parser.parse_args(["--txet=a"])
    with pytest.raises(ValueError, match=r"^argument --text: expected one argument$"):
        parser.parse_args(["--text"])


def test_a_missing_extra_is_reported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert needed("bert") == "bert is not installed by pip: run this command in the root of a clone"
    monkeypatch.setattr("sys.argv", ["program"])
    require_extra("plots", "absent")  # imported, not run as a program
    monkeypatch.setattr("sys.argv", ["-m", "words"])
    require_extra("plots", "json", "re")
    with pytest.raises(SystemExit, match="2"):
        require_extra("plots", "json", "absent", "absent_too")
    said = "error: absent is not installed: pip install '.[plots]' in the repository's root\n"
    assert capsys.readouterr() == ("", said)


def test_a_signal_during_parsing_is_not_reported_as_an_invalid_option() -> None:
    for status, kind, said in ((143, SystemExit, "143"), (2, ValueError, r"^$")):
        with pytest.raises(kind, match=said):
            parsed(lambda status=status: sys.exit(status))
