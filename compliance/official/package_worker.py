"""The process in which the official package tools run: a request a line on stdin, an answer a line on stdout.

The package checker's own program exits with status 0 whatever it found, and writes scaling.json among the results. Here
the same functions judge one part of a submission at a time, and their answers come back as they are; `path` is a copy
made of links, so that nothing is written into the submission.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import warnings
from typing import Any

from mlperf_logging.compliance_checker import mlp_compliance, mlp_parser
from mlperf_logging.repo_checker import repo_checker
from mlperf_logging.system_desc_checker import system_desc_checker

from compliance.official.checker_worker import enqueue_config, token_lines

MAX_MESSAGES = 50
MAX_MESSAGE_CHARACTERS = 400


class _Messages(logging.Handler):
    """Keeps what the tools say."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage().strip()[:MAX_MESSAGE_CHARACTERS]))


def judge(tool: str, path: str, ruleset: str) -> dict[str, Any]:
    """The answer to one request.

    Args:
        tool: "package" for the logs under path/results, "system" for one description, "repository" for names and sizes.
    """
    said = _Messages()
    logging.getLogger().handlers[:] = [said]
    mlp_compliance.enqueued_configs.clear()  # a crash leaves some behind
    try:
        if tool == "package":
            from mlperf_logging.package_checker import package_checker  # with SciPy, which takes a second to import

            passed = package_checker.check_training_result_files(
                path, "training", ruleset, quiet=False, werror=False, rcp_bypass=False, rcp_bert_train_samples=False,
                seed_checker_bypass=False,
            )  # fmt: skip
        elif tool == "system":
            passed = system_desc_checker.check_system_desc(path, "training", ruleset)[0]
        else:
            repo_checker.run_checks(path)  # its own answer is False in either case
            passed = any(text == "ALL CHECKS PASSED." for _, text in said.lines)
    except Exception as error:  # the tools crash on ordinary mistakes
        return {"passed": False, "messages": [f"it ends with {type(error).__name__}: {error}"[:MAX_MESSAGE_CHARACTERS]]}
    errors = [text for level, text in said.lines if level >= logging.ERROR]
    return {"passed": bool(passed), "messages": errors[-MAX_MESSAGES:]}


def main() -> None:
    """Answer until stdin ends."""
    logging.getLogger().setLevel(logging.INFO)
    warnings.simplefilter("ignore")
    mlp_compliance.enqueue_config = enqueue_config
    for name in dir(mlp_parser):
        if name.startswith("ruleset_"):
            getattr(mlp_parser, name).strip_and_dedup = token_lines
    for request in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()):
            answer = judge(**json.loads(request))
        print(json.dumps(answer), flush=True)
