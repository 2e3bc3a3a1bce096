"""Batches of a run: the shapes they are padded to, made-up ones for the warm-up, and the loader of the real ones."""

from collections.abc import Sequence

from bert.configuration.config import Config
from bert.log.mllog import MLLog
from bert.parallel.mesh import Mesh
from console.program import complain
from dataloading.batches.loader import Batch, Loader, batch_of, shape_bucket_of
from dataloading.batches.loader_choice import choose_loader
from dataloading.batches.sampler import BatchPlan, MicroBatch
from dataloading.batches.shape_buckets import ShapeBucket, choose_shape_buckets, draw_sizes
from dataloading.batches.synthetic import synthetic_samples
from dataloading.dataset.folder import Dataset


def plan_of(config: Config, train: Dataset, data_size: int, seed: int) -> BatchPlan:
    """Plan which samples come when, and on which of ``data_size`` copies of the model.

    Raises ``ValueError`` where a copy would get no share.
    """
    training = config.training
    return BatchPlan(
        train.lengths,
        train.masked_counts,
        global_batch_size=training.global_batch_size,
        world_size=data_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        seed=seed,
    )


def captures(config: Config, mesh: Mesh) -> bool:
    """Tell whether the step is captured, and replayed."""
    return mesh.device.type == "cuda" and config.training.cuda_graphs


def choose_shapes(config: Config, train: Dataset, mesh: Mesh) -> list[ShapeBucket]:
    """Choose shape buckets that micro-batches are padded to: for capture of the step, and for 16-bit products of a CPU.

    There are none where no shape is fixed, and padding would be work for nothing.
    """
    training = config.training
    # oneDNN compiles 16-bit products for each number of rows, and keeps the newest thousand: without padding, which costs
    # less, nearly every micro-batch would wait for some of its own.
    compiled = mesh.device.type == "cpu" and training.precision != "fp32"
    if not compiled and not captures(config, mesh):
        return []
    micro_batches = mesh.data_size * training.gradient_accumulation_steps
    tokens, masked = draw_sizes(train.lengths, train.masked_counts, training.global_batch_size, micro_batches)
    # Of the copies with the most, where shares are uneven.
    sequences = -(-training.global_batch_size // micro_batches)
    return choose_shape_buckets(tokens, masked, sequences, train.info.max_seq_length)


def made_up_batches(config: Config, train: Dataset, mesh: Mesh, shape_buckets: Sequence[ShapeBucket]) -> list[Batch]:
    """Random tokens in the lengths of a drawn global batch: sizes are metadata."""
    batches = []
    # Lengths may be read before the clock starts (training_rules, section 6.4), tokens may not: these are made up.
    for micro in plan_of(config, train, mesh.data_size, seed=0).rank_batches(0, mesh.data_rank):
        samples = synthetic_samples(train.lengths[micro.indices], config.model.vocab_size)
        batches.append(batch_of(samples, micro, shape_bucket_of(samples, shape_buckets, micro)).to(mesh.device))
    return batches


def build_loader(
    config: Config,
    train: Dataset,
    mesh: Mesh,
    seed: int,
    shape_buckets: Sequence[ShapeBucket],
    first_step: int,
    log: MLLog,
) -> Loader:
    """Build the loader of this rank's micro-batches from ``first_step`` on. It reads nothing before it is asked."""
    # Every rank makes the whole plan for itself and takes its part: none asks another.
    plan = plan_of(config, train, mesh.data_size, seed)

    def rank_batches(step: int) -> list[MicroBatch]:
        # Loaders count from 0; a run that goes on takes up the plan where its checkpoint was written.
        return plan.rank_batches(first_step + step, mesh.data_rank)

    ahead = config.data.prefetch
    choice = choose_loader(config.data.loader, mesh.device, rank_batches, train.lengths, ahead, shape_buckets)
    log.line(f"# {choice}")
    # Each rank chooses for itself, but the log is rank 0's, so every host says that its DALI cannot start.
    if choice.is_fallback and mesh.local_rank == 0:
        complain(choice, "warning")
    return choice.make(train, rank_batches, mesh.device, ahead, shape_buckets)
