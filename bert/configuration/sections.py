"""The sections of a run's configuration: what each setting means, its default, and what it may be by itself.

The docstring under each field is its ``--help`` text. What settings of several sections must have in common is checked in
``config.py``.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp32", "bf16", "fp8"]
ReductionStrategy = Literal["flat", "hierarchical", "sharded", "sharded_world"]
ReduceDtype = Literal["fp32", "bf16"]

SHARDED = ("sharded", "sharded_world")
"""Reductions after which a rank updates a shard of the weights."""


@dataclass(frozen=True)
class ModelConfig:
    """The architecture; the defaults are BERT-Large."""

    num_hidden_layers: int = 24
    hidden_size: int = 1024
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    vocab_size: int = 30522
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    layer_norm_eps: float = 1e-12
    """BERT's own; PyTorch's default is 1e-5."""
    initializer_range: float = 0.02
    """Standard deviation of the weights that are drawn."""

    def __post_init__(self) -> None:
        for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
            _at_least(1, f"model.{name}", getattr(self, name))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"model.hidden_size {self.hidden_size} is not a multiple of model.num_attention_heads "
                f"{self.num_attention_heads}"
            )
        if self.vocab_size > 65535:
            raise ValueError(f"model.vocab_size {self.vocab_size} does not fit the 16-bit token ids of the data format")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}: expected at least 0 and less than 1")


@dataclass(frozen=True)
class OptimizerConfig:
    """LAMB and its schedule, under the names of the MLPerf log."""

    base_learning_rate: float
    learning_rate_training_steps: int
    """The step at which the polynomial decay reaches 0."""
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-6
    weight_decay_rate: float = 0.01
    num_warmup_steps: int = 0
    start_warmup_step: int = 0
    """Step at which the warm-up line crosses 0: 0 or negative."""
    max_grad_norm: float = 1.0
    """Global norm that gradients are clipped to; the rules fix it at 1."""

    def __post_init__(self) -> None:
        if self.base_learning_rate <= 0:
            raise ValueError(f"optimizer.base_learning_rate is {self.base_learning_rate}: expected more than 0")
        _at_least(1, "optimizer.learning_rate_training_steps", self.learning_rate_training_steps)
        _at_least(0, "optimizer.num_warmup_steps", self.num_warmup_steps)
        if self.start_warmup_step > 0:
            raise ValueError(
                f"optimizer.start_warmup_step is {self.start_warmup_step}: expected at most 0, or first rates are negative"
            )
        for name in ("beta_1", "beta_2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} is {getattr(self, name)}: expected at least 0 and less than 1")
        # Where no gradient has ever been, the direction is 0 / epsilon.
        if self.epsilon <= 0 or self.max_grad_norm <= 0:
            raise ValueError("optimizer.epsilon and optimizer.max_grad_norm must be more than 0")


@dataclass(frozen=True)
class DataConfig:
    """Paths of the data, and their loader."""

    train: Path
    """Folder with the training shards, their manifest and length index."""
    evaluation: Path
    """Folder with the evaluation shards."""
    vocab: Path
    """The vocabulary that the shards were made with; its digest is compared with theirs."""
    initial_checkpoint: Path | None
    """Weights to start from, a safetensors file or a Hugging Face folder; None starts from random weights."""
    loader: Literal["numpy", "dali"] = "numpy"
    """numpy or dali, which needs nvidia-dali. Both give the same batches."""
    prefetch: int = 4
    """Steps that are assembled ahead."""

    def __post_init__(self) -> None:
        _at_least(1, "data.prefetch", self.prefetch)


@dataclass(frozen=True)
class TrainingConfig:
    """The batch, the length of the run, and the machine."""

    global_batch_size: int
    """Sequences an optimizer step, over all ranks."""
    max_samples: int
    """Training sequences after which a run that has not reached the target ends as aborted."""
    max_steps: int | None = None
    """The same in optimizer steps, whichever comes first."""
    max_minutes: float | None = None
    """The same in minutes since the clock started, looked at with the statistics of every log.interval_steps."""
    gradient_accumulation_steps: int = 1
    seed: int | None = None
    """Seed of sample order and dropout; by default drawn from the system's entropy (rules, section 5.1)."""
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Precision = "fp32"
    """Of matrix products; parameters are fp32. fp8: bf16, with the encoder's products in FP8 (bert/products/fp8.py)."""
    bad_intervals: int = 10
    """After so many log intervals in a row without one step whose gradients were finite, the run ends as aborted."""
    fault_seconds: float = 60.0
    """After this long without a sign of life from a rank, or with all ranks waiting for one, the run ends on all ranks. A
    phase may take ten times its longest so far, and ten times as long as this when it comes for the first time."""
    warmup_steps: int = 2
    """Steps on synthetic batches before the clock starts; every state is restored after them."""
    cuda_graphs: bool = True
    """On a GPU: pad micro-batches to a few sizes, capture the step of each before the clock starts and replay it, so that
    the host launches once where it would some thousand times. False is for finding faults, and for profiles by operator."""
    autotune: bool = True
    """On a GPU: before the clock starts, time the implementations of each op as the step will run them, and take the
    fastest. Implementations that fail are dropped."""
    reduction: Literal["auto", ReductionStrategy] = "auto"
    """How ranks add up gradients. flat: over all at once. hierarchical: inside each host, between hosts, inside again.
    sharded: hierarchical, with the optimizer divided among the ranks of a host. sharded_world: divided among all ranks.
    auto: the faster of the first two."""
    sharp: bool = False
    """Let InfiniBand switches add the gradients that hosts exchange (SHARP, by NCCL's CollNet). Needs GPUs on several hosts,
    fp32 gradients, and the reduction hierarchical, sharded or auto. NCCL sends as usual if the switches cannot."""
    reduce_dtype: ReduceDtype = "fp32"
    """The type in which gradients travel between ranks; they are added in fp32. bf16: half the bytes, more messages, and an
    error of 0.2 to 0.3 % in the norm of a tensor's gradient, at any number of ranks."""
    bucket_bytes: int = 25 * 2**20
    """Of fp32 gradients that ranks add up at once, while backward fills the next bucket. Larger ones are fewer messages, and
    a longer wait for the last."""
    recompute: Recompute = "none"
    """What the backward pass computes again for want of memory, with equal results. selective: attention, GELU and norms of
    all encoder layers but the last, which keep the products with weights. full: these layers as a whole."""
    implementations: dict[str, str] = field(default_factory=dict)
    """What computes an op, by its name, such as ``varlen_attention flash_attn``; ``python -m kernels`` lists them. It is
    taken or the run fails, whatever is faster."""

    @property
    def sample_limit(self) -> int:
        """Samples of a run that does not reach its target, by ``max_samples`` and ``max_steps``."""
        if self.max_steps is None:
            return self.max_samples
        return min(self.max_samples, self.max_steps * self.global_batch_size)

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "max_samples", "gradient_accumulation_steps"):
            _at_least(1, f"training.{name}", getattr(self, name))
        if self.max_steps is not None:
            _at_least(1, "training.max_steps", self.max_steps)
        # Negated, so that NaN is refused as well.
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise ValueError(f"training.max_minutes is {self.max_minutes}: expected more than 0")
        # One element; buckets are rounded up to what all ranks divide into aligned shards.
        _at_least(4, "training.bucket_bytes", self.bucket_bytes)
        _at_least(0, "training.warmup_steps", self.warmup_steps)
        _at_least(1, "training.bad_intervals", self.bad_intervals)
        if not 1 <= self.fault_seconds <= 3600:
            raise ValueError(f"training.fault_seconds is {self.fault_seconds}: expected 1 to 3600")
        if self.sharp:
            for name, value, refused in (
                ("device", self.device, ("cpu",)),
                ("reduction", self.reduction, ("flat", "sharded_world")),
                ("reduce_dtype", self.reduce_dtype, ("bf16",)),  # switches would round every sum of two
            ):
                if value in refused:
                    raise ValueError(
                        f"training.sharp is on, but training.{name} is {value}: change it, or turn sharp off"
                    )
        if self.seed is not None and not 0 <= self.seed < 2**31:
            raise ValueError(f"training.seed is {self.seed}: expected 0 to 2147483647")


