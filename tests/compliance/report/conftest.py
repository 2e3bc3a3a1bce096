"""Read-only folders for the tests of the report."""

from pathlib import Path

import pytest

from compliance.report.results import Results, load_results
from tests.compliance.result_folders import write_closed_folder, write_experiments, write_failing_folder
from tests.compliance.run_logs import write_run


@pytest.fixture(scope="session")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Ten closed runs on eight H100 GPUs, which converge a little faster than the reference."""
    return load_results(write_closed_folder(tmp_path_factory.mktemp("closed")))


@pytest.fixture(scope="session")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Six runs, four of which are not valid results."""
    return load_results(write_failing_folder(tmp_path_factory.mktemp("failing")))


@pytest.fixture(scope="session")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Six runs without a target, which differ in how they ended or in their settings."""
    return load_results(write_experiments(tmp_path_factory.mktemp("experiments")))


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A single valid open run without other files."""
    path = tmp_path / "results" / "node" / "bert"
    write_run(path / "result_0.txt", "open")
    return path
