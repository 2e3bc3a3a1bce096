"""Print each verdict on a line with its findings below, and a total at the end. Known findings can be left out."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compliance.artefact import MAX_FILE_BYTES
from compliance.log.findings import Verdict
from compliance.log.rules import NEWEST_RULESET
from console.files import read_json
from console.program import say
from console.text import counted, visible

MAX_NAMED = 5  # failures that the total names

Known = frozenset[tuple[str, str, str, str]]
"""(file, key, rule, found) of each known finding. The line number is left out, because lines may move."""


def read_known(path: Path) -> Known:
    """Read the findings that an earlier `check --json` printed. Raises ``ValueError`` for any other file."""
    verdicts = read_json(path, MAX_FILE_BYTES, "write it by `python -m compliance check PATH... --json > FILE`")
    try:
        found = [(verdict["file"], finding) for verdict in verdicts for finding in verdict["findings"]]
        return frozenset((file, finding["key"], finding["rule"], finding["found"]) for file, finding in found)
    except (TypeError, KeyError) as error:
        expected = "expected what `python -m compliance check PATH... --json` prints"
        raise ValueError(f"{path}: is not a list of verdicts with findings, {expected}") from error


def without_known(verdicts: Sequence[Verdict], known: Known) -> tuple[list[Verdict], int]:
    """Return the verdicts without the known findings, and the number of findings left out."""
    kept = []
    for verdict in verdicts:
        keyed = [((str(verdict.path), each.key, each.rule, each.sentence), each) for each in verdict.findings]
        kept.append(replace(verdict, findings=tuple(finding for key, finding in keyed if key not in known)))
    return kept, sum(len(verdict.findings) for verdict in verdicts) - sum(len(verdict.findings) for verdict in kept)


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


def total(verdicts: Sequence[Verdict], *, is_accepted: bool, ignored: int = 0) -> str:
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
    return "; ".join([*parts, *([f"{counted(ignored, 'known finding')} ignored"] if ignored else [])])


def _share(counted_noun: str, verdicts: Sequence[Verdict]) -> str:
    failed = [str(verdict.path) for verdict in verdicts if not verdict.passed]
    passed = len(verdicts) - len(failed)
    said = [f"{passed} {'passes' if passed == 1 else 'pass'}"] if passed or not failed else []
    if failed:
        more = f" and {len(failed) - MAX_NAMED} more" if len(failed) > MAX_NAMED else ""
        verb = "fails" if len(failed) == 1 else "fail"
        said.append(f"{len(failed)} {verb}: {', '.join(failed[:MAX_NAMED])}{more}")
    return f"{counted_noun}: {', '.join(said)}"
