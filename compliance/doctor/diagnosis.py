"""What `doctor` says, and about which run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Diagnosis:
    """One thing that was looked at before a run.

    Attributes:
        subject: a word or two.
        state: "fail" when the run would not start, would fail or would be no valid result; "warn" when it may be slower
            or when something could not be looked at.
        found: one sentence.
        remedy: what to do about it; "" when it is well.
    """

    subject: str
    state: State
    found: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return {"subject": self.subject, "state": self.state, "found": self.found, "remedy": self.remedy}


def ok(subject: str, found: str) -> Diagnosis:
    """All is well."""
    return Diagnosis(subject, "ok", found)


def warn(subject: str, found: str, remedy: str) -> Diagnosis:
    """The run would work, perhaps worse."""
    return Diagnosis(subject, "warn", found, remedy)


def fail(subject: str, found: str, remedy: str) -> Diagnosis:
    """The run would fail, or be no valid result."""
    return Diagnosis(subject, "fail", found, remedy)


def complain(subject: str, is_fatal: bool, found: str, remedy: str) -> Diagnosis:
    """A `fail` where that is fatal, elsewhere a `warn`."""
    return Diagnosis(subject, "fail" if is_fatal else "warn", found, remedy)


@dataclass(frozen=True)
class Plan:
    """The run that is to be started.

    Attributes:
        recipe: its name; "" when only the machine is looked at.
        config: the recipe's settings by section, as `bert.recipes` has them.
        nodes: machines that take part.
        ranks: processes on each of them.
    """

    recipe: str = ""
    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    nodes: int = 1
    ranks: int = 1

    def setting(self, section: str, name: str) -> Any:
        """A setting, None when there is no recipe."""
        return self.config.get(section, {}).get(name)

    @property
    def on_gpus(self) -> bool:
        """Whether the recipe trains on GPUs."""
        return self.setting("training", "device") == "cuda"

    @property
    def is_closed(self) -> bool:
        """Whether the results are to be closed."""
        return self.setting("log", "division") == "closed"

    @property
    def world_size(self) -> int:
        """Processes over all nodes."""
        return self.nodes * self.ranks


def shape_in_name(recipe: str) -> tuple[int, int] | None:
    """(nodes, GPUs of each) that a recipe is made for, by its name: dgxa100_8x8."""
    match = re.search(r"_(\d+)x(\d+)$", recipe)
    return (int(match[1]), int(match[2])) if match else None
