"""Named full configurations. A run is one of these, with settings changed by name on the command line.

Hyperparameters of the GPU recipes are those of published results at the same global batch size (MLPerf Training v2.0 to
v3.0; the rules allow borrowing them), and so is the format: on up to 64 H100 those ran in FP8, on more they did not.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bert.configuration.config import Config
from bert.configuration.sections import (
    DataConfig,
    EvaluationConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Precision,
    TrainingConfig,
)

ARTIFACTS = Path(__file__).resolve().parents[1] / "artifacts"
"""What ships with the program: the small default's vocabulary and phase-1 checkpoint."""


def tiny_cpu() -> Config:
    """A small BERT on the standard library's prose: minutes on two CPU cores."""
    return Config(
        recipe="tiny_cpu",
        model=tiny_model(),
        data=DataConfig(
            train=Path("data/tiny_cpu/train"),
            evaluation=Path("data/tiny_cpu/evaluation"),
            vocab=ARTIFACTS / "tiny_cpu" / "vocab.txt",
            initial_checkpoint=ARTIFACTS / "tiny_cpu" / "phase1.safetensors",
        ),
        optimizer=OptimizerConfig(
            base_learning_rate=5e-3,
            learning_rate_training_steps=3000,
            num_warmup_steps=100,
        ),
        training=TrainingConfig(global_batch_size=32, max_samples=96_000),
        evaluation=EvaluationConfig(target=0.36, interval_samples=4800),
        # Another model and target than the closed division's.
        log=LogConfig(system="tiny_cpu", division="open"),
    )


def own_text_cpu() -> Config:
    """The model of tiny_cpu on your own text.

    What is not given follows from the text (``own_text.py``, docs/own_text.md).
    """
    tiny = tiny_cpu()
    return replace(
        tiny,
        recipe="own_text_cpu",
        data=DataConfig(
            train=Path("data/own/train"),
            evaluation=Path("data/own/evaluation"),
            vocab=Path("data/own/vocab.txt"),
            initial_checkpoint=None,
        ),
        evaluation=EvaluationConfig(target=0.01, to_the_end=True, interval_samples=4800),
        log=LogConfig(system="own_text_cpu", division="open"),
    )


