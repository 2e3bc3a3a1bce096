"""Diagnoses, the results of the checks of `doctor`."""

from typing import Literal, NamedTuple

State = Literal["ok", "warn", "fail"]


class Diagnosis(NamedTuple):
    """Result of one check before a run.

    `state` is "fail" if the run would not start, would fail or would be invalid, and "warn" if it may be slower or if
    something could not be checked. `remedy` says what the user should do; it is "" if nothing is wrong.
    """

    subject: str
    state: State
    found: str
    remedy: str = ""


def ok(subject: str, found: str) -> Diagnosis:
    return Diagnosis(subject, "ok", found)


def warn(subject: str, found: str, remedy: str) -> Diagnosis:
    return Diagnosis(subject, "warn", found, remedy)


def fail(subject: str, found: str, remedy: str) -> Diagnosis:
    return Diagnosis(subject, "fail", found, remedy)


def fail_or_warn(subject: str, is_fatal: bool, found: str, remedy: str) -> Diagnosis:
    return Diagnosis(subject, "fail" if is_fatal else "warn", found, remedy)
