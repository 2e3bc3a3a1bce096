"""Budget of a step on paper: each of its launches timed by the slowest of what it needs, beside what was budgeted.

A launch takes as long as its matrix products, its instructions or its bytes do at the rates of the device, each at the share
of the peak that `efficiencies.toml` has, whichever is longest, and a moment between it and the next one.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from cluster.budget.launches import ATTENTION_PRODUCTS, TILE, Part, StepLaunch, StepPrecision, step_launches
from cluster.devices import Device
from cluster.published.results import Result, results

TABLE = Path(__file__).with_name("efficiencies.toml")
MICRO_BATCHES = 4
"""Of a step, which share its update: as of the recipe for one GPU."""
BUDGETED_ON = "H100"
_ISSUED = "issue slots"
# What is above is a slip of the hand.
_LARGEST = 4096
# A report of benchmarks/gpu.py is far smaller.
_LARGEST_FILE = 16 << 20


@dataclass(frozen=True)
class Efficiency:
    """Share of a device's peak rate that launches are taken to reach, of a resource: 10^12 a second, where it is a rate.

    Attributes:
        share: of the peak.
        ceiling: share of the peak that the best large case reaches.
        source: of the share.
    """

    resource: str
    peak: float
    share: float
    ceiling: float
    source: str


@dataclass(frozen=True)
class BudgetRow:
    """A part of the step, in microseconds a sequence.

    Attributes:
        budget: set on one H100; None for other devices.
        at_peak: time if every launch reached the peak of its slowest resource.
        at_ceiling: time if every launch reached the ceiling of it.
        slowest: resource that most of the time is spent on.
        gflop, megabytes: operations and memory traffic of a sequence.
        launches: of a micro-batch, or of an update.
    """

    part: str
    microseconds: float
    budget: float | None
    at_peak: float
    at_ceiling: float
    slowest: str
    gflop: float
    megabytes: float
    launches: int


@dataclass(frozen=True)
class Budget:
    """The step of a device on paper."""

    device: Device
    precision: StepPrecision
    micro_batch: int
    rows: tuple[BudgetRow, ...]
    goal: float | None
    efficiencies: tuple[Efficiency, ...]
    best: Result | None
    """The fastest published of such devices in one node."""

    @property
    def total(self) -> float:
        """Microseconds of a sequence."""
        return sum(row.microseconds for row in self.rows)


def paper_budget(device: Device, precision: StepPrecision, micro_batch: int, measured: Path | None = None) -> Budget:
    """Return the budget of a step with micro-batches of so many sequences of Wikipedia's lengths.

    ``measured`` is a folder of benchmarks/gpu.py, whose figures take the place of what is assumed.

    Raises:
        ValueError: no facts or efficiencies of the device, no FP8 on it, or Triton is not installed.
    """
    if not 1 <= micro_batch <= _LARGEST:
        raise ValueError(f"--micro-batch is {micro_batch}, expected 1 to {_LARGEST}")
    table = _table()
    known = table["resource"]["bf16 product"]["ceiling"]
    # Both are needed: issue slots follow from multiprocessors and clock, shares of the peak from the table.
    if device.multiprocessors is None or device.model not in known:
        raise ValueError(
            f"{device.name} has no efficiencies in {TABLE.name}; expected one of {', '.join(sorted(known))}"
        )
    if precision == "fp8" and device.fp8_tflops is None:
        raise ValueError(f"{device.name} has no FP8: take --precision bf16")
    launches = step_launches(precision, micro_batch, device.multiprocessors)
    # FP8 needs no efficiency where the device has none.
    efficiencies = {
        name: _efficiency(name, device) for name in table["resource"] if name != "fp8 product" or device.fp8_tflops
    }
    if measured is not None:
        efficiencies |= _measured(efficiencies, measured, launches)
    budget = table["budget"][precision] if device.model == BUDGETED_ON else None
    rows = _rows(launches, efficiencies, table["attention"][device.chip], micro_batch, budget and budget["parts"])
    # Gaps of an update count once for all micro-batches of a step, those of a micro-batch every time.
    gaps = Counter(each.part == "update" for each in launches)
    between = table["launch_us"] * (gaps[False] + gaps[True] / MICRO_BATCHES) / micro_batch
    rows.append(
        BudgetRow(
            "launches", between, budget and budget["parts"]["launches"], 0.0, between, "gaps", 0.0, 0.0, len(launches)
        )
    )
    # Published figures are of whole runs, evaluations included: a little less than a step alone would give.
    best = max((each for each in results() if _is_like(each, device)), key=sequences_per_s, default=None)
    goal = budget and budget["goal"]
    return Budget(device, precision, micro_batch, tuple(rows), goal, tuple(efficiencies.values()), best)


def sequences_per_s(result: Result) -> float:
    """Sequences a second and accelerator, over a whole published run with its evaluations."""
    assert result.samples is not None
    return result.samples / result.seconds / result.run.machine.accelerators


def _is_like(result: Result, device: Device) -> bool:
    machine = result.run.machine
    return machine.device == device and machine.nodes == 1 and result.samples is not None


@lru_cache
def _table() -> dict[str, Any]:
    with TABLE.open("rb") as file:
        table = tomllib.load(file)
    by_name = {"resource": "name", "attention": "chip"}
    return table | {kind: {each[key]: each for each in table[kind]} for kind, key in by_name.items()}


def _efficiency(name: str, device: Device) -> Efficiency:
    entry = _table()["resource"][name]
    assert device.multiprocessors is not None
    assert device.clock_ghz is not None
    if name == _ISSUED:
        peak = device.multiprocessors * device.clock_ghz / 1e3
    elif name.startswith("memory"):
        peak = device.memory_gb_s / 1e3
    else:
        peak = (device.fp8_tflops if name == "fp8 product" else device.bf16_tflops) or 0.0
    ceiling = entry["ceiling"][device.model]
    return Efficiency(name, peak, entry["of_ceiling"] * ceiling, ceiling, entry["source"])


def _rows(
    launches: Sequence[StepLaunch],
    efficiencies: Mapping[str, Efficiency],
    instructions: Mapping[str, Any],
    micro_batch: int,
    budget: Mapping[str, float] | None,
) -> list[BudgetRow]:
    rows = []
    for part in get_args(Part):
        chosen = [each for each in launches if each.part == part]
        sequences = micro_batch * (MICRO_BATCHES if part == "update" else 1)
        spent: dict[str, float] = defaultdict(float)
        at_peak = at_ceiling = 0.0
        for each in chosen:
            needed = {name: amount / efficiencies[name].peak for name, amount in _needs(each, instructions).items()}
            # Slowest at the share that launches reach: at the peak another resource might be.
            slowest = max(needed, key=lambda name: needed[name] / efficiencies[name].share)
            spent[slowest] += needed[slowest] / efficiencies[slowest].share
            at_peak += max(needed.values())
            # At the ceiling, too, the slowest resource decides anew.
            at_ceiling += max(seconds / efficiencies[name].ceiling for name, seconds in needed.items())
        rows.append(
            BudgetRow(
                part,
                1e6 * sum(spent.values()) / sequences,
                None if budget is None else budget[part],
                1e6 * at_peak / sequences,
                1e6 * at_ceiling / sequences,
                max(spent, key=lambda name: spent[name]),
                2e-9 * sum(each.launch.multiply_adds for each in chosen) / sequences,  # two operations each
                1e-6 * sum(each.bytes for each in chosen) / sequences,
                len(chosen),
            )
        )
    return rows


def _needs(each: StepLaunch, instructions: Mapping[str, Any]) -> dict[str, float]:
    """Return what a launch takes of each resource, in 10^12."""
    memory = {"update": "memory, update", "weights and gradients": "memory, passes over parameters"}
    needs = {memory.get(each.part, "memory, passes over tokens"): each.bytes / 1e12}
    launch = each.launch
    # Attention is the only op whose instructions count: of the others, products or bytes take longer.
    if each.tiles:
        counted = instructions[launch.kernel]
        needs["attention product"] = _attention_flop(each) / 1e12
        # Four warps a block and four schedulers a multiprocessor: a cycle for each instruction of a warp.
        needs[_ISSUED] = each.tiles * counted["instructions"] * (TILE / counted["keys"]) / 1e12
    elif launch.multiply_adds:
        # `mat1` of addmm, `self` of the others: the operand's size tells FP8 from 16 bits.
        operand = launch.dtypes.get("mat1", launch.dtypes.get("self"))
        name = "fp8 product" if operand is not None and operand.itemsize == 1 else "bf16 product"
        needs[name] = 2 * launch.multiply_adds / 1e12
    return needs


def _attention_flop(each: StepLaunch) -> float:
    """Operations of whole blocks of scores, which is what is computed."""
    return 2.0 * ATTENTION_PRODUCTS[each.launch.kernel] * each.tiles * TILE * TILE * each.launch.shapes["query"][-1]


def _measured(
    efficiencies: Mapping[str, Efficiency], folder: Path, launches: Sequence[StepLaunch]
) -> dict[str, Efficiency]:
    """Return the efficiencies of which all rows are in the folder, by what was measured.

    Of several rows, which have the same work each, it is the rate of all together. Attention's figure counts the model's
    work, six products of the scores that there are: it stands for all that is computed.
    """
    found = {}
    for name, efficiency in efficiencies.items():
        figures = [
            figure
            for part, rows in _table()["resource"][name].get("measured", {}).items()
            for figure in _figures(folder / f"{part}.json", rows)
        ]
        # All rows or none: a mean over some of them would be of another work than what is assumed.
        if not figures or None in figures:
            continue
        # The harmonic mean: equal amounts of work in each row, so that times add up.
        rate = len(figures) / sum(1 / figure for figure in figures if figure)
        if name == "attention product":
            inner = [each for each in launches if each.part == "attention"]
            # The measured figure counts what the model needs; what is computed are whole blocks, which is more.
            model = 2 * sum(each.launch.multiply_adds for each in inner) * 6 / sum(ATTENTION_PRODUCTS.values())
            rate *= sum(map(_attention_flop, inner)) / model
            # The measured rate holds whatever limited the kernel, so issue slots must not limit it a second time.
            found[_ISSUED] = Efficiency(_ISSUED, efficiencies[_ISSUED].peak, 1.0, 1.0, "in the rate of attention")
        share = rate / efficiency.peak
        # A measured share above the published ceiling raises that ceiling.
        found[name] = Efficiency(name, efficiency.peak, share, max(share, efficiency.ceiling), f"measured: {folder}")
    if not found:
        raise ValueError(
            f"{folder} has no figures of benchmarks/gpu.py: expected ceilings.json or kernels.json with them"
        )
    return found


def _figures(path: Path, names: Sequence[str]) -> list[float | None]:
    # Size is looked at before reading: the folder is an argument.
    if not path.is_file() or path.stat().st_size > _LARGEST_FILE:
        return [None] * len(names)
    try:
        rows = {row["name"]: row["figure"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no report of benchmarks/gpu.py: {error}") from None
    figures = [rows.get(name) for name in names]
    return [figure if isinstance(figure, int | float) and figure > 0 else None for figure in figures]


def as_lines(budget: Budget) -> list[str]:
    """The budget as a table for people."""
    device = budget.device.name
    lines = [
        f"{device}, {budget.precision}, micro-batches of {budget.micro_batch}: microseconds a sequence, on paper",
        f"{'':24}{'us':>7}{'budget':>8}{'of peak':>9}{'GFLOP':>8}{'MB':>8}{'launches':>10}  slowest",
    ]
    for row in budget.rows:
        lines.append(
            f"{row.part:24}{row.microseconds:7.0f}{_number(row.budget):>8}{row.at_peak / row.microseconds:9.0%}"
            f"{row.gflop:8.1f}{row.megabytes:8.0f}{row.launches:10,}  {row.slowest}"
        )
    at_peak, at_ceiling = (sum(getattr(row, name) for row in budget.rows) for name in ("at_peak", "at_ceiling"))
    lines += [
        f"{'all':24}{budget.total:7.0f}{_number(budget.goal):>8}{at_peak / budget.total:9.0%}",
        "",
        f"{1e6 / budget.total:,.0f} sequences a second; {1e6 / at_ceiling:,.0f} if every launch reached its ceiling",
    ]
    if budget.best is not None:
        machine = budget.best.run.machine
        lines.append(
            f"{sequences_per_s(budget.best):,.0f} published at best in one node, evaluations included: "
            f"{budget.best.submitter} {budget.best.system}, {machine.accelerators} accelerators ({budget.best.run.round})"
        )
    lines += ["", f"{'':32}{'peak':>8}{'share':>7}{'ceiling':>9}  source of the share"]
    for each in budget.efficiencies:
        lines.append(f"{each.resource:32}{each.peak:8.4g}{each.share:7.0%}{each.ceiling:9.0%}  {each.source}")
    return lines


def as_document(budget: Budget) -> dict[str, object]:
    """The budget as a document for programs."""
    best = budget.best
    return {
        "device": budget.device.name,
        "precision": budget.precision,
        "micro_batch": budget.micro_batch,
        "microseconds": budget.total,
        "sequences_per_s": 1e6 / budget.total,
        "goal_microseconds": budget.goal,
        "parts": [asdict(row) for row in budget.rows],
        "efficiencies": [asdict(each) for each in budget.efficiencies],
        "published": None
        if best is None
        else {
            "submitter": best.submitter,
            "system": best.system,
            "accelerators": best.run.machine.accelerators,
            "round": best.run.round,
            "sequences_per_s": sequences_per_s(best),
        },
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
