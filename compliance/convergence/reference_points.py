"""Reference convergence points (RCP): number of samples that the reference model needs to reach the target (TR 13, 22).

A set of closed runs fails if its mean is significantly below the reference's mean. If its mean is below but not
significantly, the set passes and its score is multiplied by reference mean / own mean. The RCP checker of
mlperf-logging computes the points, the interpolation and the limit of the t-test.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from compliance.log import rules
from compliance.official import process

Origin = Literal["exact", "interpolated", "smallest"]

TIMEOUT_S = 120


@dataclass(frozen=True)
class Reference:
    """Reference for a submission at one global batch size, in samples (sequences).

    Attributes:
        mean: mean samples. A submission with at least this mean keeps its score.
        stdev: standard deviation of single runs.
        minimum: minimum mean. A submission with a smaller mean fails.
        origin: "exact" for a point at this batch size, "interpolated" between two points, or "smallest" for a batch size
            below all points, which is compared with the smallest one.
        points: batch sizes of the one or two points used.
    """

    ruleset: str
    global_batch_size: int
    mean: float
    stdev: float
    minimum: float
    origin: Origin
    points: tuple[int, ...]

    def scaling(self, mean: float) -> float:
        """Return the score's scaling factor for a submission with this mean, at least 1 (TR 13)."""
        return max(1.0, self.mean / mean)

    def verdict(self, mean: float) -> Literal["pass", "scaled", "fail"]:
        if mean < self.minimum:
            return "fail"
        return "scaled" if mean < self.mean else "pass"

    @property
    def description(self) -> str:
        if self.origin == "exact":
            return f"reference point at batch size {self.points[0]}"
        if self.origin == "interpolated":
            return f"interpolated between the reference points at batch sizes {self.points[0]} and {self.points[1]}"
        return f"no reference point at or below batch size {self.global_batch_size}: compared with {self.points[0]}"


def reference(ruleset: str, global_batch_size: int) -> Reference | None:
    """Return the reference for a submission at a global batch size; None above the largest reference point.

    Raises ``ValueError`` if the ruleset has no points for BERT, the batch size is not positive, or mlperf-logging is
    missing.
    """
    # The batch size may come from a log, which may contain true or 448.0 instead of an integer.
    if not rules.POSITIVE_INTEGER.accepts(global_batch_size):
        raise ValueError(f"global_batch_size is {global_batch_size}, expected a positive integer")
    answer = _ask(ruleset, global_batch_size)
    if answer["origin"] == "none":
        return None
    figures = answer["mean"], answer["stdev"], answer["minimum"]
    return Reference(ruleset, global_batch_size, *figures, answer["origin"], tuple(answer["points"]))


def largest_batch_size(ruleset: str) -> int:
    """Return the batch size of the largest reference point. Raises as `reference` does."""
    return _ask(ruleset, 1)["largest"]


@lru_cache(maxsize=64)
def _ask(ruleset: str, global_batch_size: int) -> dict[str, Any]:
    rules.check_ruleset(ruleset)
    answer = process.ask("reference", global_batch_size, ruleset, TIMEOUT_S)
    if "crash" in answer:
        raise ValueError(f"no reference convergence points of ruleset {ruleset}: {answer['crash']}")
    return answer
