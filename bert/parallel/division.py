"""Division of a copy of the model among several ranks. The functions build this rank's part and join all ranks' parts."""

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise, starmap

import torch
import torch.distributed as dist
from torch import Tensor

from bert.configuration.sections import ModelConfig, Recompute
from bert.model import BertForPreTraining, MatrixProducts, parameter_shapes
from bert.optimizer import FlatParameters
from bert.parallel.mesh import Mesh, process_group
from bert.parallel.pipeline.stages import PipelineModel
from bert.parallel.single import all_gather_single
from bert.parallel.tensor.shards import TensorParallel


def own_part(
    initial: BertForPreTraining,
    mesh: Mesh,
    tensor: TensorParallel,
    virtual_stages: int = 1,
    products: MatrixProducts | None = None,
    inner_products: MatrixProducts | None = None,
    recompute: Recompute = "none",
) -> BertForPreTraining:
    """Build this rank's part of the model ``initial`` and copy its weights. All ranks must call this at the same time.

    By default, the layers multiply as PyTorch does and recompute nothing, which is sufficient for an evaluation.
    """
    placement = tensor.placement
    stages = process_group(mesh.pipeline_ranks)
    weights = dict(initial.named_parameters())
    word_VD = weights["embeddings.word"].detach()
    with mesh.device:
        if stages is None:
            model = BertForPreTraining(initial.config, placement, products, inner_products, recompute)
        else:
            word_VD = tensor.own("embeddings.word", word_VD)
            model = PipelineModel(initial.config, stages, virtual_stages, word_VD, placement, products, recompute)
    model.to(word_VD.dtype).train(initial.training)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensor.own(name, weights[name]))
    return model


class WholeVectors:
    """Conversion between flat vectors of this rank's part of the model and vectors of the whole model.

    Shape legend: R ranks of a tensor group, P elements of this rank's flat vectors.
    """

    def __init__(
        self,
        model: BertForPreTraining,
        flat: FlatParameters,
        tensor: TensorParallel,
        pipeline: PipelineModel | None,
    ) -> None:
        self._tensor = tensor
        self._pipeline = pipeline
        self._own = {name: flat.places[parameter] for name, parameter in model.named_parameters()}
        self._is_whole = tensor.group is None and pipeline is None
        if self._is_whole:
            self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
            self._places, self.size = self._own, len(flat.weights_P)
        else:
            self._shapes = parameter_shapes(model.config)
            # Whole vectors omit the flat vectors' padding, which only optimizers need.
            ends = list(accumulate(map(math.prod, self._shapes.values()), initial=0))
            self._places = dict(zip(self._shapes, starmap(slice, pairwise(ends)), strict=True))
            self.size = ends[-1]
            """Number of elements in a whole vector."""

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self._shapes.values()))

    def parts(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and a view of its part of a whole vector, in the parameter's shape."""
        for name, part in self._places.items():
            yield name, whole[part].view(self._shapes[name])

    def gather(self, vector_P: Tensor) -> Tensor:
        """Return a whole vector, gathered from the ranks of a model copy. These ranks must call this together."""
        if self._is_whole:
            return vector_P
        # First each rank of a stage gathers the stage's shards; then each parameter is broadcast to the other stages.
        shards_RP = vector_P[None]
        group = self._tensor.group
        if group is not None:
            shards_RP = vector_P.new_empty(group.size(), len(vector_P))
            all_gather_single(shards_RP.view(-1), vector_P, group=group)
        whole = vector_P.new_empty(self.size)
        for name, part in self.parts(whole):
            if name in self._own:
                split, own = self._tensor.split(name), self._own[name]
                # An undivided parameter is equal on all ranks of the group, so take the first rank's copy.
                part.copy_(shards_RP[0, own].view_as(part) if split is None else split.whole(shards_RP[:, own]))
        if self._pipeline is not None:
            for name, part in self.parts(whole):  # in the same order on all ranks, so that the broadcasts match
                dist.broadcast(part, group=self._pipeline.group, group_src=self._pipeline.owners[name])
        return whole

    def gather_model(self, weights_P: Tensor, config: ModelConfig) -> BertForPreTraining:
        """Build a new model with all weights. Every rank must call it at the same time."""
        model = BertForPreTraining(config)
        with torch.no_grad():
            for parameter, (_, part) in zip(model.parameters(), self.parts(self.gather(weights_P)), strict=True):
                parameter.copy_(part)
        return model

    def shard_(self, vector_P: Tensor, whole: Tensor) -> None:
        """Overwrite a vector with this rank's part of a whole vector."""
        if self._is_whole:
            vector_P.copy_(whole)
            return
        for name, part in self.parts(whole):
            if name in self._own:
                vector_P[self._own[name]] = self._tensor.own(name, part).flatten()
