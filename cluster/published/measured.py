"""Comparison of measured minutes with their prediction: whether they are normal for the machine, and what to check first."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from cluster.devices import device_named
from cluster.published.calibration import INTERVAL, calibration
from cluster.published.cost_model import run_time
from cluster.published.prediction import PARTS, Prediction, minutes_in_digits
from cluster.published.results import results_of_devices
from cluster.whatif import read_run
from compliance.log.reader import Log, read_log
from console.text import counted, visible

SAMPLES, MISSED = "samples to the target", "did not reach 0.720"
PROBE = "`python -m cluster probe`"

CAUSES = {
    SAMPLES: ({*PARTS} - {"start"}, "other seeds, because results scatter; hyperparameters"),
    "data wait": (set[str](), "storage; cores that load data"),
    "forward backward": ({"matrix", "memory", "power", "launch"}, f"FP8 or bf16; clocks and power limit; {PROBE}"),
    "reduce": ({"inside", "between"}, f"links and network; {PROBE}; slow ranks: `python -m cluster whatif`"),
    "update": ({"update"}, f"rate of the memory; {PROBE}"),
    "evaluations": ({"evaluation"}, "number of evaluations"),
    "start and other": ({"start"}, "storage; compilation while the clock runs; checkpoints"),
}
"""Causes of a slow run, by name in `cluster.whatif`: the predicted parts that the cause lengthens, and what to check."""


@dataclass(frozen=True)
class Measured:
    """Measured minutes. If logs were read, other fields have what they state, and ``parts`` has the minutes of each part."""

    minutes: float = 0.0
    batch: int | None = None
    accelerator: str | None = None
    ranks: int | None = None
    samples: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def agreed(option: str, given: Any, stated: Any) -> Any:
    """Return the value of an option, or else the value that the logs state. Raises ``ValueError`` if they differ."""
    if given is not None and stated is not None and given != stated:
        raise ValueError(f"{option}: {given} contradicts the logs of --measured, which state {stated}")
    return stated if given is None else given


def read_minutes(text: str, name: str, other: str = "") -> float:
    """Parse positive minutes. An error message names the setting ``name``, and ends with ``other``, another valid input."""
    minutes = float(text) if re.fullmatch(r"\d{1,6}(\.\d+)?", text, re.ASCII) else 0.0
    if not minutes:
        raise ValueError(f"{name} is {text[:80]!r}, expected minutes such as 6.1{other}")
    return minutes


def read_measured(text: str) -> Measured:
    """Parse a number of minutes, or read the runs of a results folder, its folder bert, or one log.

    Raises ``ValueError`` if no run is finished, if settings of the runs differ, or if a run is not of the benchmark.
    """
    path = Path(text)
    if not path.exists():
        return Measured(read_minutes(text, "--measured", ", or a results folder that exists, such as results/SYSTEM"))
    folder = path / "bert" if (path / "bert").is_dir() else path
    logs = [read_log(each) for each in ([path] if path.is_file() else sorted(folder.glob("result_*.txt")))]
    faults = {log.path: fault for log in logs if (fault := _fault(log))}
    kept, missed, how = [log for log in logs if log.path not in faults], [*faults.values()].count(MISSED), ""
    notes = [f"{each.name}: {fault}" for each, fault in faults.items()]
    if not kept:
        raise ValueError(f"{path}: no finished run: {'; '.join(notes[:4]) or 'there is no result_N.txt in it'}")
    settings = {(log.run.global_batch_size, *_machine(log)) for log in kept}
    if len(settings) > 1:
        found = " and ".join(sorted(map(str, settings))[:2])
        raise ValueError(
            f"{path}: runs with different batch sizes, accelerators or ranks: {found}; pass one log instead"
        )
    if len(kept) > 2 and len(kept) + missed >= 5:
        # As in MLPerf, a run that missed the target counts as the slowest. Then no other run is left out as the slowest.
        kept.sort(key=lambda log: log.run.seconds or 0.0)
        kept, how = kept[1 : None if missed else -1], ", without the fastest and the slowest"
    samples, parts = [log.run.converged_samples() for log in kept], [each for log in kept if (each := _parts(log))]
    notes.insert(0, f"mean of {len(kept)} of {counted(len(logs), 'run')}{how}; {len(parts)} with metrics of the run")
    return Measured(
        mean(log.run.seconds or 0.0 for log in kept) / 60,
        *settings.pop(),
        None if None in samples else mean(filter(None, samples)),
        {name: mean(each[name] for each in parts) / 60 for name in CAUSES if parts and name != SAMPLES},
        tuple(notes),
    )


def _machine(log: Log) -> tuple[str | None, int | None]:
    """Return the accelerator and the number of ranks, one per accelerator. Both are None if the log does not state them."""
    name, ranks = log.header.get("accelerator", "none"), re.match(r"(\d{1,7}) x", log.header.get("processes", ""))
    return (None, None) if name == "none" else (device_named(name).name, int(ranks[1]) if ranks else None)


def _fault(log: Log) -> str:
    """Return why a log is not a result, or "" for a result. Raises ``ValueError`` for other benchmarks and open runs."""
    run = log.run
    kind = (run.division, run.value("submission_benchmark") or "bert", run.value("max_sequence_length") or 512)
    if log.records and kind != ("closed", "bert", 512):
        found = f"division {kind[0]}, benchmark {visible(kind[1], 40)}, sequences of {visible(kind[2], 40)}"
        raise ValueError(f"{log.path}: {found}; expected a closed run of BERT-Large, because nothing else is predicted")
    faults = {
        log.given_up or (log.hint[0] if log.hint else "has no records"): log.given_up or not log.records,
        "was resumed from a checkpoint": "resumed from" in log.header,
        "has no run_start, or several": len(log.all("run_start")) != 1,
        "has not ended, or has no valid times": not run.seconds,
        MISSED: not run.is_unknown and run.converged_samples() is None,
        "went on after it reached the target": run.went_on,
    }
    return next((fault for fault, is_so in faults.items() if is_so), "")


def _parts(log: Log) -> Mapping[str, float]:
    """Return the seconds by part from the metrics beside a log, or {} if no metrics there have the log's run time."""
    try:
        account = read_run(log.path.with_name(f"{log.path.stem.replace('result', 'metrics')}.jsonl"))
    except ValueError:
        return {}
    if abs(account.seconds - (log.run.seconds or 0.0)) > 1 + 0.02 * account.seconds:
        return {}
    return {name.removesuffix("_ms").replace("_", " "): seconds for name, seconds in account.parts.items()}


