"""Settings from the command line, from a file or from the beginning of a result file.

Invalid settings are rejected before any work, in a message that names the setting to change.
"""

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bert.evaluate
import bert.train
from bert.configuration.config import flattened
from bert.configuration.config_file import arguments_of
from bert.configuration.recipes import RECIPES, tiny_cpu
from bert.log.mllog import MLLog
from bert.train import OLDEST_TORCH, main, parse, require_torch
from tests.conftest import REPOSITORY


def test_options_change_settings() -> None:
    """Option names may have hyphens or underscores."""
    given = "--optimizer.base-learning-rate=0.001 --training.global_batch_size 64 --data.loader dali"
    recipe, config = tiny_cpu(), parse(f"tiny_cpu {given} --training.implementations dense_gelu reference".split())
    training = replace(recipe.training, global_batch_size=64, implementations={"dense_gelu": "reference"})
    optimizer, data = replace(recipe.optimizer, base_learning_rate=0.001), replace(recipe.data, loader="dali")
    assert config == replace(recipe, optimizer=optimizer, training=training, data=data)


FOUR_STAGES = "--parallel.pipeline 4 --training.gradient-accumulation-steps"
INTERLEAVED = "--parallel.virtual-stages 2 --training.no-cuda-graphs"
SHARDED = "--training.reduction sharded --training.shard-gradients"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "no recipe given: expected one of tiny_cpu"),
        ("tiny", "unknown recipe 'tiny'"),
        ("tiny_cpu --training.global-batch-size many", "--training.global-batch-size is 'many', expected a whole"),
        ("tiny_cpu --training.seed abc", "--training.seed is 'abc', expected a whole number or None"),
        ("tiny_cpu --optimizer.epsilon tiny", "--optimizer.epsilon is 'tiny', expected a number"),
        ("tiny_cpu --no-such-setting 1", "no-such-setting"),
        ("--hlep", "there is no option --hlep; did you mean --help\\?"),
        ("tiny_cpu --hlep", "there is no setting --hlep; did you mean --help\\?"),
        ("tiny_cpu stray", "unexpected argument 'stray': expected settings"),
        ("tiny_cpu --seed 1", "--seed; did you mean --training.seed\\?"),
        ("tiny_cpu --model.hidden-size 129", "size is 129, which model.num_attention_heads 4 does not divide"),
        ("tiny_cpu --optimizer.weight-decay-rate inf", "optimizer.weight_decay_rate is inf: expected a finite"),
        ("tiny_cpu --log.division closed", "evaluation.interval_samples is set in the closed division: leave"),
        ("h100_1x1 --resume folder", "resume is set in the closed division"),
        ("h100_1x1 --training.site-steps 2", "training.site_steps is set in the closed division"),
        ("h100_1x1 --evaluation.target 0.71", "evaluation.target is 0.71, expected 0.720 in the closed division"),
        ("dgxa100_1x8 --model.hidden-dropout 0", "model.hidden_dropout is 0.0, expected 0.1"),
        ("h100_1x1 --evaluation.no-unknown-tokens", "evaluation.unknown_tokens is off in the closed division"),
        ("tiny_cpu --model.hidden-size 252 --training.precision bf16", "training.precision bf16 is slower than fp32"),
        ("tiny_cpu --model.hidden-size 256 --training.precision bf16", ""),
        ("tiny_cpu --training.max-samples 31", "training.max_samples is 31, less than one global batch of 32"),
        ("tiny_cpu --training.max-samples 32", ""),
        ("tiny_cpu --training.reduce-dtype fp16", "training.reduce-dtype"),
        ("tiny_cpu --training.reduction ring", "training.reduction"),
        ("tiny_cpu --parallel.tensor 3", "model.num_attention_heads 4 and model.intermediate_size 512: set"),
        ("tiny_cpu --parallel.tensor 4", ""),
        ("tiny_cpu --parallel.virtual-stages 2", "parallel.virtual_stages is 2, but parallel.pipeline is 1: set"),
        ("tiny_cpu --parallel.pipeline 2", "is 2, but training.gradient_accumulation_steps is 1: set it to 2"),
        ("tiny_cpu --parallel.pipeline 2 --training.gradient-accumulation-steps 5", ""),
        ("tiny_cpu --parallel.pipeline 2 --parallel.virtual-stages 3", "6 stages .* 2: set parallel.pipeline to 1"),
        ("dgxa100_1x8 --parallel.pipeline 16 --parallel.virtual-stages 4", "64 .* 24: set parallel.pipeline to 6"),
        (f"dgxa100_1x8 {FOUR_STAGES} 4", "training.cuda_graphs is on. Stages do not support that"),
        (f"h100_1x8 {FOUR_STAGES} 4", "training.precision is fp8. Stages do not support that"),
        (
            f"dgxa100_1x8 {FOUR_STAGES} 4 {SHARDED} --training.no-cuda-graphs",
            "training.shard_gradients is on. Stages do not",
        ),
        (
            f"dgxa100_1x8 {FOUR_STAGES} 9 {INTERLEAVED}",
            "set training.gradient_accumulation_steps, now 9, to a multiple of 4",
        ),
        (f"dgxa100_1x8 {FOUR_STAGES} 8 {INTERLEAVED}", ""),
        ("dgxa100_8x8 --training.shard-gradients", "training.shard_gradients is on, but with training.reduction"),
        ("dgxa100_8x8 --training.sharp --training.reduction flat", "training.reduction is flat"),
        ("dgxa100_8x8 --training.sharp --training.reduce-dtype bf16", "training.reduce_dtype is bf16"),
        ("dgxa100_8x8 --training.sharp --training.device cpu", "training.device is cpu"),
        ("dgxa100_1x8 --parallel.tensor 32", "intermediate_size 4096: set it to a divisor of 16"),
        ("tiny_cpu --training.precision fp8 --model.intermediate-size 513", "fp8 with .* 1 needs multiples of 16"),
        ("tiny_cpu --training.precision fp8 --model.num-hidden-layers 1", "model.num_hidden_layers is 1, but"),
        ("tiny_cpu --training.precision fp8", ""),
        (
            "h100_1x8 --parallel.tensor 8 --model.intermediate-size 4032 --log.division open",
            "model.intermediate_size is 4032, but training.precision fp8 with parallel.tensor 8 needs multiples of 128",
        ),
    ],
)
def test_an_invalid_setting_is_refused_in_one_line(arguments: str, message: str) -> None:
    """Cases with an empty message are valid: their settings just fit."""
    with pytest.raises(ValueError, match=message) if message else nullcontext() as caught:
        parse(arguments.split())
    assert caught is None or "\n" not in str(caught.value)


