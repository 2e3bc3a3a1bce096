"""The commands on the pages about data and weights."""

from pathlib import Path

import pytest

from tests.e2e.docs.documented import DATA, assert_works, commands


@pytest.mark.in_order
@pytest.mark.parametrize("command", commands(*DATA))
def test_each_command_about_data_and_weights_succeeds(command: str, checkout: Path) -> None:
    assert_works(command, checkout)
