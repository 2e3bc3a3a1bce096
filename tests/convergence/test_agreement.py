"""The program against an independent implementation: the short form of ``benchmarks/training/agreement.py``.

Three steps of one layer at BERT's vocabulary, on two ranks. It catches what is wrong at once: another loss, clipping,
schedule or direction, a global norm of four million elements that loses bits (3e-4
when it is added up in fp32). It cannot catch what grows over hundreds of steps, as a variance that drifts, nor trust ratios
that are a little off, since the first rates are small: for that the benchmark takes 300 steps. Norms at BERT-Large's sizes
are tested in ``tests/kernels``.
"""

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.programs import write_forked_python


def test_the_program_trains_as_an_independent_implementation_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="transformers, the independent model, is not installed")
    from benchmarks.training import agreement

    write_forked_python(tmp_path)  # launcher and ranks of the program
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    out = tmp_path / "agreement.json"
    arguments = ["--text", str(REPOSITORY / "README.md"), "--steps", "3", "--layers", "1", "--out", str(out)]
    status = agreement.main(arguments)
    figures = json.loads(out.read_text(encoding="utf-8"))
    worst = figures["differences"]["program from independent, float64"]
    found = {kind: worst[kind]["difference"] for kind in worst}
    assert found["loss"] < 1e-6
    assert found["weight matrix"] < 5e-7
    assert found["bias or norm"] < 3e-5
    assert found["gradient norm"] < 1e-6
    assert status == 0
