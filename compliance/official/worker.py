"""Process that runs the official tools of mlperf-logging. It reads a JSON request per line on stdin, and answers on stdout.

The tools' own programs check one log per start, print text for people and exit with status 0 whatever they find. This
process calls their functions on many logs and parts of submissions. It replaces three functions of the compliance checker by
functions with the same result:

- The checker's search for the token takes quadratic time in the length of a record. Cutting at the last token is linear.
- The checker opens any rule file that a log names. The replacement opens only the package's own rule files.
- The checker parses rule files for every log. The replacement parses each rule file once.
"""

import contextlib
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TextIO

import yaml
from mlperf_logging.compliance_checker import mlp_compliance, mlp_parser

if TYPE_CHECKING:
    from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

MAX_MESSAGE_CHARACTERS = 4000
MAX_TOOL_MESSAGE_CHARACTERS = 400
RULE_FILE = re.compile(r"training_\d\.\d\.\d/\w+\.yaml", re.ASCII)


def token_lines(lines: Iterable[str], token: str = ":::MLLOG ") -> list[str]:
    """Return the lines with the token, each cut to begin at its last token."""
    return [token + line.rpartition(token)[2] for line in lines if token in line]


def enqueue_config(name: str) -> None:
    """Queue a rule file of the package for checking. Raises ``ValueError`` for any other file that a log names."""
    if not RULE_FILE.fullmatch(name):
        raise ValueError(name)
    mlp_compliance.enqueued_configs.append(name)


class RuleFiles:
    """Replacement for the module yaml that parses each rule file once. The checker does not modify the loaded data."""

    BaseLoader = yaml.BaseLoader

    def __init__(self) -> None:
        self._rules: dict[str, Any] = {}

    def load(self, file: TextIO, Loader: type[yaml.BaseLoader]) -> Any:  # the checker passes `Loader` by name
        if file.name not in self._rules:
            self._rules[file.name] = yaml.load(file, Loader)
        return self._rules[file.name]


class _Messages(logging.Handler):
    """Logging handler that stores the messages of the tools."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage().strip()[:MAX_TOOL_MESSAGE_CHARACTERS]))


# One log


def judge_log(path: str, ruleset: str) -> dict[str, Any]:
    """Return the compliance checker's verdict on a log, and its messages as pairs (key or None, text)."""
    mlp_compliance.enqueued_configs.clear()  # a crash on an earlier log may have left rule files in this queue
    # Disable logging to save time. The messages are read from the checker's fields.
    logging.disable(logging.CRITICAL)
    # Use neither option: quiet would drop warnings, and werror would count them as errors.
    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=False)
    try:
        passed = checker.check_file(path, f"training_{ruleset}/common.yaml")
    except Exception as error:  # the checker crashes on ordinary mistakes in a log
        return {"crash": _shorten(f"{type(error).__name__}: {error}")}
    return {
        "passed": bool(passed),
        "warnings": [[key, _shorten(text)] for key, text in checker.warnings.items()],
        # The checker keeps one message per key, and all messages without a key.
        "errors": [[key, _shorten(text)] for key, text in checker.overwritable.items()]
        + [[None, _shorten(text)] for text in checker.not_overwritable],
    }


