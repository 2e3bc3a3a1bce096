"""Preflight checks, which find within seconds the problems that would stop a run later.

They run before the log exists and before the ranks have joined. They leave no files behind, and read only the
metadata of the data sets.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bert.checkpoints.initial_model import check_initial_weights
from bert.checkpoints.training_state import BYTES_PER_PARAMETER, checkpoint_folders, find
from bert.configuration.config import Config
from bert.configuration.run_plan import RunPlan, read_plan
from bert.guards.triton import missing_build_tools
from bert.log.result_files import choose_files
from bert.model import parameter_shapes
from bert.parallel.environment import job, may_start_again, restarts
from bert.parallel.mesh import Mesh, require_whole_copies
from bert.reporting.reporter import require_tensorboard
from compliance.log.schedule import EvaluationSchedule, evaluation_interval
from dataloading.batches.loader_choice import check_loader
from dataloading.batches.sampler import BatchSampler, require_sequences
from dataloading.dataset.folder import Dataset, open_dataset
from dataloading.options import Normalization
from dataloading.text.vocabulary import Vocabulary, read_stated
from kernels import choose

_LOGS_BYTES = 16 << 20
"""Disk space in bytes for a run's log, metrics and report."""

_MAKERS = {
    "tiny_cpu": "`./run_and_time.sh tiny_cpu` makes its data (docs/tiny_cpu.md)",
    "own_text_cpu": "`python -m dataloading from-text` makes data and vocabulary of your text (docs/own_text.md)",
}
"""Advice on making missing inputs, by recipe. Recipes that are not listed use the benchmark's data."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run, and the paths of the files that the run writes. The samples have not been read yet."""

    train: Dataset
    evaluation: Dataset
    vocabulary_sha256: str
    normalization: Normalization | None
    """Normalization of the text, or None if no input states it."""
    ignored_id: int | None
    """Id of [UNK], which evaluations do not count, or None if they count all masked tokens."""
    result: Path
    metrics: Path
    schedule: EvaluationSchedule
    run_plan: RunPlan | None = None


