import json
import pydoc_data.topics
import shutil
from functools import partial
from pathlib import Path

import pytest
from safetensors import safe_open

from bert.phase1 import Phase1, main
from dataloading.text import documents


def test_phase_1_learns_which_tokens_are_frequent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, out = tmp_path / "library", tmp_path / "out"
    (library / "pydoc_data").mkdir(parents=True)
    shutil.copy(pydoc_data.topics.__file__, library / "pydoc_data")
    monkeypatch.setattr(documents, "demo_documents", partial(documents.demo_documents, library))
    main(Phase1(out, steps=5, batch_size=2, warmup_steps=1, seed=3))
    vocabulary = (out / "vocab.txt").read_text(encoding="utf-8").split("\n")
    with safe_open(out / "phase1.safetensors", "pt") as file:
        assert json.loads(file.metadata()["provenance"])["seed"] == 3
        [name] = [name for name in file.keys() if "decoder" in name and "bias" in name]  # noqa: SIM118
        bias_V = file.get_tensor(name)
    assert bias_V[vocabulary.index("the")] > 0 > bias_V.median(), "frequent tokens, and rare ones"
