"""A container of the image that ``Dockerfile`` describes trains as an ordinary user.

buildah builds the image from a small replacement for NGC's PyTorch image. The test takes minutes and gigabytes, so it
runs only if BERT_TEST_BASE names an image with Python 3.11 and pip that buildah has. BUILDAH_OPTIONS has global options
of buildah, such as --root and --storage-driver. See docs/launching.md.
"""

import json
import os
import shlex
import shutil
import subprocess

import pytest

from tests.conftest import REPOSITORY

BASE = os.environ.get("BERT_TEST_BASE")
IMAGE = "localhost/mlperf-bert-test"
NGC = {"torch": "2.11.0", "numpy": "1.26.4", "setuptools": "81.0.0"}
"""Packages of NGC's image, which the test's base image gets too. PyTorch 2.11 requires setuptools below 82."""
STAND_IN = f"""FROM {BASE}
RUN python3 -m pip install --break-system-packages --quiet --no-cache-dir {" ".join(f"{k}=={v}" for k, v in NGC.items())}
RUN mkdir -p /opt/nvidia && cd /opt/nvidia \\
 && printf '#!/bin/bash\\necho entrypoint of the base\\nexec "$@"\\n' >nvidia_entrypoint.sh && chmod 755 nvidia_entrypoint.sh
"""
pytestmark = pytest.mark.skipif(
    not BASE or not shutil.which("buildah"), reason="no buildah here, or BERT_TEST_BASE does not name a base image"
)


def buildah(*arguments: str) -> str:
    options = shlex.split(os.environ.get("BUILDAH_OPTIONS", ""))
    done = subprocess.run(
        ["buildah", *options, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    base = tmp_path_factory.mktemp("base")
    folders = ("/etc/ssl/certs", "/usr/local/share/ca-certificates")
    certificates = [f"--volume={folder}:{folder}:ro" for folder in folders]
    build = ("bud", "--format=docker", "--isolation=chroot", *certificates)
    (base / "Dockerfile").write_text(STAND_IN)
    buildah(*build, "--layers", f"--tag={IMAGE}-base", str(base))
    given = (f"--build-arg=BASE={IMAGE}-base", "--build-arg=EXTRAS=", "--build-arg=REVISION=abc")
    buildah(*build, *given, f"--tag={IMAGE}", ".")
    return IMAGE


def test_a_container_trains_tiny_cpu_as_an_ordinary_user(image: str) -> None:
    config = json.loads(buildah("inspect", "--type=image", image))["Docker"]["config"]
    assert config["Cmd"] == ["tiny_cpu"]
    assert config["User"] == "10001"
    assert config["Labels"]["org.opencontainers.image.revision"] == "abc"
    assert config["Healthcheck"]
    container = buildah("from", image).strip()

    def run(*command: str) -> str:
        return buildah("run", "--isolation=chroot", "--user", config["User"], container, "--", *command)

    try:
        short = ("--", "--evaluation.interval-samples", "320", "--evaluation.target", "0.02")
        shown = run(*config["Entrypoint"], *config["Cmd"], "1", *short)
        head = run("cat", "results/tiny_cpu/bert/result_0.txt")
        files = run("find", ".", "-path", "./.venv", "-prune", "-o", "-print")
        versions = f"import importlib.metadata as m; print({{name: m.version(name) for name in {list(NGC)}}})"
        used = run(".venv/bin/python", "-c", versions)
    finally:
        buildah("rm", container)
    assert used.strip() == str(NGC)
    assert shown.startswith("entrypoint of the base\n")
    assert "1 of 1 runs valid" in shown
    assert "# commit: abc\n" in head
    assert not {"./.git", "./tests", "./.ci"} & set(files.split())
