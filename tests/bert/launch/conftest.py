"""A fixture that kills launchers when the test that started them ends."""

from collections.abc import Iterator

import pytest

from tests.bert.launch.started import RUNNING


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    yield
    for process in RUNNING:
        process.kill()  # the kernel then sends SIGTERM to the launcher's programs
        process.wait()
    RUNNING.clear()
