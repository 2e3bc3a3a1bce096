"""Wrong settings are rejected before any work, in a message that names the setting to change."""

from dataclasses import replace

import pytest
import torch

import bert.evaluate
import bert.train
from bert.configuration.recipes import tiny_cpu
from bert.train import OLDEST_TORCH, parse, require_torch
from tests.conftest import REPOSITORY


def test_settings_are_changed_by_name() -> None:
    """Names may have hyphens or underscores."""
    given = "--optimizer.base-learning-rate=0.001 --training.global_batch_size 64 --data.loader dali"
    recipe, config = tiny_cpu(), parse(f"tiny_cpu {given} --training.implementations dense_gelu reference".split())
    training = replace(recipe.training, global_batch_size=64, implementations={"dense_gelu": "reference"})
    optimizer, data = replace(recipe.optimizer, base_learning_rate=0.001), replace(recipe.data, loader="dali")
    assert config == replace(recipe, optimizer=optimizer, training=training, data=data)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "no recipe given: expected one of tiny_cpu"),
        ("tiny", "unknown recipe 'tiny'"),
        ("tiny_cpu --training.global-batch-size 0", "training.global_batch_size is 0"),
        ("tiny_cpu --training.global-batch-size many", "--training.global-batch-size is 'many', expected a whole"),
        ("tiny_cpu --training.seed abc", "--training.seed is 'abc', expected a whole number or None"),
        ("tiny_cpu --optimizer.epsilon tiny", "--optimizer.epsilon is 'tiny', expected a number"),
        ("tiny_cpu --no-such-setting 1", "no-such-setting"),
        ("--hlep", "there is no option --hlep; did you mean --help?"),
        ("tiny_cpu --hlep", "there is no setting --hlep; did you mean --help?"),
        ("tiny_cpu stray", "unexpected argument 'stray': expected settings"),
        ("tiny_cpu --seed 1", "--seed; did you mean --training.seed?"),
        ("tiny_cpu --model.hidden-size 130", "multiple of model.num_attention_heads"),
        ("tiny_cpu --model.hidden-dropout 1", "model.hidden_dropout"),
        ("tiny_cpu --model.vocab-size 70000", "model.vocab_size is 70000, expected at most 65535"),
        ("tiny_cpu --optimizer.beta-1 1", "optimizer.beta_1"),
        ("tiny_cpu --optimizer.base-learning-rate 0", "optimizer.base_learning_rate"),
        ("tiny_cpu --optimizer.learning-rate-training-steps 0", "optimizer.learning_rate_training_steps"),
        ("tiny_cpu --optimizer.start-warmup-step 5", "optimizer.start_warmup_step is 5: expected at most 0"),
        ("tiny_cpu --optimizer.weight-decay-rate inf", "optimizer.weight_decay_rate is inf: expected a finite"),
        ("tiny_cpu --evaluation.target 72", "evaluation.target"),
        ("tiny_cpu --training.max-samples 8", "training.max_samples"),
        ("tiny_cpu --log.division closed", "evaluation.interval_samples"),
        ("tiny_cpu --log.division closed --evaluation.interval-samples None", "evaluation.target"),
        ("dgxa100_1x8 --model.hidden-dropout 0", "model.hidden_dropout is 0.0, expected 0.1"),
        ("h100_1x1 --evaluation.no-unknown-tokens", "evaluation.unknown_tokens is off in the closed division"),
        ("tiny_cpu --log.system a/b", "log.system"),
        ("tiny_cpu --training.precision bf16", "training.precision"),
        ("tiny_cpu --training.reduce-dtype fp16", "training.reduce-dtype"),
        ("tiny_cpu --training.reduction ring", "training.reduction"),
        ("tiny_cpu --parallel.tensor 0", "parallel.tensor is 0: expected at least 1"),
        ("tiny_cpu --parallel.tensor 3", "parallel.tensor is 3"),
        ("tiny_cpu --parallel.virtual-stages 2", "parallel.virtual_stages is 2, but parallel.pipeline is 1: set"),
        ("tiny_cpu --parallel.pipeline 2", "parallel.pipeline is 2, but training.gradient_accumulation_steps is 1"),
        ("tiny_cpu --parallel.pipeline 4", "parallel.pipeline is 4"),
        ("dgxa100_1x8 --parallel.pipeline 4 --training.gradient-accumulation-steps 4", "training.cuda_graphs is on"),
        ("h100_1x8 --parallel.pipeline 4 --training.gradient-accumulation-steps 4", "training.precision is fp8"),
        (
            "dgxa100_1x8 --parallel.pipeline 4 --parallel.virtual-stages 2 --training.no-cuda-graphs "
            "--training.gradient-accumulation-steps 9",
            "set training.gradient_accumulation_steps 9 to a multiple of 4",
        ),
        ("dgxa100_8x8 --training.shard-gradients", "training.shard_gradients is on, but training.reduction is"),
        ("dgxa100_8x8 --training.sharp --training.reduction flat", "training.reduction is flat"),
        ("dgxa100_8x8 --training.sharp --training.reduce-dtype bf16", "training.reduce_dtype is bf16"),
        ("dgxa100_1x8 --parallel.tensor 32", "intermediate_size 4096: set it to a divisor of 16"),
        ("tiny_cpu --training.precision fp8 --model.intermediate-size 520", "model.intermediate_size is 520, but"),
        ("tiny_cpu --training.precision fp8 --model.num-hidden-layers 1", "model.num_hidden_layers is 1, but"),
        (
            "h100_1x8 --parallel.tensor 8 --model.intermediate-size 4032 --log.division open",
            "model.intermediate_size is 4032, but training.precision fp8 with parallel.tensor 8 needs a multiple of 128",
        ),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(arguments: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse(arguments.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_older_pytorch_is_refused_before_any_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("2.11.0a0+a6c236b9fd.nv26.03", "3.0.0"):
        monkeypatch.setattr(torch, "__version__", version)
        require_torch()
    for version, program in (("2.10.0a0+b558c986e8.nv25.12", bert.train), ("1.13.1", bert.evaluate)):
        monkeypatch.setattr(torch, "__version__", version)
        assert program.main(["tiny_cpu", "--data.vocab", "nowhere", "--data.evaluation", "nowhere"]) == 2
        assert capsys.readouterr().err.startswith(f"error: PyTorch is {version} here, expected 2.11 or newer: ")


def test_the_oldest_pytorch_is_the_same_everywhere() -> None:
    """pyproject.toml, the check at the start of a run and CI name the same oldest version."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    assert f'"torch>={oldest}.0a0"' in (REPOSITORY / "pyproject.toml").read_text()
    assert f"TORCH={oldest}.0 ./run_tests.sh -m oldest_torch" in (REPOSITORY / ".ci/run").read_text()
