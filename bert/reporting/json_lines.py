"""The records of a run as a file, for programs."""

import json
import math
from dataclasses import asdict
from pathlib import Path

from bert.reporting.records import EndRecord, EvaluationRecord, PlanRecord, Record, StepRecord, WarningRecord

_EVENTS = {
    StepRecord: "step",
    EvaluationRecord: "eval",
    WarningRecord: "warning",
    PlanRecord: "plan",
    EndRecord: "end",
}


class JsonLines:
    """Every record as a line of JSON, beside the result file; null stands for a number that is not finite.

    Where a line cannot be written, as on a full disk, it raises ``OSError`` with the file's name.
    """

    def __init__(self, path: Path, run: dict[str, object]) -> None:
        self._path = path
        # Line by line: who follows the file, or reads what a killed run has left, finds whole records.
        self._file = path.open("x", encoding="utf-8", buffering=1)
        self._put({"event": "run", **run})

    def write(self, record: Record) -> None:
        """Append one line."""
        self._put({"event": _EVENTS[type(record)], **asdict(record)})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _put(self, values: dict[str, object]) -> None:
        # JSON has no NaN: what Python writes for it, other readers refuse.
        line = json.dumps({key: _json_value(value) for key, value in values.items()}, allow_nan=False)
        try:
            self._file.write(line + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None


def _json_value(value: object) -> object:
    if not isinstance(value, float):
        return value
    # Nine digits tell every fp32 number from its neighbours.
    return float(f"{value:.9g}") if math.isfinite(value) else None
