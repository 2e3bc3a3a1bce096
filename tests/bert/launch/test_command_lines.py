"""Command lines and variables of the launcher and of elastic runs, and the number of processes and threads of a host."""

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from bert.configuration.config import Config
from bert.configuration.recipes import RECIPES, tiny_cpu
from bert.launch.__main__ import Command, parse_command, read_nodes
from bert.launch.elastic import main as elastic
from bert.launch.layout import Layout, has_gpus, layout_of
from bert.launch.series import Nodes

LAYOUT = "NPROC", "OMP_NUM_THREADS"
NAMES = (*LAYOUT, "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "LAST_CALL")
TWO = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a"}
HOSTILE = ["-1", "08", "1e2", "a[$(>opened)]", "2\n", "two words", "'", "\N{ARABIC-INDIC DIGIT TWO}", "9" * 30]


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("", Command("", ["tiny_cpu"])),
        ("h100_1x8 10", Command("", ["h100_1x8"], 10)),
        ("h100_1x8 10 -- --log.run 3", Command("", ["h100_1x8", "--log.run", "3"], 10)),
        ("h100_1x8 -- --log.run 3", Command("", ["h100_1x8", "--log.run", "3"])),
        ("--log.run 3", Command("", ["tiny_cpu", "--log.run", "3"])),
        ("tiny_cpu --help", Command("", ["tiny_cpu", "--help"])),
        ("-- --config mine.toml", Command("", ["--config", "mine.toml"])),
        ("-- --plan=plan.json", Command("", ["--plan=plan.json"])),
        ("--prepare", Command("--prepare", ["tiny_cpu"])),
        ("--prepare h100_1x8 -- --plan plan.json", Command("--prepare", ["h100_1x8", "--plan", "plan.json"])),
    ],
)
def test_a_command_line_is_parsed_into_mode_arguments_and_runs(words: str, command: Command) -> None:
    assert parse_command(shlex.split(words)) == command


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("tiny_cpu 0", "RUNS is '0', expected a whole number of at least 1"),
        *((f"tiny_cpu {shlex.quote(text)}", "RUNS is ") for text in HOSTILE if text[0] != "-"),
        ("tiny_cpu 1 stray", r"unexpected argument 'stray': expected ./run_and_time.sh \[RECIPE\] \[RUNS\]"),
        ("--prepare tiny_cpu 1", "unexpected argument '1'"),
        ("--hlep", "there is no option --hlep; did you mean --help?"),
        ("tiny_cpu --prepare", "--prepare must be the first argument"),
        ("--verdict", "--verdict: no result file given"),
        ("--verdict 'a\nb'", r"--verdict: there is no file 'a\\nb'"),
        ("-- --config", "--config needs a value"),
    ],
)
def test_an_invalid_command_line_is_refused(words: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_command(shlex.split(words))


def test_result_files_may_have_any_name(tmp_path: Path) -> None:
    log = tmp_path / 'it\'s "a"\nresult_0.txt'
    log.touch()
    assert parse_command(["--verdict", str(log)]) == Command("--verdict", [str(log)])


def test_invalid_or_incomplete_variables_about_nodes_are_refused(variables: pytest.MonkeyPatch) -> None:
    assert read_nodes(starts=True) == Nodes()
    for name, value in TWO.items():
        variables.setenv(name, value)
    assert read_nodes(starts=True) == Nodes(2, 1, "a", 29500)
    for name, value, complaint in (
        ("NODE_RANK", "2", "NODE_RANK is 2, but NNODES is 2"),
        ("NODE_RANK", "", "NNODES is 2, but NODE_RANK or MASTER_ADDR is not set"),
        ("MASTER_ADDR", "", "NNODES is 2, but NODE_RANK or MASTER_ADDR is not set"),
        ("NNODES", "1", "NODE_RANK is 1, but NNODES is 1"),
        ("MASTER_PORT", "65536", "MASTER_PORT is '65536', expected a whole number of at least 1 and at most 65535"),
        *((name, text, f"{name} is ") for name in ("NNODES", "NODE_RANK", "MASTER_PORT") for text in HOSTILE),
    ):
        with variables.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(ValueError, match=f"^{complaint}"):
                read_nodes(starts=True)
    variables.setenv("NODE_RANK", "")
    variables.delenv("MASTER_ADDR")
    assert read_nodes(starts=False).count == 2  # srun and mpirun need no NODE_RANK and MASTER_ADDR


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("", "MIN:MAX is ''"),
        ("4:3 h0:1 tiny_cpu", "MIN:MAX is '4:3'"),
        ("'2:a[$(>opened)]' h0:1 tiny_cpu", "MIN:MAX is '2:a["),
        ("3:4", "HOST:PORT is ''"),
        ("3:4 h0:1 tiny_cpu", "set --checkpoint.folder"),
        ("3:4 h0 tiny_cpu", "HOST:PORT is 'h0'"),
        ("3:4 h0:1", "expected launch/elastic.sh 3:4 h0:1 RECIPE -- settings"),
        ("3:4 h0:1 tiny_cpu --log.run 3", "expected launch/elastic.sh 3:4 h0:1 RECIPE -- settings"),
        ("3:4 h0:1 tiny_gpu", "unknown recipe 'tiny_gpu'"),
        ("3:4 h0:1 tiny_cpu -- --checkpoint.every-steps 9", "set --checkpoint.folder"),
        ("3:4 h0:1 tiny_cpu -- --checkpoint.foldr here", "did you mean --checkpoint.folder?"),
        ("3:4 h0:1 tiny_cpu more", "expected launch/elastic.sh 3:4 h0:1 RECIPE -- settings"),
        ("--meet", "PORT is ''"),
        ("--meet 65536", "PORT is '65536', expected a whole number of at least 1 and at most 65535"),
        ("--meet 29400 more", "PORT is '29400 more'"),
        ("--meet 'a[$(>opened)]'", "PORT is 'a["),
    ],
)
def test_elastic_refuses_invalid_arguments(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert elastic(shlex.split(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert complaint in line


def test_elastic_executes_torchrun_with_the_options_of_an_elastic_run(
    variables: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks get the layout's number of threads, but no PET_ variable, which would set a default of torchrun."""
    started: list[tuple[str, list[str], dict[str, str]]] = []

    def execve(*given: Any) -> NoReturn:
        started.append(given)
        raise OSError("started")

    variables.setattr(os, "execve", execve)
    for name, value in {"PET_STANDALONE": "1", "NPROC": "3", "OMP_NUM_THREADS": "5", "LAST_CALL": "3600"}.items():
        variables.setenv(name, value)
    settings = f"--checkpoint.folder {tmp_path}"
    options = f"--nproc-per-node 3 --max-restarts 1000 --rdzv-backend c10d --rdzv-endpoint h0:1 --rdzv-id {tmp_path}"
    options += " --rdzv-conf is_host=0,last_call_timeout=3600 --log-dir /dev/null"
    for hosts, address in (("3:4", ""), ("3:3", " --local-addr 10.0.0.1")):
        variables.setenv("ADDRESS", address.rpartition(" ")[2])
        assert elastic(shlex.split(f"{hosts} h0:1 tiny_cpu -- {settings}")) == 2, "because it has raised"
        program, command, environment = started.pop()
        module = "bert.launch.binding" if has_gpus() else "bert.train"
        said = f"{program} -m bert.launch.agent results/tiny_cpu/bert --nnodes {hosts} {options}{address} -m {module}"
        assert command == shlex.split(f"{said} tiny_cpu {settings}")
        assert (environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"], environment["OMP_NUM_THREADS"]) == ("1", "5")
        assert "PET_STANDALONE" not in environment
    capsys.readouterr()
    variables.setenv("LAST_CALL", "3601")
    assert elastic(["3:4", "h0:1", "tiny_cpu"]) == 2
    said = "error: LAST_CALL is '3601', expected a whole number of at least 0 and at most 3600\n"
    assert (capsys.readouterr().err, started) == (said, [])


def test_nproc_and_omp_num_threads_set_the_layout_and_invalid_values_are_refused(variables: pytest.MonkeyPatch) -> None:
    config = tiny_cpu()
    variables.setenv("OMP_NUM_THREADS", "5")
    assert layout_of(config).threads == 5
    variables.setenv("NPROC", "3")
    assert layout_of(config) == Layout(3, 5)
    for name in LAYOUT:
        for wrong in HOSTILE:
            with variables.context() as patch:
                patch.setenv(name, wrong)
                with pytest.raises(ValueError, match=f"^{name} is .*, expected a whole number of at least"):
                    layout_of(config)


def wide(config: Config) -> Config:
    return replace(config, model=replace(config.model, hidden_size=768))


def odd_batch(config: Config) -> Config:
    return replace(config, training=replace(config.training, global_batch_size=33))


@pytest.mark.parametrize(
    ("config", "cores", "gpus", "expected"),
    [
        (tiny_cpu(), 1, 0, Layout(1, 1)),
        (tiny_cpu(), 2, 8, Layout(2, 1)),
        (tiny_cpu(), 16, 0, Layout(2, 2)),
        (RECIPES["own_text_cpu"](), 2, 0, Layout(2, 1)),
        (RECIPES["own_text_cpu"](), 16, 8, Layout(2, 2)),
        (wide(RECIPES["own_text_cpu"]()), 16, 0, Layout(1, 16)),
        (odd_batch(tiny_cpu()), 16, 0, Layout(1, 2)),
        (RECIPES["h100_1x8"](), 224, 8, Layout(8, 28)),
        (RECIPES["h100_1x8"](), 4, 8, Layout(8, 1)),
        (RECIPES["h100_1x8"](), 16, 0, Layout(1, 16)),
    ],
)
def test_the_default_layout_depends_on_device_cores_model_and_batch(
    config: Config, cores: int, gpus: int, expected: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if gpus else None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert layout_of(config) == expected
