"""A fixture that hides the variables of a launcher, in case one has started the tests."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    own = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NNODES", "GLOO_SOCKET_IFNAME"
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "TORCHELASTIC_", "MASTER_")) or name in own:
            monkeypatch.delenv(name)
