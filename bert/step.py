"""Training step: forward pass, loss, backward pass, gradient reduction and update.

``TrainingStep`` runs operator by operator. ``bert.captured_step`` runs the same step as CUDA graphs, and
``bert.pipeline_step`` runs it through the stages of several ranks.

No step copies values from the device to the host: the learning rate, the step count and the sums of losses and norms
stay on the device, and the host fetches the sums once per log interval.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from bert.configuration.config import Config
from bert.configuration.sections import SHARDED, Precision
from bert.execution.stopwatch import Stopwatch, is_capturing
from bert.model import BertForPreTraining, MatrixProducts, PretrainingOutput
from bert.optimizer import FlatParameters, Lamb
from bert.parallel.division import WholeVectors, own_part
from bert.parallel.mesh import Mesh, all_reduce_, process_group
from bert.parallel.pipeline.stages import PipelineModel
from bert.parallel.reduction.gradients import Communicators, Reduction, choose
from bert.parallel.reduction.sharded_gradients import ShardedReduction
from bert.parallel.reduction.sharded_lamb import ShardedLamb, WeightGather
from bert.parallel.sites import SiteExchange
from bert.parallel.tensor.shards import TensorParallel
from bert.products import weight_gradients
from bert.products.fp8 import Fp8Scales, Fp8State
from bert.products.fp8_layer import Fp8Products
from bert.products.weight_gradients import AccumulatingProducts, WeightCopies, WeightGradients, product_weights
from dataloading.batches.loader import Batch
from dataloading.batches.sampler import ShapeBucket


class TrainingStep:
    """A training step on one global batch, with this rank's model, gradients, reduction and optimizer."""

    def __init__(self, initial: BertForPreTraining, config: Config, mesh: Mesh, stopwatch: Stopwatch) -> None:
        """Train from the weights of ``initial``. All ranks must call this at the same time.

        Raises ``ValueError`` if the precision is FP8 and the GPU does not support it.
        """
        self.mesh, self.stopwatch = mesh, stopwatch
        self.precision: Precision = config.training.precision
        self._build(initial, config, mesh)
        # Gather all weights before the next step, not during its forward pass, in two cases. FP8 must quantize whole weights
        # right after the update. Pipeline stages begin a step at different times.
        self.gathers_in_forward = self.gather is not None and self.fp8 is None and mesh.pipeline == 1
        self.statistics = Statistics(mesh, apart=self.sites is not None)

    def _build(self, initial: BertForPreTraining, config: Config, mesh: Mesh) -> None:
        """Build this rank's part of the model from the weights of ``initial``, and all objects that work on it."""
        training = config.training
        if training.site_steps > 1:
            # Sites take steps by themselves, so only ``SiteExchange`` needs the other sites' ranks.
            mesh = mesh.own_site
        shards_weights = training.reduction in SHARDED and mesh.data_size > 1
        shards_gradients = training.shard_gradients and mesh.data_size > 1
        is_whole = mesh.tensor * mesh.pipeline == 1 and not shards_weights
        # Allocate first the objects that all layers share.
        gradients, copies, scales = WeightGradients(), WeightCopies(), None
        accumulates = weight_gradients.accumulates_products(mesh.device, self.precision)
        # With FP8, the optimizer writes FP8 weights instead of 16-bit copies. ``ShardedLamb`` writes neither of the two.
        if accumulates and is_whole and self.precision != "fp8":
            copies = WeightCopies.of(config.model, mesh.device)
        # Products can add to the word table's gradient on the first stage, which has it, unless gradients are sharded.
        with_table = accumulates and mesh.tensor == 1 and mesh.pipeline_rank == 0 and not shards_gradients
        products = AccumulatingProducts(gradients, copies, with_table=with_table) if accumulates else MatrixProducts()
        inner_products = products
        if self.precision == "fp8":
            scales = Fp8Scales(config.model.num_hidden_layers - 1, mesh.device)
            # Fuse products with layer norms, unless tensor parallelism requires communication between the two.
            inner_products = Fp8Products(scales, gradients, fused=mesh.tensor == 1)
        tensor = TensorParallel(config.model, process_group(mesh.tensor_ranks), self.stopwatch)
        virtual_stages = config.parallel.virtual_stages
        self.model = own_part(initial, mesh, tensor, virtual_stages, products, inner_products, training.recompute)
        self.fp8 = None if scales is None else Fp8State(scales, self.model, tensor.group)
        pipeline = self.model if isinstance(self.model, PipelineModel) else None
        # A pipeline stage processes several micro-batches at once, so none of them may overwrite the gradients.
        overwrites = accumulates and pipeline is None and not shards_gradients
        overwritten = product_weights(self.model, with_table) if overwrites else ()
        self.weight_gradients = gradients if overwrites else None
        groups = Communicators.create(mesh, in_network=training.sharp, is_flat=training.reduction == "flat")
        self.flat = FlatParameters.of(self.model, groups.shards, overwritten, gradients=not shards_gradients)
        self.vectors = WholeVectors(self.model, self.flat, tensor, pipeline)
        # Build the flat vectors first, because the choice of a strategy may measure how fast they are reduced.
        strategy, reason = choose(training, self.flat, groups)
        self.reduction_choice = f"{strategy} ({reason})"
        settings = self.flat, groups, strategy, training.reduce_dtype, training.bucket_bytes
        reduction = ShardedReduction(*settings, self.stopwatch) if shards_gradients else Reduction(*settings)
        self.reduction = reduction if mesh.data_size > 1 else None
        if is_whole:
            casts = () if self.fp8 is None else self.fp8.casts(self.flat.places)
            self.optimizer = Lamb(self.flat, config.optimizer, copies.copies_P, casts)
        else:
            # Pipeline stages have different parameters, so the norm of all gradients must be summed over their group.
            group = None if pipeline is None else pipeline.group
            self.optimizer = ShardedLamb(self.flat, config.optimizer, reduction, tensor, group)
        self.gather = WeightGather(self.model, self.flat, reduction) if shards_weights else None
        is_apart = mesh is not self.mesh
        self.sites = SiteExchange(self.flat.weights_P, training, self.mesh, self.stopwatch) if is_apart else None

    def __call__(self, micro_batches: Sequence[Batch]) -> None:
        """Train on one global batch, of which this rank has ``micro_batches``."""
        self.compute_gradients(micro_batches)
        with self.stopwatch.time("update"):
            self.update()

    def compute_gradients(self, micro_batches: Sequence[Batch]) -> None:
        """Compute the gradients of one global batch, summed over the ranks, without an update."""
        with self.stopwatch.time("forward_backward"):
            last = len(micro_batches) - 1
            for index, batch in enumerate(micro_batches):
                self.forward_backward(batch, is_first=index == 0, is_last=index == last)

    def forward_backward(self, batch: Batch, is_first: bool, is_last: bool) -> None:
        """Add a micro-batch's gradients to the step's gradients, and its losses and tokens to the statistics.

        Gradients are summed over the ranks during the backward pass of the last micro-batch, or of every micro-batch if
        ranks keep shards of gradients. In the first micro-batch, products that accumulate weight gradients overwrite the
        gradients of the last step.
        """
        if is_first and self.gather is not None and self.gathers_in_forward:
            self.gather.start()
            if not is_capturing():
                with self.stopwatch.waiting():  # wait for the weights that the forward pass needs first
                    self.gather.wait(1)
        if self.weight_gradients is not None:
            self.weight_gradients.overwrite = is_first
        with nullcontext() if self.reduction is None else self.reduction.overlapped(is_last):
            with self.autocast():
                output = self.model(batch)
            # The backward pass runs outside autocast, because ops remember the dtypes of their forward passes.
            self.mean_loss(output, batch).backward()
        if is_last and self.reduction is not None:
            with self.stopwatch.time("reduce"):
                self.reduction.finish()

    def update(self) -> None:
        """Update the weights from the summed gradients."""
        if self.fp8 is not None:
            # Update the scales before the optimizer step, which uses them to write the FP8 weights.
            self.fp8.update_scales_()
        self.statistics.add_step(self.optimizer.step())
        if not self.gathers_in_forward:
            self.gather_in_site()
        if self.fp8 is not None and not isinstance(self.optimizer, Lamb):  # ``Lamb`` has written the FP8 weights
            self.fp8.refresh_weights_()

    def mean_loss(self, output: PretrainingOutput, batch: Batch) -> Tensor:
        """Return the training loss, [], and add the losses and tokens to the statistics."""
        masked_lm_loss, next_sentence_loss = output.mean_losses(batch)
        self.statistics.add_micro_batch(masked_lm_loss, next_sentence_loss, batch.cu_seqlens[-1])
        return masked_lm_loss + next_sentence_loss

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.mesh.device.type, torch.bfloat16, enabled=self.precision != "fp32")

    def gather_in_site(self) -> None:
        """Gather the weights that other ranks updated in the last step. All ranks of a site must call this together."""
        if self.gather is not None:
            self.gather()

    def gather_weights(self) -> BertForPreTraining:
        """Gather the weights that other ranks updated, give all sites the same weights, and return the model.

        All ranks must call this at the same time.
        """
        self.gather_in_site()
        if self.sites is not None and self.sites.settle():
            self.refresh_copies_()
        return self.model

    def meet_sites(self, steps: int) -> None:
        """Begin or apply an exchange with the other sites if one is due after ``steps`` steps of the run."""
        if self.sites is None:
            return
        if self.sites.begins_after(steps):
            self.gather_in_site()
        if self.sites.after_step(steps):
            self.refresh_copies_()

    def settled_state(self) -> list[Tensor]:
        """Give all sites the same state, and return the vectors that checkpoints store, [P] each.

        The vectors are weights, momentum, variance and, with sites, the momentum of the exchange. All ranks must call this
        at the same time.
        """
        self.gather_weights()
        moments = list(self.optimizer.moments())
        if self.sites is not None:
            moments = [self.sites.mean(moment_P) for moment_P in moments]
            self.optimizer.set_moments_(*moments)
            all_reduce_(self.optimizer.steps, "max")  # sites may have skipped different numbers of steps
            moments.append(self.sites.momentum())
        return [self.flat.weights_P, *moments]

    def gather_whole_model(self) -> BertForPreTraining:
        """Gather all weights and return the whole model. It is a new model if several ranks share a copy of the model.

        All ranks must call this at the same time.
        """
        model = self.gather_weights()
        if self.mesh.tensor * self.mesh.pipeline == 1:
            return model
        return self.vectors.gather_model(self.flat.weights_P, model.config)

    def refresh_copies_(self) -> None:
        """Refresh the low-precision copies of the weights after anything but a training step has changed the weights."""
        if isinstance(self.optimizer, Lamb):
            self.optimizer.refresh_copies_()
        if self.fp8 is not None:
            self.fp8.refresh_weights_()

    def warm_up(self, micro_batches: Sequence[Batch], steps: int, shape_buckets: Sequence[ShapeBucket] = ()) -> float:
        """Run ``steps`` steps on synthetic batches, and prepare the step for training, without changing any state.

        If the step uses CUDA graphs, this captures them for each of ``shape_buckets``. FP8 scales are calibrated last, with
        the weights that training starts from. Returns the last step's seconds on the host's clock, or 0 if ``steps`` is 0.
        """
        seconds = 0.0
        with self.rehearsal():
            for _ in range(steps):
                began = time.perf_counter()
                self(micro_batches)
                seconds = time.perf_counter() - began
            self.capture(shape_buckets)
        if self.fp8 is not None:
            with self.rehearsal():
                for _ in self.fp8.calibration_():
                    self.compute_gradients(micro_batches)
        return seconds

    def capture(self, shape_buckets: Sequence[ShapeBucket]) -> None:
        """Capture the step as CUDA graphs. A step that runs operator by operator does nothing here."""

    def restricted_ops(self) -> AbstractContextManager[None]:
        """Restrict ops, inside a ``with`` block, to implementations with which the step can run."""
        return nullcontext()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Restore the state, except FP8 scales, after a ``with`` block, which may take steps on synthetic batches."""
        weights_P, dropout_state = self.flat.weights_P.clone(), self.model.dropout_state.clone()
        devices = [self.mesh.device] if self.mesh.device.type == "cuda" else []  # fork_rng would save every GPU's state
        with torch.random.fork_rng(devices), self.restricted_ops():
            yield
        with torch.no_grad():
            # Restore everything in place, because captured graphs refer to these addresses.
            self.flat.weights_P.copy_(weights_P)
            self.model.dropout_state.copy_(dropout_state)
        self.refresh_copies_()
        # Reset the statistics, the optimizer's moments, and the gradients.
        self.statistics.fetch()
        self.optimizer.reset()
        self.stopwatch.reset()


class Statistics:
    """Running sums over this rank's steps, kept on the device: mean losses, gradient norm, tokens and skipped steps."""

    NAMES = ("masked_lm_loss", "next_sentence_loss", "gradient_norm", "tokens", "skipped_steps")

    def __init__(self, mesh: Mesh, *, apart: bool = False) -> None:
        """If sites take steps by themselves (``apart``), each site is weighted in a mean by its share of the samples."""
        self._rank, self._counts = mesh.rank, mesh.counts_losses
        site = mesh.own_site if apart else mesh
        self._share = site.data_size / mesh.data_size
        """This site's share of the samples if sites take steps by themselves, otherwise 1."""
        self._counts_steps = mesh.rank == min(site.copies[0])
        # One vector holds all values, so that one all-reduce is enough: each rank's own seconds (which only that rank
        # sets), one sum for each name, the number of steps, and the request to stop. It is fp64 so that token
        # counts stay exact.
        size = mesh.world_size + len(self.NAMES) + 2
        self._all = torch.zeros(size, dtype=torch.float64, device=mesh.device)
        self._sums = self._all[mesh.world_size :]

    def add_micro_batch(self, masked_lm_loss: Tensor, next_sentence_loss: Tensor, tokens: Tensor) -> None:
        """Add a micro-batch's contributions to the global batch's mean losses, and its number of tokens, all []."""
        # Only one of the ranks that share a copy of the model counts its losses, so that none is counted twice.
        if not self._counts:
            return
        self._sums[0] += masked_lm_loss.detach() * self._share
        self._sums[1] += next_sentence_loss.detach() * self._share
        self._sums[3] += tokens

    def add_step(self, gradient_norm: Tensor) -> None:
        """Count a step and add its gradient norm. A norm that is not finite means that the step was skipped.

        Only one rank counts the step (with ``apart``, one rank of each site), because all its ranks have the same norm.
        """
        if self._counts_steps:
            taken = torch.isfinite(gradient_norm)
            self._sums[2] += torch.where(taken, gradient_norm, 0.0) * self._share
            self._sums[4] += ~taken * self._share
            self._sums[5] += self._share

    def fetch(self, stop: bool = False, own_seconds: float = 0.0) -> tuple[dict[str, float], bool, list[float]]:
        """Return means over all steps and ranks, whether any rank asks to ``stop``, and the ``own_seconds`` of all ranks.

        The means are over the steps since the last fetch. ``skipped_steps`` is a count, and ``gradient_norm`` is the mean
        over the steps that were not skipped. The host waits for the device here. Every rank must call this after the same
        step.
        """
        # ``fill_`` does not block. An assignment would copy from the host and wait for the device.
        self._sums[-1].fill_(float(stop))
        self._all[self._rank].fill_(own_seconds)
        values = all_reduce_(self._all).tolist()
        ranks = len(values) - len(self._sums)
        *sums, steps, stopping = values[ranks:]
        means = {name: total / max(1, steps) for name, total in zip(self.NAMES, sums, strict=True)}
        skipped = means["skipped_steps"] = sums[self.NAMES.index("skipped_steps")]
        # This mean was divided by the number of all steps, but skipped steps added nothing to the sum.
        means["gradient_norm"] *= max(1, steps) / max(1, steps - skipped)
        self._all.zero_()
        return means, stopping > 0, values[:ranks]
