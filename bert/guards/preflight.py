"""Preflight of a run, before it has a log or its ranks have joined: for whatever would stop it later, in seconds.

Nothing is written, and of the data only metadata are read.
"""

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bert.batches import plan_of
from bert.checkpoints.initial_model import check_initial_weights
from bert.checkpoints.training_state import BYTES_PER_PARAMETER, checkpoint_folders, find
from bert.configuration.config import Config
from bert.configuration.run_plan import RunPlan, read_plan
from bert.log.mllog import evaluation_interval, evaluation_samples
from bert.log.result_files import choose_files
from bert.model import parameter_shapes
from bert.parallel.launch import job, may_start_again, restarts
from bert.parallel.mesh import Mesh, require_whole_copies
from bert.reporting.tensorboard import require_installed
from console.cuda import lacks_of_triton, loaded_driver, outdated_driver
from dataloading.batches.loader_choice import check_loader
from dataloading.dataset.folder import Dataset, open_dataset
from dataloading.text.tokenization import Vocabulary
from kernels import choose

_LOGS_BYTES = 16 << 20
"""What log, metrics and report of a run may take."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run, opened as far as metadata go, and the files that it writes."""

    train: Dataset
    evaluation: Dataset
    vocabulary_sha256: str
    result: Path
    metrics: Path
    interval: int
    """Training samples between evaluations."""
    plan: RunPlan | None = None
    """The plan that the run follows."""


