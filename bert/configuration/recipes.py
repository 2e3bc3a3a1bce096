"""Named full configurations. A run is one of these, with settings changed by name on the command line.

Hyperparameters of the GPU recipes are those of published results at the same global batch size (MLPerf Training v2.0 to
v3.0; the rules allow borrowing them), and so is the format: on up to 64 H100 those ran in FP8, on more they did not.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bert.configuration.config import (
    Config,
    DataConfig,
    EvaluationConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)

ARTIFACTS = Path(__file__).resolve().parents[1] / "artifacts"
"""What ships with the program: the small default's vocabulary and phase-1 checkpoint."""


def tiny_cpu() -> Config:
    """The built-in default: a small BERT on the standard library's prose, minutes on two CPU cores."""
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
        log=LogConfig(system="tiny_cpu", division="open"),
    )


def own_text_cpu() -> Config:
    """``tiny_cpu`` on one's own text (docs/own_text.md): what is not given follows from it (``own_text.py``)."""
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


def h100_1x1() -> Config:
    """BERT-Large on one H100, with the schedule of the v2.0 results on four A100 of ASUS, Dell and Lenovo."""
    return _bert_large(
        "h100_1x1",
        OptimizerConfig(3.5e-4, 13700),
        TrainingConfig(256, 4_500_000, gradient_accumulation_steps=4, device="cuda", precision="bf16"),
    )


def h100_1x8() -> Config:
    """BERT-Large on one node of eight H100, in FP8, as NVIDIA's v3.0 result."""
    return _bert_large(
        "h100_1x8",
        OptimizerConfig(9.6e-4, 3680, beta_1=0.60466, beta_2=0.85437, weight_decay_rate=0.1),
        TrainingConfig(768, 4_500_000, device="cuda", precision="fp8"),
    )


def h100_8x8() -> Config:
    """BERT-Large on eight nodes of eight H100, in FP8, as NVIDIA's v3.0 result: even for 330 steps, then falling."""
    return _bert_large(
        "h100_8x8",
        OptimizerConfig(
            2.58e-3,
            700,
            beta_1=0.6,
            beta_2=0.7,
            weight_decay_rate=0.1,
            num_warmup_steps=200_330,
            start_warmup_step=-200_000,
        ),
        TrainingConfig(4608, 4_500_000, device="cuda", precision="fp8"),
    )


def h100_64x8() -> Config:
    """BERT-Large on 64 nodes of eight H100, as NVIDIA's v3.0 result: nearly even for 500 steps, then falling."""
    return _bert_large(
        "h100_64x8",
        OptimizerConfig(
            2e-3,
            1024,
            beta_1=0.62,
            beta_2=0.9,
            weight_decay_rate=0.01,
            num_warmup_steps=10_000,
            start_warmup_step=-9500,
        ),
        TrainingConfig(3072, 4_500_000, device="cuda", precision="bf16"),
    )


def h100_384x8() -> Config:
    """BERT-Large on 384 nodes of eight H100, with the schedule of CoreWeave's and NVIDIA's v3.0 result."""
    return _bert_large(
        "h100_384x8",
        OptimizerConfig(
            3.1e-3,
            500,
            beta_1=0.8,
            beta_2=0.925,
            weight_decay_rate=0.0166629,
            num_warmup_steps=300,
            start_warmup_step=-100,
        ),
        TrainingConfig(12288, 12_000_000, device="cuda", precision="bf16"),
    )


def dgxa100_1x1() -> Config:
    """BERT-Large on one A100, with the schedule of H3C's v2.0 result."""
    return _bert_large(
        "dgxa100_1x1",
        OptimizerConfig(3.5e-4, 47540),
        TrainingConfig(92, 4_500_000, gradient_accumulation_steps=2, device="cuda", precision="bf16"),
    )


def dgxa100_1x4() -> Config:
    """BERT-Large on four A100, with the schedule of the v2.0 results of ASUS, Dell and Lenovo."""
    return _bert_large(
        "dgxa100_1x4",
        OptimizerConfig(3.5e-4, 13700),
        TrainingConfig(256, 4_500_000, device="cuda", precision="bf16"),
    )


