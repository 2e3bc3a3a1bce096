"""Training step: forward, loss, backward, reduction, update.

Nothing here reads the device: the rate and the step count live there, losses and norms are summed there, and the host
fetches the sums once an interval. So both halves can be captured (``bert.cuda_graphs``): forward and backward of a
micro-batch once for each shape bucket and role (the last one's reduction runs beside its backward pass, the first one may
gather weights or write over gradients), the update once.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from bert.configuration.config import Config
from bert.cuda_graphs import ROLES, BatchGraphs, CudaCapturer, Role, roles_of
from bert.model import BertForPreTraining, PretrainingOutput
from bert.optimizer import Lamb
from bert.parallel.mesh import Mesh
from bert.reporting.statistics import Statistics
from bert.step_parts import build_parts
from bert.timing.stopwatch import Stopwatch, is_capturing
from dataloading.batches.loader import Batch, inert_batch
from dataloading.batches.shape_buckets import ShapeBucket
from kernels import captured


class TrainingStep:
    """Model, optimizer and what one step does with a global batch."""

    def __init__(self, whole: BertForPreTraining, config: Config, mesh: Mesh, stopwatch: Stopwatch) -> None:
        """Train what this rank has of a model with the weights of ``whole``."""
        parts = build_parts(whole, config, mesh, stopwatch)
        self.model = parts.built.model
        self.flat, self.whole, self.choice = parts.flat, parts.whole, parts.choice
        self.fp8, self.optimizer = parts.built.fp8, parts.optimizer
        self._weight_gradients, self._recomputed = parts.built.weight_gradients, parts.recomputed
        self._reduction, self._gather, self._pipeline = parts.reduction, parts.gather, parts.built.pipeline
        self.statistics = Statistics(mesh)
        self._mesh, self._stopwatch, self.precision = mesh, stopwatch, config.training.precision
        self._micro_batches = config.training.gradient_accumulation_steps
        self._train_on = {role: BatchGraphs(partial(self._forward_backward, role)) for role in ROLES}
        self._is_captured = False
        self.uncaptured_batches = 0
        """Micro-batches since the warm-up that ran without a graph. It stays 0 if the step is not captured."""
        self._schedule: Callable[[Sequence[Batch]], None] = self._one_by_one
        if self._pipeline is not None:
            from bert.parallel.pipeline.schedule import PipelineSchedule

            through_stages = PipelineSchedule(
                self._pipeline, self._micro_batches, self.autocast, self._mean_loss, stopwatch
            )
            self._schedule = partial(self._through_stages, through_stages)
        self._update: Callable[[], None] = self._update_weights

    def __call__(self, micro_batches: Sequence[Batch]) -> None:
        """Train on this rank's micro-batches of one global batch."""
        self._schedule(micro_batches)
        self._update()

    def _one_by_one(self, micro_batches: Sequence[Batch]) -> None:
        with self._stopwatch.time("forward_backward"):
            for role, batch in zip(self._roles(len(micro_batches)), micro_batches, strict=True):
                replayed = self._train_on[role](batch)
                self.uncaptured_batches += self._is_captured and not replayed

    def _through_stages(self, schedule: Callable[[Sequence[Batch]], None], micro_batches: Sequence[Batch]) -> None:
        schedule(micro_batches)
        with self._stopwatch.time("reduce"):
            self._reduction.finish()

    def _roles(self, count: int) -> list[Role]:
        """The roles of a step's micro-batches, in their order."""
        # With FP8 all weights have been gathered right after the update.
        gathers, overwrites = self._gather is not None and self.fp8 is None, bool(self.flat.segments.overwritten)
        return roles_of(count, gathers, self._mesh.data_size > 1, overwrites)

    def _forward_backward(self, role: Role, batch: Batch) -> None:
        """Add the micro-batch's gradients to the flat ones, and its losses and tokens to the statistics."""
        if role.gathers_weights:
            self._begin_gathering()
        overwritten = self._weight_gradients.overwritten(role.overwrites_gradients)
        with self._reduction.overlapped(role.reduces_gradients), overwritten:
            with self.autocast():
                output = self.model(batch)
            self._mean_loss(output, batch).backward()  # outside of autocast: ops know the types of their forward passes
        if role.reduces_gradients:
            with self._stopwatch.time("reduce"):
                self._reduction.finish()

    def _mean_loss(self, output: PretrainingOutput, batch: Batch) -> Tensor:
        """Return what is trained on, []; the losses and the tokens go to the statistics."""
        masked_lm_loss, next_sentence_loss = output.mean_losses(batch)
        self.statistics.add_micro_batch(masked_lm_loss, next_sentence_loss, batch.cu_seqlens[-1])
        return masked_lm_loss + next_sentence_loss

    def _begin_gathering(self) -> None:
        """The forward pass can begin with the first weights; how long they take says how late other ranks are."""
        assert self._gather is not None
        self._gather.start()
        if not is_capturing():
            with self._stopwatch.waiting():
                self._gather.wait(1)

    def _update_weights(self) -> None:
        with self._stopwatch.time("update"):
            if self.fp8 is not None:
                self.fp8.update_scales_()  # first, as weights are cast with the new ones
            self.statistics.add_step(self.optimizer.step())
            # Before the next forward pass: FP8 casts whole weights, the last stage copies the first one's word table.
            if self.fp8 is not None or self._pipeline is not None:
                self.gather_weights()
            if self.fp8 is not None and not isinstance(self.optimizer, Lamb):  # which leaves casts
                self.fp8.refresh_weights_()

    def gather_weights(self) -> BertForPreTraining:
        """Gather all weights of the last step, some of which only other ranks may have, and return the model.

        Every rank must call it at the same time.
        """
        if self._gather is not None:
            self._gather()
        if self._pipeline is not None:
            self._pipeline.copy_word_()
        return self.model

    def gather_whole_model(self) -> BertForPreTraining:
        """``gather_weights``, and where ranks share a copy of the model, return one of their own with all weights of it.

        Every rank must call it at the same time.
        """
        model = self.gather_weights()
        if self._mesh.tensor * self._mesh.pipeline == 1:
            return model
        return self.whole.gather_model(self.flat.weights_P, model.config)

    def refresh_copies_(self) -> None:
        """Copy the weights again for those who compute with copies, after any change but a step's."""
        if isinstance(self.optimizer, Lamb):
            self.optimizer.refresh_copies_()
        if self.fp8 is not None:
            self.fp8.refresh_weights_()

    def autocast(self) -> torch.autocast:
        """The context in which the model computes."""
        return torch.autocast(self._mesh.device.type, torch.bfloat16, enabled=self.precision != "fp32")

    def warm_up(
        self,
        micro_batches: Sequence[Batch],
        steps: int,
        capturer: CudaCapturer | None = None,
        shape_buckets: Sequence[ShapeBucket] = (),
        choose: Callable[[Callable[[], None]], None] | None = None,
    ) -> float:
        """Run steps on synthetic batches, then restore weights, optimizer, statistics and random states.

        ``choose`` gets a step to run first, to see what it calls and choose what computes it. With a ``capturer`` the step
        is then captured as well, for each of ``shape_buckets``, and replayed from now on; batches of other ones run as
        before. FP8 scales are found last, for the weights that training starts from. Returns the host's seconds for the last
        of ``steps``, 0 without any.
        """
        weights_P, dropout_state = self.flat.weights_P.clone(), self.model.dropout_state.clone()
        devices = [self._mesh.device] if self._mesh.device.type == "cuda" else []  # else fork_rng takes every GPU
        # Choices of implementations stay: steps before the capture must choose among what can be captured already.
        with torch.random.fork_rng(devices), nullcontext() if capturer is None else captured(self._recomputed):
            if choose is not None:
                choose(lambda: self(micro_batches))
            seconds = 0.0
            for _ in range(steps):
                began = time.perf_counter()
                self(micro_batches)
                seconds = time.perf_counter() - began
            if capturer is not None:
                self._capture(capturer, shape_buckets)
            with torch.no_grad():
                # In place, as all that is restored: captured graphs have these addresses.
                self.flat.weights_P.copy_(weights_P)
            self.refresh_copies_()
            if self.fp8 is not None:
                self.fp8.calibrate_(lambda: self._schedule(micro_batches))
            if self._pipeline is not None:
                self._pipeline.copy_word_()
        # Sums of the steps, moments, gradients that calibration left, and the dropout steps of all these passes.
        self.statistics.fetch()
        self.optimizer.reset()
        with torch.no_grad():
            self.model.dropout_state.copy_(dropout_state)
        self._stopwatch.reset()
        self.uncaptured_batches = 0
        return seconds

    def _capture(self, capturer: CudaCapturer, shape_buckets: Sequence[ShapeBucket]) -> None:
        batches = [inert_batch(shape_bucket).to(self._mesh.device) for shape_bucket in shape_buckets]
        # The last micro-batch first: it takes the most memory.
        for role in dict.fromkeys(reversed(self._roles(self._micro_batches))):
            self._train_on[role].prepare(batches, capturer)
        replay = capturer.prepare(self._update_weights)
        capturer.capture()
        self._is_captured = True

        def timed() -> None:
            with self._stopwatch.time("update"):
                replay()

        self._update = timed
