"""The file of trained weights that the setting save_checkpoint names."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from bert.checkpoints.weights import metadata_entry, read_header, save_weights
from bert.configuration.config import Config
from bert.parallel.mesh import agreed_text
from bert.step import TrainingStep
from compliance.log.metrics import EvaluationRecord
from console.version import commit

_EVALUATION = "evaluation"
"""Key under which the file's metadata contains the evaluation of its weights."""


def stated_evaluation(path: Path) -> EvaluationRecord | None:
    """Return the evaluation that is recorded with the weights in a file, or None if there is none.

    Raises ``ValueError`` if the file is missing or damaged.
    """
    return metadata_entry(read_header(path)[1], _EVALUATION, EvaluationRecord, str(path))


class TrainedWeights:
    """Writer of a run's weights. It writes the final ones or, if the run has no target, those of the best evaluation.

    All ranks must call each method at the same time. ``of_text`` is the metadata about the training text. If a run without
    a target is resumed, it replaces the file from before the interruption only when it has better weights.
    """

    def __init__(self, config: Config, of_text: Mapping[str, str], step: TrainingStep, *, is_resumed: bool) -> None:
        self._path, self._step = config.save_checkpoint, step
        self._metadata = {"recipe": config.recipe, "commit": commit(), **of_text}
        self._keeps_best = config.evaluation.target is None
        self._best = -1.0
        if self._path is not None and self._keeps_best and is_resumed:
            # Rank 0 reads the file for all ranks, because it may be on a disk that only rank 0 can access.
            found = repr(_accuracy_of(self._path)) if step.mesh.is_main else ""
            self._best = float(agreed_text(found, step.mesh))

    def evaluated(self, found: EvaluationRecord) -> None:
        """Write the weights if the run keeps its best weights and this evaluation is the best so far."""
        if self._keeps_best and found.masked_lm_accuracy > self._best:
            self._best = found.masked_lm_accuracy
            self._write({_EVALUATION: msgspec.json.encode(found).decode()})

    def ended(self) -> None:
        """Write the weights at the end of a run, unless the file already holds the weights of the best evaluation."""
        if self._best < 0:
            self._write({})

    def _write(self, more: Mapping[str, str]) -> None:
        if self._path is None:
            return
        # All ranks must take part in gathering the weights, but only rank 0 writes the file.
        model = self._step.gather_whole_model()
        if self._step.mesh.is_main:
            save_weights(model, self._path, {**self._metadata, **more})


def _accuracy_of(path: Path) -> float:
    """Return the accuracy of the evaluation recorded in a file, or -1 if the file is missing, damaged or has no record."""
    with suppress(ValueError):
        if found := stated_evaluation(path):
            return found.masked_lm_accuracy
    return -1.0
