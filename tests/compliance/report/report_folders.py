"""Complete results folders of simulated runs for the tests of the report. Their names mark them as made up."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert.log.mllog import MLLog
from compliance.log.rules import SYSTEM_FIELDS
from compliance.log.schedule import evaluation_interval, evaluation_samples
from tests.compliance.run_logs import CLOSED, START_MS, initialise

BATCH = 768
INTERVAL = evaluation_interval(BATCH)
RATE = 8 * 950.0
"""Sequences per second of the simulated machine: the published throughput of eight H100 GPUs."""


@dataclass
class Clock:
    """Clock that advances by `step_ms` per call. The step is large while the 398 tensors are initialized."""

    ms: int
    step_ms: int = 200

    def __call__(self) -> int:
        self.ms += self.step_ms
        return self.ms


def write_closed_run(
    path: Path,
    number: int,
    evaluations: int = 16,
    *,
    rate: float = RATE,
    reached: bool = True,
    header: dict[str, object] | None = None,
) -> None:
    """Write the log and metrics of a closed run: batch size 768, one evaluation per 150,528 samples."""
    draw = random.Random(number)
    settings = CLOSED | {"global_batch_size": BATCH, "eval_interval_samples": INTERVAL}
    clock = Clock(START_MS + 3_600_000 * number)
    start = {"event": "run", "recipe": "h100_1x8", "world_size": 8, "started": "2024-01-02T03:04:05+00:00"}
    metrics: list[dict[str, Any]] = [start]
    head = {"recipe": "h100_1x8", "torch": "2.13.0", "accelerator": "NVIDIA H100 80GB HBM3", "seed": 1000 + number}
    path.mkdir(parents=True, exist_ok=True)
    with MLLog(path / f"result_{number}.txt", clock_ms=clock) as log:
        log.header(head | {"config.training.global_batch_size": BATCH} | (header or {}))
        initialise(log, "closed", settings, seed=1000 + number, platform="made_up_h100")
        clock.step_ms = 2
        samples = 0
        for index in range(1, evaluations + 1):
            log.block_start(samples)
            before, samples = samples, evaluation_samples(index, INTERVAL, BATCH)
            clock.ms += int((samples - before) / rate * 1000)
            log.block_stop(samples)
            log.eval_start(samples)
            clock.ms += 400
            left = 1 - (index / evaluations if reached else index / evaluations / 2)
            accuracy = 0.7205 - 0.31 * left**2.2 + draw.uniform(-0.002, 0) * (left > 0)
            log.eval_accuracy(round(accuracy, 5), samples)
            log.eval_stop(samples)
            metrics += _metrics(draw, before, samples, rate)
        if reached:
            log.run_stop("success", samples=samples, eval_samples=10_000)
        else:
            log.abort()
    lines = "".join(json.dumps(entry) + "\n" for entry in metrics)
    (path / f"metrics_{number}.jsonl").write_text(lines)


def _metrics(draw: random.Random, before: int, samples: int, rate: float) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for at in range(before + 20 * BATCH, samples + 1, 20 * BATCH):
        step_ms = 1000 * BATCH / rate * draw.uniform(0.99, 1.03)
        entries.append(
            {
                "event": "step",
                "step": at // BATCH,
                "samples": at,
                "step_ms": step_ms,
                "data_wait_ms": 0.004 * step_ms,
                "forward_backward_ms": 0.86 * step_ms,
                "reduce_ms": 0.045 * step_ms,
                "update_ms": 0.06 * step_ms,
                "loss": 1.3 + 2.4 * math.exp(-at / 6e5) + draw.uniform(-0.04, 0.04),
                "sequences_per_s": 1000 * BATCH / step_ms,
                "skipped_steps": 0,
            }
        )
    entries.append({"event": "eval", "step": samples // BATCH, "samples": samples, "eval_s": 0.4})
    return entries


def write_description(folder: Path, **fields: object) -> Path:
    """Write the system description for results/<system>/bert."""
    system = folder.parent.name
    path = folder.parents[1] / "systems" / f"{system}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    description = dict.fromkeys(SYSTEM_FIELDS, "") | {
        "submitter": "Example",
        "division": "closed",
        "status": "Research, Development, or Internal (RDI)",
        "system_name": system,
        "number_of_nodes": "1",
        "host_processors_per_node": "2",
        "host_processor_model_name": "made up",
        "accelerators_per_node": "8",
        "accelerator_model_name": "NVIDIA H100 80GB HBM3",
        "accelerator_interconnect": "NVLink 4, NVSwitch 3",
        "framework": "PyTorch 2.13.0",
        "operating_system": "Ubuntu 24.04",
    }
    path.write_text(json.dumps(description | fields))
    return path


def write_closed_folder(root: Path, evaluations: Sequence[int] = (16, 17, 16, 16, 17, 16, 15, 16, 17, 16)) -> Path:
    """Write results/made_up_h100/bert with one run per entry of `evaluations`; 0 is a run that misses the target."""
    folder = root / "results" / "made_up_h100" / "bert"
    for number, last in enumerate(evaluations):
        rate = RATE * (1 + 0.01 * math.sin(number))
        write_closed_run(folder, number, last or 20, rate=rate, reached=last > 0)
    write_description(folder)
    return folder


def write_failing_folder(root: Path) -> Path:
    """Write a folder with many problems: an edited log, two aborted runs, broken metrics and an invalid log."""
    folder = write_closed_folder(root, (16, 0, 16, 0, 11))
    edited = folder / "result_2.txt"
    lines = edited.read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"cache_clear"' not in line]
    start = next(line for line in kept if '"run_start"' in line)
    edited.write_text("".join(kept) + start)
    (folder / "result_5.txt").write_text("<b>nothing</b>\n")
    (folder / "metrics_0.jsonl").write_text('{"event": "step", "step": 20, "loss": NaN, "samples": null}\n{"event')
    with (folder / "metrics_4.jsonl").open("a") as file:
        file.write(json.dumps({"event": "warning", "step": 120, "time_s": 9.0, "text": "rank 5 on node b takes 1.4x"}))
        file.write("\n")
    return folder
