"""A rank's stages of the model: its parameters, the copy of the word table, and forward passes without a backward pass.

Shape legend in ``bert/model.py``; besides W own rows of T, where stages are shared by the ranks of a tensor group.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert.configuration.sections import ParallelConfig
from bert.model import BertForPreTraining, DropoutSites, PretrainingOutput
from bert.parallel.mesh import Mesh, process_group, require_order
from bert.parallel.pipeline.division import Stage, stages_of
from dataloading.batches.loader import Batch
from kernels import compute_dtype


class PipelineParallel:
    """A model of which this rank has some stages; called, it goes through the stages of all ranks."""

    def __init__(self, model: BertForPreTraining, group: dist.ProcessGroup, virtual_stages: int) -> None:
        """Leave of the model that each rank has whole, or its shard of, the parameters of this rank's stages, in place."""
        self.model = model
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        stages = stages_of(model.config, self.size * virtual_stages)
        self.stages = stages[self.rank :: self.size]
        """Of this rank: with several, each begins where the one before it has been through all ranks."""
        names = [name for name, _ in model.named_parameters()]
        self.owners = {name: next(s.index for s in stages if s.owns(name)) % self.size for name in names}
        """Rank of the group that updates each parameter."""
        word = model.embeddings.word.detach()  # the last stage's copy, kept from what goes next
        for name in names:
            if self.owners[name] != self.rank:
                module, _, own = name.rpartition(".")
                # None in its place frees it, while modules keep their names and layers their numbers.
                setattr(model.get_submodule(module), own, None)
        self._gradient: Tensor | None = None
        if self.has_losses:
            del model.embeddings.word
            self._gradient = torch.zeros_like(word)
            # Autograd adds up in this buffer, which the optimizer does not know and ``add_word_gradient_`` sends.
            word.requires_grad_().grad = self._gradient
            model.embeddings.register_buffer("word", word, persistent=False)  # a parameter would be updated here too
        model.forward = self.forward  # whoever evaluates the model goes through all stages

    @property
    def has_losses(self) -> bool:
        """Tell whether this rank has the last stage."""
        return self.rank == self.size - 1

    @property
    def shared_parameters(self) -> list[nn.Parameter]:
        """Parameters of this rank of which ``add_word_gradient_`` changes the gradient."""
        return [self.model.embeddings.word] if self.rank == 0 else []

    def rows(self, batch: Batch) -> int:
        """W of a micro-batch: rows of hidden states that this rank gets and gives."""
        return len(self.model.placement.own_rows(batch.position_ids))

    def hidden_dtype(self) -> torch.dtype:
        """Type of hidden states, in the context in which the model computes."""
        weight = next(self.model.parameters())
        return compute_dtype(weight) if weight.is_cuda else weight.dtype  # autocast's norms on a CPU give fp32

    def through(
        self, stage: Stage, given_WD: Tensor | None, batch: Batch, sites: DropoutSites
    ) -> Tensor | PretrainingOutput:
        """Compute a stage from what the one before gives: its hidden states [W, D], or the losses after the last one."""
        model = self.model
        hidden_WD = model.embedded(batch, sites) if given_WD is None else given_WD
        for layer in stage.layers[:-1] if stage.is_last else stage.layers:
            hidden_WD = model.layers[layer](hidden_WD, batch.cu_seqlens, batch.max_seqlen, sites)
        if not stage.is_last:
            # The next stage has a buffer of this type, and the last norm may give another.
            return hidden_WD.to(self.hidden_dtype())
        return model.losses(*model.last_layer(hidden_WD, batch, sites), batch)

    def forward(self, batch: Batch) -> PretrainingOutput:
        """Compute both losses of a batch, on the rank that has the last stage; zeros elsewhere. Every rank must call it."""
        sites = self.model.next_sites()
        zero = torch.zeros((), device=batch.input_ids.device)
        output = PretrainingOutput(zero, zero, zero.long())
        for stage in self.stages:
            hidden_WD = None
            if not stage.is_first:
                shape = self.rows(batch), self.model.config.hidden_size
                hidden_WD = torch.empty(shape, dtype=self.hidden_dtype(), device=batch.input_ids.device)
                # With several stages a rank, the first rank goes on with what the last one sends.
                dist.recv(hidden_WD, group=self.group, group_src=(self.rank - 1) % self.size)
            computed = self.through(stage, hidden_WD, batch, sites)
            if isinstance(computed, Tensor):
                dist.send(computed.contiguous(), group=self.group, group_dst=(self.rank + 1) % self.size)
            else:
                output = computed
        return output

    @torch.no_grad()
    def add_word_gradient_(self) -> None:
        """Add the gradient of the copy of the word table to that of the table itself. Every rank must call it."""
        if self._gradient is not None:
            dist.send(self._gradient, group=self.group, group_dst=0)
            self._gradient.zero_()
        elif self.rank == 0:
            word = self.model.embeddings.word
            received = torch.empty_like(word)
            dist.recv(received, group=self.group, group_src=self.size - 1)
            if word.grad is None:  # sharded gradients are freed when they are packed
                word.grad = received
            else:
                word.grad += received

    @torch.no_grad()
    def copy_word_(self) -> None:
        """Bring the word table to the last stage. Every rank must call it."""
        if self._gradient is not None:
            dist.recv(self.model.embeddings.word.detach(), group=self.group, group_src=0)
        elif self.rank == 0:
            dist.send(self.model.embeddings.word.detach(), group=self.group, group_dst=self.size - 1)


def pipeline_parallel(model: BertForPreTraining, mesh: Mesh, parallel: ParallelConfig) -> PipelineParallel:
    """Divide the model among the pipeline group of this rank. Every rank must call it."""
    # Stages are numbered by the place in the copy, which the group must keep to.
    require_order(mesh)
    group = process_group(mesh.pipeline_ranks)
    assert group is not None
    return PipelineParallel(model, group, parallel.virtual_stages)
