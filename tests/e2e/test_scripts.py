"""``run_and_time.sh``, ``run_tests.sh`` and ``launch/``: invalid input, help, and installation of packages."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from console.version import version_line
from tests.programs import PATIENCE_S, REPOSITORY, wait_for, write_script

SHORT = ("--evaluation.interval-samples", "160", "--log.interval-steps", "5", "--evaluation.target")
REACHED_AT_ONCE, NEVER_REACHED = "0.02", "0.99"


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Make a checkout without .venv, and a ``python`` that only records calls of pip and installs nothing."""
    shutil.copytree(REPOSITORY / "launch", tmp_path / "launch")
    for name in ("constraints.txt", "hashes.txt", "pyproject.toml", "run_and_time.sh", "run_tests.sh"):
        shutil.copy(REPOSITORY / name, tmp_path)
    (tmp_path / "calls").touch()
    write_script(
        tmp_path / "python",
        f"""#!/bin/bash
        case "$*" in
          "-m pip --python"*--version | "-m pip index"*) ;;
          "-m pip"*--require-hashes*) cp .venv/hashes.txt hashed ;;
          "-m pip"*) echo pip "$@" >>calls ;;
          "-m venv"*) echo venv >>calls; mkdir -p .venv/bin && ln -sf {sys.executable!r} .venv/bin/python ;;
          *) exec {sys.executable!r} "$@" ;;
        esac
        """,
    )
    return tmp_path


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a shell outside any launcher. CLEAR_CACHES=0 keeps the page cache for other tests."""
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NPROC", "NNODES", "NODE_RANK", "OMP_NUM_THREADS", "PYTHON")
    return {name: value for name, value in os.environ.items() if name not in unset} | {"CLEAR_CACHES": "0"} | changes


def start(program: Path | str, *arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *arguments], cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=PATIENCE_S
    )


def begin(script: Path, *arguments: str, cwd: Path, **env: str) -> subprocess.Popen[str]:
    """Start the script in its own session, with all output in one stream.

    Restore the default action for SIGINT, because background jobs ignore it, and a shell that starts with an ignored
    signal cannot trap it.
    """
    return subprocess.Popen(
        [script, *arguments],
        cwd=cwd,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def prepare(bare: Path, *extras: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = f"source launch/venv.sh; prepare_venv {' '.join(extras)}"
    return start("bash", "-c", command, cwd=bare, PYTHON="./python", **env)


def calls(bare: Path) -> list[str]:
    return [line.split()[0] for line in (bare / "calls").read_text().splitlines()]


def one_error(done: subprocess.CompletedProcess[str]) -> str:
    """Return the only line on stderr of a command that rejected its input."""
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def status_of(log: Path) -> str:
    """Return the status in the log's only ``run_stop``."""
    (line,) = (line for line in log.read_text().splitlines() if '"run_stop"' in line)
    return json.loads(line.partition(":::MLLOG ")[2])["metadata"]["status"]


TWO_NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_SUBMIT_DIR": "."}
OPENS = "a[$(>opened)]"
"""A value that creates a file if bash evaluates it as a number."""


@pytest.mark.parametrize(
    ("command", "env", "complaint"),
    [
        # TORCH becomes part of the path of a folder that the script removes.
        ("bash -c 'source launch/venv.sh; prepare_torch ../../..'", {}, "TORCH is '"),
        ("bash -c 'source launch/venv.sh; prepare_torch 2.11.0/../..'", {}, "TORCH is '"),
        ("launch/docker.sh", {"ENGINE": "nowhere"}, "there is no nowhere here"),
        ("launch/docker.sh", {"ENGINE": "true", "IMAGE": "--privileged"}, "IMAGE is '--privileged', expected the name"),
        ("launch/docker.sh", {"ENGINE": "true", "DATA": "-v"}, "DATA is '-v', expected a folder"),
        ("launch/docker.sh", {"ENGINE": "true", "DATA": "a:b"}, "DATA is 'a:b', expected a folder"),
        ("launch/docker.sh", {"ENGINE": "true", "RESULTS": "linked"}, "RESULTS is 'linked', expected a folder"),
        ("bash launch/slurm.sub", SLURM, "no recipe given"),
        ("bash launch/slurm.sub tiny_cpu 1 --log.run 3", SLURM, "expected -- and settings"),
        ("bash launch/slurm.sub tiny_cpu", SLURM | {"SLURM_JOB_NUM_NODES": OPENS}, "SLURM_JOB_NUM_NODES is 'a["),
        ("bash launch/slurm.sub tiny_cpu", SLURM | {"SLURM_JOB_ID": "../7"}, "SLURM_JOB_ID is '../7'"),
        ("bash launch/slurm.sub tiny_cpu", SLURM | {"CONTAINER": "--overlay=/etc.sif"}, "CONTAINER is '--overlay=/etc"),
        ("bash launch/slurm.sub tiny_cpu", SLURM | {"CONTAINER": "a.sif", "MOUNTS": "/etc"}, "MOUNTS is '/etc'"),
    ],
)  # fmt: skip
def test_scripts_refuse_invalid_input_in_one_line(
    bare: Path, command: str, env: dict[str, str], complaint: str
) -> None:
    (bare / "linked").symlink_to("a:b")
    program, *arguments = shlex.split(command)
    assert complaint in one_error(start(program, *arguments, cwd=bare, PYTHON="./python", **env))
    assert not [name for name in ("opened", ".venv", "a:b") if (bare / name).exists()]


