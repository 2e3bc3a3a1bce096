"""The process in which the official tools run: a request a line on stdin, an answer a line on stdout.

Their own programs are started once a log, print for people, end with status 0 whatever they found or with a traceback, and
write scaling.json among the results. Here the same functions judge one log, or one part of a submission, after the other,
and their messages come back as they are; where a whole program is asked for, it runs in a fork, with all that has been
imported. Three functions of the checker are replaced, by ones with the same result:

- The search for the token needs time quadratic in the length of a record. Cutting at the last token does not.
- Rule files are opened by names taken from the log. Only those of the package are.
- A rule file is parsed once and not for every log.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, TextIO

import yaml
from mlperf_logging.compliance_checker import mlp_compliance, mlp_parser

MAX_MESSAGE_CHARACTERS = 4000
MAX_TOOL_MESSAGES = 50
MAX_TOOL_MESSAGE_CHARACTERS = 400
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
    """Replacement for the module yaml that keeps what it makes of a file."""

    BaseLoader = yaml.BaseLoader

    def __init__(self) -> None:
        # By the name of the file: those of an installation do not change while a program asks.
        self._known: dict[str, Any] = {}

    def load(self, file: TextIO, Loader: type[yaml.BaseLoader]) -> Any:
        """The content of a rule file; the checker does not change it."""
        if file.name not in self._known:
            self._known[file.name] = yaml.load(file, Loader)
        return self._known[file.name]


class _Messages(logging.Handler):
    """Handler that keeps what the tools say."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage().strip()[:MAX_TOOL_MESSAGE_CHARACTERS]))


def judge(tool: str, path: str, ruleset: str) -> dict[str, Any]:
    """The answer to one request.

    Args:
        tool: "log" for one log, "package" for the logs under path/results, "system" for one description, "repository" for
            names and sizes.
        path: of a copy, or of what the tool only reads.
    """
    mlp_compliance.enqueued_configs.clear()  # a crash leaves some behind
    return _judge_log(path, ruleset) if tool == "log" else _judge_part(tool, path, ruleset)


def _judge_log(path: str, ruleset: str) -> dict[str, Any]:
    # What it would log stands in the checker's own fields as well, keyed; formatting it for nobody takes time.
    logging.disable(logging.CRITICAL)
    # quiet would drop the warnings, werror count them as errors.
    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=False)
    try:
        # From common.yaml on it goes to the files of the division and the benchmark that the log names.
        passed = checker.check_file(path, f"training_{ruleset}/common.yaml")
    except Exception as error:  # the checker crashes on ordinary mistakes in a log
        return {"passed": False, "crash": _shorten(f"{type(error).__name__}: {error}")}
    return {
        "passed": bool(passed),
        "warnings": [[key, _shorten(text)] for key, text in checker.warnings.items()],
        # It keeps one message a key, of which later ones take the place, and those without a key.
        "errors": [[key, _shorten(text)] for key, text in checker.overwritable.items()]
        + [[None, _shorten(text)] for text in checker.not_overwritable],
    }


def _judge_part(tool: str, path: str, ruleset: str) -> dict[str, Any]:
    # A question about a log may have come before.
    logging.disable(logging.NOTSET)
    said = _Messages()
    # Alone: a handler of an earlier question would still collect.
    logging.getLogger().handlers[:] = [said]
    try:
        # Imported when they are asked for: with the package checker comes SciPy, which takes a second.
        if tool == "package":
            from mlperf_logging.package_checker import package_checker

            passed = package_checker.check_training_result_files(
                path, "training", ruleset, quiet=False, werror=False, rcp_bypass=False, rcp_bert_train_samples=False,
                seed_checker_bypass=False,
            )  # fmt: skip
        elif tool == "system":
            from mlperf_logging.system_desc_checker import system_desc_checker

            passed = system_desc_checker.check_system_desc(path, "training", ruleset)[0]
        else:
            from mlperf_logging.repo_checker import repo_checker

            repo_checker.run_checks(path)  # its own answer is False in either case
            passed = any(text == "ALL CHECKS PASSED." for _, text in said.lines)
    except Exception as error:  # the tools crash on ordinary mistakes
        message = f"it ends with {type(error).__name__}: {error}"
        return {"passed": False, "messages": [message[:MAX_TOOL_MESSAGE_CHARACTERS]]}
    errors = [text for level, text in said.lines if level >= logging.ERROR]  # the rest is how it went on
    return {"passed": bool(passed), "messages": errors[-MAX_TOOL_MESSAGES:]}


def run_program(program: str, arguments: list[str], folder: str, output: str) -> dict[str, Any]:
    """Run `python -m mlperf_logging.PROGRAM ARGUMENTS` in a folder, its output in a file; the answer is its exit status."""
    # Imported before the fork, so that the next run of the program finds it there.
    main = importlib.import_module(f"mlperf_logging.{program}.{program}").main
    fork = os.fork()
    if fork == 0:
        status = 1  # of a fork that does not come to the end of the block
        try:
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.chdir(folder)
            sys.argv[1:] = arguments
            status = _status_of(main)
        finally:
            os._exit(status)  # nothing of the process that forked is to be done twice
    return {"status": os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])}


def _status_of(main: Callable[[], object]) -> int:
    """Exit status of a program whose output is fresh, with logging as an interpreter begins with it."""
    logging.disable(logging.NOTSET)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    with open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1) as sys.stdout:  # they print names
        sys.stderr = sys.stdout
        try:
            main()
        except SystemExit as stop:
            # A text as the exit status means 1, as in any Python program.
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except Exception:
            traceback.print_exc()
            return 1
    return 0


def _shorten(text: str) -> str:
    if len(text) <= MAX_MESSAGE_CHARACTERS:
        return text
    # The condition stands between the record and the checker's state, of which either may be long.
    test = re.search(r"^failed test: .*$", text, re.MULTILINE)
    return text[: MAX_MESSAGE_CHARACTERS // 2] + ("\n" + test[0] if test else "")


def main() -> None:
    """Answer until stdin ends."""
    # The repository checker says that all passed at the level INFO.
    logging.getLogger().setLevel(logging.INFO)
    mlp_compliance.enqueue_config = enqueue_config
    mlp_compliance.yaml = RuleFiles()
    # Each ruleset has a parser module with a copy of this function.
    for name in dir(mlp_parser):
        if name.startswith("ruleset_"):
            getattr(mlp_parser, name).strip_and_dedup = token_lines
    # Only answers may go to stdout: it is read line by line.
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # the tools print for people
        for line in sys.stdin:
            request = json.loads(line)
            answer = run_program(**request) if "program" in request else judge(**request)
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
