"""Results folders and submissions of simulated runs, written by the real log writer."""

import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from compliance.log.rules import SYSTEM_FIELDS
from tests.compliance import run_logs
from tests.compliance.run_logs import CLOSED, OPEN, START_MS, log_of, write_metrics

SYSTEM = "node_8x"
EVALUATIONS = 17
"""Number of evaluations of a run that needs more sequences (2,550,016 at batch size 448) than the reference's mean."""


def write_log(
    path: Path,
    number: int,
    *,
    evaluations: int = EVALUATIONS,
    failed: bool = False,
    division: Any = "closed",
    global_batch_size: int | None = None,
    header: Mapping[str, object] | None = None,
    step_ms: int = 1000,
    **submission: str,
) -> Path:
    """Write the log of run `number`, which has its own seed and starts three hours after the previous run.

    If `failed`, the run is aborted without reaching the target. An evaluation takes 5 times `step_ms`.
    """
    target = float((CLOSED if division == "closed" else OPEN)["quality_target"])
    log = log_of(
        (*[0.9 * target] * (evaluations - 1), 0.9 * target if failed else target + 0.0005),
        division,
        global_batch_size=global_batch_size,
        seed=1000 + 17 * number,
        status="aborted" if failed else "success",
        header=tuple((header or {}).items()),
        # One layer saves records: 24 layers have 398 weights, and ruleset 5.0.0 does not require a record of each.
        submission=(*submission.items(), ("layers", 1)),
        step_ms=step_ms,
        start_ms=START_MS + number * 10_800_000,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(log)
    return path


def write_series(
    folder: Path, evaluations: Sequence[int], *, failed: Collection[int] = (), **options: Any
) -> list[Path]:
    """Write one log per entry of `evaluations`; runs in `failed` are aborted."""
    return [
        write_log(folder / f"result_{number}.txt", number, evaluations=count, failed=number in failed, **options)
        for number, count in enumerate(evaluations)
    ]


# Submissions


def describe_system(**changes: Any) -> dict[str, Any]:
    """Return a complete system description with changes. Omit a field that is changed to None."""
    fields = dict.fromkeys(SYSTEM_FIELDS, "") | {
        "submitter": "Example",
        "division": "closed",
        "status": "Research, Development, or Internal (RDI)",
        "system_name": SYSTEM,
        "number_of_nodes": "1",
        "host_processors_per_node": "2",
        "accelerators_per_node": "8",
    }
    return {name: value for name, value in (fields | changes).items() if value is not None}


def write_description(root: Path, system: str = SYSTEM, **changes: Any) -> Path:
    """Write systems/<system>.json below `root`."""
    path = root / "systems" / f"{system}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(describe_system(system_name=system, **changes), indent=2) + "\n")
    return path


def without_chain(path: Path) -> Path:
    """Remove the digests from a log, so that edits break none."""
    path.write_text(run_logs.without_chain(path.read_text()))
    return path


def write_submission(root: Path, runs: int = 10, **options: Any) -> Path:
    """Write the complete submission of one system, and return `root`."""
    options = {"org": "Example", "platform": SYSTEM, "status": "research"} | options
    for number in range(runs):
        write_log(root / "results" / SYSTEM / "bert" / f"result_{number}.txt", number, **options)
    write_description(root, division=options.get("division", "closed"))
    source = root / "benchmarks" / "bert" / "implementations" / "pytorch"
    source.mkdir(parents=True)
    (source / "README.md").write_text("How to run it.\n")
    return root


def benchmark_folder(root: Path) -> Path:
    """Return the folder that contains the logs."""
    return root / "results" / SYSTEM / "bert"


def write_listed(root: Path, listed: bytes, logs: Sequence[bytes]) -> None:
    """Create ``root`` from lines: a path, a tab, and "link TARGET", "pipe", "log WORD", "system" or the text of a file."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for line in os.fsdecode(listed).split("\n")[:40]:
        name, _, content = line.partition("\t")
        kind, _, word = content.partition(" ")
        with suppress(OSError, ValueError):  # a path may be too long, contain a zero byte, or lie below a file
            (place := root / name).resolve().relative_to(root)
            place.parent.mkdir(parents=True, exist_ok=True)
            match kind:
                case "link":
                    place.symlink_to(word)
                case "pipe":
                    os.mkfifo(place)
                case _:
                    made = {"log": logs[len(word) % len(logs)], "system": json.dumps(describe_system()).encode()}
                    with place.open("xb") as file:  # mode x never writes to an existing link or pipe
                        file.write(made.get(kind, os.fsencode(content)))


# Folders for the report, with "made_up" in their names


def write_closed_folder(root: Path, evaluations: Sequence[int] = (16, 17, 16, 16, 17, 16, 15, 16, 17, 16)) -> Path:
    """Write results/made_up_h100/bert with one run per entry of `evaluations`; 0 is a run that misses the target.

    The runs have the published throughput of eight H100 GPUs, about 7,500 sequences per second.
    """
    folder = root / "results" / "made_up_h100" / "bert"
    failed = {number for number, last in enumerate(evaluations) if not last}
    header = {"recipe": "h100_1x8", "torch": "2.13.0", "accelerator": "NVIDIA H100 80GB HBM3"}
    header |= {"config.training.global_batch_size": 768}
    counts = [last or 20 for last in evaluations]
    write_series(
        folder, counts, failed=failed, global_batch_size=768, header=header, platform="made_up_h100", step_ms=3850
    )
    for number, count in enumerate(counts):
        # Evaluations are 196 steps of 768 sequences apart, which take 19 s.
        write_metrics(folder / f"metrics_{number}.jsonl", 196 * count, every=20, batch=768, scale=3.5)
    described = {"accelerator_model_name": "NVIDIA H100 80GB HBM3", "accelerator_interconnect": "NVLink 4, NVSwitch 3"}
    described |= {"host_processor_model_name": "made up", "framework": "PyTorch 2.13.0"}
    write_description(root / "results", "made_up_h100", **described)
    return folder


def write_experiment(
    folder: Path,
    number: int,
    accuracies: Sequence[float],
    settings: Mapping[str, object] | None = None,
    *,
    seed: int = 7,
    status: Any = "success",
    resumed: int = 0,
    fault: str = "",
) -> Path:
    """Write the log and the metrics of a run without a target. `settings` become its configuration."""
    header: dict[str, object] = {"note": "not an MLPerf result", "processes": "2 x 1 threads"}
    header |= {"ended by a fault": fault} if fault else {}
    configured = {"evaluation.target": None, "training.max_samples": 9024, "training.seed": seed, "log.run": number}
    header |= {f"config.{name}": value for name, value in (configured | dict(settings or {})).items()}
    path = folder / f"result_{number}.txt"
    folder.mkdir(parents=True, exist_ok=True)
    log = log_of(
        (*accuracies,), "open", header=(*header.items(),), seed=seed, status=status, resumed=resumed,
        step_ms=100, start_ms=START_MS + number * 3_600_000,
    )  # fmt: skip
    path.write_bytes(log)
    evaluated = [step for step in (32, 63, 94, 125) if 32 * step > resumed][: len(accuracies)]
    parts = {"step_ms": 8, "data_wait_ms": 1, "forward_backward_ms": 4, "reduce_ms": 1, "update_ms": 2}
    entries: list[dict[str, Any]] = []
    for step, accuracy in zip(evaluated, accuracies, strict=True):
        at = {"step": step, "samples": 32 * step}
        entries.append({"event": "step", **at, **parts, "loss": 9 / step, "sequences_per_s": 3e3})
        evaluation = {"eval_s": 0.05, "masked_lm_accuracy": accuracy, "count": 400, "perplexity": 100 * (1 - accuracy)}
        entries.append({"event": "eval", **at, **evaluation})
    if number < 2:
        entries.append({"event": "warning", "step": 40, "text": "the loss is not finite"})
    (folder / f"metrics_{number}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def write_experiments(root: Path) -> Path:
    """Write results/made_up_text/bert with runs without a target: finished, interrupted, resumed, failed and unfinished."""
    folder = root / "results" / "made_up_text" / "bert"
    slow, fast, faster = (
        {"optimizer.base_learning_rate": rate, "save_checkpoint": "data/trained.safetensors"}
        for rate in (0.002, 0.005, 0.01)
    )
    write_experiment(folder, 0, (0.1, 0.25, 0.2), fast)
    write_experiment(folder, 1, (0.1, 0.2, 0.25), slow, seed=8)
    write_experiment(folder, 2, (0.15,), faster, status="aborted")
    write_experiment(folder, 3, (0.3, 0.28), faster, resumed=1280)
    write_experiment(folder, 4, (0.05,), faster, status="aborted", fault="a GPU was lost")
    write_experiment(folder, 5, (0.02,), faster, status="running")
    return folder


def write_failing_folder(root: Path) -> Path:
    """Write a folder with many problems: an edited log, two aborted runs, an invalid log, broken metrics and description."""
    folder = write_closed_folder(root, (16, 0, 16, 0, 11))
    edited = folder / "result_2.txt"
    lines = edited.read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"cache_clear"' not in line]
    start = next(line for line in kept if '"run_start"' in line)
    edited.write_text("".join(kept) + start)
    (folder / "result_5.txt").write_text("<b>nothing</b>\n")
    (folder.parents[1] / "systems" / "made_up_h100.json").write_text("{")
    (folder / "metrics_0.jsonl").write_text('{"event": "step", "step": 20, "loss": NaN, "samples": null}\n{"event')
    with (folder / "metrics_4.jsonl").open("a") as file:
        file.write(json.dumps({"event": "warning", "step": 120, "time_s": 9.0, "text": "rank 5 on node b takes 1.4x"}))
        file.write("\n")
    return folder