@pytest.mark.parametrize(
    ("command", "env", "complaint"),
    [
        (f"./run_and_time.sh tiny_cpu {OPENS}", {}, "RUNS is 'a["),
        ("./run_and_time.sh", {"NPROC": OPENS}, "NPROC is 'a["),
        ("./run_and_time.sh", {"NNODES": "2\x1b[2J"}, r"NNODES is '2\x1b[2J'"),
        ("./run_and_time.sh", {"CLEAR_CACHES": "2"}, "CLEAR_CACHES is '2', expected a whole number of at least 0"),
        ("./run_and_time.sh --hlep", {}, "there is no option --hlep; did you mean --help?"),
        ("./run_and_time.sh tiny_cpu 1 -- stray --dry-run", {}, "unexpected argument 'stray': expected settings"),
        ("./run_and_time.sh tiny_gpu", {}, "unknown recipe 'tiny_gpu'"),
        ("./run_and_time.sh --verdict 'a\nb'", {}, r"--verdict: there is no file 'a\nb'"),
        ("./run_and_time.sh -- --data.train nowhere", {"RANK": "0", "WORLD_SIZE": "2"}, "nowhere"),
        (f"launch/elastic.sh --meet {OPENS}", {}, "PORT is 'a["),
    ],
)  # fmt: skip
def test_the_launcher_refuses_invalid_input_in_one_line(
    checkout: Path, tmp_path: Path, command: str, env: dict[str, str], complaint: str
) -> None:
    program, *arguments = shlex.split(command)
    done = start(checkout / program, *arguments, cwd=tmp_path, **env)
    assert complaint in one_error(done)
    assert done.stdout == ""
    assert not [folder for folder in (checkout, tmp_path) if (folder / "opened").exists()]


def test_a_taken_master_port_is_refused_in_one_line_before_a_run(checkout: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        env = TWO_NODES | {"NODE_RANK": "0", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "NPROC": "1"}
        settings = ("--", "--log.results", str(tmp_path / "results"))
        done = start(checkout / "run_and_time.sh", "h100_8x8", "1", *settings, cwd=tmp_path, **env)
    error = one_error(done)
    assert f"MASTER_PORT is {port}, but this node cannot listen there (Address already in use): set it to" in error
    assert "run 1 of 1" not in done.stdout
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("run_and_time.sh", "  ./run_and_time.sh [RECIPE] [RUNS]"),
        ("run_tests.sh", "Run the tests: ./run_tests.sh [--quick] [pytest arguments]."),
        ("launch/docker.sh", "  IMAGE=mlperf-bert launch/docker.sh h100_1x8 10"),
        ("launch/elastic.sh", "  launch/elastic.sh MIN:MAX HOST:PORT RECIPE -- --checkpoint.folder DIR"),
        ("launch/slurm.sub", "  sbatch -N8 launch/slurm.sub dgxa100_8x8 10"),
        ("launch/data.sub", "  sbatch --array=1-16 --cpus-per-task=32 --mem-per-cpu=1G launch/data.sub FOLDER..."),
    ],
)
def test_help_and_version_need_no_packages_and_help_prints_the_header_comment(
    bare: Path, script: str, says: str
) -> None:
    done = start("bash", script, "--help", cwd=bare)
    assert (done.returncode, done.stderr) == (0, "")
    assert any(line.startswith(says) for line in done.stdout.splitlines())
    assert "set -" not in done.stdout
    assert "SBATCH" not in done.stdout
    assert not (bare / ".venv").exists()
    done = start("bash", str(REPOSITORY / script), "--version", cwd=bare)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{version_line()}\n", "")


