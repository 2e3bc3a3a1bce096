"""Valid logs that tests in several folders edit."""

import pytest

from tests.compliance.run_logs import without_chain, write_run


@pytest.fixture(scope="session")
def closed_log(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A valid closed-division log without a digest chain, so that tests can edit it."""
    return without_chain(write_run(tmp_path_factory.mktemp("closed") / "result_0.txt").read_text())


@pytest.fixture(scope="session")
def open_log(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A valid open-division log without a digest chain."""
    return without_chain(write_run(tmp_path_factory.mktemp("open") / "result_0.txt", "open").read_text())