AT_LEAST_1 = """
    model.num_hidden_layers model.intermediate_size optimizer.learning_rate_training_steps
    training.global_batch_size training.max_samples training.max_steps training.gradient_accumulation_steps
    training.site_steps parallel.tensor parallel.pipeline parallel.virtual_stages
    evaluation.interval_samples evaluation.batch_size checkpoint.every_steps checkpoint.keep log.interval_steps
"""
FRACTIONS = "model.hidden_dropout model.attention_dropout optimizer.beta_1 optimizer.beta_2 training.site_momentum"
POSITIVE = "optimizer.base_learning_rate optimizer.epsilon optimizer.max_grad_norm training.site_learning_rate"
LIMITS: list[tuple[str, tuple[object, ...], tuple[object, ...]]] = [
    *((name, (1,), (0,)) for name in AT_LEAST_1.split()),
    *((name, (0.0, 0.99), (-0.01, 1.0)) for name in FRACTIONS.split()),
    *((name, (0.01,), (0.0,)) for name in POSITIVE.split()),
    ("model.vocab_size", (1, 65535), (0, 65536)),
    ("optimizer.num_warmup_steps", (0,), (-1,)),
    ("optimizer.start_warmup_step", (0, -9), (1,)),
    ("training.max_minutes", (0.01, None), (0.0, float("nan"))),
    ("training.fault_seconds", (1, 3600), (0.99, 3600.5)),
    ("training.seed", (0, 2**31 - 1, None), (-1, 2**31)),
    ("training.bucket_bytes", (4,), (3,)),
    ("evaluation.target", (0.01, 0.99, None), (0.0, 1.0)),
    ("log.run", (0, None), (-1,)),
    ("log.system", ("a.b",), ("", ".a", "a/b", "a b")),
]


