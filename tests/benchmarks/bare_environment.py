"""Environment with few packages and a copy of the source without ``.git``, as on a borrowed machine."""

import importlib.metadata
import os
import shutil
import subprocess
import venv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from tests.programs import OWN, PATIENCE_S, REPOSITORY


@dataclass(frozen=True)
class BareEnvironment:
    folder: Path

    @classmethod
    def of(cls, folder: Path, packages: Iterable[str]) -> "BareEnvironment":
        """Make a virtual environment and a copy of the source in an empty folder.

        The environment has these ``packages`` and all their requirements, in the versions of this process.
        """
        venv.create(folder / "venv", symlinks=True)
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        for name in {each for package in packages for each in _with_requirements(package)}:
            distribution = importlib.metadata.distribution(name)
            for top in {
                file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")
            }:
                (link := site / top).unlink(missing_ok=True)
                link.symlink_to(Path(str(distribution.locate_file(top))))
        for room in set(OWN) - {"tests"}:
            shutil.copytree(
                REPOSITORY / room, folder / "copy" / room, ignore=shutil.ignore_patterns("__pycache__", "results")
            )
        shutil.copy(REPOSITORY / "pyproject.toml", folder / "copy")
        return cls(folder)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python in the copy's folder. Of this process's variables, it gets only PATH."""
        python, home = self.folder / "venv" / "bin" / "python", self.folder / "home"
        home.mkdir(exist_ok=True)
        variables = {"PATH": os.environ["PATH"], "HOME": str(home), "OMP_NUM_THREADS": "1"}
        line = [str(python), *arguments]
        return subprocess.run(
            line,
            cwd=self.folder / "copy",
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )


def _with_requirements(name: str) -> Iterator[str]:
    """Yield a distribution and, recursively, the installed distributions that it requires."""
    seen, waiting = set(), [name]
    while waiting:
        if (name := waiting.pop().lower().replace("_", "-")) in seen:
            continue
        seen.add(name)
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # only other builds of PyTorch require this package
        yield name
        marked = (Requirement(text) for text in requires)
        waiting += [each.name for each in marked if each.marker is None or each.marker.evaluate({"extra": ""})]
