"""Jobs of ``launch/slurm.sub`` in a checkout, and their output."""

from pathlib import Path

from tests.conftest import SmallRun
from tests.e2e.slurm.slurm_cluster import Cluster

RESULTS = Path("results/tiny_cpu/bert")


def submit(cluster: Cluster, checkout: Path, *arguments: str, options: tuple[str, ...] = ("-N2",), **env: str) -> str:
    """Submit ``launch/slurm.sub`` from the checkout and return the job's number."""
    command = ("sbatch", "--parsable", *options, "launch/slurm.sub", *arguments)
    return cluster.run(*command, cwd=checkout, **({"OMP_NUM_THREADS": "1", "CLEAR_CACHES": "0"} | env)).strip()


def small(run: SmallRun, results: str = "results", samples: int = 10_000_000, **changes: object) -> list[str]:
    """Return settings of a very small, endless run with a target that it does not reach."""
    settings = {"training__max_samples": samples, "evaluation__interval_samples": 1600} | changes
    return ["--", *run.arguments(Path(results), **settings)[1:]]


def output(checkout: Path, job: str) -> str:
    path = checkout / f"results/slurm-{job}.out"
    return path.read_text() if path.exists() else ""


def training(cluster: Cluster, checkout: Path, number: int, folder: Path = RESULTS) -> None:
    """Wait until run ``number`` has trained for some steps."""
    path = checkout / folder / f"metrics_{number}.jsonl"
    cluster.wait_for(lambda: path.exists() and '"event": "step"' in path.read_text())
