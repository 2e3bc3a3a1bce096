"""The sections of a run's configuration, with the meaning, default and valid range of each setting.

The docstring under each field is its ``--help`` text. ``config.py`` checks combinations of settings across sections.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp32", "bf16", "fp8"]
ReductionStrategy = Literal["flat", "hierarchical", "sharded", "sharded_world"]
ReduceDtype = Literal["fp32", "bf16"]
SiteDtype = Literal["fp32", "bf16", "int8"]

SHARDED = ("sharded", "sharded_world")
"""Reduction strategies with which each rank updates only its shard of the weights."""


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of the model, by default BERT-Large."""

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
    """The default is BERT's value. PyTorch's default is 1e-5."""
    initializer_range: float = 0.02
    """Standard deviation of the random weights that training starts from, if there is no checkpoint."""

    def __post_init__(self) -> None:
        for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
            _at_least(1, f"model.{name}", getattr(self, name))
        refuse(
            self.hidden_size % self.num_attention_heads > 0,
            f"model.hidden_size is {self.hidden_size}, which model.num_attention_heads "
            f"{self.num_attention_heads} does not divide: change one of them",
        )
        refuse(
            self.vocab_size > 65535,
            f"model.vocab_size is {self.vocab_size}, expected at most 65535, because shards store ids in 16 bits",
        )
        for name in ("hidden_dropout", "attention_dropout"):
            _fraction(f"model.{name}", getattr(self, name))


@dataclass(frozen=True)
class OptimizerConfig:
    """LAMB and its learning rate schedule, with the names used in the MLPerf log."""

    base_learning_rate: float
    learning_rate_training_steps: int
    """Step at which the polynomial decay of the learning rate reaches 0."""
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-6
    weight_decay_rate: float = 0.01
    num_warmup_steps: int = 0
    start_warmup_step: int = 0
    """Step at which the linear warm-up of the learning rate starts from 0. It must be 0 or negative."""
    max_grad_norm: float = 1.0
    """Global norm to which gradients are clipped. The rules fix it at 1."""

    def __post_init__(self) -> None:
        # Epsilon must not be 0: for a parameter without any gradient so far, the update is 0 / epsilon.
        for name in ("base_learning_rate", "epsilon", "max_grad_norm"):
            refuse(getattr(self, name) <= 0, f"optimizer.{name} is {getattr(self, name)}: expected more than 0")
        _at_least(1, "optimizer.learning_rate_training_steps", self.learning_rate_training_steps)
        _at_least(0, "optimizer.num_warmup_steps", self.num_warmup_steps)
        refuse(
            self.start_warmup_step > 0,
            f"optimizer.start_warmup_step is {self.start_warmup_step}: expected at most 0, so that no rate is negative",
        )
        for name in ("beta_1", "beta_2"):
            _fraction(f"optimizer.{name}", getattr(self, name))


@dataclass(frozen=True)
class DataConfig:
    """Paths of the data, and settings of the loader."""

    train: Path
    """Folder with the training shards, their manifest and their length index."""
    evaluation: Path
    """Folder with the evaluation shards, their manifest and their length index."""
    vocab: Path
    """Vocabulary file of the shards. Its digest must match the digest in their manifest."""
    initial_checkpoint: Path | None
    """Weights to start from: a safetensors file or a Hugging Face folder. None: random weights."""
    loader: Literal["auto", "numpy", "dali"] = "auto"
    """auto: numpy or, on a GPU with nvidia-dali installed, the faster of numpy and dali. Both give the same batches."""


