"""Print verdicts, one line each followed by its findings, and a total at the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from compliance.log.findings import Verdict
from compliance.log.rules import NEWEST_RULESET
from console.program import say
from console.text import counted, visible

MAX_NAMED = 5
"""Maximum number of failures named in the total."""


def say_verdicts(verdicts: Sequence[Verdict], *, quiet: bool = False) -> None:
    """Print each verdict with its findings. If `quiet`, print only errors."""
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


def total(verdicts: Sequence[Verdict], *, is_accepted: bool) -> str:
    """Return one line that counts the passing and failing logs, folders and descriptions, and names failures."""
    others = [verdict for verdict in verdicts if verdict.path.suffix == ".json" or verdict.path.is_dir()]
    logs = [verdict for verdict in verdicts if verdict not in others]
    parts = [_share(counted(len(logs), "log"), logs)] if logs or not others else []
    if others:
        noun = "folder or description" if len(others) == 1 else "folders and descriptions"
        parts.append(_share(f"{len(others):,} {noun}", others))
    if is_accepted and not all(verdict.passed for verdict in logs):
        parts.append("each folder passes without the log that fails")
    rulesets = {verdict.ruleset for verdict in verdicts}
    if rulesets - {NEWEST_RULESET}:
        parts.append(f"checked under ruleset {', '.join(sorted(rulesets))}")
    return "; ".join(parts)


def _share(counted_noun: str, verdicts: Sequence[Verdict]) -> str:
    failed = [str(verdict.path) for verdict in verdicts if not verdict.passed]
    passed = len(verdicts) - len(failed)
    said = [f"{passed} {'passes' if passed == 1 else 'pass'}"] if passed or not failed else []
    if failed:
        more = f" and {len(failed) - MAX_NAMED} more" if len(failed) > MAX_NAMED else ""
        verb = "fails" if len(failed) == 1 else "fail"
        said.append(f"{len(failed)} {verb}: {', '.join(failed[:MAX_NAMED])}{more}")
    return f"{counted_noun}: {', '.join(said)}"
