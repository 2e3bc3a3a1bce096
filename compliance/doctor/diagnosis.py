"""Diagnoses: what `doctor` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of one thing that was looked at before a run.

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


def ok(subject: str, found: str) -> Diagnosis:
    """Diagnosis that all is well."""
    return Diagnosis(subject, "ok", found)


def warn(subject: str, found: str, remedy: str) -> Diagnosis:
    """Diagnosis that the run would work, perhaps worse."""
    return Diagnosis(subject, "warn", found, remedy)


def fail(subject: str, found: str, remedy: str) -> Diagnosis:
    """Diagnosis that the run would fail, or be no valid result."""
    return Diagnosis(subject, "fail", found, remedy)


def fail_or_warn(subject: str, is_fatal: bool, found: str, remedy: str) -> Diagnosis:
    """A `fail` where that is fatal, elsewhere a `warn`."""
    return Diagnosis(subject, "fail" if is_fatal else "warn", found, remedy)