@dataclass(frozen=True)
class TrainingConfig:
    """The batch size, the length of the run, and how training uses the machine."""

    global_batch_size: int
    """Number of sequences per optimizer step, summed over all ranks."""
    max_samples: int
    """Number of training sequences after which a run ends. A run that has not reached its target by then is aborted."""
    max_steps: int | None = None
    """Like max_samples, but in optimizer steps. The limit that is reached first ends the run."""
    max_minutes: float | None = None
    """Like max_samples, but in minutes since the clock started. The time is checked every log.interval_steps."""
    gradient_accumulation_steps: int = 1
    seed: int | None = None
    """Seed of the sample order and of dropout. None: a random seed from the system's entropy (rules, section 5.1)."""
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Precision = "fp32"
    """Precision of matrix products. Parameters are fp32. fp8: FP8 in all encoder layers but the last, bf16 elsewhere."""
    fault_seconds: float = 60.0
    """End the run on all ranks if a rank sends no heartbeat for this many seconds, or if all other ranks wait for a
    rank that stays in a phase too long. The limit of a phase is ten times its longest duration so far, and at
    least fault_seconds. The first time, it is ten times fault_seconds."""
    cuda_graphs: bool = True
    """On a GPU: pad micro-batches to a few sizes, capture the step for each size before the clock starts, and replay
    it. This saves thousands of kernel launches. Turn it off to debug, and for profiles of single operators."""
    autotune: bool = True
    """On a GPU: before the clock starts, time the implementations of each op under the conditions of the step, and use
    the fastest. Implementations that fail are skipped."""
    reduction: Literal["auto", ReductionStrategy] = "auto"
    """How ranks sum gradients. flat: over all ranks at once. hierarchical: first inside each host, then between hosts,
    then inside each host again. sharded: like hierarchical, but the ranks of a host divide the optimizer among
    them. sharded_world: all ranks divide the optimizer among them. auto: the faster of flat and hierarchical."""
    shard_gradients: bool = False
    """With the reductions sharded and sharded_world: each rank also keeps only its shard of the gradients (ZeRO-2), which
    saves 4 bytes per parameter. With gradient accumulation, every micro-batch sends its gradients. Not possible with
    parallel.pipeline."""
    sharp: bool = False
    """Let InfiniBand switches add the gradients that hosts exchange (SHARP, through NCCL's CollNet). Needs GPUs on several
    hosts, fp32 gradients, and the reduction hierarchical, sharded or auto. If the switches do not support it, NCCL sends
    gradients as usual."""
    reduce_dtype: ReduceDtype = "fp32"
    """Type in which ranks send gradients. Gradients are always summed in fp32. bf16 halves the bytes, needs more messages,
    and causes an error of 0.2 to 0.3 % in the norm of a tensor's gradient, for any number of ranks."""
    bucket_bytes: int = 25 * 2**20
    """Size in bytes of a bucket of fp32 gradients. Ranks sum a bucket while the backward pass fills the next one. Larger
    buckets need fewer messages, but the wait for the last bucket is longer."""
    site_steps: int = 1
    """Number of steps that each site takes by itself before sites exchange the change of their weights. A site consists of
    the hosts that state the same MLPERF_BERT_SITE. 1: sites sum the gradients of every step. Set more if the links
    between sites are slow (open division only). The number must divide the number of steps between evaluations."""
    site_dtype: SiteDtype = "int8"
    """Type in which sites send the change of their weights. int8: 256 elements share a scale. The rounding error of each
    change is added to the next change."""
    site_learning_rate: float = 0.7
    """Factor by which the mean change of the sites' weights is multiplied before it is applied."""
    site_momentum: float = 0.5
    """Nesterov momentum with which the mean change of the sites' weights is applied."""
    recompute: Recompute = "none"
    """What the backward pass recomputes to save memory; results do not change. selective: attention, GELU and layer norms of
    all encoder layers except the last. full: these layers completely."""
    implementations: dict[str, str] = field(default_factory=dict)
    """Names of ops, each followed by the implementation to use, for example ``varlen_attention flash_attn``.
    ``python -m kernels`` lists the implementations. The run fails if an implementation cannot be used."""

    @property
    def sample_limit(self) -> int:
        """Number of samples after which a run ends even if it has not reached its target."""
        if self.max_steps is None:
            return self.max_samples
        return min(self.max_samples, self.max_steps * self.global_batch_size)

    @property
    def site_delay(self) -> int:
        """Number of steps that a site takes while an exchange is in progress, before it applies the result."""
        return self.site_steps // 2

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "max_samples", "max_steps", "gradient_accumulation_steps"):
            _at_least(1, f"training.{name}", getattr(self, name))
        _at_least(1, "training.site_steps", self.site_steps)
        _fraction("training.site_momentum", self.site_momentum)
        refuse(
            self.site_learning_rate <= 0,
            f"training.site_learning_rate is {self.site_learning_rate}: expected more than 0",
        )
        # The minimum is one fp32 element. Bucket sizes are rounded up later, so that all ranks get equal, aligned shards.
        _at_least(4, "training.bucket_bytes", self.bucket_bytes)
        # The comparison is negated so that NaN is refused as well.
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
        names = [*self.implementations, *self.implementations.values()]
        odd = next((name for name in names if not re.fullmatch(r"\w+", name, re.ASCII)), None)
        refuse(odd is not None, f"training.implementations holds {odd!r}: expected names of ops and implementations")
        refuse(
            self.shard_gradients and self.reduction not in SHARDED,
            f"training.shard_gradients is on, but with training.reduction {self.reduction} every rank needs all "
            "gradients: set training.reduction to sharded or sharded_world, or leave shard_gradients out",
        )
        for name, value, refused in (
            ("device", self.device, ("cpu",)),
            ("reduction", self.reduction, ("flat", "sharded_world")),
            ("reduce_dtype", self.reduce_dtype, ("bf16",)),  # switches would round partial sums to bf16
        ):
            refuse(
                self.sharp and value in refused,
                f"training.sharp is on, but training.{name} is {value}: change it, or turn sharp off",
            )