@pytest.mark.parametrize("setting", [(), ("--log.tensorboard", "here"), ("--log.tensorboard=here",)])
def test_tensorboard_is_installed_if_a_setting_needs_it(checkout: Path, bare: Path, setting: tuple[str, ...]) -> None:
    (checkout / "calls").write_text("")
    (checkout / ".venv/installed/tensorboard").unlink(missing_ok=True)
    arguments = ("tiny_cpu", "1", "--", *setting, "--dry-run")
    done = start(checkout / "run_and_time.sh", *arguments, cwd=bare, PYTHON=str(bare / "python"), NPROC="1")
    assert done.returncode == 0, done.stderr
    assert ("tensorboard" in (checkout / "calls").read_text().split()) == bool(setting)


def test_run_tests_exits_with_the_status_of_pytest(checkout: Path, tmp_path: Path) -> None:
    assert start(checkout / "run_tests.sh", "-n0", "no_such_test.py", cwd=tmp_path).returncode == 4
    slow = ("-n0", "--collect-only", "tests/e2e/test_report_page.py")
    assert start(checkout / "run_tests.sh", "--quick", *slow, cwd=tmp_path).returncode == 5  # no tests selected


def test_the_venv_is_installed_again_only_for_new_pins_new_extras_and_lost_packages(bare: Path) -> None:
    assert prepare(bare).returncode == 0
    assert calls(bare) == ["venv", "pip"]
    assert prepare(bare).stdout == ""
    prepare(bare, "test")  # the extra "test" needs more packages
    assert calls(bare) == ["venv", "pip", "pip"]
    packages = bare / ".venv/lib/python3.11/site-packages"
    for name in ("numpy", "torch", "torch-2.dist-info"):
        (packages / name).mkdir(parents=True)
    with (bare / "constraints.txt").open("a") as pins:
        pins.write("another==1.0\n")
    prepare(bare, "test")
    assert calls(bare) == ["venv", "pip", "pip", "pip"]
    (packages / "flash_attn").mkdir()  # a package that the user has added
    assert prepare(bare).stdout == ""  # the extra has installed the packages of a run, too
    assert calls(bare) == ["venv", "pip", "pip", "pip"]
    (packages / "torch").rmdir()
    assert "==> python3.11/site-packages/torch is gone from .venv: installing it again" in prepare(bare).stdout
    assert calls(bare)[4:] == ["venv", "pip"]
    assert not packages.exists()
    (bare / ".venv/bin/python").unlink()
    (bare / ".venv/bin/python").symlink_to("/removed/python")
    prepare(bare)
    assert calls(bare)[6:] == ["venv", "pip"]


def test_simultaneous_starts_install_the_packages_once(bare: Path) -> None:
    (bare / "python").write_text((bare / "python").read_text().replace("echo pip", "sleep 0.5; echo pip"))
    command = ["bash", "-c", "source launch/venv.sh; prepare_venv"]
    both = [subprocess.Popen(command, cwd=bare, env=environment(PYTHON="./python")) for _ in range(2)]
    assert [process.wait(timeout=PATIENCE_S) for process in both] == [0, 0]
    assert calls(bare) == ["venv", "pip"]


def test_the_setting_system_torch_keeps_the_installed_numpy_and_setuptools(bare: Path) -> None:
    for name, number in {"torch": "2.11.0a0+nv26.3", "numpy": "1.26.4", "setuptools": "81.0.0"}.items():
        folder = bare / f"base/{name}-{number}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    assert prepare(bare, SYSTEM_TORCH="1", PYTHONPATH=str(bare / "base")).returncode == 0
    pinned = set((bare / ".venv/constraints.txt").read_text().splitlines())
    assert {"torch==2.11.0a0+nv26.3", "numpy==1.26.4", "setuptools==81.0.0"} <= pinned
    all_pins = {line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line}
    assert {line.partition("==")[0] for line in all_pins - pinned} <= {"torch", "numpy", "setuptools", "triton"}
    assert not re.search("^(numpy|setuptools)==", (bare / "hashed").read_text(), re.MULTILINE)


