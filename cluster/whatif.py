"""Breakdown of a run's time, and an estimate of how much removing each bottleneck would save.

All figures come from the records of the run: the parts of its steps on rank 0, its evaluations, and the stragglers that it
reported. Each estimate assumes that the other bottlenecks stay the same, so the savings are upper bounds.
"""

from dataclasses import dataclass, field
from pathlib import Path

from compliance.log.metrics import Straggler, read_metrics

PARTS = ("data_wait_ms", "forward_backward_ms", "reduce_ms", "update_ms")


@dataclass
class Account:
    """The total seconds of a run, its seconds by part, and its number of steps.

    ``slow`` has the number of steps and the stragglers of each interval between two records.
    """

    seconds: float
    steps: int
    parts: dict[str, float]
    slow: list[tuple[int, list[Straggler]]] = field(default_factory=list)


def read_run(path: Path) -> Account:
    """Read the records of a run. Raises ``ValueError`` if the file has no records of steps."""
    metrics = read_metrics(path)
    timed = [*metrics.steps, *metrics.evaluations, *([metrics.end] if metrics.end else [])]
    account = Account(max((record.time_s for record in timed), default=0.0), 0, dict.fromkeys(PARTS, 0.0))
    warnings = [(each.step, each.straggler) for each in metrics.warnings if each.straggler]
    slow: dict[int, Straggler] = {}
    for record in metrics.steps:
        # A record holds means over all steps since the previous record.
        steps = max(0, record.step - account.steps)
        for name in PARTS:
            account.parts[name] += steps * getattr(record, name) / 1000
        while warnings and warnings[0][0] < record.step:
            _, rank = warnings.pop(0)
            slow.pop(rank.rank, None)
            if rank.is_slow:
                slow[rank.rank] = rank
        account.slow.append((steps, list(slow.values())))
        account.steps = max(account.steps, record.step)
    if not account.steps or not account.seconds:
        raise ValueError(f"{path}: no record of steps; expected the file metrics_N.jsonl beside a run's result_N.txt")
    account.parts["evaluations"] = sum(record.eval_s for record in metrics.evaluations)
    # The time that no part explains was spent on the start, checkpoints and everything else.
    account.parts["start and other"] = max(0.0, account.seconds - sum(account.parts.values()))
    return account


def savings(account: Account) -> dict[str, float]:
    """Return the seconds that removing each bottleneck would save, the largest first."""
    found = {
        "waiting for the reduction (perfect overlap)": account.parts["reduce_ms"],
        "waiting for data": account.parts["data_wait_ms"],
        "evaluations": account.parts["evaluations"],
    }
    ranks = {(each.host, each.rank) for _, slow in account.slow for each in slow}
    for host, rank in ranks:  # key by host and rank, because after a restart a rank may be on another host
        found[f"rank {rank} on host {host}"] = _without(account, {(host, rank)})
        on_host = {each for each in ranks if each[0] == host}
        if len(on_host) > 1:
            found[f"host {host}"] = _without(account, on_host)
    return {name: saved for name, saved in sorted(found.items(), key=lambda each: -each[1]) if saved > 0}


def _without(account: Account, removed: set[tuple[str, int]]) -> float:
    """Return the seconds that other ranks waited for the ``removed`` ranks, given as (host, rank)."""
    saved = 0.0
    for steps, slow in account.slow:
        if slow:
            # Without the removed ranks, a step takes as long as the slowest other straggler, or else the median rank.
            others = [each.own_ms for each in slow if (each.host, each.rank) not in removed]
            saved += steps * max(0.0, max(each.own_ms for each in slow) - max([slow[0].median_ms, *others])) / 1000
    return saved


def report(account: Account) -> list[str]:
    total = account.seconds
    lines = [f"{total:.2f} s from start to end, {account.steps:,} steps"]
    for name, seconds in account.parts.items():
        title = name.removesuffix("_ms").replace("_", " ")
        lines.append(f"  {title:<20}{seconds:10.2f} s{100 * seconds / total:7.1f} %")
    lines.append("it would have taken at least this long without")
    for name, saved in savings(account).items():
        lines.append(f"{max(0.0, total - saved):10.2f} s  {100 * saved / total:5.1f} % less  {name}")
    if not any(slow for _, slow in account.slow):
        lines.append("the run named no rank as a straggler")
    return lines
