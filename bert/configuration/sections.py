"""The sections of a run's configuration: each setting's meaning, default and range.

The docstring under each field is its ``--help`` text. ``config.py`` checks settings of several sections together.
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
    """BERT's value; PyTorch's default is 1e-5."""
    initializer_range: float = 0.02
    """Standard deviation of random weights."""

    def __post_init__(self) -> None:
        for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
            _at_least(1, f"model.{name}", getattr(self, name))
        refuse(
            self.hidden_size % self.num_attention_heads > 0,
            f"model.hidden_size is {self.hidden_size}, expected a multiple of model.num_attention_heads "
            f"{self.num_attention_heads}",
        )
        refuse(
            self.vocab_size > 65535, f"model.vocab_size is {self.vocab_size}, expected at most 65535: ids have 16 bits"
        )
        for name in ("hidden_dropout", "attention_dropout"):
            _fraction(f"model.{name}", getattr(self, name))


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
        # If no gradient has ever been, the direction is 0 / epsilon.
        for name in ("base_learning_rate", "epsilon", "max_grad_norm"):
            refuse(getattr(self, name) <= 0, f"optimizer.{name} is {getattr(self, name)}: expected more than 0")
        _at_least(1, "optimizer.learning_rate_training_steps", self.learning_rate_training_steps)
        _at_least(0, "optimizer.num_warmup_steps", self.num_warmup_steps)
        refuse(
            self.start_warmup_step > 0,
            f"optimizer.start_warmup_step is {self.start_warmup_step}: expected at most 0, or first rates are negative",
        )
        for name in ("beta_1", "beta_2"):
            _fraction(f"optimizer.{name}", getattr(self, name))


@dataclass(frozen=True)
class DataConfig:
    """Paths of the data, and the loader."""

    train: Path
    """Folder with the training shards, their manifest and length index."""
    evaluation: Path
    """Folder with the evaluation shards."""
    vocab: Path
    """The vocabulary of the shards. Its digest is compared with the digest in their manifest."""
    initial_checkpoint: Path | None
    """Weights to start from: a safetensors file or a Hugging Face folder. None: random weights."""
    loader: Literal["auto", "numpy", "dali"] = "auto"
    """auto: on a GPU the faster of both, if nvidia-dali is installed; otherwise numpy. Both give the same batches."""
    prefetch: int = 4
    """Number of steps that the loader prepares ahead."""

    def __post_init__(self) -> None:
        _at_least(1, "data.prefetch", self.prefetch)


@dataclass(frozen=True)
class TrainingConfig:
    """The batch, the length of the run, and the machine."""

    global_batch_size: int
    """Sequences of an optimizer step, over all ranks."""
    max_samples: int
    """Training sequences after which a run ends as aborted if it has not reached the target."""
    max_steps: int | None = None
    """The same in optimizer steps, whichever comes first."""
    max_minutes: float | None = None
    """The same in minutes since the clock started, checked every log.interval_steps."""
    gradient_accumulation_steps: int = 1
    seed: int | None = None
    """Seed of sample order and dropout. None: drawn from the system's entropy (rules, section 5.1)."""
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Precision = "fp32"
    """Precision of matrix products; parameters are fp32. fp8: bf16, with the encoder's products in FP8."""
    bad_intervals: int = 10
    """End the run as aborted after so many log intervals in a row in which no step had finite gradients."""
    fault_seconds: float = 60.0
    """Timeout of a rank's heartbeat, and of progress while all ranks wait for one; then the run ends on all ranks. A
    phase may take ten times its longest duration so far, and ten times the timeout when it comes for the first time."""
    warmup_steps: int = 2
    """Steps on synthetic batches before the clock starts, after which all state is restored."""
    cuda_graphs: bool = True
    """On a GPU: pad micro-batches to a few sizes, capture the step for each size before the clock starts, and replay
    it, which saves thousands of launches. False is for debugging, and for profiles by operator."""
    autotune: bool = True
    """On a GPU: before the clock starts, time the implementations of each op as the step will run them, and use the
    fastest. Implementations that fail are dropped."""
    reduction: Literal["auto", ReductionStrategy] = "auto"
    """How ranks sum gradients. flat: over all at once. hierarchical: inside each host, between hosts, inside again.
    sharded: hierarchical, with the optimizer divided among the ranks of a host. sharded_world: divided among all ranks.
    auto: the faster of the first two."""
    shard_gradients: bool = False
    """With sharded and sharded_world: a rank also keeps only its shard of the gradients (ZeRO-2), which saves 4 bytes a
    parameter. With gradient accumulation, every micro-batch sends its gradients. Not with parallel.pipeline."""
    sharp: bool = False
    """Let InfiniBand switches add the gradients that hosts exchange (SHARP, by NCCL's CollNet). Needs GPUs on several hosts,
    fp32 gradients, and the reduction hierarchical, sharded or auto. NCCL sends as usual if the switches cannot."""
    reduce_dtype: ReduceDtype = "fp32"
    """Type in which gradients are sent between ranks; they are summed in fp32. bf16: half the bytes, more messages, and
    an error of 0.2 to 0.3 % in the norm of a tensor's gradient, at any number of ranks."""
    bucket_bytes: int = 25 * 2**20
    """Size of a bucket of fp32 gradients, which ranks sum while backward fills the next bucket. Larger buckets are
    fewer messages, and a longer wait for the last one."""
    recompute: Recompute = "none"
    """What the backward pass computes again to save memory, with equal results. selective: attention, GELU and norms of
    all encoder layers but the last. full: these layers as a whole."""
    implementations: dict[str, str] = field(default_factory=dict)
    """Implementation of an op by the op's name, such as ``varlen_attention flash_attn``; ``python -m kernels`` lists
    them. The run fails if it cannot be used."""

    @property
    def sample_limit(self) -> int:
        """Training samples of a run that does not reach its target."""
        if self.max_steps is None:
            return self.max_samples
        return min(self.max_samples, self.max_steps * self.global_batch_size)

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "max_samples", "max_steps", "gradient_accumulation_steps", "bad_intervals"):
            _at_least(1, f"training.{name}", getattr(self, name))
        # One element. Buckets are rounded up to aligned shards for all ranks.
        _at_least(4, "training.bucket_bytes", self.bucket_bytes)
        _at_least(0, "training.warmup_steps", self.warmup_steps)
        # Negated, so that NaN is refused as well.
        refuse(
            self.max_minutes is not None and not self.max_minutes > 0,
            f"training.max_minutes is {self.max_minutes}: expected more than 0",
        )
        refuse(
            not 1 <= self.fault_seconds <= 3600, f"training.fault_seconds is {self.fault_seconds}: expected 1 to 3600"
        )
        refuse(
            self.seed is not None and not 0 <= self.seed < 2**31,
            f"training.seed is {self.seed}: expected 0 to 2147483647",
        )
        refuse(
            self.shard_gradients and self.reduction not in SHARDED,
            f"training.shard_gradients is on, but training.reduction is {self.reduction}, after which every rank needs all "
            "gradients: set training.reduction to sharded or sharded_world, or leave shard_gradients out",
        )
        for name, value, refused in (
            ("device", self.device, ("cpu",)),
            ("reduction", self.reduction, ("flat", "sharded_world")),
            ("reduce_dtype", self.reduce_dtype, ("bf16",)),  # switches would round every sum of two
        ):
            refuse(
                self.sharp and value in refused,
                f"training.sharp is on, but training.{name} is {value}: change it, or turn sharp off",
            )


