"""Check a run before it starts, and predict its memory and the time of a step.

    python -m cluster.dry_run RECIPE [--section.field value ...]

This runs ``python -m bert.train RECIPE --dry-run``. It adds a forecast if the run uses GPUs, or if several ranks share a
copy of the model.
"""

import signal
import sys
from collections.abc import Sequence

from bert.parallel.environment import Launch
from bert.train import main as train
from bert.train import parse
from console.program import say


def main(arguments: Sequence[str]) -> int:
    if status := train([*arguments, "--dry-run"]):
        return status
    # The trainer ignores signals once it has ended, but the forecast takes seconds.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    config, launch = parse(arguments), Launch.from_environment()
    if config.training.device == "cuda" or config.parallel.copy_ranks > 1:
        from cluster.plan.command import forecast  # these imports take a second

        for line in forecast(config, launch.world_size, launch.local_size):
            say(f"{config.recipe}: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
