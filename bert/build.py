"""Construction of the model that one rank trains: matrix products, sharding and recomputation of its layers.

With recomputation, the backward pass of an encoder layer recomputes activations that its forward pass does not keep.
``torch.utils.checkpoint`` recomputes the part of a layer that its ``forward`` calls. PyTorch's wrapper for modules would
also run the module's hooks again, which wait for gathered weights.

The result is the same bit for bit. Kernels derive dropout from a counter that is an input of the layer. For ops that draw
from PyTorch's generator, the generator's state in the forward pass is restored. This is not possible while a CUDA graph is
captured, so ``RECOMPUTED_OPS`` must not draw from the generator then (``kernels.captured``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from bert.configuration.config import Config
from bert.configuration.sections import ModelConfig, Precision, Recompute, TrainingConfig
from bert.execution.stopwatch import is_capturing
from bert.layers import EncoderLayer, MatrixProducts, Placement, Recomputation, compute_once
from bert.model import BertForPreTraining, MakeLayer
from bert.parallel.mesh import Mesh, process_group
from bert.parallel.pipeline.stages import PipelineModel
from bert.parallel.tensor.placement import Waiting
from bert.parallel.tensor.shards import TensorParallel, tensor_parallel
from bert.products.fp8 import Fp8Layer, Fp8State, require_fp8
from bert.products.fp8_layer import FusedLayer
from bert.products.weight_gradients import AccumulatingProducts, AccumulatingTable, WeightGradients

RECOMPUTED_OPS = ("varlen_self_attention", "dropout_add_layer_norm")
"""Ops of ``kernels`` that apply dropout in a recomputed layer."""

# Ops of products with weights, which have 2D operands. Attention's products are batched or inside its kernel.
_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default]


def recomputation(mode: Recompute) -> Recomputation:
    """Return a function that runs an encoder layer in training, with or without recomputation.

    none: compute once. selective: keep the results of the layer's four products with weights, and recompute attention, GELU,
    norms and dropout, which take much of the memory and little of the time. full: keep only the layer's input.
    """
    if mode == "none":
        return compute_once
    contexts = partial(create_selective_checkpoint_contexts, _PRODUCTS) if mode == "selective" else noop_context_fn

    def recompute(function: Callable[..., Any], *inputs: Any) -> Any:
        if not torch.is_grad_enabled():  # an evaluation
            return function(*inputs)
        # While capturing, the generator's state can be neither read nor set, and no op draws from it.
        preserve = not is_capturing()
        # PyTorch accepts contexts only for non-reentrant checkpoints.
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts, preserve_rng_state=preserve)

    return recompute


@dataclass(frozen=True)
class RankModel:
    """One rank's part of the model, and the state that its layers share."""

    model: BertForPreTraining
    tensor: TensorParallel | None
    """Division of parameters among the ranks of a tensor-parallel group; None without tensor parallelism."""
    fp8: Fp8State | None
    weight_gradients: WeightGradients
    """Accumulator of weight gradients, which bypasses autograd."""
    copies: dict[nn.Parameter, Tensor]
    """16-bit copies of the weights for matrix products. Empty until an optimizer adds them."""
    accumulates: bool
    """Whether the backward passes of matrix products add weight gradients directly to the flat gradient vector."""


def accumulates_products(device: torch.device, precision: Precision) -> bool:
    """Tell whether matrix products add weight gradients directly to the flat gradient: on a GPU, except in fp32."""
    return device.type == "cuda" and precision != "fp32"


def shards_gradients(training: TrainingConfig, mesh: Mesh) -> bool:
    return training.shard_gradients and mesh.data_size > 1


def build_model(whole: BertForPreTraining, config: Config, mesh: Mesh, waiting: Waiting) -> RankModel:
    """Build this rank's part of the model ``whole`` for training with ``config``, and copy its weights.

    All ranks must call this at the same time. Raises ``ValueError`` if the precision is FP8 and the GPU does not support it.
    """
    training = config.training
    tensor = tensor_parallel(config.model, mesh, waiting)
    gradients, copies = WeightGradients(), {}
    accumulates = accumulates_products(mesh.device, training.precision)
    products = AccumulatingProducts(gradients, copies) if accumulates else MatrixProducts()
    # Only the first pipeline stage has the word table. With sharded gradients, no rank keeps the table's gradient.
    adds_to_table = accumulates and tensor is None and mesh.pipeline_rank == 0 and not shards_gradients(training, mesh)
    placement = AccumulatingTable(gradients, copies) if adds_to_table else None
    fp8 = _fp8_state(config, mesh, tensor, gradients) if training.precision == "fp8" else None
    make_layer = _layer_maker(config, products, fp8, tensor)
    model = divided_model(whole, mesh, tensor, config.parallel.virtual_stages, placement, make_layer)
    if fp8 is not None:
        # The first cast measures the magnitudes of the weights; the update computes scales from them and casts again.
        fp8.refresh_weights_()
        fp8.update_()
    return RankModel(model, tensor, fp8, gradients, copies, accumulates)


def divided_model(
    whole: BertForPreTraining,
    mesh: Mesh,
    tensor: TensorParallel | None,
    virtual_stages: int,
    placement: Placement | None = None,
    make_layer: MakeLayer = EncoderLayer,
) -> BertForPreTraining:
    """Build this rank's part of the model ``whole`` and copy its weights. All ranks must call this at the same time.

    By default, the layers multiply as PyTorch does and recompute nothing, which is sufficient for an evaluation.
    """
    if placement is None and tensor is not None:
        placement = tensor.placement
    own: Callable[[str, Tensor], Tensor] = tensor.own if tensor is not None else lambda _, weight: weight
    stages = process_group(mesh.pipeline_ranks)
    word_VD = whole.embeddings.word.detach()
    with mesh.device:
        if stages is None:
            model = BertForPreTraining(whole.config, placement, make_layer)
        else:
            word_VD = own("embeddings.word", word_VD)
            model = PipelineModel(whole.config, stages, virtual_stages, word_VD, placement, make_layer)
    model.to(word_VD.dtype).train(whole.training)
    weights = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(own(name, weights[name]))
    return model


def _fp8_state(config: Config, mesh: Mesh, tensor: TensorParallel | None, gradients: WeightGradients) -> Fp8State:
    require_fp8(mesh.device)
    layers = config.model.num_hidden_layers - 1  # not the last layer, which computes only the rows that the heads read
    agree_ = (lambda _: None) if tensor is None else partial(dist.all_reduce, op=dist.ReduceOp.MAX, group=tensor.group)
    return Fp8State(layers, mesh.device, agree_, gradients)


def _layer_maker(
    config: Config, products: MatrixProducts, fp8: Fp8State | None, tensor: TensorParallel | None
) -> MakeLayer:
    recompute = config.training.recompute

    def make(model: ModelConfig, index: int, placement: Placement) -> EncoderLayer:
        # The last layer uses neither FP8 nor recomputation: it has few rows, and its backward pass comes first.
        if index == model.num_hidden_layers - 1:
            return EncoderLayer(model, index, placement, products)
        if fp8 is None:
            return EncoderLayer(model, index, placement, products, recomputation(recompute))
        # Fused layers combine products with layer norms, but tensor parallelism must communicate between the two.
        if tensor is not None:
            return Fp8Layer(model, index, placement, fp8, recomputation(recompute))
        return FusedLayer(model, index, placement, fp8, recomputation(recompute), recompute == "none")

    return make
