"""Write hashes.txt: each pin of constraints.txt with the SHA-256 digests of its wheels, and the extras that need it.

Run `python launch/lock.py` after a change of constraints.txt or pyproject.toml. It needs uv, which resolves each extra for
all platforms at once. PyTorch and the packages that only its CUDA builds need are left out, because every package index
has its own builds.
"""

import re
import subprocess
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHEEL = re.compile(r"-(py3|py2\.py3|cp3\d+)-(none|abi3|cp3(1[1-9]|[2-9]\d)t?)-(any|.*linux.*_(x86_64|aarch64))\.whl$")
"""Pattern of the names of wheels for Linux and for supported versions of Python."""


def locked(*options: str, others: bytes = b"") -> dict[str, list[str]]:
    """Resolve the program's requirements and return the hashes of their wheels by pin.

    ``options`` are options of uv, and ``others`` are further requirements, one per line.
    """
    command = ["uv", "pip", "compile", "--quiet", "pyproject.toml", "-", "--universal", "--constraint=constraints.txt"]
    output = subprocess.check_output([*command, "--format=pylock.toml", *options], cwd=ROOT, input=others)
    return {
        f"{package['name']}=={package['version']}": sorted(
            wheel["hashes"]["sha256"] for wheel in package["wheels"] if WHEEL.search(wheel["url"])
        )
        for package in tomllib.loads(output.decode())["packages"]
    }


def main() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pinned = {re.sub("[-_.]+", "-", pin.lower().partition("==")[0]) for pin in pins} - {"torch"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys() - {"train"}
    found = {"checker": locked(), "run": locked("--extra=train", others=b"pip")}
    found |= {extra: locked(f"--extra={extra}") for extra in sorted(extras)}
    needed, hashes = defaultdict[str, list[str]](list), {}
    for extra, packages in found.items():
        for pin, values in packages.items():
            if pin.partition("==")[0] in pinned:
                needed[pin].append(extra)
                hashes[pin] = values
    lines = [
        " ".join([pin, *(f"--hash=sha256:{each}" for each in hashes[pin]), "#", *needed[pin]]) for pin in sorted(needed)
    ]
    (ROOT / "hashes.txt").write_text("\n".join(["# Written by launch/lock.py, from constraints.txt.", *lines, ""]))


if __name__ == "__main__":
    main()
