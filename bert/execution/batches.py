"""Batches of a run: shapes for padding, synthetic batches for the warm-up, the loader."""

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
    """Plan the samples of each step for ``data_size`` copies of the model. Raises ``ValueError`` if one gets no share."""
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
    """Tell whether the step runs as CUDA graphs."""
    return mesh.device.type == "cuda" and config.training.cuda_graphs


def choose_shapes(config: Config, train: Dataset, mesh: Mesh) -> list[ShapeBucket]:
    """Choose shape buckets to which micro-batches are padded; none if neither CUDA graphs nor oneDNN need fixed shapes."""
    training = config.training
    # oneDNN compiles 16-bit products for each number of rows and caches a thousand: without padding, nearly every
    # micro-batch would wait for compilation.
    compiled = mesh.device.type == "cpu" and training.precision != "fp32"
    if not compiled and not captures(config, mesh):
        return []
    micro_batches = mesh.data_size * training.gradient_accumulation_steps
    tokens, masked = draw_sizes(train.lengths, train.masked_counts, training.global_batch_size, micro_batches)
    # If shares are uneven, the largest.
    sequences = -(-training.global_batch_size // micro_batches)
    return choose_shape_buckets(tokens, masked, sequences, train.info.max_seq_length)


def synthetic_batches(config: Config, train: Dataset, mesh: Mesh, shape_buckets: Sequence[ShapeBucket]) -> list[Batch]:
    """Return micro-batches of random tokens with the lengths of a real global batch.

    Lengths may be read before the clock starts (training_rules, section 6.4), tokens may not.
    """
    batches = []
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
    """Build the loader of this rank's micro-batches from ``first_step`` on. It reads nothing before its first batch."""
    plan = plan_of(config, train, mesh.data_size, seed)

    def rank_batches(step: int) -> list[MicroBatch]:
        # Loaders count from 0, also in a resumed run.
        return plan.rank_batches(first_step + step, mesh.data_rank)

    ahead = config.data.prefetch
    choice = choose_loader(config.data.loader, mesh.device, rank_batches, train.lengths, ahead, shape_buckets)
    log.line(f"# {choice}")
    # Each rank chooses for itself, but the log is rank 0's, so every host says that its DALI cannot start.
    if choice.is_fallback and mesh.local_rank == 0:
        complain(choice, "warning")
    return choice.make(train, rank_batches, mesh.device, ahead, shape_buckets)
