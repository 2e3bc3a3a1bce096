"""Traced steps run on "meta"."""

import pytest
import torch


@pytest.fixture(autouse=True)
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report autocast as off, because PyTorch raises if it is asked about autocast on "meta"."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _device=None: False)
