"""Print verdicts: a line each, the findings below it, and the total at the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from compliance.log.findings import Verdict
from compliance.log.rules import NEWEST_RULESET
from console.program import say
from console.text import counted, visible

MAX_NAMED = 5
"""Maximum number of failures that the total names."""


def say_verdicts(verdicts: Sequence[Verdict], *, quiet: bool = False) -> None:
    """Print each verdict with its findings; if `quiet`, only errors."""
    for verdict in verdicts:
        if quiet and verdict.passed:
            continue
        _say_verdict(verdict)
        for finding in verdict.errors if quiet else verdict.findings:
            say(f"    {finding}")


def _say_verdict(verdict: Verdict) -> None:
    word = "PASS" if verdict.passed else "FAIL"
    text = f" {verdict.path}: official {verdict.official}, ours {verdict.ours}: {verdict.summary}"
    if not sys.stdout.isatty():
        say(word + text)
        return
    from rich.console import Console
    from rich.text import Text

    line = Text(word, style="bold green" if verdict.passed else "bold red")
    Console(highlight=False).print(line.append(visible(text), style="not bold default"), soft_wrap=True)


def total(verdicts: Sequence[Verdict], *, is_accepted: bool, ignored: int = 0) -> str:
    """Return one line that counts and names the logs, folders and descriptions that pass and fail."""
    others = [verdict for verdict in verdicts if verdict.path.suffix == ".json" or verdict.path.is_dir()]
    logs = [verdict for verdict in verdicts if verdict not in others]
    parts = [_share(counted(len(logs), "log"), logs)] if logs or not others else []
    if others:
        noun = "folder or description" if len(others) == 1 else "folders and descriptions"
        parts.append(_share(f"{len(others):,} {noun}", others))
    text = "; ".join(parts)
    if is_accepted and not all(verdict.passed for verdict in logs):
        text += "; each folder passes without the log that fails"
    rulesets = {verdict.ruleset for verdict in verdicts}
    if rulesets - {NEWEST_RULESET}:
        text += f"; checked under ruleset {', '.join(sorted(rulesets))}"
    return text + (f"; {counted(ignored, 'known finding')} ignored" if ignored else "")


def _share(counted_noun: str, verdicts: Sequence[Verdict]) -> str:
    failed = [verdict for verdict in verdicts if not verdict.passed]
    passed = len(verdicts) - len(failed)
    said = [f"{passed} {'passes' if passed == 1 else 'pass'}"] if passed or not failed else []
    if failed:
        names = ", ".join(str(verdict.path) for verdict in failed[:MAX_NAMED])
        more = f" and {len(failed) - MAX_NAMED} more" if len(failed) > MAX_NAMED else ""
        said.append(f"{len(failed)} {'fails' if len(failed) == 1 else 'fail'}: {names}{more}")
    return f"{counted_noun}: {', '.join(said)}"
