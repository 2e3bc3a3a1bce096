"""Complete results folders of simulated runs for the tests of the report. Their names mark them as made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.compliance.run_logs import write_metrics
from tests.compliance.run_series import write_series
from tests.compliance.submission.submission_trees import describe_system


def write_description(folder: Path, **fields: object) -> Path:
    """Write the system description for results/<system>/bert."""
    system = folder.parent.name
    path = folder.parents[1] / "systems" / f"{system}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    description = describe_system(system_name=system) | {
        "host_processor_model_name": "made up",
        "accelerator_model_name": "NVIDIA H100 80GB HBM3",
        "accelerator_interconnect": "NVLink 4, NVSwitch 3",
        "framework": "PyTorch 2.13.0",
        "operating_system": "Ubuntu 24.04",
    }
    path.write_text(json.dumps(description | fields))
    return path


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
        # An evaluation is 196 steps of 768 sequences, and 19 s, after the previous one.
        write_metrics(folder / f"metrics_{number}.jsonl", 196 * count, every=20, batch=768, scale=3.5)
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
