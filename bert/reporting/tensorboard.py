"""Sink that writes a run's records for TensorBoard while the run goes on (the setting log.tensorboard)."""

from importlib.util import find_spec
from pathlib import Path

from compliance.log.records import EvaluationRecord, Record, StepRecord

_GROUPS = {
    "loss": ("loss", "masked_lm_loss", "next_sentence_loss"),
    "optimizer": ("learning_rate", "gradient_norm", "skipped_steps"),
    "rate": ("sequences_per_s", "tokens_per_s"),
    "step": ("step_ms", "data_wait_ms", "forward_backward_ms", "reduce_ms", "update_ms"),
    "evaluation": ("masked_lm_accuracy", "eval_s"),
}
"""Fields of the records, grouped by the heading under which TensorBoard shows them."""


def require_installed() -> None:
    if find_spec("tensorboard") is None:
        raise ValueError(
            "log.tensorboard is set, but tensorboard is not installed: pip install '.[tensorboard]', or leave the "
            "setting out"
        )


class TensorBoard:
    """Sink that writes the numbers of each record as scalars. TensorBoard's steps are numbers of training samples."""

    def __init__(self, folder: Path) -> None:
        # Import it here, because the package is optional.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=10)

    def write(self, record: Record) -> None:
        # Other kinds of records have no values to plot over samples.
        if isinstance(record, StepRecord | EvaluationRecord):
            for group, names in _GROUPS.items():
                for name in names:
                    if hasattr(record, name):
                        self._writer.add_scalar(f"{group}/{name}", getattr(record, name), record.samples)

    def close(self) -> None:
        """Write pending records and close the file."""
        self._writer.close()
