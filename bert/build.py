"""Parts of a training step on several ranks, or with other matrix products than PyTorch's."""

from dataclasses import dataclass

from bert.configuration.config import Config
from bert.configuration.sections import SHARDED
from bert.execution.stopwatch import Stopwatch
from bert.model import BertForPreTraining, MatrixProducts
from bert.optimizer import FlatParameters, Lamb
from bert.parallel.division import WholeVectors, own_part
from bert.parallel.mesh import Mesh
from bert.parallel.pipeline.stages import PipelineModel
from bert.parallel.reduction.gradients import Communicators, Reduction, choose
from bert.parallel.reduction.sharded_gradients import ShardedReduction
from bert.parallel.reduction.sharded_lamb import ShardedLamb, WeightGather
from bert.parallel.sites import SiteExchange
from bert.parallel.tensor.shards import tensor_parallel
from bert.products import weight_gradients
from bert.products.fp8 import Fp8Scales, Fp8State
from bert.products.fp8_layer import Fp8Products
from bert.products.weight_gradients import AccumulatingProducts, WeightCopies, WeightGradients, product_weights


@dataclass(frozen=True)
class Parts:
    """Objects of a training step."""

    model: BertForPreTraining
    flat: FlatParameters
    optimizer: Lamb | ShardedLamb
    vectors: WholeVectors
    """Conversion between ``flat`` and vectors of the whole model."""
    weight_gradients: WeightGradients | None
    """Accumulator of gradients that the first micro-batch of a step overwrites; None if no gradient is overwritten."""
    fp8: Fp8State | None
    reduction: Reduction | None
    """Sum of gradients over the copies of the model; None if there is only one copy."""
    reduction_choice: str  # strategy and reason
    gather: WeightGather | None
    """Gathering of weights after an update that is divided among ranks."""
    sites: SiteExchange | None
    """Exchange of weights between sites that take steps by themselves; None if all ranks take every step together."""


def build_parts(initial: BertForPreTraining, config: Config, mesh: Mesh, stopwatch: Stopwatch) -> Parts:
    """Build this rank's parts from the weights of ``initial``. All ranks must call this at the same time.

    Raises ``ValueError`` if the precision is FP8 and the GPU does not support it.
    """
    training, all_sites = config.training, mesh
    if training.site_steps > 1:  # sites take steps by themselves, so only ``SiteExchange`` needs the other sites' ranks
        mesh = mesh.own_site
    shards_weights = training.reduction in SHARDED and mesh.data_size > 1
    shards_gradients = training.shard_gradients and mesh.data_size > 1
    is_whole = mesh.tensor * mesh.pipeline == 1 and not shards_weights
    # Allocate first the objects that all layers share.
    gradients, copies, scales = WeightGradients(), WeightCopies(), None
    accumulates = weight_gradients.accumulates_products(mesh.device, training.precision)
    # With FP8, the optimizer writes FP8 weights instead of copies. ``ShardedLamb`` writes neither.
    if accumulates and is_whole and training.precision != "fp8":
        copies = WeightCopies.of(config.model, mesh.device)
    # Only the first pipeline stage has the word table. With sharded gradients, no rank keeps the table's gradient.
    with_table = accumulates and mesh.tensor == 1 and mesh.pipeline_rank == 0 and not shards_gradients
    products = AccumulatingProducts(gradients, copies, with_table=with_table) if accumulates else MatrixProducts()
    inner_products = products
    if training.precision == "fp8":
        scales = Fp8Scales(config.model.num_hidden_layers - 1, mesh.device)
        # Fused layers combine products with layer norms, but tensor parallelism must communicate between the two.
        inner_products = Fp8Products(scales, gradients, fused=mesh.tensor == 1)
    tensor = tensor_parallel(config.model, mesh, stopwatch)
    virtual_stages = config.parallel.virtual_stages
    model = own_part(initial, mesh, tensor, virtual_stages, products, inner_products, training.recompute)
    fp8 = None if scales is None else Fp8State(scales, model, None if tensor is None else tensor.group)
    pipeline = model if isinstance(model, PipelineModel) else None
    # A pipeline stage processes several micro-batches at once, so none of them may overwrite the gradients.
    overwrites = accumulates and pipeline is None and not shards_gradients
    overwritten = product_weights(model, with_table) if overwrites else ()
    groups = Communicators.create(mesh, in_network=training.sharp, is_flat=training.reduction == "flat")
    flat = FlatParameters.of(model, groups.shards, overwritten, gradients=not shards_gradients)
    # The choice of a strategy may measure reductions of the flat vectors.
    strategy, reason = choose(training, flat, groups)
    settings = flat, groups, strategy, training.reduce_dtype, training.bucket_bytes
    reduction = ShardedReduction(*settings, stopwatch) if shards_gradients else Reduction(*settings)
    if is_whole:
        optimizer = Lamb(flat, config.optimizer, copies.copies_P, () if fp8 is None else fp8.casts(flat.places))
    else:
        # The norm of all gradients is a sum over the stages, which have different parameters.
        group = None if pipeline is None else pipeline.group
        optimizer = ShardedLamb(flat, config.optimizer, reduction, tensor, group)
    return Parts(
        model=model,
        flat=flat,
        optimizer=optimizer,
        vectors=WholeVectors(model, flat, tensor, pipeline),
        weight_gradients=gradients if overwrites else None,
        fp8=fp8,
        reduction=reduction if mesh.data_size > 1 else None,
        reduction_choice=f"{strategy} ({reason})",
        gather=WeightGather(model, flat, reduction) if shards_weights else None,
        sites=SiteExchange(flat.weights_P, training, all_sites, stopwatch) if mesh is not all_sites else None,
    )
