"""The wheel built from this tree, in an empty environment: it is complete, and its programs name a missing extra."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.e2e.conftest import left_behind

PACKAGES = ("bert", "cluster", "compliance", "console", "dataloading", "kernels")
OF_EXTRAS = ("torch", "triton", "h5py", "numba", "safetensors", "tokenizers", "google_crc32c", "scipy")
PROGRAMS = (
    "bert.train",
    "bert.evaluate",
    "bert.convert",
    "dataloading",
    "kernels",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel as pip does, without downloading anything."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    tree = shutil.copytree(REPOSITORY, folder / "tree", ignore=left_behind)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, folder], cwd=tree, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the wheel beside this environment's packages, except those of the extras."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(OF_EXTRAS) and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    return site


def run(site: Path, folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-S", "-m", module, *arguments]  # -S hides this environment's other packages
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def test_every_file_of_the_packages_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        path.relative_to(REPOSITORY).as_posix()
        for package in PACKAGES
        for path in (REPOSITORY / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert found == expected


@pytest.mark.parametrize("module", PROGRAMS)
def test_a_program_without_its_extra_names_it(installed: Path, tmp_path: Path, module: str) -> None:
    done = run(installed, tmp_path, module, "--help")
    assert done.returncode != 0
    assert " is not installed: pip install '.[train]'" in done.stderr
    if not module.startswith("kernels"):  # programs of kernels import nothing that could print the error
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith("error: ")


@pytest.mark.parametrize("command", ["plan h100_1x8", "scale h100_1x8", "probe --out view.json"])
def test_a_command_without_its_extra_names_it(installed: Path, tmp_path: Path, command: str) -> None:
    done = run(installed, tmp_path, "cluster", *command.split())
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: ")
    assert " is not installed: pip install '.[train]'" in done.stderr


def test_devices_are_listed_and_times_predicted_without_extras(installed: Path, tmp_path: Path) -> None:
    for command in ("devices", "predict --accelerator H100-SXM"):
        done = run(installed, tmp_path, "cluster", *command.split())
        assert done.returncode == 0, done.stderr


def test_logs_are_checked_without_extras(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "compliance", "check", str(REPOSITORY / "results/cpu_2cores/bert/result_0.txt"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PASS ")


def test_the_doctor_examines_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "compliance", "doctor", "--quick")
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    assert "recipe " in done.stdout
