"""Fuzz each reader of untrusted files for about a second, with the same damaged files in every run."""

from pathlib import Path

import pytest

from tests.fuzz.attempt import Target, trial
from tests.fuzz.targets import TARGETS


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_damaged_file_is_read_or_refused_by_a_short_message_with_its_name(target: Target, tmp_path: Path) -> None:
    trial(target, tmp_path, max_examples=target.inputs, derandomize=True, database=None)()
