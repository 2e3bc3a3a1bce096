"""Plan of a run: settings that ``python -m cluster plan`` has chosen for a number of ranks, and predicted times."""

from dataclasses import dataclass, fields
from pathlib import Path

from bert.configuration.config import Config, flattened
from bert.configuration.config_file import option_of
from bert.configuration.recipes import RECIPES
from bert.configuration.sections import OptimizerConfig
from bert.execution.phases import PHASES
from console.documents import FileKind
from console.files import shown
from console.text import counted

PLANNED = (
    "training.global_batch_size",
    "training.gradient_accumulation_steps",
    "training.max_samples",
    "training.precision",
    "training.reduction",
    "training.reduce_dtype",
    "training.bucket_bytes",
    "training.recompute",
    "training.site_steps",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.virtual_stages",
    *(f"optimizer.{field.name}" for field in fields(OptimizerConfig)),
)
"""Settings that a plan determines. They include the optimizer's settings, which depend on the global batch size."""


@dataclass(frozen=True)
class RunPlan:
    """Settings of a run, and the predicted times.

    Attributes:
        settings: values of the settings in `PLANNED`, in the form used on a command line.
        hyperparameters: where the hyperparameters come from.
        step_seconds: predicted seconds per step in each phase of `PHASES`, and outside these phases (``other``).
        train_seconds: predicted seconds from ``run_start`` to ``run_stop``.
    """

    recipe: str
    device: str
    nodes: int
    ranks_per_node: int
    settings: dict[str, str]
    hyperparameters: str
    step_seconds: dict[str, float]
    train_seconds: float

    def arguments(self) -> list[str]:
        """Return the settings as command-line arguments. CUDA graphs are on unless there are pipeline stages."""
        captured = str(self.settings["parallel.pipeline"] == "1")
        settings = {"training.cuda_graphs": captured, **self.settings}
        return [argument for each in settings.items() for argument in option_of(*each)]

    def require_settings(self, config: Config) -> None:
        """Raise ``ValueError`` if a setting of the configuration differs from the plan."""
        for name, value in settings_of(config).items():
            if value != self.settings[name]:
                raise ValueError(
                    f"{name} is {value}, but {config.plan} plans {shown(self.settings[name])}: leave the setting out, or "
                    "make another plan"
                )

    def is_for(self, world_size: int, local_size: int) -> bool:
        """Tell whether the plan is for ``world_size`` ranks with ``local_size`` ranks on this node (0 if unknown)."""
        return world_size == self.nodes * self.ranks_per_node and local_size in (0, self.ranks_per_node)

    def require_ranks(self, world_size: int, local_size: int, path: Path) -> None:
        """Raise ``ValueError`` if the plan is for another number of ranks."""
        if not self.is_for(world_size, local_size):
            planned = f"{counted(self.nodes, 'node')} of {counted(self.ranks_per_node, 'rank')}"
            here = counted(world_size, "rank") + (f", {local_size} a node" if local_size else "")
            raise ValueError(
                f"{path} is a plan for {planned}, but the run has {here}: make another plan, or start the planned ranks"
            )


def settings_of(config: Config) -> dict[str, str]:
    """Return the configuration's values of the settings in `PLANNED`, in the form used on a command line."""
    values = dict(flattened("config", config))
    # Values are compared as text. This is exact for floats too, because a printed float reads back as the same number.
    return {name: str(values[f"config.{name}"]) for name in PLANNED}


def _check(plan: RunPlan) -> None:
    known = plan.recipe in RECIPES and set(plan.step_seconds) == {*PHASES, "other"}
    if not known or set(plan.settings) != set(PLANNED) or min(plan.nodes, plan.ranks_per_node) < 1:
        raise ValueError("another version of this program made it: its recipe, settings or times do not match")


_FILE = FileKind(
    kind=RunPlan,
    format="mlperf-bert run plan",
    version=2,
    noun="plan of a run",
    maker="python -m cluster plan",
    largest_bytes=64 * 2**10,
    check=_check,
)
write_plan, read_plan = _FILE.write, _FILE.read