def test_every_pin_except_pytorch_has_the_digests_of_its_wheels(bare: Path) -> None:
    def name_of(pin: str) -> str:
        return re.sub("[-_.]+", "-", pin.lower())

    assert prepare(bare, "dali").returncode == 0
    hashed = (bare / "hashed").read_text().splitlines()
    lines = (bare / "hashes.txt").read_text().splitlines()[1:]
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+( --hash=sha256:[0-9a-f]{64})+ #( [a-z]+)+", line) for line in lines)
    pins = {name_of(line) for line in (bare / "constraints.txt").read_text().splitlines() if "==" in line}
    assert pins - {name_of(line.split()[0]) for line in lines} == {
        name_of(f"torch=={version('torch').partition('+')[0]}")
    }
    assert hashed == [line for line in lines if {"run", "dali"} & {*line.partition("#")[2].split()}]


@pytest.mark.parametrize(
    ("python", "complaint"),
    [
        ("#!/bin/bash\n[[ $1 == -V ]] && echo Python 3.10.9", "Python 3.10.9, expected 3.11 or newer"),
        ("#!/bin/bash\n[[ $1 != -m ]]", "no pip"),
        (None, "there is no ./python"),
    ],
)
def test_an_unsuitable_interpreter_is_refused_in_one_line(bare: Path, python: str | None, complaint: str) -> None:
    (bare / "python").unlink()
    if python:
        write_script(bare / "python", python)
    assert complaint in one_error(prepare(bare))
    assert not (bare / ".venv").exists()


def test_a_failed_installation_is_repeated_at_the_next_start(bare: Path) -> None:
    working = (bare / "python").read_text()
    (bare / "python").write_text(working.replace('echo pip "$@" >>calls', "exit 1"))
    assert one_error(prepare(bare)).endswith("pip could not install the packages, see above")
    kept = f"PyTorch stays torch=={version('torch')}"  # the error names PyTorch, which may be too old
    assert one_error(prepare(bare, SYSTEM_TORCH="1")).endswith(f"pip could not install the packages, see above; {kept}")
    (bare / "python").write_text(working)
    assert prepare(bare).returncode == 0
    assert calls(bare) == ["venv", "venv", "venv", "pip"]  # every attempt makes a new environment


@pytest.mark.parametrize(
    ("script", "number", "status"), [("run_and_time.sh", signal.SIGTERM, 143), ("run_tests.sh", signal.SIGINT, 130)]
)
def test_an_interrupted_installation_starts_again(bare: Path, script: str, number: int, status: int) -> None:
    """While pip installs, the script gets SIGTERM, as from ``docker stop``, or all processes get SIGINT, as from Ctrl-C."""
    working = (bare / "python").read_text()
    half = "mkdir -p .venv/half && echo $$ >pip; trap 'echo Operation cancelled' INT; while true; do sleep 0.1; done"
    (bare / "python").write_text(working.replace('echo pip "$@" >>calls', half))
    process = begin(bare / script, "--", "--help", cwd=bare, PYTHON="./python")
    wait_for(lambda: (bare / "pip").exists() and (bare / "pip").read_text().endswith("\n"))
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does on Ctrl-C
    else:
        process.terminate()
    lines = process.communicate(timeout=PATIENCE_S)[0].splitlines()
    assert process.returncode == status
    said = [line for line in lines if not line.startswith("==> ")]
    assert said == ["interrupted: the next start installs the packages again"]
    pip = int((bare / "pip").read_text())
    running = lambda: [each.pid for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"]]  # noqa: E731
    wait_for(lambda: pip not in running())
    (bare / "python").write_text(working)
    assert prepare(bare).returncode == 0
    assert calls(bare) == ["venv", "venv", "pip"]
    assert prepare(bare).stdout == ""


def test_a_signal_right_after_the_start_of_an_installation_ends_it() -> None:
    """bash runs the trap DEBUG before each command, so the signal arrives before the first command after the start."""
    at_once = """trap '[[ ! ${!-} ]] || { trap - DEBUG; echo $! && kill -TERM $$; }' DEBUG"""
    script = (
        f"set -euoT pipefail; source launch/venv.sh; {at_once}; run_apart bash -c 'exec sleep {PATIENCE_S} &>/dev/null'"
    )
    done = start("bash", "-c", script, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (143, "interrupted: the next start installs the packages again\n")
    running = [each.pid for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"]]  # leaves out zombies
    assert int(done.stdout) not in running
