"""The weights that a run leaves behind: of its end, or of its best evaluation, also after it was resumed."""

import math
from pathlib import Path

import pytest
import torch

from bert.checkpoints.sources import open_source
from bert.checkpoints.trained import TrainedWeights, stated_evaluation
from bert.configuration.sections import ModelConfig
from compliance.log.records import EvaluationRecord
from tests.bert.small_models import CPU, drawn_model

SMALL = ModelConfig(1, 16, 2, 32, 50, 16)


class Leaving:
    """A run that only saves weights. The bias of its decoder is the number of the last evaluation."""

    def __init__(self, path: Path, *, keeps_best: bool, is_resumed: bool = False) -> None:
        self.path, self.model = path, drawn_model(SMALL, seed=0)
        self.weights = TrainedWeights(
            path, {"recipe": "some"}, CPU, lambda: self.model, keeps_best=keeps_best, is_resumed=is_resumed
        )

    def evaluated(self, number: int, correct: int) -> None:
        torch.nn.init.constant_(self.model.decoder_bias, number)
        record = EvaluationRecord(number, 100 * number, 0.0, 0.0, correct / 1000, correct, 1000, math.exp(2))
        self.weights.evaluated(record)

    @property
    def saved(self) -> int:
        """Number of the evaluation whose weights are saved."""
        return int(open_source(self.path).weights["decoder_bias"].read()[0])


def test_a_run_without_a_target_keeps_its_best_weights_also_after_it_was_resumed(tmp_path: Path) -> None:
    run = Leaving(tmp_path / "weights.safetensors", keeps_best=True)
    for number, correct, kept in ((1, 0, 1), (2, 300, 2), (3, 300, 2), (4, 299, 2)):
        run.evaluated(number, correct)
        assert run.saved == kept
    run.weights.ended()
    assert run.saved == 2
    found = stated_evaluation(run.path)
    assert found is not None
    assert (found.samples, found.masked_lm_accuracy, found.count) == (200, 0.3, 1000)
    assert found.perplexity == pytest.approx(7.389, rel=1e-3)
    assert found.error == pytest.approx(0.0284, rel=1e-2)
    resumed = Leaving(run.path, keeps_best=True, is_resumed=True)
    for number, correct, kept in ((5, 299, 2), (6, 301, 6)):
        resumed.evaluated(number, correct)
        assert resumed.saved == kept
    again = Leaving(run.path, keeps_best=True)
    again.evaluated(7, 1)
    assert again.saved == 7, "a new run does not compare itself with an earlier one"
    run.path.write_bytes(b"cut off")
    resumed = Leaving(run.path, keeps_best=True, is_resumed=True)
    resumed.evaluated(8, 5)
    assert resumed.saved == 8, "a damaged file is replaced"


def test_a_run_without_evaluations_and_one_with_a_target_save_their_last_weights(tmp_path: Path) -> None:
    run = Leaving(tmp_path / "early.safetensors", keeps_best=True)
    run.weights.ended()
    assert stated_evaluation(run.path) is None
    run.evaluated(1, 0)
    run.weights.ended()
    assert stated_evaluation(run.path) is not None, "its best evaluation got nothing right"
    run = Leaving(tmp_path / "target.safetensors", keeps_best=False)
    run.evaluated(1, 500)
    assert not run.path.exists()
    run.evaluated(2, 400)
    run.weights.ended()
    assert run.saved == 2
