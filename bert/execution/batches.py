"""Batches of a run: the shape buckets for padding, synthetic batches for the warm-up, and the data loader."""

from collections.abc import Sequence

from bert.configuration.config import Config
from bert.log.mllog import MLLog
from bert.parallel.mesh import Mesh
from console.program import complain
from dataloading.batches.loader import Batch, Loader, batch_of, shape_bucket_of
from dataloading.batches.loader_choice import choose_loader
from dataloading.batches.plan import BatchPlan, MicroBatch, ShapeBucket, choose_shape_buckets, draw_sizes
from dataloading.dataset.folder import Dataset
from dataloading.shards.samples import synthetic_samples


def plan_of(config: Config, train: Dataset, data_size: int, seed: int) -> BatchPlan:
    """Plan each step's samples for ``data_size`` model copies. Raises ``ValueError`` if a copy would get no samples."""
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
    return mesh.device.type == "cuda" and config.training.cuda_graphs


def choose_shapes(config: Config, train: Dataset, mesh: Mesh) -> list[ShapeBucket]:
    """Choose the shape buckets to which micro-batches are padded.

    The list is empty if neither CUDA graphs nor oneDNN need fixed shapes.
    """
    training = config.training
    # oneDNN compiles a 16-bit matrix product for each number of rows and caches about a thousand of them. Without
    # padding, nearly every micro-batch would wait for a compilation.
    compiled = mesh.device.type == "cpu" and training.precision != "fp32"
    if not compiled and not captures(config, mesh):
        return []
    micro_batches = mesh.data_size * training.gradient_accumulation_steps
    tokens, masked = draw_sizes(train.lengths, train.masked_counts, training.global_batch_size, micro_batches)
    # Round up: if the shares are uneven, the buckets must fit the largest share.
    sequences = -(-training.global_batch_size // micro_batches)
    return choose_shape_buckets(tokens, masked, sequences, train.info.max_seq_length)


def synthetic_batches(config: Config, train: Dataset, mesh: Mesh, shape_buckets: Sequence[ShapeBucket]) -> list[Batch]:
    """Return micro-batches of random tokens with the lengths of a real global batch.

    Sequence lengths may be read before the clock starts (training_rules, section 6.4), but tokens may not.
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
    """Build the loader of this rank's micro-batches, starting at ``first_step``.

    The loader reads no data until its first batch is requested.
    """
    plan = plan_of(config, train, mesh.data_size, seed)

    def rank_batches(step: int) -> list[MicroBatch]:
        # Loaders count steps from 0 even in a resumed run.
        return plan.rank_batches(first_step + step, mesh.data_rank)

    ahead = config.data.prefetch
    choice = choose_loader(config.data.loader, mesh.device, rank_batches, train.lengths, ahead, shape_buckets)
    log.line(f"# {choice}")
    # Each rank chooses its own loader, but only rank 0 writes the log. One rank per host therefore warns on the
    # console if DALI cannot start there.
    if choice.is_fallback and mesh.local_rank == 0:
        complain(choice, "warning")
    return choice.make(train, rank_batches, mesh.device, ahead, shape_buckets)
