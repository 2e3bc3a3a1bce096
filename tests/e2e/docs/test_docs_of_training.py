"""The commands on the pages about training."""

from pathlib import Path

import pytest

from tests.e2e.docs.documented import TRAINING, assert_works, commands


@pytest.mark.in_order
@pytest.mark.parametrize("command", commands(*TRAINING))
def test_each_command_about_training_succeeds(command: str, checkout_with_all_data: Path) -> None:
    assert_works(command, checkout_with_all_data)