def dgxa100_1x8() -> Config:
    """BERT-Large on one node of eight A100, with the schedule of NVIDIA's v2.1 result."""
    return _bert_large(
        "dgxa100_1x8",
        OptimizerConfig(4.25e-4, 6700),
        TrainingConfig(448, 4_500_000, device="cuda", precision="bf16"),
    )


def dgxa100_8x8() -> Config:
    """BERT-Large on eight nodes of eight A100, with the schedule of the v2.1 results of Baidu, NVIDIA and HazyResearch."""
    return _bert_large(
        "dgxa100_8x8",
        OptimizerConfig(2.0992e-3, 1059, beta_1=0.60466, beta_2=0.85437, weight_decay_rate=0.1),
        TrainingConfig(3072, 4_500_000, device="cuda", precision="bf16"),
    )


def dgxa100_16x8() -> Config:
    """BERT-Large on 16 nodes of eight A100, with the schedule of HazyResearch's v2.1 result."""
    return _bert_large(
        "dgxa100_16x8",
        OptimizerConfig(2.0992e-3, 1059, beta_1=0.60466, beta_2=0.85437, weight_decay_rate=0.1),
        TrainingConfig(3072, 4_500_000, device="cuda", precision="bf16"),
    )


def dgxa100_128x8() -> Config:
    """BERT-Large on 128 nodes of eight A100, with the schedule of NVIDIA's v2.1 result."""
    return _bert_large(
        "dgxa100_128x8",
        OptimizerConfig(
            2.55e-3,
            820,
            beta_1=0.71,
            beta_2=0.88,
            weight_decay_rate=0.0166629,
            num_warmup_steps=256,
            start_warmup_step=-76,
        ),
        TrainingConfig(4096, 7_000_000, device="cuda", precision="bf16"),
    )


def dgxa100_512x8() -> Config:
    """BERT-Large on 512 nodes of eight A100, with the schedule of NVIDIA's v2.1 result."""
    return _bert_large(
        "dgxa100_512x8",
        OptimizerConfig(
            3.3e-3,
            470,
            beta_1=0.75,
            beta_2=0.9,
            weight_decay_rate=0.0166629,
            num_warmup_steps=290,
            start_warmup_step=-100,
        ),
        TrainingConfig(16384, 12_000_000, device="cuda", precision="bf16"),
    )


def bert_3_9b_8x8() -> Config:
    """A BERT of 3.9 billion parameters (Megatron-LM's largest, arXiv 1909.08053), on eight nodes of eight A100 of 40 GB.

    Nobody's result is behind its schedule. Each node has a copy of the model: two stages of 24 layers, on four GPUs each.
    """
    large = _bert_large(
        "bert_3_9b_8x8",
        OptimizerConfig(4e-4, 4300, num_warmup_steps=430),
        TrainingConfig(
            1024,
            4_500_000,
            gradient_accumulation_steps=16,
            device="cuda",
            precision="bf16",
            cuda_graphs=False,
            reduction="sharded_world",
            recompute="selective",
        ),
    )
    return replace(
        large,
        model=ModelConfig(num_hidden_layers=48, hidden_size=2560, num_attention_heads=40, intermediate_size=10240),
        data=replace(large.data, initial_checkpoint=None),
        log=replace(large.log, division="open"),
        parallel=ParallelConfig(tensor=4, pipeline=2),
    )


def _bert_large(name: str, optimizer: OptimizerConfig, training: TrainingConfig) -> Config:
    return Config(
        recipe=name,
        model=ModelConfig(),
        data=DataConfig(
            train=Path("data/wikipedia/train"),
            evaluation=Path("data/wikipedia/evaluation"),
            vocab=Path("data/wikipedia/vocab.txt"),
            initial_checkpoint=Path("data/wikipedia/phase1.safetensors"),
        ),
        optimizer=optimizer,
        training=training,
        evaluation=EvaluationConfig(),
        log=LogConfig(system=name),
    )


RECIPES: dict[str, Callable[[], Config]] = {
    recipe.__name__: recipe
    for recipe in (
        tiny_cpu,
        own_text_cpu,
        h100_1x1,
        h100_1x8,
        h100_8x8,
        h100_64x8,
        h100_384x8,
        dgxa100_1x1,
        dgxa100_1x4,
        dgxa100_1x8,
        dgxa100_8x8,
        dgxa100_16x8,
        dgxa100_128x8,
        dgxa100_512x8,
        bert_3_9b_8x8,
    )
}
