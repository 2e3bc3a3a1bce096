"""The accuracy of a checkpoint before any training: ``python -m bert.evaluate RECIPE [--section.field value ...]``.

It evaluates data.initial_checkpoint on data.evaluation, by itself or as ranks under a launcher, and writes nothing. Settings
are those of ``python -m bert.train``, from --config FILE too; two are of this command alone:

    --expect ACCURACY     what is to be found, as 0.34085 of the benchmark's phase-1 checkpoint on its evaluation set
    --tolerance SHARE     how far from it the accuracy may lie, 0.001 by default

Exit status: 0 as expected, or nothing was expected; 1 when the accuracy is another one; 2 when an input or a setting is
wrong. torchrun makes 1 of both.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import tyro

from console.interruption import end_in_order
from console.program import accept_any_text, answer_version, complain, parsed, say, say_document

if TYPE_CHECKING:
    from bert.config import Config
    from bert.evaluator import Accuracy
    from bert.parallel.mesh import Mesh
    from dataloading.dataset.folder import Dataset


@dataclass(frozen=True)
class Expectation:
    """What the accuracy should be."""

    expect: float | None = None
    tolerance: float = 0.001

    def check(self) -> None:
        """Raise ``ValueError`` where an accuracy cannot be such."""
        for name, value in (("expect", self.expect), ("tolerance", self.tolerance)):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"--{name} is {value}: expected a share from 0 to 1")

    def met_by(self, accuracy: float) -> bool:
        """Whether nothing else was expected."""
        return self.expect is None or abs(accuracy - self.expect) <= self.tolerance

    def verdict(self, accuracy: float) -> str:
        """What to say of an accuracy."""
        wanted = f"{self.expect} within {self.tolerance}"
        if self.met_by(accuracy):
            return f"as expected: {wanted}"
        return (
            f"expected {wanted}, found {accuracy:.5f}: see whether data.initial_checkpoint is the right one, and what "
            "python -m dataloading verify says of data.evaluation"
        )


def main(arguments: Sequence[str]) -> int:
    """Parse, check, evaluate; returns the exit status."""
    accept_any_text()
    answer_version(arguments)
    if arguments and arguments[0] in ("-h", "--help"):
        say_document(str(__doc__))
        return 0
    from bert.train import parse, refused

    try:
        read = partial(tyro.cli, Expectation, args=arguments, return_unknown_args=True, add_help=False)
        expectation, settings = parsed(read)
        expectation.check()
        config = parse(settings, "bert.evaluate")
        from bert.guards.preflight import check_evaluation
        from bert.guards.triton_cache import require_private_cache
        from bert.parallel.mesh import join_mesh, leave_mesh

        dataset = check_evaluation(config)
        if config.dry_run:
            say(f"{config.recipe}: ready, {len(dataset):,} samples would be evaluated")
            return 0
        mesh = join_mesh(config.training.device)
        if mesh.device.type == "cuda" and (warning := require_private_cache()) and mesh.is_main:
            complain(warning, "warning")
    except (ValueError, OSError) as error:
        return refused(error)
    try:
        accuracy = evaluate(config, dataset, mesh)
    except (ValueError, OSError) as error:
        return refused(error)
    finally:
        leave_mesh()
    if expectation.expect is not None and mesh.is_main:
        say(expectation.verdict(accuracy.value))
    return 0 if expectation.met_by(accuracy.value) else 1


def evaluate(config: Config, dataset: Dataset, mesh: Mesh) -> Accuracy:
    """Evaluate the initial checkpoint, and say on rank 0 how far that is and what comes of it.

    FP8 is training's: where a recipe has it, the products are in bf16 here. Raises ``ValueError`` where no token is masked.
    """
    import torch

    from bert.evaluator import Evaluator
    from bert.train import first_model

    started = time.perf_counter()
    model = first_model(config, mesh, seed=0)
    evaluator = Evaluator(dataset, mesh, config.evaluation.batch_size)
    autocast = torch.autocast(mesh.device.type, torch.bfloat16, enabled=config.training.precision != "fp32")
    report = _progress(started, len(dataset), mesh.is_main)
    accuracy = evaluator.start(model, autocast, report).result()
    if accuracy.count == 0:
        raise ValueError(f"{dataset.folder}: no token is masked, so there is nothing to predict: prepare it again")
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


if __name__ == "__main__":
    end_in_order()
    sys.exit(main(sys.argv[1:]))
