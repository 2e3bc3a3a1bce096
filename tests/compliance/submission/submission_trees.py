"""Submissions of simulated runs, written by the real log writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compliance.log.rules import SYSTEM_FIELDS
from tests.compliance.run_series import write_log

SYSTEM = "node_8x"


def describe_system(**changes: Any) -> dict[str, Any]:
    """Return a complete system description; a field that is changed to None is omitted."""
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


def write_description(root: Path, **changes: Any) -> Path:
    """Write systems/<system>.json below `root`."""
    path = root / "systems" / f"{SYSTEM}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(describe_system(**changes), indent=2) + "\n")
    return path


def without_chain(path: Path) -> Path:
    """Keep only the records that ruleset 5.0.0 requires, so that edits break no digest and checks are fast."""
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.startswith(":::MLLOG") and "weights_initialization" not in line]
    path.write_text("".join(kept))
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
