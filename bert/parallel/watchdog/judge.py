"""Judge of the watchdog: it decides which rank is to blame if one dies, hangs or stops."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bert.execution.phases import EXCHANGE, PHASES, SITE_WAIT

FAULT_STATUS = 3
"""Exit status of every rank after a fault."""
LINE = 8192
"""Maximum length of a message in bytes."""
_GATHER_S = 0.5
"""Seconds that the judge waits after the report of an error. A lost rank causes errors on other ranks, and their reports may
arrive before the judge learns of the loss."""
# Order of the phases in a step, which shows which rank is further ahead. An unknown phase counts as furthest ahead.
_ORDER = {phase: place for place, phase in enumerate((*PHASES, SITE_WAIT, "statistics", "checkpoint", "evaluation"))}


@dataclass(frozen=True)
class Ending:
    """Reason for the end of the run, and the exit status of all ranks."""

    text: str
    status: int = FAULT_STATUS
    rank: int | None = None
    """The rank to blame, or None if no single rank is to blame."""


@dataclass
class Member:
    rank: int
    name: str
    beating: bool = False
    """Whether the rank has reported its position since it connected."""
    left: bool = False
    """Whether the rank has left without a fault."""
    heard_s: float = 0.0
    place: str = "start"
    order: tuple[int, int] = (0, 0)
    """Position of the rank in the step; lower values are further behind."""
    entered: int = -1
    moved_s: float = 0.0
    limit_s: float | None = None
    """Seconds that the rank may stay at its position; None before training."""


class Judge:
    def __init__(self, names: Sequence[str], seconds: float, beat_s: float) -> None:
        """``names`` are the ranks' names. Ranks report every ``beat_s`` seconds and may be silent for ``seconds``."""
        self.members = [Member(rank, name) for rank, name in enumerate(names)]
        self._seconds, self._beat_s = seconds, beat_s
        self._now_s = 0.0
        self._lost: list[Member] = []
        self._failed: list[tuple[float, Ending]] = []

    def greet(self, member: Member) -> None:
        """Record that a rank has connected. A rank that gets no answer connects again."""
        member.beating, member.heard_s = False, self._now_s

    def lose(self, member: Member) -> None:
        """Record that a rank's connection was closed."""
        # A rank that has not reported yet may have given up waiting for an answer, and will connect again.
        if member.beating and not member.left:
            self._lost.append(member)

    def hear(self, member: Member, line: bytes) -> None:
        """Handle a message. An invalid message is ignored and does not count as a sign of life."""
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            self._take(member, parsed(line))

    def _take(self, member: Member, message: dict[str, Any]) -> None:
        if "left" in message:
            member.left = True
        elif "failed" in message:
            status = int(message["status"])
            # The system keeps eight bits of a status, so 256 would become 0, which torchrun takes for an orderly end.
            status = status if 0 <= status < 256 else FAULT_STATUS
            verdict = Ending(f"{member.name}: {message['failed']}", status, member.rank)
            self._failed.append((self._now_s + _GATHER_S, verdict))
        else:
            step, entered, phase = int(message["step"]), int(message["entered"]), str(message["phase"])
            limit_s = None if message["limit"] is None else float(message["limit"])
            member.limit_s = limit_s
            member.place = f"{phase} of step {step}" if limit_s else phase
            place = _ORDER.get(phase.removeprefix(EXCHANGE), len(_ORDER))
            member.order = step, 2 * place + phase.startswith(EXCHANGE)
            if entered != member.entered:
                member.entered, member.moved_s = entered, self._now_s
            member.beating = True
        member.heard_s = self._now_s

    def pass_time(self, elapsed_s: float) -> Ending | None:
        """Advance the time by ``elapsed_s``, and return the verdict, or None if there is none yet."""
        self._now_s += elapsed_s
        if self._lost:  # checked before errors, because a lost rank causes errors on others
            text = f"{_names(self._lost)}: ended without a word, last in {self._lost[0].place}"
            return Ending(text, rank=self._lost[0].rank)
        if self._failed and self._now_s > self._failed[0][0]:
            return self._failed[0][1]
        present = [member for member in self.members if not member.left]
        if any(self._silence(member) > self._seconds for member in present):
            # Ranks behind a broken link fall silent within one beat of each other, so name all near the limit.
            silent = [member for member in present if self._silence(member) > self._seconds - 2 * self._beat_s]
            text = f"{_names(silent)}: not heard of for {self._silence(silent[0]):.0f} s, last in {silent[0].place}: "
            return Ending(text + "stopped, or cut off", rank=silent[0].rank)
        return self._standstill([member for member in present if member.limit_s is not None])

    def _silence(self, member: Member) -> float:
        return self._now_s - member.heard_s

    def _standstill(self, present: list[Member]) -> Ending | None:
        """Blame the ranks furthest behind if they have not moved for too long, because the other ranks wait for them."""
        if not present:
            return None
        least = min(member.order for member in present)
        behind = [member for member in present if member.order == least]
        still_s = {member.rank: self._now_s - member.moved_s for member in behind}
        # As long as one of the ranks furthest behind may still move, blame none: the others may be waiting for it.
        if not all(member.limit_s is not None and still_s[member.rank] > member.limit_s for member in behind):
            return None
        where = f"for {still_s[behind[0].rank]:.0f} s in {behind[0].place}"
        if len(behind) == len(present) > 1:
            return Ending(f"no rank gets on: all {len(present)} stand still {where}")
        ahead = next((f", and the others wait for it in {m.place}" for m in present if m.order != least), "")
        return Ending(f"{_names(behind)}: standing still {where}{ahead}", rank=behind[0].rank)


def encoded(message: dict[str, object]) -> bytes:
    text = json.dumps(message, ensure_ascii=False)
    return text.encode(errors="backslashreplace") + b"\n"  # backslashreplace escapes a lone surrogate as JSON does


def parsed(line: bytes) -> dict[str, Any]:
    """Parse a line as a message; return {} if it is invalid."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _names(members: list[Member]) -> str:
    names = ", ".join(member.name for member in members[:8])
    return names + (f" and {len(members) - 8} more" if len(members) > 8 else "")
