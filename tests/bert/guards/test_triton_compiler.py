"""Check for what Triton needs besides PyTorch: a C compiler, Python's header files and libcuda."""

import sysconfig
from pathlib import Path

import pytest

from bert.guards.triton import LIBCUDA, lacks_of_triton


def test_what_triton_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_paths", lambda **_: {"include": str(tmp_path / "include")})
    compiler, header, driver = lacks_of_triton()
    assert "C compiler" in compiler
    assert f"{tmp_path}/include/Python.h" in header
    assert LIBCUDA in driver
    (tmp_path / "include").mkdir()
    for path in ("clang", "include/Python.h", LIBCUDA):
        (tmp_path / path).touch(mode=0o755)
    assert lacks_of_triton() == []
    monkeypatch.setenv("CC", "my-compiler")
    assert ["my-compiler" in lack for lack in lacks_of_triton()] == [True]
