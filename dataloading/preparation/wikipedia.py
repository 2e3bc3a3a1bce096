"""Preparation of the benchmark's data from MLCommons' files, in stages and with verification, for the GPU recipes.

OUT/vocab.txt, phase1.safetensors, evaluation/, train/   results; each appears once it is complete
OUT/preparation/                                         intermediate files (`stages`)
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from console.locks import BusyError, lock_file
from console.program import say
from dataloading.dataset.folder import open_dataset
from dataloading.preparation.estimate import total_bytes
from dataloading.preparation.mlcommons import (
    CHECKPOINT,
    EVALUATION,
    TRAIN,
    VOCABULARY,
    Checksums,
    Inputs,
    check_sizes,
    find_inputs,
)
from dataloading.preparation.stages import Preparation, Request, in_units

_ACCURACY_BEFORE_TRAINING = 0.34085
"""Accuracy of the phase-1 checkpoint on the evaluation set, from the reference's README."""
_SOURCES = {
    VOCABULARY: "vocab.txt",
    CHECKPOINT: "the TF1 checkpoint (tf1_ckpt/model.ckpt-28252.index and .data-00000-of-00001)",
    EVALUATION: "eval.txt",
    TRAIN: "the text (part-00000-of-00500 ...)",
}


def make_wikipedia(request: Request) -> bool:
    """Make all results that the inputs allow, or one part of the samples; return whether all results exist in the end.

    The process that completes the last part also makes the other results.

    Raises:
        ValueError: an input is wrong, a result was made from other inputs, or another process is running.
        OSError: the disk is full or cannot be written.
    """
    inputs = find_inputs(request.folders, request.out)
    if not inputs.files:
        folders = ", ".join(map(str, request.folders)) or "no folder named"
        raise ValueError(f"{folders}: none of MLCommons' files found; docs/data.md says how to download them")
    checksums = Checksums(request.checksums, inputs.lists)
    check_sizes(inputs.files, checksums)
    _describe(request, inputs)
    request.work.mkdir(parents=True, exist_ok=True)
    # If the training set is complete, no part needs to be made.
    if request.part is not None and not (request.out / TRAIN).exists():
        with _locked(request, shared=True):
            is_last = Preparation(request, inputs, checksums).make_part(request.part)
        if not is_last:
            say(f"part {request.part} is done; the process that completes the last part makes the rest")
            return True
    try:
        with _locked(request, shared=False):
            Preparation(replace(request, part=None), inputs, checksums).make()
    except BusyError as owner:
        if request.part is None:
            raise ValueError(f"{request.out}: {owner} is at work there; wait for it, or name another --out") from None
        # Another process holds the lock. It will complete a later part, or is already making the other results.
        say(f"part {request.part} is done; another process makes the rest")
        return True
    return _conclude(request.out, inputs)


@contextmanager
def _locked(request: Request, *, shared: bool) -> Iterator[None]:
    """Hold the folder's lock, exclusively or shared with other processes that make parts."""
    descriptor = lock_file(request.work / "lock", shared=shared)
    try:
        yield
    finally:
        os.close(descriptor)


def _describe(request: Request, inputs: Inputs) -> None:
    """Print the inputs that were found and the results that cannot be made."""
    found: dict[str, Sequence[Path]] = {
        "vocabulary": inputs.vocabulary,
        "checkpoint": inputs.checkpoint,
        "text": inputs.text,
        "evaluation text": inputs.evaluation,
    }
    for name, paths in found.items():
        if paths:
            more = f" ... ({len(paths):,} files)" if len(paths) > 1 else ""
            say(f"found: {name}, {paths[0]}{more}, {in_units(total_bytes(paths))}")
    for prefix in inputs.unused:
        say(f"note: {prefix}: not used, because another checkpoint is")
    for name in _missing(request.out, inputs):
        say(f"missing: {_SOURCES[name]}, from which {request.out / name} is made; docs/data.md says how to download it")


def _missing(out: Path, inputs: Inputs) -> list[str]:
    """Return the results that do not exist and cannot be made."""
    return [name for name, files in inputs.by_result.items() if not files and not (out / name).exists()]


def _conclude(out: Path, inputs: Inputs) -> bool:
    """Print the existing results and the next step; return whether all results exist."""
    for folder in (out / TRAIN, out / EVALUATION):
        if folder.exists():
            say(f"{folder}: {len(open_dataset(folder)):,} samples, verified")
    if missing := _missing(out, inputs):
        names = ", ".join(str(out / name) for name in missing)
        say(f"not made: {names}; run the command again with the folders of the missing files")
        return False
    settings = {"train": TRAIN, "evaluation": EVALUATION, "vocab": VOCABULARY, "initial-checkpoint": CHECKPOINT}
    given = "".join(f" --data.{key} {out / name}" for key, name in settings.items())
    given = "" if out == Path("data/wikipedia") else given
    say(f"accuracy before training: python -m bert.evaluate h100_1x1 --expect {_ACCURACY_BEFORE_TRAINING}{given}")
    say(f"whether a run would start: python -m bert.train h100_1x8 --dry-run{given}")
    return True
