"""Check for what Triton needs besides PyTorch: a C compiler, Python's header files and libcuda."""

import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from bert.guards import triton
from bert.guards.triton import LIBCUDA, lacks_of_triton
from console import processes


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
    monkeypatch.delenv("TRITON_LIBCUDA_PATH")
    for answer, folders, found in (("", "", False), (f"{LIBCUDA} => /lib", "", True), ("", f":{tmp_path}", True)):
        monkeypatch.setattr(processes, "run", lambda *_, said=answer, **__: SimpleNamespace(answer=said))
        monkeypatch.setenv("LD_LIBRARY_PATH", folders)
        assert (lacks_of_triton() == []) == found
    monkeypatch.setenv("CC", "my-compiler")
    assert lacks_of_triton() == ["no C compiler (my-compiler) for Triton: install gcc, or set CC"]
    monkeypatch.setattr(triton, "find_spec", lambda _: None)
    assert lacks_of_triton() == []