def check(config: Config, world_size: int, local_size: int = 0) -> Inputs:
    """Open what the run will read and look for everything that would stop it later; ``local_size``: ranks of this node, 0
    where that is not known. Raises ``ValueError``.
    """
    plan, may_go_on = None, may_start_again() or restarts() > 0
    if config.plan is not None:
        # Settings have been taken from it by now; here it says for how many ranks they are.
        plan = read_plan(config.plan)
        if not may_go_on:
            plan.require_ranks(world_size, local_size, config.plan)
        elif not plan.is_for(world_size, local_size):
            plan = None  # hosts have gone or come: its settings hold, its prediction does not
    (train, evaluation), vocabulary = _open_data(config, [config.data.train, config.data.evaluation])
    if config.data.initial_checkpoint is not None:
        check_initial_weights(config.data.initial_checkpoint, config, vocabulary)
    # As if all ranks were on one host: who shares one is known when they have joined, and looked at again then.
    require_whole_copies(config.parallel, 1, world_size)
    if not may_go_on:  # then the checkpoint may say how shares are planned anew
        check_shares(config, train, world_size // config.parallel.copy_ranks)
    _require_masked(evaluation)
    _choose_implementations(config)
    _check_gpu_software(config)
    check_loader(config.data.loader)
    if not (may_go_on or job()):
        refuse_others(config)
    if config.dry_run and config.resume is not None:  # a run reads it through when its ranks have joined
        # As a single rank, since a dry run joins nobody.
        find(config.resume, config, train, Mesh(0, 1, 0, torch.device("cpu")))
    _check_places(config)
    # A proposal: the log gets its number when it is created, and others may be faster.
    files = choose_files(result_folder(config), config.log.run)
    return Inputs(train, evaluation, vocabulary.sha256, *files, _interval(config), plan)


def check_evaluation(config: Config) -> Dataset:
    """Open the evaluation set and look for everything that would stop an evaluation of the initial checkpoint.

    Raises ``ValueError``. Neither the training set nor a place for results need be there.
    """
    (evaluation,), vocabulary = _open_data(config, [config.data.evaluation])
    if config.data.initial_checkpoint is None:
        raise ValueError(
            "data.initial_checkpoint is not set: name the file or folder whose weights are to be evaluated"
        )
    check_initial_weights(config.data.initial_checkpoint, config, vocabulary)
    _require_masked(evaluation)
    _choose_implementations(config)
    _check_gpu_software(config)
    return evaluation


def result_folder(config: Config) -> Path:
    """The folder of the logs of this system."""
    return config.log.results / config.log.system / "bert"


def check_shares(config: Config, train: Dataset, data_size: int, uneven: bool = False) -> None:
    """Raise ``ValueError`` where the global batch does not divide, or with ``uneven`` where a copy would get no share."""
    micro_batches = plan_of(config, train, data_size, seed=0).micro_batches
    batch, steps = config.training.global_batch_size, config.training.gradient_accumulation_steps
    if batch % micro_batches and not uneven:
        raise ValueError(
            f"training.global_batch_size {batch} does not divide over {data_size} ranks x {steps} accumulation steps: "
            f"make it a multiple of {micro_batches}"
        )


def refuse_others(config: Config) -> None:
    """Raise ``ValueError`` where the folder for checkpoints holds those of another run."""
    folder, source = config.checkpoint.folder, config.resume
    # The source may be one checkpoint of the folder, or the folder of all.
    own = folder and source and folder.resolve() in (source.resolve(), source.resolve().parent)
    if folder and not own and checkpoint_folders(folder):
        raise ValueError(f"{folder} holds checkpoints of another run: go on from them with resume, or move them away")


def _open_data(config: Config, folders: Sequence[Path]) -> tuple[list[Dataset], Vocabulary]:
    datasets = [open_dataset(folder) for folder in folders]
    vocabulary = Vocabulary.from_file(config.data.vocab)
    # The word table has a row for each entry: ids past its end would be read out of bounds.
    if vocabulary.size != config.model.vocab_size:
        raise ValueError(
            f"{config.data.vocab} has {vocabulary.size} entries, but model.vocab_size is {config.model.vocab_size}: "
            "set data.vocab or model.vocab_size"
        )
    for dataset in datasets:
        dataset.check_files()
        dataset.check_vocabulary(vocabulary)
        if dataset.info.max_seq_length > config.model.max_position_embeddings:
            raise ValueError(
                f"{dataset.folder} holds sequences of up to {dataset.info.max_seq_length} tokens, but "
                f"model.max_position_embeddings is {config.model.max_position_embeddings}"
            )
    return datasets, vocabulary


def _require_masked(evaluation: Dataset) -> None:
    """Raise ``ValueError`` where there is nothing to predict: accuracy is a share of the masked tokens."""
    if not evaluation.masked_counts.any():
        raise ValueError(f"{evaluation.folder}: no token is masked, so there is nothing to predict: prepare it again")


def _choose_implementations(config: Config) -> None:
    try:
        choose(config.training.implementations)
    except ValueError as error:
        raise ValueError(f"training.implementations: {error}") from None


def _check_gpu_software(config: Config) -> None:
    """Raise ``ValueError`` where the driver is too old for PyTorch, or Triton cannot compile its launcher."""
    if config.training.device != "cuda":
        return
    if torch.cuda.is_available():
        lacks = lacks_of_triton()
    else:  # on a machine without a driver, a dry run checks everything else
        outdated = outdated_driver(loaded_driver(), torch.version.cuda or "")
        lacks = [outdated] if outdated else []
    if lacks:
        raise ValueError(f"training.device is cuda, but {'; '.join(map(str, lacks))}")


def _interval(config: Config) -> int:
    """Training samples between evaluations, of which there must be one."""
    interval = config.evaluation.interval_samples or evaluation_interval(config.training.global_batch_size)
    training = config.training
    if training.sample_limit < interval:
        setting = "max_samples" if training.sample_limit == training.max_samples else "max_steps"
        raise ValueError(
            f"training.{setting} {getattr(training, setting):,} ends the run before its first evaluation, after "
            f"{interval:,} samples: raise it, or lower evaluation.interval_samples"
        )
    batch = training.global_batch_size
    # A step is whole: the last one may go past the limit.
    end = -(-training.sample_limit // batch) * batch
    if config.evaluation.to_the_end and evaluation_samples(end // interval, interval, batch) != end:
        raise ValueError(
            f"evaluation.to_the_end is set, but with evaluation.interval_samples {interval:,} no evaluation comes after the "
            f"last of {end:,} samples: choose a divisor of that"
        )
    return interval


def _check_places(config: Config) -> None:
    """Raise ``ValueError`` where one of the files that the run writes cannot be written, or has no room."""
    _require_room(result_folder(config), _LOGS_BYTES, "log.results")
    if config.log.tensorboard is not None:
        require_installed()
        _require_room(config.log.tensorboard, _LOGS_BYTES, "log.tensorboard")
    parameters = sum(torch.Size(shape).numel() for shape in parameter_shapes(config.model).values())
    if config.save_checkpoint is not None:
        if config.save_checkpoint.is_dir():
            raise ValueError(f"{config.save_checkpoint} is a folder: set save_checkpoint to a file")
        _require_room(config.save_checkpoint.parent, 4 * parameters, "save_checkpoint")
    if config.checkpoint.folder is not None:
        # While one is written, those that are kept are there as well; some may be there already.
        kept = len(checkpoint_folders(config.checkpoint.folder)) if config.checkpoint.folder.is_dir() else 0
        count = max(1, config.checkpoint.keep + 1 - kept)
        _require_room(config.checkpoint.folder, count * BYTES_PER_PARAMETER * parameters, "checkpoint.folder")


def _require_room(folder: Path, size: int, setting: str) -> None:
    """Raise ``ValueError`` unless files of ``size`` bytes can be made in a folder that need not be there yet."""
    place = folder.absolute()
    # A link that leads nowhere counts as there: a folder in its place could not be made.
    while not os.path.lexists(place):
        place = place.parent
    try:
        # By trying: permissions do not tell of a file system that is read-only.
        with tempfile.TemporaryFile(dir=place):
            pass
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be written ({place}: {error.strerror}): set {setting} to another place"
        ) from None
    if free < size:
        raise ValueError(
            f"{folder} needs {size / 1e6:,.1f} MB, but {free / 1e6:,.1f} MB are free there: make room, or set {setting} to "
            "another place"
        )
