"""The installed wheel can check results and predict times. Programs that lack packages name the extra to install."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.e2e.conftest import left_behind

PACKAGES = ("cluster", "compliance", "console")
OF_EXTRAS = ("torch", "triton", "h5py", "numba", "safetensors", "tokenizers", "google_crc32c", "scipy")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this repository without downloads."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    tree = shutil.copytree(REPOSITORY, folder / "tree", ignore=left_behind)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, folder], cwd=tree, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the wheel into a folder that links to all installed packages, except packages that only extras install."""
    site = tmp_path_factory.mktemp("site")
    shutil.unpack_archive(wheel, site, "zip")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(OF_EXTRAS) and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    return site


def run(site: Path, folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-S", "-m", module, *arguments]  # -S hides the packages of this environment
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def test_every_file_of_the_packages_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    paths = [path for package in PACKAGES for path in (REPOSITORY / package).rglob("*") if path.is_file()]
    assert found == {path.relative_to(REPOSITORY).as_posix() for path in paths if "__pycache__" not in path.parts}


@pytest.mark.slow
def test_transformers_imports_hugging_faces_kernels_beside_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    """Python's option -P makes transformers import Hugging Face's ``kernels``, not the clone's package of that name."""
    venv.create(tmp_path, symlinks=True)
    install = [sys.executable, "-m", "pip", "--python", str(tmp_path / "bin/python"), "install", "-qq", "--no-deps"]
    theirs = subprocess.run([*install, "--retries=0", "kernels==0.17.2"], capture_output=True, text=True, timeout=600)
    if theirs.returncode:
        pytest.skip(f"pip cannot install Hugging Face's kernels: {theirs.stderr[-300:]}")
    subprocess.run([*install, wheel], check=True, timeout=600)
    # Skip the version check: each version of transformers accepts only one minor version of Hugging Face's kernels.
    use = (
        "import transformers.utils.import_utils as found; found.is_kernels_available = lambda: True; "
        "import transformers.integrations.hub_kernels; from transformers import BertModel"
    )
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    command = [tmp_path / "bin/python", "-P", "-c", use]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        *("bert.train --help", "bert.evaluate --help", "bert.convert --help", "dataloading --help", "kernels --help"),
        *("cluster plan h100_1x8", "cluster scale h100_1x8", "cluster probe --out view.json"),
    ],
)
def test_a_program_without_its_packages_names_the_extra_to_install(installed: Path, command: str) -> None:
    done = run(installed, REPOSITORY, *command.split())
    assert done.returncode != 0
    assert " is not installed: pip install '.[train]'" in done.stderr
    if not command.startswith("kernels"):  # kernels may not import console, which prints errors in one line
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("cluster devices", "H100-SXM"),
        ("cluster predict --accelerator H100-SXM", " min to "),
        ("compliance check REPOSITORY/results/cpu_2cores/bert/result_0.txt", "PASS "),
        ("compliance doctor --quick", "recipe "),
    ],
)
def test_programs_that_need_no_extra_run_from_the_installed_wheel(
    installed: Path, tmp_path: Path, command: str, shown: str
) -> None:
    done = run(installed, tmp_path, *(word.replace("REPOSITORY", str(REPOSITORY)) for word in command.split()))
    assert done.returncode in ((0, 1) if "doctor" in command else (0,)), done.stderr
    assert "Traceback" not in done.stderr
    assert shown in done.stdout


@pytest.mark.parametrize(
    "command", ["compliance doctor --recipe tiny_cpu", "cluster plan h100_1x8", "cluster scale h100_1x8"]
)
def test_an_installed_program_that_needs_a_clone_says_so(installed: Path, tmp_path: Path, command: str) -> None:
    done = run(installed, tmp_path, *command.split())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "in the root of a clone" in done.stderr
