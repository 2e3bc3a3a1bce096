"""Evaluate a checkpoint without training: ``python -m bert.evaluate RECIPE [--section.field value ...]``.

This evaluates data.initial_checkpoint on data.evaluation, in one process or as several ranks under a launcher, and writes no
files. It takes the settings of ``python -m bert.train``, including --config, and two more options:

    --expect ACCURACY     the expected accuracy, such as 0.34085 for the benchmark's phase-1 checkpoint
    --tolerance SHARE     the largest allowed difference from the expected accuracy, 0.001 by default

Exit status: 0 if the accuracy is as expected or no accuracy was expected, 1 if it differs, 2 for a wrong input. Under
torchrun, torchrun's own status is 1 instead of 2.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from bert.parallel.environment import Launch
from bert.train import parse, refused, require_torch, without_option
from console.interruption import end_in_order
from console.program import accept_any_text, answer_version, complain, say, say_document
from console.text import counted

if TYPE_CHECKING:
    from bert.configuration.config import Config


def _share(name: str, text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) <= 1:
            return float(text)
    raise ValueError(f"{name} is {text}: expected a share from 0 to 1")


def main(arguments: Sequence[str]) -> int:
    accept_any_text()
    answer_version(arguments)
    try:
        if arguments and arguments[0] in ("-h", "--help"):
            say_document(str(__doc__))
            return 0
        expected, settings = without_option("--expect", arguments)
        within, settings = without_option("--tolerance", settings)
        expect = None if expected is None else _share("--expect", expected)
        tolerance = _share("--tolerance", within or "0.001")
        config = parse(settings, "bert.evaluate")
        # Check this last, because it imports PyTorch, which is slow.
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
    if accuracy is None or expect is None:
        return 0
    is_met = abs(accuracy - expect) <= tolerance
    if Launch.from_environment().rank == 0:
        wanted = f"{expect} within {tolerance}"
        remedy = "check data.initial_checkpoint, and run python -m dataloading verify on data.evaluation"
        say(f"as expected: {wanted}" if is_met else f"expected {wanted}, found {accuracy:.5f}: {remedy}")
    # Unlike a training run, this returns 1 even under torchrun, because callers must see a wrong accuracy as a failure.
    return 0 if is_met else 1


def checkpoint_accuracy(config: "Config") -> float | None:
    """Check everything, join the other ranks, evaluate and return the accuracy. A dry run only checks and returns None.

    Rank 0 prints the progress and the result. Raises ``ValueError`` or ``OSError`` for a wrong input or setting. The caller
    must always call ``leave_mesh`` afterwards, even after an exception.
    """
    import torch

    from bert.checkpoints.initial_model import first_model
    from bert.evaluation import Evaluator
    from bert.execution.stopwatch import Stopwatch
    from bert.guards.preflight import check_evaluation
    from bert.guards.triton import require_private_cache
    from bert.parallel.division import own_part
    from bert.parallel.mesh import join_mesh, process_group
    from bert.parallel.tensor.shards import TensorParallel

    dataset, ignored_id = check_evaluation(config)
    samples = len(dataset)
    if config.dry_run:
        say(f"{config.recipe}: ready, {counted(samples, 'sample')} would be evaluated")
        return None
    # Join after the checks, so that errors are reported before ranks wait for each other.
    mesh = join_mesh(config.training.device, parallel=config.parallel)
    if mesh.device.type == "cuda" and (warning := require_private_cache()) and mesh.is_main:
        complain(warning, "warning")
    started, said = time.perf_counter(), 0

    def report(share: float) -> None:
        nonlocal said
        if mesh.is_main and int(10 * share) > said:
            said = int(10 * share)
            say(f"{time.perf_counter() - started:7.1f} s  {10 * said} % of {samples:,} samples")

    # Weights that the checkpoint lacks are random. The fixed seed makes them equal on all ranks without a broadcast.
    whole = first_model(config, mesh, seed=0)
    tensor = TensorParallel(config.model, process_group(mesh.tensor_ranks), Stopwatch())
    model = own_part(whole, mesh, tensor, config.parallel.virtual_stages)
    # A warm-up is not needed, because no benchmark clock runs and every batch is used only once. If the precision is fp8,
    # the matrix products use bf16 here, because only a training run has FP8 scales.
    evaluator = Evaluator(dataset, mesh, config.evaluation.batch_size, ignored_id)
    autocast = torch.autocast(mesh.device.type, torch.bfloat16, enabled=config.training.precision != "fp32")
    accuracy = evaluator(model, autocast, report)
    if mesh.is_main:
        counts = f"{accuracy.correct:,} of {accuracy.count:,} masked tokens of {counted(samples, 'sample')}"
        counts += "" if ignored_id is None else ", without [UNK]"
        say(f"perplexity {accuracy.perplexity:.1f}")
        say(f"masked-LM accuracy {accuracy.value:.5f}: {counts}, in {time.perf_counter() - started:.1f} s")
    return accuracy.value


if __name__ == "__main__":
    end_in_order()
    sys.exit(main(sys.argv[1:]))
