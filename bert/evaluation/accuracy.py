"""The accuracy of the checkpoint that a run would start from: what ``python -m bert.evaluate`` does."""

import time
from collections.abc import Callable

import torch

from bert.build import divided_model
from bert.checkpoints.initial_model import first_model
from bert.configuration.config import Config
from bert.evaluation.evaluator import Accuracy, Evaluator
from bert.guards.preflight import check_evaluation
from bert.guards.triton_cache import require_private_cache
from bert.parallel.mesh import Mesh, join_mesh, leave_mesh
from bert.parallel.tensor.shards import tensor_parallel
from console.program import complain, say
from dataloading.dataset.folder import Dataset

__all__ = ["checkpoint_accuracy", "leave_mesh"]


def checkpoint_accuracy(config: Config) -> Accuracy | None:
    """Check everything, join the other ranks and evaluate, or return None where it is a dry run.

    On rank 0 it says how far it is and what comes of it. Raises ``ValueError`` or ``OSError`` where an input or a setting is
    wrong. ``leave_mesh`` is for the caller, however it ends.
    """
    dataset = check_evaluation(config)
    if config.dry_run:
        say(f"{config.recipe}: ready, {len(dataset):,} samples would be evaluated")
        return None
    # Behind the checks, so that what is wrong is said before ranks wait for each other.
    mesh = join_mesh(config.training.device, parallel=config.parallel)
    if mesh.device.type == "cuda" and (warning := require_private_cache()) and mesh.is_main:
        complain(warning, "warning")
    return _evaluate(config, dataset, mesh)


def _evaluate(config: Config, dataset: Dataset, mesh: Mesh) -> Accuracy:
    """FP8 is training's: where a recipe has it, the products are in bf16 here."""
    started = time.perf_counter()
    # A fixed seed: heads that a folder lacks must be the same on all ranks, and nothing is broadcast here.
    whole = first_model(config, mesh, seed=0)
    model = divided_model(whole, mesh, tensor_parallel(config.model, mesh), config.parallel.virtual_stages)
    # No warm-up: no clock of a benchmark runs, and every batch comes once.
    evaluator = Evaluator(dataset, mesh, config.evaluation.batch_size)
    autocast = torch.autocast(mesh.device.type, torch.bfloat16, enabled=config.training.precision != "fp32")
    report = _progress(started, len(dataset), mesh.is_main)
    accuracy = evaluator.start(model, autocast, report).result()
    if mesh.is_main:
        seconds = time.perf_counter() - started
        counts = f"{accuracy.correct:,} of {accuracy.count:,} masked tokens of {len(dataset):,} samples"
        say(f"masked-LM accuracy {accuracy.value:.5f}: {counts}, in {seconds:.1f} s")
    return accuracy


def _progress(started: float, samples: int, aloud: bool) -> Callable[[float], None]:
    """Return what says, if ``aloud``, a line for each tenth of the work."""
    said = 0

    def report(share: float) -> None:
        nonlocal said
        if aloud and int(10 * share) > said:
            said = int(10 * share)
            say(f"{time.perf_counter() - started:7.1f} s  {10 * said} % of {samples:,} samples")

    return report
