"""The process in which the official checker runs: a request a line on stdin, an answer a line on stdout.

Its own program is started once a log, prints for people and ends with a traceback on some logs. Here the same checker
class reads one file after another, and its messages come back as they stand in it, by key. Three of its functions are
replaced, by ones with the same result:

- The search for the token needs time quadratic in the length of a record. Cutting at the last token does not.
- Rule files are opened by names taken from the log. Only those of the package are.
- A rule file is parsed once and not for every log.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

import yaml
from mlperf_logging.compliance_checker import mlp_compliance, mlp_parser

MAX_MESSAGE_CHARACTERS = 4000
RULE_FILE = re.compile(r"training_\d\.\d\.\d/\w+\.yaml", re.ASCII)


def token_lines(lines: Iterable[str], token: str = ":::MLLOG ") -> list[str]:
    """Each line that holds the token, from its last token on."""
    return [token + line.rpartition(token)[2] for line in lines if token in line]


def enqueue_config(name: str) -> None:
    """Have a rule file of the package checked next; a log can name any other, and gets it refused."""
    if not RULE_FILE.fullmatch(name):
        raise ValueError(name)
    mlp_compliance.enqueued_configs.append(name)


class RuleFiles:
    """In place of the module yaml: what it makes of a file, kept."""

    BaseLoader = yaml.BaseLoader

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def load(self, file: TextIO, Loader: type[yaml.BaseLoader]) -> Any:
        """The content of a rule file; the checker does not change it."""
        if file.name not in self._known:
            self._known[file.name] = yaml.load(file, Loader)
        return self._known[file.name]


def judge(path: str, ruleset: str) -> dict[str, Any]:
    """The answer to one request: what the checker says about the file at `path`."""
    mlp_compliance.enqueued_configs.clear()  # a crash leaves some behind
    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=False)
    try:
        passed = checker.check_file(path, f"training_{ruleset}/common.yaml")
    except Exception as error:  # the checker crashes on ordinary mistakes in a log
        return {"passed": False, "crash": _shorten(f"{type(error).__name__}: {error}")}
    return {
        "passed": bool(passed),
        "warnings": [[key, _shorten(text)] for key, text in checker.warnings.items()],
        "errors": [[key, _shorten(text)] for key, text in checker.overwritable.items()]
        + [[None, _shorten(text)] for text in checker.not_overwritable],
    }


def _shorten(text: str) -> str:
    if len(text) <= MAX_MESSAGE_CHARACTERS:
        return text
    # The condition stands after the record, which may be long.
    test = re.search(r"^failed test: .*$", text[-MAX_MESSAGE_CHARACTERS:], re.MULTILINE)
    return text[: MAX_MESSAGE_CHARACTERS // 2] + ("\n" + test[0] if test else "")


def main() -> None:
    """Answer until stdin ends."""
    logging.disable(logging.CRITICAL)
    mlp_compliance.enqueue_config = enqueue_config
    mlp_compliance.yaml = RuleFiles()
    for name in dir(mlp_parser):
        module = getattr(mlp_parser, name)
        if name.startswith("ruleset_"):
            module.strip_and_dedup = token_lines
    answers, sys.stdout = sys.stdout, sys.stderr
    for request in sys.stdin:
        print(json.dumps(judge(**json.loads(request))), file=answers, flush=True)


if __name__ == "__main__":
    main()
