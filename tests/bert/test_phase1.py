import json
import pydoc_data.topics
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bert.phase1 import Phase1, _train, main
from dataloading.batches.loader import batch_of
from dataloading.batches.sampler import BatchPlan
from dataloading.text import documents
from tests.bert.small_models import OF_SMALL_RUN, assert_near, mean_loss, random_model
from tests.conftest import SmallRun

DROPLESS = replace(OF_SMALL_RUN, hidden_dropout=0.0, attention_dropout=0.0)


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


def test_phase_1_is_adamw_on_clipped_gradients(small_run: SmallRun) -> None:
    """As plain PyTorch has it on the model's own tensors; the learning rate rises for 2 steps, and falls to the end."""
    settings = Phase1(Path(), steps=4, batch_size=8, learning_rate=1e-2, warmup_steps=2, seed=5)
    trained, expected = random_model(DROPLESS), random_model(DROPLESS)
    _train(trained, small_run.train, settings)
    optimizer = torch.optim.AdamW(expected.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    plan = BatchPlan(small_run.train.lengths, small_run.train.masked_counts, 8, 1, 1, seed=5)
    norms = []
    for step, learning_rate in enumerate((0.5e-2, 0.75e-2, 0.5e-2, 0.25e-2)):
        (micro_batch,) = plan.rank_batches(step, rank=0)
        optimizer.zero_grad()
        mean_loss(expected, batch_of(small_run.train.take(micro_batch.indices), micro_batch)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0))
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.step()
    assert min(norms) > 1, norms
    # AdamW makes much of the rounding that a key bias's gradient is.
    assert_near(dict(trained.named_parameters()), dict(expected.named_parameters()), 1e-8)
