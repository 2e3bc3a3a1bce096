"""Programs run no compiled code from caches that other users can write to, and report missing build tools."""

import os
import pickle
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from bert.guards import triton
from bert.guards.triton import LIBCUDA, missing_build_tools
from console import processes
from tests.programs import python

CALL = """
import sys
sys.path.insert(0, sys.argv[1])
import doubling
print(doubling.double(4))
"""
MODULE = """
from dataloading.preparation.pretraining_data import compiled

@compiled
def double(number):
    return 2 * number
"""


class Planted:
    """Object that runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def visible() -> Iterator[Path]:
    """Make a folder that all users can enter. pytest's own temporary folders are closed to other users."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def call(module: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    return python("-c", CALL, module, NUMBA_CACHE_DIR=cache)


@pytest.mark.slow
def test_a_pickle_in_a_folder_that_others_can_write_to_is_not_read(visible: Path) -> None:
    module, cache, mark = visible / "module", visible / "cache", visible / "mark"
    module.mkdir()
    (module / "doubling.py").write_text(MODULE)
    assert call(module, cache).stdout == "8\n"
    [index] = cache.rglob("*.nbi")  # Numba's index of cached code, a pickle
    index.write_bytes(pickle.dumps(Planted(mark)))
    for folder in (index.parent, cache):
        mode = folder.stat().st_mode
        folder.chmod(0o777)
        done = call(module, cache)
        folder.chmod(mode)
        assert done.stdout == "8\n", done.stderr
        assert not mark.exists()
        assert f"{index.parent} can be written by others" in done.stderr


def test_triton_does_not_use_a_cache_that_others_can_write_to(visible: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(triton.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("TRITON_HOME", str(visible))
    assert triton.require_private_cache() is None
    assert triton.CACHE_VARIABLE not in os.environ
    monkeypatch.setenv(triton.CACHE_VARIABLE, "")  # lets monkeypatch undo the change that follows
    (visible / ".triton" / "cache").chmod(0o777)
    warning = triton.require_private_cache()
    assert warning is not None
    assert str(visible / ".triton" / "cache") in warning
    own = Path(os.environ[triton.CACHE_VARIABLE])
    assert own.stat().st_mode & 0o777 == 0o700
    assert list(own.iterdir()) == []
    (visible / "file").touch()
    monkeypatch.setenv(triton.CACHE_VARIABLE, str(visible / "file" / "cache"))
    assert (triton.require_private_cache() or "").startswith(f"{visible}/file/cache cannot be used (Not a directory): ")


def test_missing_build_tools_of_triton_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_paths", lambda **_: {"include": str(tmp_path / "include")})
    compiler, header, driver = missing_build_tools()
    assert "C compiler" in compiler
    assert f"{tmp_path}/include/Python.h" in header
    assert LIBCUDA in driver
    (tmp_path / "include").mkdir()
    for path in ("clang", "include/Python.h", LIBCUDA):
        (tmp_path / path).touch(mode=0o755)
    assert missing_build_tools() == []
    monkeypatch.delenv("TRITON_LIBCUDA_PATH")
    for answer, folders, found in (("", "", False), (f"{LIBCUDA} => /lib", "", True), ("", f":{tmp_path}", True)):
        monkeypatch.setattr(processes, "run", lambda *_, said=answer, **__: SimpleNamespace(answer=said))
        monkeypatch.setenv("LD_LIBRARY_PATH", folders)
        assert (missing_build_tools() == []) == found
    monkeypatch.setenv("CC", "my-compiler")
    assert missing_build_tools() == ["no C compiler (my-compiler) for Triton: install gcc, or set CC"]
    monkeypatch.setattr(triton, "find_spec", lambda _: None)
    assert missing_build_tools() == []