@dataclass(frozen=True)
class ParallelConfig:
    """Division of a copy of the model among ranks."""

    tensor: int = 1
    """Number of ranks of a host that share a copy: they divide heads, feed-forward layer and vocabulary."""
    pipeline: int = 1
    """Number of stages of consecutive layers that a copy is divided into, each on parallel.tensor ranks. Micro-batches
    pass through them one after another (1F1B), so training.gradient_accumulation_steps must be at least as large."""
    virtual_stages: int = 1
    """Stages per rank of a pipeline. More than one (interleaved 1F1B): less idle time at the ends of a step, more
    messages."""

    @property
    def copy_ranks(self) -> int:
        """Ranks that share a copy of the model."""
        return self.tensor * self.pipeline

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "virtual_stages"):
            _at_least(1, f"parallel.{name}", getattr(self, name))
        refuse(
            self.virtual_stages > 1 and self.pipeline == 1,
            f"parallel.virtual_stages is {self.virtual_stages}, but parallel.pipeline is 1: set that to 2 or more, or "
            "leave both out",
        )


@dataclass(frozen=True)
class EvaluationConfig:
    """Target and times of evaluations."""

    target: float = 0.720
    """Masked-LM accuracy that ends the run as a success."""
    to_the_end: bool = False
    """Train training.max_samples even if the target is reached earlier; the last evaluation decides."""
    interval_samples: int | None = None
    """Training samples between evaluations. None: the MLPerf formula for the global batch size."""
    batch_size: int = 64
    """Sequences that a rank evaluates at once."""

    def __post_init__(self) -> None:
        refuse(not 0 < self.target < 1, f"evaluation.target is {self.target}: expected a fraction between 0 and 1")
        _at_least(1, "evaluation.interval_samples", self.interval_samples)
        _at_least(1, "evaluation.batch_size", self.batch_size)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints, from which a run continues after a fault."""

    folder: Path | None = None
    """Folder for checkpoints: weights, moments and position. None: no checkpoints."""
    every_steps: int = 1000
    """Steps between checkpoints. One is also written when a signal ends the run."""
    keep: int = 2
    """Number of checkpoints to keep; older ones are removed."""

    def __post_init__(self) -> None:
        _at_least(1, "checkpoint.every_steps", self.every_steps)
        _at_least(1, "checkpoint.keep", self.keep)


@dataclass(frozen=True)
class LogConfig:
    """Result file of the run, and its description of the system."""

    system: str
    """Name of the system. Results go to results/<system>/bert/."""
    results: Path = Path("results")
    run: int | None = None
    """The n of result_<n>.txt. None: the first free number."""
    division: Literal["open", "closed"] = "closed"
    organization: str = "unverified"
    """submission_org of the log."""
    platform: str = ""
    """submission_platform of the log; by default the system's name."""
    status: Literal["cloud", "onprem", "preview", "research"] = "research"
    cache_cleared: bool = False
    """Whether the launcher dropped the file caches before this run; logged as cache_clear."""
    interval_steps: int = 20
    """Steps between two lines of metrics."""
    tensorboard: Path | None = None
    """Folder for TensorBoard, with the metrics by training samples in <system>/result_<n>. It needs
    pip install '.[tensorboard]'."""

    def __post_init__(self) -> None:
        # It names a folder, out of which nothing may lead.
        refuse(
            not self.system or set(self.system) & set("/\\ \t\n") != set() or self.system.startswith("."),
            f"log.system is {self.system!r}: expected a plain name without spaces or slashes",
        )
        _at_least(1, "log.interval_steps", self.interval_steps)
        _at_least(0, "log.run", self.run)


def refuse(is_wrong: bool, message: str) -> None:
    """Raise ``ValueError`` if a setting is wrong."""
    if is_wrong:
        raise ValueError(message)


def _at_least(minimum: int, name: str, value: int | None) -> None:
    refuse(value is not None and value < minimum, f"{name} is {value}: expected at least {minimum}")


def _fraction(name: str, value: float) -> None:
    refuse(not 0 <= value < 1, f"{name} is {value}: expected at least 0 and less than 1")