@pytest.mark.parametrize(("name", "accepted", "refused"), LIMITS)
def test_settings_accept_exactly_the_values_within_their_limits(
    name: str, accepted: tuple[object], refused: tuple[object]
) -> None:
    section, field = name.split(".")
    own: Any = getattr(tiny_cpu(), section)
    for value in accepted:
        assert getattr(replace(own, **{field: value}), field) == value
    for value in refused:
        with pytest.raises(ValueError, match=f"^{re.escape(f'{name} is {value!r}')}"):
            replace(own, **{field: value})


def test_the_sample_limit_and_the_site_delay_follow_from_settings() -> None:
    training = replace(tiny_cpu().training, max_samples=100)
    assert [replace(training, max_steps=steps).sample_limit for steps in (3, 4, None)] == [96, 100, 100]
    assert [replace(training, site_steps=steps).site_delay for steps in (1, 2, 5)] == [0, 1, 2]


def test_the_option_list_describes_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(RECIPES)
    large = "BERT-Large on Wikipedia"
    assert f"h100_1x1        {large}, 1 node x 1 GPU; global batch 256, bf16" in lines
    assert f"h100_64x8       {large}, 64 nodes x 8 GPUs; global batch 3,072, bf16" in lines
    assert lines[-1].startswith("bert_3_9b_8x8   A BERT of 3.9 billion parameters (")
    assert lines[-1].endswith("on 8 nodes of 8 A100 with 40 GB each; global batch 1,024, bf16")


def test_errors_of_ranks_other_than_0_name_the_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, name in (("0", "error: "), ("1", "error: rank 1: ")):
        for variable, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", "2")):
            monkeypatch.setenv(variable, value)
        assert main(["tiny"]) == 2
        assert capsys.readouterr().err.startswith(
            f"{name}unknown recipe 'tiny': expected one of tiny_cpu, own_text_cpu, "
        )


def test_an_old_pytorch_is_refused_before_other_errors_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("2.11.0a0+a6c236b9fd.nv26.03", "3.0.0"):
        monkeypatch.setattr(torch, "__version__", version)
        require_torch()
    for version, program in (("2.10.0a0+b558c986e8.nv25.12", bert.train), ("1.13.1", bert.evaluate)):
        monkeypatch.setattr(torch, "__version__", version)
        assert program.main(["tiny_cpu", "--data.vocab", "nowhere", "--data.evaluation", "nowhere"]) == 2
        assert capsys.readouterr().err.startswith(f"error: PyTorch is {version} here, expected 2.11 or newer: ")


def test_pyproject_program_and_ci_name_the_same_oldest_pytorch() -> None:
    oldest = ".".join(map(str, OLDEST_TORCH))
    assert f'"torch>={oldest}.0a0"' in (REPOSITORY / "pyproject.toml").read_text()
    assert f"TORCH={oldest}.0 ./run_tests.sh -m oldest_torch" in (REPOSITORY / ".ci/run").read_text()


def test_settings_are_read_from_toml_and_the_command_line_overrides_them(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'recipe = "tiny_cpu"\ndry_run = false\n[training]\nmax_samples = 6400\nautotune = false\n'
        'reduction = "sharded"\nshard_gradients = true\n[training.implementations]\ndense_gelu = "reference"\n'
        '[data]\ntrain = "my data"\n[log]\ncache_cleared = true\n'
    )
    recipe = tiny_cpu()
    own = {"autotune": False, "reduction": "sharded", "shard_gradients": True, "max_samples": 6400}
    training = replace(recipe.training, implementations={"dense_gelu": "reference"}, **own)
    data, log = replace(recipe.data, train=Path("my data")), replace(recipe.log, cache_cleared=True)
    expected = replace(recipe, training=training, data=data, log=log)
    for given in (["tiny_cpu", f"--config={file}"], ["--config", str(file), "tiny_cpu"], ["--config", str(file)]):
        assert parse(given) == expected
    more = parse(["--config", str(file), "--training.max-samples", "9600"])
    assert more == replace(expected, training=replace(training, max_samples=9600))
    with pytest.raises(
        ValueError, match=r"mine\.toml is for the recipe tiny_cpu, but the command line names h100_1x1: n"
    ):
        parse(["h100_1x1", "--config", str(file)])