@dataclass(frozen=True)
class ParallelConfig:
    """How a copy of the model is divided among ranks."""

    tensor: int = 1
    """Number of ranks on a host that share each layer. They divide the heads, the feed-forward layer and the vocabulary."""
    pipeline: int = 1
    """Number of stages of consecutive layers into which a copy of the model is divided, each on parallel.tensor ranks.
    Micro-batches pass through the stages one after another (1F1B), so training.gradient_accumulation_steps must be at
    least parallel.pipeline."""
    virtual_stages: int = 1
    """Number of pipeline stages per rank. More than one (interleaved 1F1B) means less idle time at the beginning and end
    of a step, but more messages."""

    @property
    def copy_ranks(self) -> int:
        """Number of ranks that share a copy of the model."""
        return self.tensor * self.pipeline

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "virtual_stages"):
            _at_least(1, f"parallel.{name}", getattr(self, name))
        refuse(
            self.virtual_stages > 1 and self.pipeline == 1,
            f"parallel.virtual_stages is {self.virtual_stages}, but parallel.pipeline is 1: set parallel.pipeline to 2 "
            "or more, or leave both settings out",
        )


@dataclass(frozen=True)
class EvaluationConfig:
    """Target accuracy, and how often and how evaluations run."""

    target: float | None = 0.720
    """Masked-LM accuracy that ends the run as a success. None: the run is a success after training.max_samples sequences,
    and save_checkpoint keeps the weights of the best evaluation."""
    interval_samples: int | None = None
    """Number of training samples between evaluations. None: the MLPerf formula for the global batch size."""
    batch_size: int = 64
    """Number of sequences that a rank evaluates at once."""
    unknown_tokens: bool = True
    """Count masked tokens that are [UNK], as the benchmark does. They are easy to guess if the vocabulary lacks many words
    of the text."""

    def __post_init__(self) -> None:
        refuse(
            self.target is not None and not 0 < self.target < 1,
            f"evaluation.target is {self.target}: expected a fraction between 0 and 1, or None",
        )
        _at_least(1, "evaluation.interval_samples", self.interval_samples)
        _at_least(1, "evaluation.batch_size", self.batch_size)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints, from which a run can continue after a fault."""

    folder: Path | None = None
    """Folder for checkpoints, which contain the weights, the optimizer's moments and the position. None: no checkpoints."""
    every_steps: int = 1000
    """Number of steps between checkpoints. A checkpoint is also written when a signal ends the run."""
    keep: int = 2
    """Number of checkpoints to keep. Older checkpoints are removed."""

    def __post_init__(self) -> None:
        _at_least(1, "checkpoint.every_steps", self.every_steps)
        _at_least(1, "checkpoint.keep", self.keep)


@dataclass(frozen=True)
class LogConfig:
    """Location of the result file, and the statements about the system in it."""

    system: str
    """Name of the system. Results are written to results/<system>/bert/."""
    results: Path = Path("results")
    run: int | None = None
    """The number n of result_<n>.txt. None: the lowest free number."""
    division: Literal["open", "closed"] = "closed"
    organization: str = "unverified"
    """Value of submission_org in the log."""
    platform: str = ""
    """Value of submission_platform in the log. It must resemble system_name in the system description. By default, it is the
    system's name."""
    status: Literal["cloud", "onprem", "preview", "research"] = "research"
    cache_cleared: bool = False
    """Whether the launcher dropped the file caches before this run. It is logged as cache_clear."""
    interval_steps: int = 20
    """Number of steps between two lines of metrics."""
    tensorboard: Path | None = None
    """Folder for TensorBoard. The metrics over training samples are written to <system>/result_<n> inside it. Needs
    pip install '.[tensorboard]'."""

    def __post_init__(self) -> None:
        # The name becomes a folder name, so it must not lead out of the results folder.
        refuse(
            not self.system or set(self.system) & set("/\\ \t\n") != set() or self.system.startswith("."),
            f"log.system is {self.system!r}: expected a plain name without spaces or slashes",
        )
        _at_least(1, "log.interval_steps", self.interval_steps)
        _at_least(0, "log.run", self.run)

    @property
    def folder(self) -> Path:
        """Folder of the result files."""
        return self.results / self.system / "bert"


def refuse(is_wrong: bool, message: str) -> None:
    if is_wrong:
        raise ValueError(message)


def _at_least(minimum: int, name: str, value: int | None) -> None:
    refuse(value is not None and value < minimum, f"{name} is {value}: expected at least {minimum}")


def _fraction(name: str, value: float) -> None:
    refuse(not 0 <= value < 1, f"{name} is {value}: expected at least 0 and less than 1")
