"""Requirements of a GPU run on the machine, besides PyTorch."""

import sysconfig
from pathlib import Path

import pytest

from console.cuda import LIBCUDA, lacks_of_triton, loaded_driver, outdated_driver

OPEN = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@host)  Sun Jul 27
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version:\n"


@pytest.mark.parametrize(
    ("driver", "cuda", "facts"),
    [
        ("550.54.15", "13.0", ("driver 550.54.15", "CUDA 13.0", "580 or newer", "PyTorch for CUDA 12")),
        ("470.82", "12.8", ("525 or newer", "PyTorch for CUDA 11")),
        ("390.1", "13.0", ("580 or newer",)),
        ("580.65.06", "13.0", None),
        ("525.60", "12.9", None),
        ("", "13.0", None),
        ("550.54.15", "", None),
        ("550.54.15", "99.0", None),
    ],
)
def test_drivers_that_are_too_old_for_a_cuda(driver: str, cuda: str, facts: tuple[str, ...] | None) -> None:
    said = outdated_driver(driver, cuda)
    assert (said is None) == (facts is None)
    assert all(fact in str(said) for fact in facts or ())


@pytest.mark.parametrize(("text", "version"), [(OPEN, "580.65.06"), (CLOSED, "550.54.15"), ("NVRM version:\n", "")])
def test_the_driver_that_is_loaded(tmp_path: Path, text: str, version: str) -> None:
    assert loaded_driver(tmp_path) == ""
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(text)
    assert loaded_driver(tmp_path) == version


def test_what_triton_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_paths", lambda **_: {"include": str(tmp_path / "include")})
    compiler, header, driver = (lack.found for lack in lacks_of_triton())
    assert "C compiler" in compiler
    assert f"{tmp_path}/include/Python.h" in header
    assert LIBCUDA in driver
    (tmp_path / "include").mkdir()
    for path in ("clang", "include/Python.h", LIBCUDA):
        (tmp_path / path).touch(mode=0o755)
    assert lacks_of_triton() == []
    monkeypatch.setenv("CC", "my-compiler")
    assert ["my-compiler" in lack.found for lack in lacks_of_triton()] == [True]
