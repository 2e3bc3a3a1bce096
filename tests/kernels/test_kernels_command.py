"""``python -m kernels``: measure, show, pin, clear."""

from pathlib import Path

import pytest

from kernels.__main__ import main
from kernels.tuning.cache import Cache


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLPERF_BERT_CACHE", str(tmp_path / "cache"))


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["show"]) == 0
    assert "nothing is measured or pinned" in capsys.readouterr().out
    assert main(["autotune", "dropout_add_layer_norm", "--device", "cpu", "--dtype", "fp32", "--sequences", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 sequences of 256 tokens on cpu, fp32"
    assert sum(line.endswith("<-") for line in lines) == 1
    assert (tmp_path / "cache" / "kernels").is_dir()
    assert main(["pin", "varlen_attention", "reference"]) == 0
    assert main(["--device", "cpu", "--dtype", "fp32"]) == 0
    table = capsys.readouterr().out
    assert "reference           pin   usable" in table
    assert "dropout_add_layer_norm (256 x 1024, float32): pytorch" in table
    assert main(["show"]) == 0
    assert capsys.readouterr().out.startswith("varlen_attention: reference, pinned\ndropout_add_layer_norm (256")
    assert main(["pin", "dense_gelu", "reference"]) == 0
    capsys.readouterr()
    assert main(["clear", "varlen_attention"]) == 0
    assert capsys.readouterr().out == "1 forgotten\n"
    assert Cache().pins() == {"dense_gelu": "reference"}
    assert main(["clear"]) == 0
    assert capsys.readouterr().out == "2 forgotten\n"
    assert (Cache().entries(), Cache().pins()) == ([], {})


@pytest.mark.parametrize(
    "arguments",
    [
        ["pin", "varlen_attention", "gone"],
        ["pin", "gone", "triton"],
        ["pin", "varlen_attention"],
        ["clear", "gone"],
        ["autotune", "gone"],
        ["autotune", "--sequences", "0"],
        ["autotune", "--sequences", "many"],
        ["--device", "tpu"],
        ["tune"],
        ["show", "all"],
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1


def test_what_cannot_run_here_is_not_pinned(capsys: pytest.CaptureFixture[str]):
    assert main(["pin", "dropout_add_layer_norm", "apex", "--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(
        "error: dropout_add_layer_norm=apex is not pinned: on cpu in fp32 it cannot be used: fused"
    )
    assert Cache().pins() == {}
