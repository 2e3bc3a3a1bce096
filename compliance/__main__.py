"""Check logs, describe the system, report on a results folder: `python -m compliance --help`."""

from __future__ import annotations

import sys
from json import dumps
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg
from tyro.extras import SubcommandApp

from compliance.checker import check_file
from compliance.report import write_report
from compliance.results import load_results
from compliance.rules import NEWEST_RULESET, RULESETS, Division
from compliance.summary import print_summary
from compliance.system import describe, write

Ruleset = Annotated[str, arg(metavar="RULESET", help=f"One of {', '.join(RULESETS)}.")]
Folder = Annotated[Positional[Path], arg(metavar="FOLDER", help="results/<system>/bert")]

app = SubcommandApp()


@app.command
def check(
    files: Annotated[Positional[tuple[Path, ...]], arg(metavar="FILE...", help="Logs: result_<n>.txt")],
    ruleset: Ruleset = NEWEST_RULESET,
    json: FlagCreatePairsOff[bool] = False,
) -> int:
    """Check logs with the official checker and stricter rules. Exit status 0 only if all pass, 1 if one does not.

    Args:
        json: Print the verdicts as one JSON document.
    """
    if not files:
        raise ValueError("no file given, expected one or more results/<system>/bert/result_<n>.txt")
    verdicts = [check_file(path, ruleset) for path in files]
    if json:
        print(dumps([verdict.as_dict() for verdict in verdicts], indent=2))
    else:
        for verdict in verdicts:
            print(f"{'PASS' if verdict.passed else 'FAIL'} {verdict.path}: {verdict.summary}")
            for finding in verdict.findings:
                print(f"    {finding}")
    return 0 if all(verdict.passed for verdict in verdicts) else 1


@app.command
def report(folder: Folder, ruleset: Ruleset = NEWEST_RULESET) -> int:
    """Write FOLDER/report.html from the logs and metrics in it."""
    print(write_report(folder, ruleset))
    return 0


@app.command
def summary(folder: Folder, ruleset: Ruleset = NEWEST_RULESET) -> int:
    """Print the table of all runs in FOLDER: time to train, accuracy, sequences, throughput, verdict."""
    print_summary(load_results(folder, ruleset))
    return 0


@app.command
def system(
    out: Path,
    division: Division = "open",
    fields: Annotated[tuple[str, ...], arg(name="set", metavar="KEY=VALUE...")] = (),
) -> int:
    """Write the system description of this machine as JSON.

    Args:
        out: The file, results/systems/<system>.json.
        division: The division of the submission.
        fields: Fields to set instead of what was found out.
    """
    pairs = [field.partition("=") for field in fields]
    for name, equals, _ in pairs:
        if not equals:
            raise ValueError(f"--set {name}: expected KEY=VALUE, such as number_of_nodes=8")
    write(out, describe(division, {"system_name": out.stem} | {name: value for name, _, value in pairs}))
    print(out)
    return 0


def main() -> int:
    """Run the command line; a user's error is one line on stderr and exit status 2."""
    try:
        return app.cli(prog="python -m compliance")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
