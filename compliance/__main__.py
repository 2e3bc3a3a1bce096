"""Check logs, describe the system, report on a results folder: `python -m compliance --help`.

Each command imports its modules when it runs, so that --help and errors in options appear without delay.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from compliance.log.rules import AUTO, NEWEST_RULESET, RULESETS, Division
from console.commands import Commands
from console.program import say, say_document, say_json

Ruleset = Annotated[str, arg(metavar="RULESET", help=f"One of {', '.join(RULESETS)}.")]
AnyRuleset = Annotated[
    str, arg(metavar="RULESET", help=f"One of {', '.join(RULESETS)}; auto is the newest that accepts the logs.")
]
Folder = Annotated[Positional[Path], arg(metavar="FOLDER", help="results/<system>/bert")]

app = Commands()


@app.command
def check(
    paths: Annotated[Positional[tuple[Path, ...]], arg(metavar="PATH...", help="Logs, folders of them, or -")],
    ruleset: AnyRuleset = AUTO,
    # A parameter has the name of its option. Without FlagCreatePairsOff, tyro would add an option --no-... for each flag.
    quiet: FlagCreatePairsOff[bool] = False,
    ignore: Path | None = None,
    json: FlagCreatePairsOff[bool] = False,
    sarif: Path | None = None,
    junit: Path | None = None,
    format: Literal["text", "github"] = "text",
) -> int:
    """Check logs with the official checker and stricter rules. Exit status 0 if all pass, otherwise 1.

    A PATH is a log result_<n>.txt or result_<n>.txt.gz, results/<system>/bert, results/<system>, results, a whole
    submission, or a round of submissions. The PATH - reads one log, plain or gzip, from standard input.

    Args:
        quiet: Print errors and the total only.
        ignore: Leave out the findings in this file, which must be the --json output of an earlier check.
        json: Print the verdicts as one JSON document.
        sarif: Also write the findings to this file, as SARIF 2.1.0, which code review tools show beside the lines.
        junit: Also write the verdicts to this file, as JUnit XML, which CI servers show as tests.
        format: "github" adds workflow annotations, which GitHub shows beside the lines.
    """
    # tyro does not require positional arguments, so require a path here.
    if not paths:
        raise ValueError("no path given. Give logs results/<system>/bert/result_<n>.txt, or folders of them")
    # Annotations and the JSON document both go to standard output, where annotations would make the JSON invalid.
    if format == "github" and json:
        raise ValueError("--format github and --json exclude each other. Choose one of them")
    from compliance.check import output
    from compliance.submission.check import accepted, check_paths

    known = output.read_known(ignore) if ignore else frozenset()
    # Check everything first, so that a path that cannot be checked ends the command before any output.
    verdicts, ignored = output.without_known(check_paths(paths, ruleset), known)
    # Write files first, so that a file that cannot be written ends the command before any output.
    if sarif:
        output.write_sarif(sarif, verdicts)
    if junit:
        output.write_junit(junit, verdicts)
    # all() would be wrong here: a folder of ten logs is accepted even if one of them fails.
    is_accepted = accepted(verdicts)
    if json:
        say_json([verdict.as_dict() for verdict in verdicts])
        return 0 if is_accepted else 1
    output.say_verdicts(verdicts, quiet=quiet)
    if format == "github":
        output.say_annotations(verdicts)
    say(output.total(verdicts, is_accepted=is_accepted, ignored=ignored))
    return 0 if is_accepted else 1


@app.command
def report(
    folder: Folder,
    ruleset: AnyRuleset = AUTO,
    format: Literal["html", "markdown", "json", "csv"] = "html",
    out: Path | None = None,
) -> int:
    """Report on the logs and metrics in FOLDER, as an HTML page, Markdown, JSON or CSV.

    Args:
        format: html is written to FOLDER/report.html. The other formats are printed.
        out: Write the report to this file, not to FOLDER/report.html or standard output.
    """
    from compliance.artefact import write_whole
    from compliance.report.page import render_as
    from compliance.report.results import load_results
    from compliance.report.summary import as_dict

    results = load_results(folder, ruleset)
    if format == "html" or out is not None:
        path = out or folder / "report.html"
        write_whole(path, render_as(results, format))
        say(path)
    elif format == "json":
        # Text in a log may look like a command of a CI server (`::error::`), so print with `say_json`, which escapes it.
        say_json(as_dict(results))
    else:
        say_document(render_as(results, format))
    return 0


@app.command
def summary(folder: Folder, ruleset: AnyRuleset = AUTO) -> int:
    """Print the table of all runs in FOLDER: time to train, accuracy, sequences, throughput, verdict."""
    from compliance.report.results import load_results
    from compliance.report.summary import print_summary

    print_summary(load_results(folder, ruleset))
    return 0


@app.command
def system(
    out: Path,
    division: Division | None = None,
    set: Annotated[tuple[str, ...], arg(metavar="KEY=VALUE...")] = (),
    measure: FlagCreatePairsOff[bool] = False,
) -> int:
    """Write the system description of this machine as JSON, or change fields of an existing description.

    Args:
        out: The description file, results/systems/<system>.json.
        division: The division of the submission; open by default in a new file.
        set: Fields to set. In an existing file, only these fields change.
        measure: Measure this machine again, and replace the fields that were measured before.
    """
    from compliance.doctor.system import renew

    # Split at the first "=" only, because the value may contain "=" too.
    pairs = [field.partition("=") for field in set]
    for name, equals, _ in pairs:
        if not equals:
            raise ValueError(f"--set {name}: expected KEY=VALUE, such as number_of_nodes=8")
    given = ({"division": division} if division else {}) | {name: value for name, _, value in pairs}
    renew(out, given, measure_again=measure)
    say(out)
    return 0


@app.command
def convergence(folder: Folder, ruleset: Ruleset = NEWEST_RULESET) -> int:
    """Compare the convergence of the runs so far in FOLDER with the reference. Exit status 1 on failure."""
    from compliance.report.results import load_results
    from compliance.report.summary import print_summary

    results = load_results(folder, ruleset)
    outlook = results.convergence
    if not outlook and results.division != "open":
        found = "the logs do not agree on one submission_division and one global_batch_size"
        raise ValueError(f"{folder}: {found}. Keep only the runs of one configuration in the folder")
    print_summary(results)
    say(outlook.sentence if outlook else "No reference convergence point applies in the open division.")
    return 1 if outlook and outlook.verdict in ("fail", "no reference", "unknown") else 0


@app.command
def doctor(
    recipe: str = "",
    data: Path | None = None,
    checkpoint: Path | None = None,
    results: Path | None = None,
    nodes: int | None = None,
    quick: FlagCreatePairsOff[bool] = False,
    json: FlagCreatePairsOff[bool] = False,
) -> int:
    """Check before a run for anything that would stop it, slow it down or make it invalid. Exit status 1 if a check fails.

    Args:
        recipe: The recipe to run. Without a recipe, only the machine is checked.
        data: A data set, or a folder that contains train and evaluation; by default the recipe's.
        checkpoint: The weights that the run starts from; by default the recipe's.
        results: Where results go; by default the recipe's.
        nodes: Number of machines; by default from Slurm, NNODES or the recipe's name.
        quick: Do not read the data.
        json: Print the results as one JSON document.
    """
    from compliance.doctor.examination import examine, print_diagnoses
    from compliance.doctor.intended_run import IntendedRun

    intended = IntendedRun(recipe, data, checkpoint, results, nodes, quick)
    return print_diagnoses(examine(intended), as_json=json)


@app.command
def package(
    org: str,
    system: Path,
    runs: Path,
    out: Path,
) -> int:
    """Make a submission tree OUT/ORG and run the official tools on it. Exit status 0 if all pass, otherwise 1.

    Args:
        org: Name of the submitting organisation.
        system: The system description. Its file name without .json becomes the system's name.
        runs: The folder with the logs of at least ten runs: results/<system>/bert.
        out: The folder to create the tree in.
    """
    from compliance.package.command import run
    from compliance.package.tree import PackageRequest

    return run(PackageRequest(org, system, runs, out))


@app.command
def watch(
    path: Annotated[Positional[Path], arg(metavar="PATH", help="A log, output that contains a log, or a folder.")],
    ruleset: Ruleset = NEWEST_RULESET,
    timeout: float = 600.0,
    stale: float = 600.0,
) -> int:
    """Follow a run in progress to its end. Exit status 0 if it ends with success, 1 if not, 130 after Ctrl-C.

    Args:
        timeout: Seconds to wait for a log that is not there yet.
        stale: Seconds without new output after which to give up. During initialisation, the limit is at least an hour.
    """
    from compliance.watch.screen import watch as follow

    return follow(path, ruleset, timeout, stale)


def main() -> int:
    installed = Path(sys.argv[0]).name
    return app.main(installed if installed == "mlperf-bert-compliance" else "python -m compliance")


if __name__ == "__main__":
    sys.exit(main())
