"""Fuzz the readers of untrusted files for minutes: ``python -m tests.fuzz [--minutes N] [--jobs N] [TARGET ...]``.

With the package atheris, coverage guides the inputs; otherwise Hypothesis draws them at random. Failing inputs are kept in
.hypothesis, tried first in the next run, and reduced to the smallest. A target stops at its first failure.
"""

import argparse
import os
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGES = ["bert", "cluster", "compliance", "console", "dataloading"]
COMPILED = "dataloading.preparation.pretraining_data"


def fuzz(name: str, seconds: float, *, guided: bool) -> None:
    """Fuzz one target in this process, which ends with an exception at the first failure."""
    if guided:
        atheris = import_module("atheris")
    with atheris.instrument_imports(include=PACKAGES, exclude=[COMPILED]) if guided else nullcontext():
        from hypothesis.database import DirectoryBasedExampleDatabase

        from tests.fuzz import attempt
        from tests.fuzz.targets import TARGETS

    target, end = next(target for target in TARGETS if target.name == name), time.monotonic() + seconds
    # A shared database would lose inputs that fail in one target and not in another.
    database = DirectoryBasedExampleDatabase(Path(".hypothesis", name))
    with TemporaryDirectory() as folder:
        if guided:
            one = attempt.trial(target, folder, database=database).hypothesis.fuzz_one_input
            corpus = Path(folder, "corpus")
            corpus.mkdir()
            for number in range(20):  # libFuzzer's own first inputs are too short for Hypothesis to draw from
                (corpus / str(number)).write_bytes(random.Random(number).randbytes(300))
            options = [f"-max_total_time={seconds:.0f}", "-reduce_inputs=0", f"-artifact_prefix={folder}/", str(corpus)]
            atheris.Setup(
                [name, *options], lambda data: (one(data), attempt.tried % 20 or print(attempt.tried, "tried"))
            )
            atheris.Fuzz()  # ends the process
        while time.monotonic() < end:
            attempt.trial(target, folder, database=database, max_examples=200)()  # different inputs in each round
            print(attempt.tried, "tried", flush=True)


def report(name: str, seconds: float) -> bool:
    """Fuzz one target in other processes, print its result, and return whether no input failed."""
    guided, one = find_spec("atheris") is not None, [sys.executable, "-um", "tests.fuzz", "--only", name]
    done = subprocess.run([*one, "--seconds", f"{seconds}", *["--guided"] * guided], capture_output=True, text=True)
    counts = re.findall(r"(\d+) tried", done.stdout)
    # libFuzzer writes an exception to its standard output.
    said = re.sub(r"\d+ tried\n", "", done.stdout) + done.stderr if done.returncode else ""
    if said and guided:  # reduce the failing input, which was saved
        said = subprocess.run([*one, "--seconds", "1"], capture_output=True, text=True).stderr or said
    print(f"{name}: {int(counts[-1]) if counts else 0:,} inputs{', FAILED' if said else ''}", flush=True)
    print("\n".join(line[:1000] for line in said.splitlines()[-40:]), end="\n" if said else "", flush=True)
    return not said


def main() -> int:
    from tests.fuzz.targets import TARGETS

    names = [target.name for target in TARGETS]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"by default all: {', '.join(names)}")
    parser.add_argument("--minutes", type=float, default=10.0, help="of all targets together (10)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets at a time (all processors)")
    given = parser.parse_args()
    if unknown := {*given.targets} - {*names}:
        parser.error(f"there is no target {', '.join(unknown)}: expected some of {', '.join(names)}")
    chosen = given.targets or names
    seconds = 60 * given.minutes * min(given.jobs, len(chosen)) / len(chosen)
    with ThreadPoolExecutor(given.jobs) as pool:
        return 0 if all([*pool.map(report, chosen, [seconds] * len(chosen))]) else 1


if __name__ == "__main__":
    if "--only" in sys.argv:  # `report` has started this process
        fuzz(sys.argv[2], float(sys.argv[4]), guided="--guided" in sys.argv)
    else:
        sys.exit(main())
