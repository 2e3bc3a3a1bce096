"""The accuracy of a checkpoint before any training: ``python -m bert.evaluate RECIPE [--section.field value ...]``.

It evaluates data.initial_checkpoint on data.evaluation, by itself or as ranks under a launcher, and writes nothing. Settings
are those of ``python -m bert.train``, from --config FILE too; two are of this command alone:

    --expect ACCURACY     what is to be found, as 0.34085 of the benchmark's phase-1 checkpoint on its evaluation set
    --tolerance SHARE     how far from it the accuracy may lie, 0.001 by default

Exit status: 0 as expected, or nothing was expected; 1 when the accuracy is another one; 2 when an input or a setting is
wrong. torchrun makes 1 of both.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import tyro

from bert.parallel.launch import Launch
from bert.train import parse, refused, require_torch
from console.interruption import end_in_order
from console.program import accept_any_text, answer_version, parsed, say, say_document


@dataclass(frozen=True)
class Expectation:
    """Expected accuracy, and the tolerance."""

    expect: float | None = None
    tolerance: float = 0.001

    def check(self) -> None:
        """Raise ``ValueError`` where an accuracy cannot be such."""
        for name, value in (("expect", self.expect), ("tolerance", self.tolerance)):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"--{name} is {value}: expected a share from 0 to 1")

    def met_by(self, accuracy: float) -> bool:
        """Tell whether an accuracy is as expected, or nothing was expected."""
        return self.expect is None or abs(accuracy - self.expect) <= self.tolerance

    def verdict(self, accuracy: float) -> str:
        """Say whether an accuracy is as expected, and where it is not, what to look at."""
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
    try:
        if arguments and arguments[0] in ("-h", "--help"):
            say_document(str(__doc__))
            return 0
        # All other options are for the parser of bert.train; a help of tyro's would show these two alone.
        read = partial(tyro.cli, Expectation, args=arguments, return_unknown_args=True, add_help=False)
        expectation, settings = parsed(read)
        expectation.check()
        config = parse(settings, "bert.evaluate")
        # Behind what can be refused without it: it imports PyTorch.
        require_torch()
    except (ValueError, OSError) as error:
        return refused(error)
    from bert.evaluation.accuracy import checkpoint_accuracy, leave_mesh  # PyTorch and kernels, as in bert.train

    try:
        accuracy = checkpoint_accuracy(config)
    except (ValueError, OSError) as error:
        return refused(error)
    finally:
        leave_mesh()
    if accuracy is None:  # a dry run
        return 0
    if expectation.expect is not None and Launch.from_environment().rank == 0:
        say(expectation.verdict(accuracy.value))
    # Not made 0 under torchrun, as a run's status is: whoever started this is to see it fail.
    return 0 if expectation.met_by(accuracy.value) else 1


if __name__ == "__main__":
    end_in_order()
    sys.exit(main(sys.argv[1:]))