def _shorten(text: str) -> str:
    if len(text) <= MAX_MESSAGE_CHARACTERS:
        return text
    # Append the failed condition, which follows the record and may have been cut off.
    test = re.search(r"^failed test: .*$", text, re.MULTILINE)
    return text[: MAX_MESSAGE_CHARACTERS // 2] + ("\n" + test[0] if test else "")


# Parts of a submission. Functions import the tools' modules when called, because loading SciPy and pandas takes a second.


def _package(path: str, ruleset: str, by_train_samples: bool = False) -> bool:
    from mlperf_logging.package_checker import package_checker

    mlp_compliance.enqueued_configs.clear()
    return package_checker.check_training_result_files(
        path, "training", ruleset, quiet=False, werror=False, rcp_bypass=False, rcp_bert_train_samples=by_train_samples,
        seed_checker_bypass=False,
    )  # fmt: skip


def _system(path: str, ruleset: str) -> bool:
    from mlperf_logging.system_desc_checker import system_desc_checker

    return system_desc_checker.check_system_desc(path, "training", ruleset)[0]


def _repository(path: str, _ruleset: str) -> bool:
    from mlperf_logging.repo_checker import repo_checker

    repo_checker.run_checks(path)  # ignore the return value, which is False even on success
    return any(text == "ALL CHECKS PASSED." for _, text in _said.lines)


def judge_part(judge: Callable[[str, str], bool], path: str, ruleset: str) -> dict[str, Any]:
    """Return a tool's verdict on a part of a submission and its last error message."""
    logging.disable(logging.NOTSET)  # turn logging on, which an earlier question about a log may have disabled
    logging.getLogger().handlers[:] = [_said]
    _said.lines.clear()
    try:
        passed = judge(path, ruleset)
    except Exception as error:  # the tools crash on ordinary mistakes
        message = f"it ends with {type(error).__name__}: {error}"
        return {"passed": False, "message": message[:MAX_TOOL_MESSAGE_CHARACTERS]}
    errors = [text for level, text in _said.lines if level >= logging.ERROR]
    return {"passed": bool(passed), "message": errors[-1] if errors else ""}


_said = _Messages()


# Convergence and score


@cache
def _rcp_checker(ruleset: str) -> "RCP_Checker":
    from mlperf_logging.rcp_checker import rcp_checker

    return rcp_checker.RCP_Checker("training", ruleset, "bert", verbose=False)


def reference(batch: int, ruleset: str) -> dict[str, Any]:
    """Return the reference that the RCP checker's `check_directory` would choose for a global batch size."""
    checker, points = _rcp_checker(ruleset), "pruned_rcps"
    low, high = checker._find_top_min_rcp(batch, points), checker._find_bottom_max_rcp(batch, points)
    origin, used = "none", []
    if record := checker._find_rcp(batch, points):
        origin, used = "exact", [record]
    elif low and high:
        origin, used = "interpolated", [low, high]
        _, record = checker._create_interp_rcp(batch, low, high)
    elif high:
        # `_find_min_rcp` returns the same point, because no point is below the batch size.
        origin, used, record = "smallest", [high], high
    answer: dict[str, Any] = {"origin": origin, "points": [point["BS"] for point in used]}
    answer["largest"] = max(point["BS"] for point in checker.pruned_rcp_data.values())
    if record:
        mean, stdev = float(record["RCP Mean"]), float(record["RCP Stdev"])
        answer |= {"mean": mean, "stdev": stdev, "minimum": mean / float(record["Max Speedup"])}
    return answer


def score(path: str, ruleset: str) -> dict[str, Any]:
    """Return the result summarizer's figures for a submission with one system; None for a missing figure."""
    from mlperf_logging.result_summarizer.result_summarizer import summarize_results

    columns = ("bert:rcp_scaling_factor", "bert:samples_to_converge")
    try:
        scores, _, details, _ = summarize_results(path, "training", ruleset)
        figures = scores.iloc[0].get("bert"), *(details.iloc[0].get(name) for name in columns)
    except Exception as error:
        return {"crash": f"the result summarizer ends with {type(error).__name__}: {error}"}
    numbers = [float(figure) if isinstance(figure, float) and math.isfinite(figure) else None for figure in figures]
    return dict(zip(("minutes", "scaling", "samples"), numbers, strict=True))


PARTS: dict[str, Callable[[str, str], bool]] = {
    "package": _package,
    "package by train_samples": partial(_package, by_train_samples=True),
    "system": _system,
    "repository": _repository,
}
QUESTIONS: dict[str, Callable[[Any, str], dict[str, Any]]] = {"log": judge_log, "reference": reference, "score": score}


def main() -> None:
    """Answer requests until stdin ends."""
    # Store INFO messages too, because the repository checker reports success at this level.
    logging.getLogger().setLevel(logging.INFO)
    mlp_compliance.enqueue_config = enqueue_config
    mlp_compliance.yaml = RuleFiles()
    # Replace the function in every parser module, because each ruleset has its own copy.
    for name in dir(mlp_parser):
        if name.startswith("ruleset_"):
            getattr(mlp_parser, name).strip_and_dedup = token_lines
    # Only answers may go to stdout, so redirect what the tools print.
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            tool, subject, ruleset = json.loads(line)
            answer = judge_part(PARTS[tool], subject, ruleset) if tool in PARTS else QUESTIONS[tool](subject, ruleset)
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