def tiny_model() -> ModelConfig:
    """The architecture of ``tiny_cpu``."""
    return ModelConfig(
        num_hidden_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        intermediate_size=512,
        vocab_size=1024,
        max_position_embeddings=128,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def _on_gpus(
    name: str,
    global_batch_size: int,
    optimizer: OptimizerConfig,
    max_samples: int = 4_500_000,
    gradient_accumulation_steps: int = 1,
    precision: Precision = "bf16",
) -> Config:
    """BERT-Large on Wikipedia; the name ends in nodes x GPUs a node."""
    return Config(
        recipe=name,
        model=ModelConfig(),
        data=DataConfig(
            train=Path("data/wikipedia/train"),
            evaluation=Path("data/wikipedia/evaluation"),
            vocab=Path("data/wikipedia/vocab.txt"),
            # What `bert.convert` makes of the benchmark's checkpoint (docs/checkpoints.md).
            initial_checkpoint=Path("data/wikipedia/phase1.safetensors"),
        ),
        optimizer=optimizer,
        training=TrainingConfig(
            global_batch_size,
            max_samples,
            gradient_accumulation_steps=gradient_accumulation_steps,
            device="cuda",
            precision=precision,
        ),
        evaluation=EvaluationConfig(),
        log=LogConfig(system=name),
    )


_ON_GPUS = (
    # As the v2.0 results on four A100 of ASUS, Dell and Lenovo.
    _on_gpus("h100_1x1", 256, OptimizerConfig(3.5e-4, 13700), gradient_accumulation_steps=4),
    # As NVIDIA's v3.0 result.
    _on_gpus("h100_1x8", 768, OptimizerConfig(9.6e-4, 3680, 0.60466, 0.85437, weight_decay_rate=0.1), precision="fp8"),
    # As NVIDIA's v3.0 result: even for 330 steps, then falling.
    _on_gpus(
        "h100_8x8",
        4608,
        OptimizerConfig(
            2.58e-3, 700, 0.6, 0.7, weight_decay_rate=0.1, num_warmup_steps=200_330, start_warmup_step=-200_000
        ),
        precision="fp8",
    ),
    # As NVIDIA's v3.0 result: nearly even for 500 steps, then falling.
    _on_gpus(
        "h100_64x8",
        3072,
        OptimizerConfig(2e-3, 1024, 0.62, 0.9, num_warmup_steps=10_000, start_warmup_step=-9500),
    ),
    # As CoreWeave's and NVIDIA's v3.0 result.
    _on_gpus(
        "h100_384x8",
        12288,
        OptimizerConfig(
            3.1e-3, 500, 0.8, 0.925, weight_decay_rate=0.0166629, num_warmup_steps=300, start_warmup_step=-100
        ),
        12_000_000,
    ),
    # As H3C's v2.0 result.
    _on_gpus("dgxa100_1x1", 92, OptimizerConfig(3.5e-4, 47540), gradient_accumulation_steps=2),
    # As the v2.0 results of ASUS, Dell and Lenovo.
    _on_gpus("dgxa100_1x4", 256, OptimizerConfig(3.5e-4, 13700)),
    # As NVIDIA's v2.1 result.
    _on_gpus("dgxa100_1x8", 448, OptimizerConfig(4.25e-4, 6700)),
    # As the v2.1 results of Baidu, NVIDIA and HazyResearch.
    _on_gpus("dgxa100_8x8", 3072, OptimizerConfig(2.0992e-3, 1059, 0.60466, 0.85437, weight_decay_rate=0.1)),
    # As HazyResearch's v2.1 result.
    _on_gpus("dgxa100_16x8", 3072, OptimizerConfig(2.0992e-3, 1059, 0.60466, 0.85437, weight_decay_rate=0.1)),
    # As NVIDIA's v2.1 result.
    _on_gpus(
        "dgxa100_128x8",
        4096,
        OptimizerConfig(
            2.55e-3, 820, 0.71, 0.88, weight_decay_rate=0.0166629, num_warmup_steps=256, start_warmup_step=-76
        ),
        7_000_000,
    ),
    # As NVIDIA's v2.1 result.
    _on_gpus(
        "dgxa100_512x8",
        16384,
        OptimizerConfig(
            3.3e-3, 470, 0.75, 0.9, weight_decay_rate=0.0166629, num_warmup_steps=290, start_warmup_step=-100
        ),
        12_000_000,
    ),
)


def bert_3_9b_8x8() -> Config:
    """A BERT of 3.9 billion parameters (Megatron-LM's largest, arXiv 1909.08053), on eight nodes of eight A100 of 40 GB.

    Nobody's result is behind its schedule. Each node has a copy of the model: two stages of 24 layers, on four GPUs each.
    """
    large = _on_gpus(
        "bert_3_9b_8x8", 1024, OptimizerConfig(4e-4, 4300, num_warmup_steps=430), gradient_accumulation_steps=16
    )
    return replace(
        large,
        model=ModelConfig(num_hidden_layers=48, hidden_size=2560, num_attention_heads=40, intermediate_size=10240),
        data=replace(large.data, initial_checkpoint=None),
        # What stages send one another is not captured.
        training=replace(large.training, cuda_graphs=False, reduction="sharded_world", recompute="selective"),
        # Another model than BERT-Large, which the closed division refuses.
        log=replace(large.log, division="open"),
        parallel=ParallelConfig(tensor=4, pipeline=2),
    )


RECIPES: dict[str, Callable[[], Config]] = {
    "tiny_cpu": tiny_cpu,
    "own_text_cpu": own_text_cpu,
    **{config.recipe: lambda config=config: config for config in _ON_GPUS},
    "bert_3_9b_8x8": bert_3_9b_8x8,
}


def described(name: str) -> str:
    """Describe a recipe in one line."""
    config = RECIPES[name]()
    nodes, _, gpus = name.rpartition("_")[2].partition("x")
    # Only recipes of a shape of their own are functions with a docstring.
    what = (
        (RECIPES[name].__doc__ or f"BERT-Large on Wikipedia, {nodes} nodes x {gpus} GPUs").splitlines()[0].rstrip(".")
    )
    return f"{what}; global batch {config.training.global_batch_size:,}, {config.training.precision}"