def check(config: Config, world_size: int, local_size: int = 0) -> Inputs:
    """Open the inputs of a run and check everything that could stop the run later.

    ``local_size`` is the number of ranks on this node, or 0 if unknown. Raises ``ValueError`` if a check fails.
    """
    plan, is_elastic = None, may_start_again() or restarts() > 0
    if config.plan is not None:
        # The configuration already contains the plan's settings, so only the number of ranks remains to be checked.
        plan = read_plan(config.plan)
        if not is_elastic:
            plan.require_ranks(world_size, local_size, config.plan)
        elif not plan.is_for(world_size, local_size):
            plan = None  # drop the plan, because its prediction is for another number of ranks
    # The hosts are not known yet, so assume one host for all ranks. ``join_mesh`` checks the real hosts.
    require_whole_copies(config.parallel, 1, world_size)
    if not is_elastic:  # a restarted run may divide its batch differently, and is checked later
        check_shares(config, world_size // config.parallel.copy_ranks)
    (train, evaluation), vocabulary, normalization = _open_inputs(config, [config.data.train, config.data.evaluation])
    check_loader(config.data.loader)
    if not (is_elastic or job()):
        refuse_foreign_checkpoints(config)
    if config.dry_run and config.resume is not None:
        # A run checks the checkpoint after its ranks have joined. A dry run joins no ranks, so check it here.
        find(config.resume, config, train, Mesh(0, 1, 0, torch.device("cpu")))
    _check_places(config)
    # The run number is only a proposal, because another run may take it before the log is created.
    files = choose_files(config.log.folder, config.log.run)
    ignored_id, schedule = _ignored_id(config, vocabulary), _schedule(config)
    return Inputs(train, evaluation, vocabulary.sha256, normalization, ignored_id, *files, schedule, plan)


def check_evaluation(config: Config) -> tuple[Dataset, int | None]:
    """Open the evaluation set and check everything that could stop an evaluation of the initial checkpoint.

    Returns the evaluation set, and the id of [UNK] if the evaluation ignores it, else None. Raises ``ValueError`` if a
    check fails. No training set and no folder for results are needed.
    """
    if config.data.initial_checkpoint is None:
        raise ValueError("data.initial_checkpoint is not set: set it to the file or folder to evaluate")
    (evaluation,), vocabulary, _ = _open_inputs(config, [config.data.evaluation])
    return evaluation, _ignored_id(config, vocabulary)


def _ignored_id(config: Config, vocabulary: Vocabulary) -> int | None:
    return None if config.evaluation.unknown_tokens else vocabulary.ids["[UNK]"]


def batch_sampler(config: Config, train: Dataset, data_size: int, seed: int) -> BatchSampler:
    """Return the sampler for ``data_size`` copies of the model. Raises ``ValueError`` if a copy would get no samples."""
    training = config.training
    return BatchSampler(
        train.lengths,
        train.masked_counts,
        global_batch_size=training.global_batch_size,
        world_size=data_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        seed=seed,
    )


def check_shares(config: Config, data_size: int, uneven: bool = False) -> None:
    """Raise ``ValueError`` if the global batch cannot be divided evenly among the micro-batches of all model copies.

    If ``uneven`` is set, only micro-batches without a sample are an error.
    """
    batch, steps = config.training.global_batch_size, config.training.gradient_accumulation_steps
    require_sequences(batch, data_size, steps)
    if batch % (data_size * steps) and not uneven:
        raise ValueError(
            f"training.global_batch_size {batch} does not divide over {data_size} copies of the model x {steps} "
            f"accumulation steps: make it a multiple of {data_size * steps}"
        )


def refuse_foreign_checkpoints(config: Config) -> None:
    """Raise ``ValueError`` if the checkpoint folder holds checkpoints of another run."""
    folder, source = config.checkpoint.folder, config.resume
    # ``resume`` may name the checkpoint folder or one checkpoint inside it.
    own = folder and source and folder.resolve() in (source.resolve(), source.resolve().parent)
    if folder and not own and checkpoint_folders(folder):
        raise ValueError(f"{folder} holds checkpoints of another run: set resume to continue it, or move them away")


def _open_inputs(config: Config, folders: Sequence[Path]) -> tuple[list[Dataset], Vocabulary, Normalization | None]:
    """Open the data sets in ``folders``, and check the vocabulary, the initial weights, the kernels and the build tools."""
    _require_presence(config, folders)
    datasets = [open_dataset(folder) for folder in folders]
    vocabulary = Vocabulary.read(config.data.vocab)
    # The word embedding table has one row per vocabulary entry; a larger id would read out of bounds.
    if vocabulary.size != config.model.vocab_size:
        raise ValueError(
            f"{config.data.vocab} has {vocabulary.size} entries, but model.vocab_size is {config.model.vocab_size}: "
            "set data.vocab or model.vocab_size so that they match"
        )
    for dataset in datasets:
        dataset.check_files()
        dataset.check_vocabulary(vocabulary)
        if dataset.info.max_seq_length > config.model.max_position_embeddings:
            raise ValueError(
                f"{dataset.folder} holds sequences of up to {dataset.info.max_seq_length} tokens, but "
                f"model.max_position_embeddings is {config.model.max_position_embeddings}: raise it, or use shorter samples"
            )
        if not dataset.masked_counts.any():
            raise ValueError(f"{dataset.folder}: no token is masked, so there is nothing to predict: prepare new data")
    normalizations = {str(dataset.folder): dataset.info.normalization for dataset in datasets}
    normalizations[str(config.data.vocab)] = read_stated(config.data.vocab)
    if (start := config.data.initial_checkpoint) is not None:
        normalizations[str(start)] = check_initial_weights(start, config, vocabulary)
    normalization = _common_normalization(normalizations)
    try:
        choose(config.training.implementations)
    except ValueError as error:
        raise ValueError(f"training.implementations: {error}") from None
    # Skip this check if PyTorch sees no GPU, as in a dry run elsewhere. PyTorch itself warns if the driver is outdated.
    if config.training.device == "cuda" and torch.cuda.is_available() and (lacks := missing_build_tools()):
        raise ValueError(f"training.device is cuda, but this machine has {'; '.join(lacks)}")
    return datasets, vocabulary, normalization


def _require_presence(config: Config, folders: Sequence[Path]) -> None:
    """Raise ``ValueError`` if inputs do not exist. It names all of them, so that the user can make all at once."""
    start, data = config.data.initial_checkpoint, config.data
    settings = {data.train: "data.train", data.evaluation: "data.evaluation"}
    missing = [f"{settings[folder]} {folder}" for folder in folders if not folder.exists()]
    if not data.vocab.exists():
        missing.append(f"data.vocab {data.vocab}")
    # A TensorFlow checkpoint is named by the prefix of its files.
    if start is not None and not start.exists() and not start.with_name(f"{start.name}.index").exists():
        missing.append(f"data.initial_checkpoint {start}")
    if missing:
        maker = _MAKERS.get(
            config.recipe, "`python -m dataloading wikipedia` makes the benchmark's data (docs/data.md)"
        )
        raise ValueError(f"missing: {', '.join(missing)}. {maker}")


def _common_normalization(stated: Mapping[str, Normalization | None]) -> Normalization | None:
    """Return the normalization that inputs state, or None if no input states it. Raises ``ValueError`` if they differ."""
    known = {name: normalization for name, normalization in stated.items() if normalization is not None}
    if len(set(known.values())) > 1:
        named = "; ".join(f"{name}: {normalization}" for name, normalization in known.items())
        raise ValueError(
            f"the text of these inputs was normalized in different ways ({named}): make the samples with the settings "
            "of the checkpoint and the vocabulary (--do-lower-case, --strip-accents, --tokenize-chinese-chars), or correct "
            "the file that is wrong"
        )
    return next(iter(known.values()), None)


def _schedule(config: Config) -> EvaluationSchedule:
    """Return the schedule of the evaluations.

    Raises ``ValueError`` if the run would end before its first evaluation, or if a step would need several evaluations.
    Also raises it if an evaluation would come between two exchanges of weights among sites, or if a run without a target
    would not end with an evaluation.
    """
    interval = config.evaluation.interval_samples or evaluation_interval(config.training.global_batch_size)
    training = config.training
    if training.sample_limit < interval:
        setting = "max_samples" if training.sample_limit == training.max_samples else "max_steps"
        raise ValueError(
            f"training.{setting} {getattr(training, setting):,} ends the run before its first evaluation, after "
            f"{interval:,} samples: raise it, or lower evaluation.interval_samples"
        )
    batch = training.global_batch_size
    if interval < batch:
        raise ValueError(
            f"evaluation.interval_samples is {interval:,}, less than training.global_batch_size {batch:,}: raise the "
            "interval, because a run evaluates at most once a step"
        )
    together = batch * training.site_steps
    if training.site_steps > 1 and interval % together:
        most = max(steps for steps in range(1, training.site_steps) if interval % (batch * steps) == 0 or steps == 1)
        raise ValueError(
            f"training.site_steps is {training.site_steps}, which does not divide the {interval / batch:g} steps between "
            f"evaluations: set it to {most}, or set evaluation.interval_samples to a multiple of {together:,}"
        )
    schedule = EvaluationSchedule(interval, batch)
    # A run trains whole global batches, so its last step may exceed the sample limit.
    end = -(-training.sample_limit // batch) * batch
    if config.evaluation.target is None and schedule.samples(end // interval) != end:
        raise ValueError(
            f"evaluation.target is None, but with evaluation.interval_samples {interval:,} no evaluation comes after the "
            f"last of {end:,} samples: set evaluation.interval_samples to a divisor of {end:,}"
        )
    return schedule


def _check_places(config: Config) -> None:
    _require_room(config.log.folder, _LOGS_BYTES, "log.results")
    if config.log.tensorboard is not None:
        require_tensorboard()
        _require_room(config.log.tensorboard, _LOGS_BYTES, "log.tensorboard")
    parameters = sum(torch.Size(shape).numel() for shape in parameter_shapes(config.model).values())
    if config.save_checkpoint is not None:
        if config.save_checkpoint.is_dir():
            raise ValueError(f"{config.save_checkpoint} is a folder: set save_checkpoint to a file")
        _require_room(config.save_checkpoint.parent, 4 * parameters, "save_checkpoint")
    if config.checkpoint.folder is not None:
        # The next checkpoint is written before the oldest one is deleted, so there must be space for one more.
        count = max(1, config.checkpoint.keep + 1 - len(checkpoint_folders(config.checkpoint.folder)))
        _require_room(config.checkpoint.folder, count * BYTES_PER_PARAMETER * parameters, "checkpoint.folder")


def _require_room(folder: Path, size: int, setting: str) -> None:
    """Raise ``ValueError`` unless ``size`` bytes can be written to a folder, which may not exist yet."""
    place = folder.absolute()
    # A broken link counts as existing, because no folder can be created at its path.
    while not os.path.lexists(place):
        place = place.parent
    try:
        # Try to create a file, because permissions do not show whether a file system is read-only.
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
