"""A training step whose micro-batches pass through pipeline stages on several ranks."""

from collections.abc import Sequence

from bert.configuration.config import Config
from bert.execution.stopwatch import Stopwatch
from bert.model import BertForPreTraining
from bert.parallel.mesh import Mesh
from bert.parallel.pipeline.schedule import PipelineSchedule
from bert.parallel.pipeline.stages import PipelineModel
from bert.step import TrainingStep
from dataloading.batches.loader import Batch


class PipelineStep(TrainingStep):
    """``TrainingStep`` on this rank's stages of the model."""

    model: PipelineModel

    def __init__(self, initial: BertForPreTraining, config: Config, mesh: Mesh, stopwatch: Stopwatch) -> None:
        super().__init__(initial, config, mesh, stopwatch)
        micro_batches = config.training.gradient_accumulation_steps
        self._schedule = PipelineSchedule(self.model, micro_batches, self.autocast, self.mean_loss, stopwatch)

    def compute_gradients(self, micro_batches: Sequence[Batch]) -> None:
        # Computation counts as the phase "forward_backward", and waiting for other ranks as "reduce".
        with self.stopwatch.time("reduce"):
            self._schedule(micro_batches)
            self.model.add_word_gradient_()
            if self.reduction is not None:
                self.reduction.finish()

    def gather_in_site(self) -> None:
        super().gather_in_site()
        # The last stage has a copy of the first stage's word table, which must follow every change of the table.
        self.model.copy_word_()

    def refresh_copies_(self) -> None:
        super().refresh_copies_()
        self.model.copy_word_()
