"""The commands on the pages about data and weights."""

from pathlib import Path

import pytest

from tests.e2e.docs.documented import DATA, assert_works, commands


@pytest.mark.in_order
@pytest.mark.parametrize("command", commands(*DATA))
def test_a_command_works(command: str, checkout: Path) -> None:
    assert_works(command, checkout)