def compare(measured: Measured, prediction: Prediction) -> dict[str, Any]:
    """Return a JSON document about measured minutes.

    For each part, ``causes`` has the minutes predicted for the measured samples, and the measured minutes. Without metrics
    of the run, ``alone`` replaces the measured minutes: the minutes of the part if it caused the whole delay.
    """
    minutes, device, parameters = measured.minutes, prediction.run.machine.device, calibration().parameters
    ratio, expected = minutes / prediction.minutes, run_time(parameters, prediction.run, measured.samples)
    alike, among = [*results_of_devices()], "any accelerator"
    for key, name in (("chip", f"the chip {device.chip}"), ("model", device.model)):
        same = [each for each in results_of_devices() if getattr(each.run.machine.device, key) == getattr(device, key)]
        alike, among = (same, name) if len(same) >= 10 else (alike, among)
    predicted = {name: sum(expected.parts[part] for part in parts) / 60 for name, (parts, _) in CAUSES.items()}
    excess = minutes - expected.total / 60
    alone = {name: each + excess for name, each in predicted.items() if each and excess > 0}
    if measured.samples:
        alone.pop(SAMPLES, None)
    found, kind = (measured.parts, "measured") if measured.parts else (alone, "alone")
    slower_than = mean(each.seconds < ratio * run_time(parameters, each.run).total for each in alike)
    verdict = "normal"
    if not prediction.low <= minutes <= prediction.high:
        verdict = f"{'slower' if ratio > 1 else 'faster'} than normal"
    elif abs(slower_than - 0.5) > INTERVAL / 2:
        verdict = f"{'slower' if slower_than > 0.5 else 'faster'} than most"
    return {
        "minutes": minutes,
        "ratio": ratio,
        "verdict": verdict,
        "compared_with": among,
        "results": len(alike),
        "slower_than": slower_than,
        "samples": measured.samples,
        "samples_ratio": measured.samples and measured.samples / prediction.time.samples,
        "speed_ratio": measured.samples and 60 * minutes / expected.total,
        "causes": {
            name: {"predicted": predicted[name], kind: found[name]}
            for name in sorted(found, key=lambda name: (round(predicted[name] - found[name], 9), -predicted[name]))
        },
        "notes": measured.notes,
    }


def as_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines that explain a document of `compare`."""
    yield ""
    where = f"{'outside' if found['verdict'].endswith('than normal') else 'inside'} its {INTERVAL:.0%} interval"
    yield f"measured {minutes_in_digits(found['minutes'])} min, {_percent(found['ratio'])}, {where}: {found['verdict']}"
    among = f"{found['results']} published results with {found['compared_with']}"
    yield f"slower than {found['slower_than']:.0%} of {among}, each compared with its own prediction"
    yield from found["notes"]
    if found["samples"]:
        yield f"convergence: {found['samples'] / 1e6:.2f} million samples, {_percent(found['samples_ratio'])}"
        yield f"speed: the time for these samples is {_percent(found['speed_ratio'])}"
    for number, (name, row) in enumerate(found["causes"].items()):
        if number == 0:
            yield from ("", f"{'':22}   predicted    {'measured' if 'measured' in row else 'if it is the only cause'}")
        before, after = row.values()
        times = after / before if before else math.inf
        check = "" if times <= 1 else "unlikely alone" if "alone" in row and times > 3 else CAUSES[name][1]
        factor = f"{times:9.2f} x" if before else ""
        yield f"{name:22}{minutes_in_digits(before):>8} min{minutes_in_digits(after):>8} min{factor:11}  {check}".rstrip()


def _percent(ratio: float) -> str:
    return f"{abs(ratio - 1):.1%} {'above' if ratio > 1 else 'below'} the prediction"
