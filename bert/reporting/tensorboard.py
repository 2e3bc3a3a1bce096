"""A run's numbers as TensorBoard reads them, while it runs: the setting log.tensorboard.

PyTorch's SummaryWriter hands events to a thread beside the timed loop, in which errors come late or are lost, and imports
TensorFlow where that is installed. Here an event is written when its record comes, by TensorBoard's own writer of records.
Nothing of the package is imported unless a run asks for it.
"""

import os
import socket
import time
from importlib.util import find_spec
from pathlib import Path

from bert.configuration.config import Config
from bert.reporting.reporter import Sink
from compliance.log.records import EvaluationRecord, Record, StepRecord

_GROUPS = {
    "loss": ("loss", "masked_lm_loss", "next_sentence_loss"),
    "optimizer": ("learning_rate", "gradient_norm", "skipped_steps"),
    "rate": ("sequences_per_s", "tokens_per_s"),
    "step": ("step_ms", "data_wait_ms", "forward_backward_ms", "reduce_ms", "update_ms"),
    "evaluation": ("masked_lm_accuracy", "eval_s"),
}
"""Fields of the records, under the names of metrics_<n>.jsonl, by the heading that TensorBoard shows them under."""


def require_installed() -> None:
    """Raise ``ValueError`` where the package is missing."""
    if find_spec("tensorboard") is None:
        raise ValueError(
            "log.tensorboard is set, but tensorboard is not installed: pip install '.[tensorboard]', or leave the "
            "setting out"
        )


def tensorboard_sinks(config: Config, result: Path) -> list[Sink]:
    """Return the sink that the run which logs to ``result`` asks for, if it does, in a folder of that run's own."""
    if config.log.tensorboard is None:
        return []
    return [TensorBoard(config.log.tensorboard / config.log.system / result.stem)]


class TensorBoard:
    """Every number of a record as a scalar; what TensorBoard calls step is the number of training samples so far.

    Where an event cannot be written, as on a full disk, it raises ``OSError`` with the file's name.
    """

    def __init__(self, folder: Path) -> None:
        # Here, as the package is an extra.
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard looks for tfevents in names.
        self._path = folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter(self._path.open("xb"))
        self._event = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue] the module makes it when imported
        # Its readers expect the version in the first event.
        self._put(file_version="brain.Event:2")

    def write(self, record: Record) -> None:
        """Append one event."""
        # Other records have no numbers over samples.
        if isinstance(record, StepRecord | EvaluationRecord):
            values = [
                {"tag": f"{group}/{name}", "simple_value": getattr(record, name)}
                for group, names in _GROUPS.items()
                for name in names
                if hasattr(record, name)
            ]
            self._put(step=record.samples, summary={"value": values})

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _put(self, **fields: object) -> None:
        try:
            self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())
            self._writer.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None
