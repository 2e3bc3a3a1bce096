"""Settings from a file or from the beginning of a result file."""

from dataclasses import replace
from pathlib import Path

import pytest

from bert.configuration.config import flattened
from bert.configuration.config_file import arguments_of
from bert.configuration.recipes import RECIPES, tiny_cpu
from bert.log.mllog import MLLog
from bert.train import main, parse
from tests.conftest import REPOSITORY


def test_settings_from_toml(tmp_path: Path) -> None:
    """The command line takes precedence over the file."""
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
    with pytest.raises(ValueError, match=r"mine\.toml is of the recipe tiny_cpu, expected h100_1x1: name tiny_cpu, or"):
        parse(["h100_1x1", "--config", str(file)])


@pytest.mark.parametrize("recipe", ["tiny_cpu", "own_text_cpu", "h100_8x8"])
def test_a_result_file_configures_its_run_once_more(recipe: str, tmp_path: Path) -> None:
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


def test_a_result_file_of_an_earlier_version_does_so_too() -> None:
    """A result file may have settings that were renamed or removed since."""
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
        ("a.toml", "training = [", "is no TOML"),
        ("a.toml", "x = " + "[" * 100_000, "is no TOML"),
        ("a.toml", "recipe = " + "7" * 5000, "is no TOML"),
        ("a.toml", f"[{'x' * 3000}]\n" * 2, "is no TOML"),
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
def test_a_file_that_cannot_be_used(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        parse(["--config", str(tmp_path / name)])
    assert "\n" not in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
    assert len(str(caught.value)) < 500
    if "seed" in message or "target" in message:  # the command line is not to blame for the file, nor the file for it
        with pytest.raises(ValueError, match=message) as caught:
            parse(["tiny_cpu", *arguments_of(tmp_path / name, None)[1]])
        assert name not in str(caught.value)


def test_a_file_is_not_blamed_for_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('recipe = "tiny_cpu"\n[training]\nseed = -1\n')
    with pytest.raises(ValueError, match=r"^training\.max_steps is 0") as caught:
        parse(["--config", str(tmp_path / "a.toml"), "--training.seed", "3", "--training.max-steps", "0"])
    assert "a.toml" not in str(caught.value)
