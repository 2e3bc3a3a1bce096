"""Verdicts on edited logs as text, which tests compare with recorded text."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from compliance.check.checker import check_file
from tests.compliance.log_edits import original_verdict

VerdictText = Callable[..., str]


@pytest.fixture
def verdict_text(tmp_path: Path) -> VerdictText:
    """Return a function that checks a log and returns its verdict and findings without the source positions of records."""

    def text_of(content: str | bytes, ruleset: str = "5.0.0") -> str:
        path = tmp_path / "result_0.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        verdict = check_file(path, ruleset)
        assert verdict.official == original_verdict(path, verdict.ruleset)
        assert verdict.official == "pass" or verdict.errors
        said = "; ".join([f"official {verdict.official}, {verdict.summary}", *map(str, verdict.findings)])
        return re.sub(r"; logged at tests/compliance/run_logs\.py:\d+(?=\])", "", said)

    return text_of
