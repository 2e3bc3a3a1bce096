"""The accuracy of a checkpoint before any training: ``python -m bert.evaluate RECIPE [--section.field value ...]``.

It evaluates data.initial_checkpoint on data.evaluation, by itself or as ranks under a launcher, and writes nothing. It takes
the settings of ``python -m bert.train``, --config included, and two options of its own:

    --expect ACCURACY     the expected accuracy, such as 0.34085 for the benchmark's phase-1 checkpoint
    --tolerance SHARE     the largest difference from it, 0.001 by default

Exit status: 0 as expected, or nothing was expected; 1 another accuracy; 2 wrong input. torchrun makes 1 of both.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import tyro

from bert.parallel.launch import Launch
from bert.train import parse, refused, require_torch
from console.interruption import end_in_order
from console.program import accept_any_text, answer_version, complain, parsed, say, say_document

if TYPE_CHECKING:
    from bert.configuration.config import Config


@dataclass(frozen=True)
class Expectation:
    """Expected accuracy, and the tolerance."""

    expect: float | None = None
    tolerance: float = 0.001

    def __post_init__(self) -> None:
        for name, value in (("expect", self.expect), ("tolerance", self.tolerance)):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"--{name} is {value}: expected a share from 0 to 1")


def main(arguments: Sequence[str]) -> int:
    """Parse, check, evaluate; return the exit status."""
    accept_any_text()
    answer_version(arguments)
    try:
        if arguments and arguments[0] in ("-h", "--help"):
            say_document(str(__doc__))
            return 0
        # bert.train's parser reads all other options; tyro's help would show these two alone.
        read = partial(tyro.cli, Expectation, args=arguments, return_unknown_args=True, add_help=False)
        expectation, settings = parsed(read)
        config = parse(settings, "bert.evaluate")
        # After what can be refused without it: it imports PyTorch.
        require_torch()
    except (ValueError, OSError) as error:
        return refused(error)
    from bert.parallel.mesh import leave_mesh

    try:
        accuracy = checkpoint_accuracy(config)
    except (ValueError, OSError) as error:
        return refused(error)
    finally:
        leave_mesh()
    if accuracy is None or expectation.expect is None:
        return 0
    is_met = abs(accuracy - expectation.expect) <= expectation.tolerance
    if Launch.from_environment().rank == 0:
        wanted = f"{expectation.expect} within {expectation.tolerance}"
        remedy = "check data.initial_checkpoint, and run python -m dataloading verify on data.evaluation"
        say(f"as expected: {wanted}" if is_met else f"expected {wanted}, found {accuracy:.5f}: {remedy}")
    # Not 0 under torchrun, unlike a run's status: a wrong accuracy must be visible as a failure.
    return 0 if is_met else 1


def checkpoint_accuracy(config: Config) -> float | None:
    """Check everything, join the other ranks and evaluate; return None for a dry run.

    Rank 0 prints progress and result. Raises ``ValueError`` or ``OSError`` for a wrong input or setting. The caller must
    call ``leave_mesh``, however this ends.
    """
    import torch

    from bert.build import divided_model
    from bert.checkpoints.initial_model import first_model
    from bert.evaluation.evaluator import Evaluator
    from bert.guards.preflight import check_evaluation
    from bert.guards.triton_cache import require_private_cache
    from bert.parallel.mesh import join_mesh
    from bert.parallel.tensor.shards import tensor_parallel

    dataset = check_evaluation(config)
    samples = len(dataset)
    if config.dry_run:
        say(f"{config.recipe}: ready, {samples:,} samples would be evaluated")
        return None
    # After the checks, so that errors are reported before ranks wait for each other.
    mesh = join_mesh(config.training.device, parallel=config.parallel)
    if mesh.device.type == "cuda" and (warning := require_private_cache()) and mesh.is_main:
        complain(warning, "warning")
    started, said = time.perf_counter(), 0

    def report(share: float) -> None:
        nonlocal said
        if mesh.is_main and int(10 * share) > said:
            said = int(10 * share)
            say(f"{time.perf_counter() - started:7.1f} s  {10 * said} % of {samples:,} samples")

    # A fixed seed: heads that the checkpoint lacks must be the same on all ranks, and nothing is broadcast here.
    whole = first_model(config, mesh, seed=0)
    model = divided_model(whole, mesh, tensor_parallel(config.model, mesh), config.parallel.virtual_stages)
    # No warm-up: no benchmark clock runs, and every batch comes once. FP8 is for training: here products are in bf16.
    evaluator = Evaluator(dataset, mesh, config.evaluation.batch_size)
    autocast = torch.autocast(mesh.device.type, torch.bfloat16, enabled=config.training.precision != "fp32")
    accuracy = evaluator.start(model, autocast, report).result()
    if mesh.is_main:
        counts = f"{accuracy.correct:,} of {accuracy.count:,} masked tokens of {samples:,} samples"
        say(f"masked-LM accuracy {accuracy.value:.5f}: {counts}, in {time.perf_counter() - started:.1f} s")
    return accuracy.value


if __name__ == "__main__":
    end_in_order()
    sys.exit(main(sys.argv[1:]))
