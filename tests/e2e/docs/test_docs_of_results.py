"""The commands on the pages about logs, reports, machines and launchers."""

from pathlib import Path

import pytest

from tests.e2e.docs.documented import RESULTS, assert_works, commands


@pytest.mark.in_order
@pytest.mark.parametrize("command", commands(*RESULTS))
def test_each_command_about_results_and_machines_succeeds(command: str, checkout_with_results: Path) -> None:
    assert_works(command, checkout_with_results)