@dataclass(frozen=True)
class ParallelConfig:
    """Division of a copy of the model among ranks."""

    tensor: int = 1
    """Ranks of a host that share a copy: heads, the feed-forward layer and the vocabulary are divided among them."""
    pipeline: int = 1
    """Stages of consecutive layers that a copy is divided into, each on parallel.tensor ranks of its own. Micro-batches go
    through them one after another (1F1B), so a step needs at least as many: training.gradient_accumulation_steps."""
    virtual_stages: int = 1
    """Stages of each rank of a pipeline. More than one (interleaved 1F1B): shorter idle times at the ends of a step, more
    messages."""

    @property
    def copy_ranks(self) -> int:
        """Ranks that share a copy of the model."""
        return self.tensor * self.pipeline

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "virtual_stages"):
            _at_least(1, f"parallel.{name}", getattr(self, name))
        if self.virtual_stages > 1 and self.pipeline == 1:
            raise ValueError(
                f"parallel.virtual_stages is {self.virtual_stages}, but parallel.pipeline is 1: set that to 2 or more, or "
                "leave both out"
            )


@dataclass(frozen=True)
class EvaluationConfig:
    """Target and times of evaluations."""

    target: float = 0.720
    """Masked-LM accuracy at which the run has succeeded."""
    to_the_end: bool = False
    """Train training.max_samples though the target is reached before; the last evaluation decides."""
    interval_samples: int | None = None
    """Training samples between evaluations; by default the MLPerf formula for the global batch size."""
    batch_size: int = 64
    """Sequences a rank evaluates at once."""

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise ValueError(f"evaluation.target is {self.target}: expected a fraction between 0 and 1")
        if self.interval_samples is not None:
            _at_least(1, "evaluation.interval_samples", self.interval_samples)
        _at_least(1, "evaluation.batch_size", self.batch_size)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints, from which a run goes on after a fault."""

    folder: Path | None = None
    """Where checkpoints are written: weights, moments and position. None: nowhere."""
    every_steps: int = 1000
    """Steps from one to the next; also when a signal ends the run."""
    keep: int = 2
    """Older ones are removed."""

    def __post_init__(self) -> None:
        _at_least(1, "checkpoint.every_steps", self.every_steps)
        _at_least(1, "checkpoint.keep", self.keep)


@dataclass(frozen=True)
class LogConfig:
    """Result file of the run: its place, and what it says of the system."""

    system: str
    """Name of the system: results go to results/<system>/bert/."""
    results: Path = Path("results")
    run: int | None = None
    """The n of result_<n>.txt; by default the first free one."""
    division: Literal["open", "closed"] = "closed"
    organization: str = "unverified"
    """submission_org of the log."""
    platform: str = ""
    """submission_platform of the log; by default the system's name."""
    status: Literal["cloud", "onprem", "preview", "research"] = "research"
    cache_cleared: bool = False
    """Whether the launcher dropped the file caches just before this run; logged as cache_clear."""
    interval_steps: int = 20
    """Steps between two lines of metrics."""
    tensorboard: Path | None = None
    """A folder for TensorBoard, which gets the metrics in <system>/result_<n>, by training samples. None: nothing. It needs
    pip install '.[tensorboard]'."""

    def __post_init__(self) -> None:
        # It names a folder, out of which nothing must lead.
        if not self.system or any(character in self.system for character in "/\\ \t\n") or self.system.startswith("."):
            raise ValueError(f"log.system {self.system!r} must be a plain name without spaces or slashes")
        _at_least(1, "log.interval_steps", self.interval_steps)
        if self.run is not None:
            _at_least(0, "log.run", self.run)


def _at_least(minimum: int, name: str, value: int) -> None:
    if value < minimum:
        raise ValueError(f"{name} is {value}: expected at least {minimum}")
