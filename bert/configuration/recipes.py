"""Recipes: named, complete configurations. Each setting can be overridden on the command line.

The GPU recipes use the hyperparameters and the precision of published results that have the same global batch
size. The rules allow this.
"""

import re
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
from console.text import counted

ARTIFACTS = Path(__file__).resolve().parents[1] / "artifacts"
"""Folder with the vocabulary and the phase-1 checkpoint of ``tiny_cpu``, which ship with the program."""


def tiny_cpu() -> Config:
    """A small BERT on the prose of Python's standard library, trained within minutes on two CPU cores."""
    return Config(
        recipe="tiny_cpu",
        model=ModelConfig(2, 128, 4, 512, 1024, 128, hidden_dropout=0.0, attention_dropout=0.0),
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
        # This model needs the open division, because the closed one requires BERT-Large and a higher target.
        log=LogConfig(system="tiny_cpu", division="open"),
    )


def own_text_cpu() -> Config:
    """The model of tiny_cpu on your own text.

    Settings that are not given are derived from the text (``derived_settings.py``, docs/own_text.md).
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
        evaluation=EvaluationConfig(target=None, interval_samples=4800, unknown_tokens=False),
        log=LogConfig(system="own_text_cpu", division="open"),
    )


def _on_gpus(
    name: str,
    global_batch_size: int,
    accumulation: int,
    optimizer: OptimizerConfig,
    max_samples: int = 4_500_000,
    precision: Precision = "bf16",
) -> Config:
    """Return a recipe for BERT-Large on Wikipedia. Its ``name`` ends with the nodes and GPUs per node, such as 8x8."""
    return Config(
        recipe=name,
        model=ModelConfig(),
        data=DataConfig(
            train=Path("data/wikipedia/train"),
            evaluation=Path("data/wikipedia/evaluation"),
            vocab=Path("data/wikipedia/vocab.txt"),
            # `bert.convert` creates this file from the benchmark's checkpoint (docs/checkpoints.md).
            initial_checkpoint=Path("data/wikipedia/phase1.safetensors"),
        ),
        optimizer=optimizer,
        training=TrainingConfig(
            global_batch_size,
            max_samples,
            gradient_accumulation_steps=accumulation,
            device="cuda",
            precision=precision,
        ),
        evaluation=EvaluationConfig(),
        log=LogConfig(system=name),
    )


# `OptimizerConfig` takes the learning rate, its last step, beta_1, beta_2, epsilon, the weight decay, the number of warm-up
# steps, and the step at which the warm-up starts.
_NVIDIA = (0.60466, 0.85437)
"""Values of beta_1 and beta_2."""
# The warm-up starts far before step 0, so the learning rate is nearly constant for 330 steps. Then it falls.
_NVIDIA_4608 = OptimizerConfig(2.58e-3, 700, 0.6, 0.7, 1e-6, 0.1, 200_330, -200_000)
_ON_GPUS = (
    # The hyperparameters are from the result of ASUS, Dell and Lenovo in round v2.0, on four A100.
    _on_gpus("h100_1x1", 256, 4, OptimizerConfig(3.5e-4, 13700)),
    # The hyperparameters are from NVIDIA's result of round v3.0.
    _on_gpus("h100_1x8", 768, 1, OptimizerConfig(9.6e-4, 3680, *_NVIDIA, 1e-6, 0.1), precision="fp8"),
    # The hyperparameters are from NVIDIA's result of round v3.0.
    _on_gpus("h100_8x8", 4608, 1, _NVIDIA_4608, precision="fp8"),
    # The hyperparameters are from NVIDIA's result of round v3.0. The learning rate is nearly constant for
    # 500 steps and then falls.
    _on_gpus("h100_64x8", 3072, 1, OptimizerConfig(2e-3, 1024, 0.62, 0.9, 1e-6, 0.01, 10_000, -9500)),
    # The hyperparameters are from CoreWeave and NVIDIA's result of round v3.0.
    _on_gpus("h100_384x8", 12288, 1, OptimizerConfig(3.1e-3, 500, 0.8, 0.925, 1e-6, 0.0166629, 300, -100), 12_000_000),
    # The hyperparameters are from NVIDIA's result of round v5.0.
    _on_gpus("b200_1x8", 768, 1, OptimizerConfig(9.6e-4, 3680, *_NVIDIA, 1e-6, 0.1), precision="fp8"),
    # The hyperparameters are from NVIDIA's result of round v3.0 on H100. A result of round v5.0 on 64 GB200 has the same
    # batch size, but it does not state when the warm-up starts.
    _on_gpus("gb200_18x4", 4608, 1, _NVIDIA_4608, precision="fp8"),
    # The hyperparameters are from H3C's result of round v2.0.
    _on_gpus("dgxa100_1x1", 92, 2, OptimizerConfig(3.5e-4, 47540)),
    # The hyperparameters are from the result of ASUS, Dell and Lenovo in round v2.0.
    _on_gpus("dgxa100_1x4", 256, 1, OptimizerConfig(3.5e-4, 13700)),
    # The hyperparameters are from NVIDIA's result of round v2.1.
    _on_gpus("dgxa100_1x8", 448, 1, OptimizerConfig(4.25e-4, 6700)),
    # The hyperparameters are from the result of Baidu, NVIDIA and HazyResearch in round v2.1.
    _on_gpus("dgxa100_8x8", 3072, 1, OptimizerConfig(2.0992e-3, 1059, *_NVIDIA, 1e-6, 0.1)),
    # The hyperparameters are from HazyResearch's result of round v2.1.
    _on_gpus("dgxa100_16x8", 3072, 1, OptimizerConfig(2.0992e-3, 1059, *_NVIDIA, 1e-6, 0.1)),
    # The hyperparameters are from NVIDIA's result of round v2.1.
    _on_gpus("dgxa100_128x8", 4096, 1, OptimizerConfig(2.55e-3, 820, 0.71, 0.88, 1e-6, 0.0166629, 256, -76), 7_000_000),
    # The hyperparameters are from NVIDIA's result of round v2.1.
    _on_gpus(
        "dgxa100_512x8", 16384, 1, OptimizerConfig(3.3e-3, 470, 0.75, 0.9, 1e-6, 0.0166629, 290, -100), 12_000_000
    ),
)
"""Recipes with the hyperparameters of published MLPerf Training results. The comments name the submitters and rounds."""


def bert_3_9b_8x8() -> Config:
    """A BERT of 3.9 billion parameters (Megatron-LM's largest, arXiv 1909.08053), on 8 nodes of 8 A100 with 40 GB each.

    Its learning rate schedule is not from a published result. Each node has one copy of the model, which is divided into
    two pipeline stages of 24 layers on four GPUs each.
    """
    large = _on_gpus("bert_3_9b_8x8", 1024, 16, OptimizerConfig(4e-4, 4300, num_warmup_steps=430))
    return replace(
        large,
        model=ModelConfig(num_hidden_layers=48, hidden_size=2560, num_attention_heads=40, intermediate_size=10240),
        data=replace(large.data, initial_checkpoint=None),
        # CUDA graphs are off, because they cannot capture the exchanges between pipeline stages.
        training=replace(large.training, cuda_graphs=False, reduction="sharded_world", recompute="selective"),
        # This model needs the open division, because the closed one requires BERT-Large.
        log=replace(large.log, division="open"),
        parallel=ParallelConfig(tensor=4, pipeline=2),
    )


RECIPES: dict[str, Callable[[], Config]] = {
    "tiny_cpu": tiny_cpu,
    "own_text_cpu": own_text_cpu,
    **{config.recipe: lambda config=config: config for config in _ON_GPUS},
    "bert_3_9b_8x8": bert_3_9b_8x8,
}


def shape_of(name: str) -> tuple[int, int] | None:
    """Return the nodes and the GPUs per node in a recipe's name: (384, 8) for ``h100_384x8``, and None for ``tiny_cpu``."""
    sized = re.fullmatch(r"\w+_(\d+)x(\d+)", name, re.ASCII)
    return (int(sized[1]), int(sized[2])) if sized else None


def described(name: str) -> str:
    config, (nodes, gpus) = RECIPES[name](), shape_of(name) or (1, 1)
    # Recipes of BERT-Large have no docstring, so describe them by their shape.
    what = RECIPES[name].__doc__ or f"BERT-Large on Wikipedia, {counted(nodes, 'node')} x {counted(gpus, 'GPU')}"
    what = what.splitlines()[0].rstrip(".")
    return f"{what}; global batch {config.training.global_batch_size:,}, {config.training.precision}"
