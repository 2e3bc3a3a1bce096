"""Training step: forward pass, loss, backward pass, gradient reduction and update.

Nothing here copies values from the device to the host: the learning rate, the step count and the sums of losses and norms
stay on the device, and the host fetches the sums once per log interval. CUDA graphs can therefore capture the passes of a
micro-batch and the update (``bert.execution.cuda_graphs``).
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bert.build import RECOMPUTED_OPS, build_model, shards_gradients
from bert.configuration.config import Config
from bert.configuration.sections import SHARDED
from bert.execution.cuda_graphs import CudaCapturer, Graph, Passes, Role
from bert.execution.stopwatch import Stopwatch, is_capturing
from bert.model import BertForPreTraining, PretrainingOutput
from bert.optimizer import FlatParameters, Lamb
from bert.parallel.mesh import Mesh
from bert.parallel.pipeline.stages import PipelineModel
from bert.parallel.reduction.gradients import Communicators, Reduction, choose
from bert.parallel.reduction.sharded_gradients import ShardedReduction
from bert.parallel.reduction.sharded_lamb import ShardedLamb, WeightGather
from bert.parallel.whole_vectors import WholeVectors
from bert.products.weight_gradients import AccumulatingTable, product_weights
from bert.reporting.statistics import Statistics
from dataloading.batches.loader import Batch, inert_batch
from dataloading.batches.plan import ShapeBucket
from kernels import captured

if TYPE_CHECKING:
    from bert.parallel.pipeline.schedule import PipelineSchedule


class TrainingStep:
    """A training step on one global batch, with this rank's model, gradients, reduction and optimizer."""

    def __init__(
        self,
        whole: BertForPreTraining,
        config: Config,
        mesh: Mesh,
        stopwatch: Stopwatch,
        capturer: CudaCapturer | None = None,
    ) -> None:
        """Build this rank's part of the model from the weights of ``whole``. All ranks must call this at the same time.

        If a ``capturer`` is given, ``warm_up`` captures the step.
        """
        training = config.training
        self._mesh, self._stopwatch, self._capturer = mesh, stopwatch, capturer
        self.precision, self._micro_batches = training.precision, training.gradient_accumulation_steps
        self._recomputed = () if training.recompute == "none" else RECOMPUTED_OPS
        built = build_model(whole, config, mesh, stopwatch.exchanging)
        self.model, self.fp8, self._weight_gradients = built.model, built.fp8, built.weight_gradients
        self._pipeline = built.model if isinstance(built.model, PipelineModel) else None
        # Set up the reduction: groups of ranks, flat vectors, and then the strategy. The choice of a strategy may measure
        # reductions of these vectors.
        communicators = Communicators.create(mesh, in_network=training.sharp)
        is_sharded = shards_gradients(training, mesh)
        # A pipeline stage processes several micro-batches at once, so none of them may overwrite the gradients.
        overwrites = built.accumulates and self._pipeline is None and not is_sharded
        adds_to_table = isinstance(self.model.placement, AccumulatingTable)
        overwritten = product_weights(self.model, adds_to_table) if overwrites else ()
        self.flat = FlatParameters.of(self.model, communicators.world_size, overwritten, gradients=not is_sharded)
        self.whole = WholeVectors(self.model, self.flat, built.tensor, self._pipeline)
        self.strategy, self.reason = choose(training, self.flat, communicators)
        settings = self.flat, communicators, self.strategy, training.reduce_dtype, training.bucket_bytes
        self._reduction = ShardedReduction(*settings, stopwatch.waiting) if is_sharded else Reduction(*settings)
        self._gather = WeightGather(self.model, self.flat, self._reduction) if self.strategy in SHARDED else None
        # If a rank holds only parts of tensors, their norms are sums over ranks, which ``ShardedLamb`` computes.
        if self._gather is None and built.tensor is None and self._pipeline is None:
            dtype = torch.bfloat16 if built.accumulates and self.fp8 is None else None
            casts = () if self.fp8 is None else self.fp8.casts(self.flat.places)  # FP8 casts replace the bf16 copies
            self.optimizer = Lamb(self.flat, config.optimizer, dtype, casts)
            built.copies.update(self.optimizer.copies())
        else:
            group = None if self._pipeline is None else self._pipeline.group
            self.optimizer = ShardedLamb(self.flat, config.optimizer, self._reduction, built.tensor, group)
        self.statistics = Statistics(mesh)
        self.execution = self._choose_execution()
        self.update = Graph(self._update_weights)

    def _choose_execution(self) -> "Passes | PipelineSchedule":
        if self._pipeline is not None:
            from bert.parallel.pipeline.schedule import PipelineSchedule

            finish = self._reduction.finish
            return PipelineSchedule(
                self._pipeline, self._micro_batches, self.autocast, self._mean_loss, finish, self._stopwatch
            )
        duties = Role(
            # With FP8, all weights are gathered right after the update.
            gathers_weights=self._gather is not None and self.fp8 is None,
            reduces_gradients=self._mesh.data_size > 1,
            overwrites_gradients=bool(self.flat.segments.overwritten),
        )
        return Passes(self._forward_backward, duties, self._stopwatch)

    def __call__(self, micro_batches: Sequence[Batch]) -> None:
        self.execution(micro_batches)
        with self._stopwatch.time("update"):
            self.update()

    @property
    def uncaptured_batches(self) -> int:
        """Number of micro-batches since the warm-up that ran without a CUDA graph; 0 if the step is not captured."""
        if self._capturer is None or not isinstance(self.execution, Passes):
            return 0
        return self.execution.uncaptured_batches

    def _forward_backward(self, role: Role, batch: Batch) -> None:
        """Add the micro-batch's gradients to the flat gradients, and its losses and tokens to the statistics."""
        if role.gathers_weights:
            self._begin_gathering()
        overwritten = self._weight_gradients.overwritten(role.overwrites_gradients)
        with self._reduction.overlapped(role.reduces_gradients), overwritten:
            with self.autocast():
                output = self.model(batch)
            # The backward pass runs outside autocast, because ops remember the dtypes of their forward passes.
            self._mean_loss(output, batch).backward()
        if role.reduces_gradients:
            with self._stopwatch.time("reduce"):
                self._reduction.finish()

    def _mean_loss(self, output: PretrainingOutput, batch: Batch) -> Tensor:
        """Return the training loss, [], and add the losses and tokens to the statistics."""
        masked_lm_loss, next_sentence_loss = output.mean_losses(batch)
        self.statistics.add_micro_batch(masked_lm_loss, next_sentence_loss, batch.cu_seqlens[-1])
        return masked_lm_loss + next_sentence_loss

    def _begin_gathering(self) -> None:
        """Start the all-gather and wait for the first weights, which the forward pass needs to begin.

        The wait counts as waiting for other ranks.
        """
        assert self._gather is not None
        self._gather.start()
        if not is_capturing():
            with self._stopwatch.waiting():
                self._gather.wait(1)

    def _update_weights(self) -> None:
        if self.fp8 is not None:
            self.fp8.update_scales_()  # first, because weights are cast with the new scales
        self.statistics.add_step(self.optimizer.step())
        # This communication cannot overlap the next forward pass: FP8 casts whole weights, and the last pipeline stage
        # copies the first stage's word embedding table.
        if self.fp8 is not None or self._pipeline is not None:
            self.gather_weights()
        if self.fp8 is not None and not isinstance(self.optimizer, Lamb):  # ``Lamb`` casts the weights itself
            self.fp8.refresh_weights_()

    def gather_weights(self) -> BertForPreTraining:
        """Gather the weights that other ranks updated in the last step, and return the model.

        All ranks must call this at the same time.
        """
        if self._gather is not None:
            self._gather()
        if self._pipeline is not None:
            self._pipeline.copy_word_()
        return self.model

    def gather_whole_model(self) -> BertForPreTraining:
        """Gather all weights and return the whole model. It is a new model if several ranks share a copy of the model.

        All ranks must call this at the same time.
        """
        model = self.gather_weights()
        if self._mesh.tensor * self._mesh.pipeline == 1:
            return model
        return self.whole.gather_model(self.flat.weights_P, model.config)

    def refresh_copies_(self) -> None:
        """Refresh the low-precision weight copies after any change that was not made by a step."""
        if isinstance(self.optimizer, Lamb):
            self.optimizer.refresh_copies_()
        if self.fp8 is not None:
            self.fp8.refresh_weights_()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self._mesh.device.type, torch.bfloat16, enabled=self.precision != "fp32")

    def warm_up(
        self,
        micro_batches: Sequence[Batch],
        steps: int,
        shape_buckets: Sequence[ShapeBucket] = (),
        choose: Callable[[Callable[[], None]], None] | None = None,
    ) -> float:
        """Run ``steps`` steps on synthetic batches, then restore weights, optimizer, statistics and random states.

        ``choose`` is called first, with a function that runs a step, so that it can observe the step's ops and choose their
        implementations. If there is a capturer, the step is captured for each of ``shape_buckets`` after the steps. FP8
        scales are calibrated last, with the restored weights. Returns the last step's seconds on the host's clock, or 0 if
        ``steps`` is 0.
        """
        weights_P, dropout_state = self.flat.weights_P.clone(), self.model.dropout_state.clone()
        devices = [self._mesh.device] if self._mesh.device.type == "cuda" else []  # fork_rng's default is every GPU
        # The steps before the capture must already use implementations that can be captured.
        capturable = nullcontext() if self._capturer is None else captured(self._recomputed)
        with torch.random.fork_rng(devices), capturable:
            if choose is not None:
                choose(lambda: self(micro_batches))
            seconds = 0.0
            for _ in range(steps):
                began = time.perf_counter()
                self(micro_batches)
                seconds = time.perf_counter() - began
            if self._capturer is not None and isinstance(self.execution, Passes):
                batches = [inert_batch(shape_bucket).to(self._mesh.device) for shape_bucket in shape_buckets]
                self.execution.prepare(self._micro_batches, batches, self._capturer)
                self.update.prepare(self._capturer)
                self._capturer.capture()
            with torch.no_grad():
                # Restore everything in place, because captured graphs refer to these addresses.
                self.flat.weights_P.copy_(weights_P)
            self.refresh_copies_()
            if self.fp8 is not None:
                self.fp8.calibrate_(lambda: self.execution(micro_batches))
            if self._pipeline is not None:
                self._pipeline.copy_word_()
        # Reset the statistics, the optimizer's moments, the gradients left by calibration, and the dropout step counter.
        self.statistics.fetch()
        self.optimizer.reset()
        with torch.no_grad():
            self.model.dropout_state.copy_(dropout_state)
        self._stopwatch.reset()
        if isinstance(self.execution, Passes):
            self.execution.uncaptured_batches = 0
        return seconds