@pytest.mark.parametrize("recipe", ["tiny_cpu", "own_text_cpu", "h100_8x8"])
def test_a_result_file_reproduces_the_settings_of_its_run(recipe: str, tmp_path: Path) -> None:
    config = RECIPES[recipe]()
    training = replace(config.training, implementations={"dense_gelu": "reference"}, seed=5, cuda_graphs=False)
    config = replace(config, training=training, log=replace(config.log, run=3, platform="a b", cache_cleared=True))
    path = tmp_path / "result_3.txt"
    with MLLog(path) as log:
        log.header(dict(flattened("config", config)))
    found = parse(["--config", str(path)])
    expected = replace(config, log=replace(config.log, run=None, cache_cleared=False))
    # Paths below the repository are written relative to its root.
    assert dict(flattened("config", found)) == dict(flattened("config", expected))


def test_an_old_result_file_with_renamed_or_removed_settings_is_read() -> None:
    config, recipe = parse(["--config", str(REPOSITORY / "results/cpu_2cores/bert/result_0.txt")]), tiny_cpu()
    assert flattened("", config) == flattened("", replace(recipe, log=replace(recipe.log, system="cpu_2cores")))


def test_printed_settings_configure_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ("--training.seed=5", "--data.initial-checkpoint=None", f"--log.results={tmp_path / 'a b'}")
    given = ["tiny_cpu", *own]
    with pytest.raises(SystemExit, match="0"):
        main([*given, "--print-config"])
    printed = tmp_path / "my settings"
    printed.write_text(capsys.readouterr().out)
    found = parse(["--config", str(printed)])
    assert dict(flattened("config", found)) == dict(flattened("config", parse(given)))
    assert not (tmp_path / "a b").exists()


TINY = 'recipe = "tiny_cpu"\n'
HEADER = "# config.recipe: tiny_cpu\n# config."


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "training = [", "is not valid TOML"),
        ("a.toml", "x = " + "[" * 100_000, "is not valid TOML"),
        ("a.toml", "recipe = " + "7" * 5000, "is not valid TOML"),
        ("a.toml", f"[{'x' * 3000}]\n" * 2, "is not valid TOML"),
        ("a.toml", "recipe = 1" + "0" * 4000, r"names the recipe '1000"),
        ("a.toml", "", r"names no recipe: .* put it before --config '?/.*a\.toml"),
        ("a.toml", 'recipe = "tiny"', r"names the recipe 'tiny': expected recipe = one of tiny_cpu, own_"),
        ("a.toml", TINY + "[training]\nmax_sample = 1", r"did you mean training\.max_samples\?"),
        ("a.toml", TINY + '[training]\nmax_samples = "many"', r"training\.max-samples"),
        ("a.toml", TINY + '[training.implementations]\n"a b" = "triton"', r"implementations holds 'a b'"),
        ("a.toml", TINY + "[training]\nseed = -1", r"training\.seed"),
        ("result_0.txt", f"{HEADER}training.seed: {'7' * 5000}\n", r"training\.seed"),
        ("result_0.txt", f"{HEADER}evaluation.target: null\n", r"evaluation\.target is 'null'"),
        ("result_0.txt", f"{HEADER}training.moon: full\n", r"no setting training\.moon"),
        ("result_0.txt", ":::MLLOG {}", "neither a .toml file nor a result file"),
        ("result_0.txt", None, r"result_0\.txt: No such file"),
    ],
)
def test_an_invalid_settings_file_is_refused(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        parse(["--config", str(tmp_path / name)])
    assert "\n" not in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
    assert len(str(caught.value)) < 500
    if "seed" in message or "target" in message:  # given as arguments, the settings cause the same error
        with pytest.raises(ValueError, match=message) as caught:
            parse(["tiny_cpu", *arguments_of(tmp_path / name, None)[1]])
        assert name not in str(caught.value)


def test_an_error_on_the_command_line_does_not_name_the_settings_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('recipe = "tiny_cpu"\n[training]\nseed = -1\n')
    with pytest.raises(ValueError, match=r"^training\.max_steps is 0") as caught:
        parse(["--config", str(tmp_path / "a.toml"), "--training.seed", "3", "--training.max-steps", "0"])
    assert "a.toml" not in str(caught.value)
