"""Logs that several rooms begin with."""

from __future__ import annotations

import pytest

from tests.compliance.run_logs import without_chain, write_run


@pytest.fixture(scope="session")
def closed_log(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A valid closed log that has no chain of digests, so that it can be edited."""
    return without_chain(write_run(tmp_path_factory.mktemp("closed") / "result_0.txt").read_text())


@pytest.fixture(scope="session")
def open_log(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same of the open division."""
    return without_chain(write_run(tmp_path_factory.mktemp("open") / "result_0.txt", "open").read_text())
