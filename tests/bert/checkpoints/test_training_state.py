"""Checkpoints of a run in one process: written in the background, never partially, and resumed bit for bit.

Also how a changed number of ranks divides the global batch, and the messages about that change.
"""

import errno
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from bert.checkpoints import training_state, writer
from bert.checkpoints.training_state import FILES, Allocation, checkpoint_folders, find, fixed_settings, reseed, restore
from bert.checkpoints.writer import Checkpoints
from bert.configuration.config import Config
from bert.configuration.recipes import tiny_cpu
from bert.configuration.sections import ParallelConfig
from bert.execution.stopwatch import Stopwatch
from bert.parallel.mesh import Mesh
from bert.products import weight_gradients
from bert.reporting.reporter import Position, Reporter, StepLines
from bert.step import TrainingStep
from bert.train import parse
from compliance.log.schedule import EvaluationSchedule
from console import files
from dataloading.batches.loader import batch_of
from dataloading.dataset.folder import Dataset, open_dataset
from tests.bert.small_models import CPU, assert_same, drawn_model, state_of, take_steps
from tests.conftest import SmallRun
from tests.programs import PATIENCE_S

SEED = 7


@dataclass(frozen=True)
class Run:
    """The parts of a run that saving and resuming need."""

    config: Config
    train: Dataset
    samples: SmallRun
    step: TrainingStep
    checkpoints: Checkpoints
    told: list[str]
    folder: Path

    def take(self, *steps: int) -> dict[str, Tensor]:
        """Train the steps with these numbers, each on its own samples, and return the statistics."""
        samples = self.samples.train
        return take_steps(self.step, ([batch_of(samples.slice(8 * step, 8 * step + 8))] for step in steps))

    def save(self, steps: int) -> list[str]:
        """Write the checkpoint of a step, wait for it, and return the warnings."""
        self.told.clear()
        at = Position(steps, 8 * steps)
        self.checkpoints.save(at)
        self.checkpoints.wait(at)
        return list(self.told)


@pytest.fixture
def make(small_run: SmallRun, tmp_path: Path) -> Callable[..., Run]:
    def make(seed: int = SEED, **changes: object) -> Run:
        folder = tmp_path / "checkpoints"
        config = parse(small_run.arguments(tmp_path, checkpoint__folder=folder, **changes))
        train = open_dataset(config.data.train)
        step = TrainingStep(drawn_model(config.model, seed), config, CPU, Stopwatch())
        step.model.seed_dropout(SEED)
        told = list[str]()
        reporter = Reporter([StepLines(told.append, 0.4, 100, EvaluationSchedule(10, 10))])
        checkpoints = Checkpoints(config, train, SEED, step, reporter, Allocation.of(["host"], config))
        return Run(config, train, small_run, step, checkpoints, told, folder)

    return make


Make = Callable[..., Run]


def test_training_continues_while_a_checkpoint_is_written(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the previous write is a phase of its own, "checkpoint_write", whose longest duration is recorded."""
    run, begun, go, write = make(), threading.Event(), threading.Event(), writer.write_safetensors
    held = lambda *given: begun.set() or (go.wait(PATIENCE_S) and write(*given))  # noqa: E731
    monkeypatch.setattr(writer, "write_safetensors", held)
    run.take(0, 1)
    start = time.monotonic()
    run.checkpoints.save(Position(2, 16))
    assert begun.wait(PATIENCE_S)
    saved = state_of(run.step)
    run.take(2, 3, 4)
    [unfinished] = run.folder.iterdir()
    assert re.fullmatch(r"\.step_00000002\.[0-9a-f]{16}\.partial", unfinished.name)
    tracker = run.step.stopwatch.tracker
    entered = tracker.entered
    threading.Timer(0.05, go.set).start()
    run.checkpoints.save(Position(5, 40))
    assert (tracker.phase, tracker.entered) == ("checkpoint", entered + 2), "waited as checkpoint_write"
    run.checkpoints.wait(Position(5, 40))
    assert 0.04 < tracker.longest["checkpoint_write"] < time.monotonic() - start
    assert run.told == []
    assert [path.name for path in checkpoint_folders(run.folder)] == ["step_00000005", "step_00000002"]
    again = make(seed=1)
    restore(again.step, find(run.folder / "step_00000002", again.config, again.train, CPU))
    assert_same(state_of(again.step), saved)


def test_a_run_resumed_in_fp8_gets_scales_that_fit_its_weights(make: Make) -> None:
    """Trained weights may be much larger than the initial weights, for which the warm-up chose the scales."""
    run = make(model__num_hidden_layers=3)
    with torch.no_grad():
        run.step.flat.weights_P.mul_(50)
    run.save(1)
    again = make(seed=1, model__num_hidden_layers=3, training__precision="fp8")
    again.step.warm_up([batch_of(again.samples.train.slice(0, 8))], 1)
    restore(again.step, find(run.folder, again.config, again.train, CPU))
    assert again.step.fp8 is not None
    for dense in again.step.fp8.denses:
        cast = dense.weight_NK.float() * dense.weight_scaling.inverse
        torch.testing.assert_close(cast, dense.weight.detach(), rtol=2**-4, atol=1e-3)
    again.save(2)
    state = find(again.folder, run.config, run.train, CPU)
    again.step.fp8.set_scales_(again.step.fp8.scale_S * 4)
    assert (again.step.fp8.scale_S * again.step.fp8.inverse_S).eq(1).all()
    restore(again.step, state)
    assert again.step.fp8.scale_S.tolist() == state.fp8_scales
    of_sites = {training_state.SITE_MOMENTUM: training_state.Digest(1, "")}
    restore(run.step, replace(state, files=state.files | of_sites))  # a run without sites ignores this file
    assert torch.equal(run.step.flat.weights_P, again.step.flat.weights_P)
    with pytest.raises(ValueError, match=r"step_00000002 holds 11 FP8 scales of another model; remove it, or"):
        restore(again.step, replace(state, fp8_scales=[1.0] * 11))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.slow
def test_a_resumed_run_takes_the_same_steps_as_an_uninterrupted_run(
    make: Make, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resume with dropout, with bf16 weight copies as on a GPU, and in FP8 with all scales and cast weights.

    The checkpoint of step 3 counts only 2 optimizer steps, because one step was skipped.
    """
    monkeypatch.setattr(weight_gradients, "accumulates_products", lambda _, precision: precision == "bf16")
    changes = {"training__precision": precision, "model__num_hidden_layers": 3, "model__hidden_dropout": 0.1}
    changes |= {"model__hidden_size": 256} if precision == "bf16" else {}
    run = make(**changes)
    run.step.warm_up([batch_of(run.samples.train.slice(80, 88))], 1)
    run.take(0, 1)
    run.step.flat.gradients_P[0] = torch.inf
    run.take(2)
    assert run.step.fp8 is None or len(run.step.fp8.scale_S.unique()) > 2
    assert run.save(3) == []
    saved = state_of(run.step)
    further = run.take(3, 4, 5)
    again = make(seed=1, **changes)
    again.take(8, 9)  # so that restoring has to replace changed state
    state = find(run.folder, again.config, again.train, CPU)
    assert (state.step, state.samples, state.optimizer_steps, state.seed) == (3, 24, 2, SEED)
    assert (state.fp8_scales is None) == (precision != "fp8")
    restore(again.step, state)
    assert_same(state_of(again.step), saved)
    assert_same(again.take(3, 4, 5), further)


def test_a_full_disk_gives_a_warning_and_unexpected_errors_end_the_run(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk fails, the run continues. Any other error is a bug, which ends the run."""
    run, errors = make(), [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RuntimeError("a bug")]
    assert run.save(1) == []

    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run.folder.rglob("*.*")}

    before = content()

    def fail(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise errors.pop(0)

    run.take(0)
    monkeypatch.setattr(writer, "write_safetensors", fail)
    [told] = run.save(1)  # must fail and keep the earlier checkpoint of step 1
    assert told.startswith(f"warning at step 1: no checkpoint was written: {run.folder}")
    assert told.endswith(os.strerror(errno.ENOSPC))
    run.checkpoints.poll(Position(1, 0))
    assert len(run.told) == 1
    with pytest.raises(RuntimeError, match="a bug"):
        run.save(2)
    assert content() == before


def test_locking_a_folder_removes_unfinished_checkpoints(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make()
    assert run.save(1) == []
    (run.folder / "step_00000001").rename(run.folder / ".step_00000001.fedcba9876543210.partial")
    (run.folder / ".step_00000009.0123456789abcdef.partial").mkdir()
    (run.folder / "step_x").mkdir()
    strangers = [".step_00000003.0123456789abcdef.partial", ".step_00000004.0123456789abcdef.partial"]
    (run.folder / strangers[0]).write_text("a file")
    (run.folder / strangers[1]).symlink_to("step_x")
    assert checkpoint_folders(run.folder) == []
    training_state.lock(run.folder, CPU, again=False)
    assert run.save(2) == []
    assert sorted(path.name for path in run.folder.iterdir()) == [".lock", *strangers, "step_00000002", "step_x"]
    with pytest.raises(ValueError, match=r"another run .* writes its checkpoints into "):
        training_state.lock(run.folder, CPU, again=False)
    training_state.lock(Path("/proc/folder"), CPU, again=False)
    said = "warning: no lock on /proc/folder (No such file or directory): make sure that no other run writes there\n"
    assert capsys.readouterr().out == said


def test_a_checkpoint_gets_its_name_only_after_all_its_files_are_on_disk(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partial checkpoint never has the final name, even after a crash of the machine."""
    run, sync, synced = make(), files.sync, []

    def noting(path: Path) -> None:
        synced.append((re.sub(r"\.[0-9a-f]{16}", "", path.name), (run.folder / "step_00000001").exists()))
        sync(path)

    monkeypatch.setattr(writer, "sync", noting)
    monkeypatch.setattr(files, "sync", noting)
    assert run.save(1) == []
    names = (*FILES, ".state.json.partial", ".step_00000001.partial")
    assert list(dict.fromkeys(synced)) == [*((name, False) for name in names), (run.folder.name, True)]


def test_reseeding_depends_on_the_seed_the_step_and_the_rank() -> None:
    def drawn(seed: int, steps: int, rank: int) -> float:
        reseed(seed, steps, Mesh(rank, 4, rank, torch.device("cpu")))
        return torch.rand(()).item()

    places = [(seed, steps, rank) for seed in (1, 2) for steps in (1, 2) for rank in range(4)]
    numbers = [drawn(*place) for place in places]
    assert len(set(numbers)) == len(places)
    assert [drawn(*place) for place in places] == numbers


def test_the_checkpoints_with_the_highest_steps_are_kept(make: Make) -> None:
    """A new checkpoint of a step replaces an old one of the same step only when the new one is complete."""
    run = make(checkpoint__keep=2, checkpoint__every_steps=3)
    assert [steps for steps in range(1, 10) if run.checkpoints.due(steps)] == [3, 6, 9]
    for steps in (99_999_999, 5, 100_000_000):
        assert run.save(steps) == []
    newest, older = checkpoint_folders(run.folder)
    assert (newest.name, older.name) == ("step_100000000", "step_99999999")
    (newest / "other").write_text("")
    run.take(0)
    assert run.save(100_000_000) == []
    weights, flat = load_file(newest / "model.safetensors"), run.step.flat
    for name, parameter in run.step.model.named_parameters():
        assert torch.equal(weights[name].flatten(), flat.weights_P[flat.places[parameter]]), name
    assert not (newest / "other").exists()
    assert find(run.folder, run.config, run.train, CPU).step == 100_000_000


def test_resuming_with_different_settings_or_data_is_refused(make: Make, small_run: SmallRun) -> None:
    run = make()
    assert run.save(4) == []
    for change, message in (
        ({"optimizer__epsilon": 1e-5}, "was made with optimizer.epsilon 1e-06, but this run has 1e-05"),
        ({"training__seed": 8}, "was made with training.seed 7: leave training.seed out"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            find(run.folder, make(**change).config, run.train, CPU)
    with pytest.raises(ValueError, match=r"was made with data\.train sha256 "):
        find(run.folder, run.config, open_dataset(small_run.folder / "evaluation"), CPU)
    changed = SimpleNamespace(shards=[replace(shard, digest="0" * 64) for shard in run.train.shards])
    assert fixed_settings(run.config, cast(Dataset, changed)) != fixed_settings(run.config, run.train)
    other = make(log__interval_steps=5, evaluation__interval_samples=160, training__max_samples=320).config
    assert find(run.folder, other, run.train, CPU).path == str(run.folder / "step_00000004")
    assert find(run.folder / "step_00000004", other, run.train, CPU).step == 4


def test_checkpoints_of_another_run_are_kept(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs may share a folder if locks do not work. ``checkpoint.keep`` does not count broken checkpoints."""
    # Make two broken checkpoints. Step 1 is old enough to be removed, and step 8 does not count as one of those to keep.
    for steps in (1, 8):
        (make().folder / f"step_{steps:08}").mkdir(parents=True)
    first, second = make(checkpoint__keep=1), make(checkpoint__keep=1)
    for steps in (2, 4, 6):
        assert first.save(steps) == []
        assert second.save(steps + 1) == []
    names = [path.name for path in checkpoint_folders(first.folder)]
    assert names == ["step_00000008", "step_00000007", "step_00000006"]
    [told] = second.save(6)
    assert f"{first.folder}/step_00000006" in told
    assert find(first.folder, first.config, first.train, CPU).step == 7
    broken = f"{first.folder}/step_00000008/state.json: No such file or directory; remove it, or resume from another"
    assert capsys.readouterr().out == f"warning: {broken}; resuming from {first.folder}/step_00000007\n"
    last = first.folder / "step_00000006"
    state = find(last, first.config, first.train, CPU)
    assert state.step == 6
    for name in (FILES[0], FILES[2]):
        whole = load_file(last / name)
        save_file({each: tensor.reshape(-1)[:1] for each, tensor in whole.items()}, last / name)
        with pytest.raises(ValueError, match=rf"{name} holds .* of shape \(1,\), expected \("):
            restore(first.step, state)
        reason = f"{last}/{name} is missing or has changed since it was written; remove it, or resume from another"
        with pytest.raises(ValueError, match=rf"no complete checkpoint in {last}: .*out; {reason}"):
            find(last, first.config, first.train, CPU)
        save_file(whole, last / name)


def config(batch: int, steps: int = 1) -> Config:
    recipe = tiny_cpu()
    training = replace(recipe.training, global_batch_size=batch, gradient_accumulation_steps=steps)
    return replace(recipe, training=training)


def hosts(count: int, ranks: int = 1) -> list[str]:
    return [f"h{host}" for host in range(count) for _ in range(ranks)]


@given(st.integers(1, 4096), st.integers(1, 64), st.integers(1, 8), st.lists(st.integers(1, 64), max_size=4))
def test_micro_batches_never_exceed_the_largest_size_that_fits(
    batch: int, first: int, steps: int, then: list[int]
) -> None:
    batch = max(batch, first * steps, *then, 1)
    made = config(batch, steps)
    allocation = Allocation.of(hosts(first), made)
    fitting = allocation.sequences
    for ranks in then:
        made = training_state.rebalance_batch(made, allocation, ranks)
        allocation = Allocation.of(hosts(ranks), made, allocation)
        assert made.training.global_batch_size == batch
        assert batch >= ranks * allocation.accumulation  # each micro-batch has at least one sequence
        assert allocation.fitting == max(fitting, allocation.sequences)
        assert allocation.sequences <= fitting or fitting == 1
        if allocation.accumulation > 1 and allocation.sequences <= fitting:
            assert -(-batch // (ranks * (allocation.accumulation - 1))) > fitting, "one micro-batch fewer would fit"
        fitting = allocation.fitting


def test_rebalancing_adds_micro_batches_if_ranks_are_lost_and_removes_them_if_ranks_return() -> None:
    """A pipeline of 2 stages needs an even number of micro-batches, so it takes 4 instead of 3."""
    made = config(448, 2)
    first = Allocation.of(hosts(4, 8), made)
    fewer = Allocation.of(hosts(3, 8), training_state.rebalance_batch(made, first, 24), first)
    assert (first.accumulation, first.sequences) == (2, 7)
    assert (fewer.accumulation, fewer.sequences, fewer.fitting) == (3, 7, 7)
    assert Allocation.of(hosts(4, 8), training_state.rebalance_batch(made, fewer, 32), fewer) == first
    made = replace(config(64, 2), parallel=ParallelConfig(pipeline=2))
    first = Allocation.of(hosts(4, 2), made)
    assert (first.accumulation, first.sequences) == (2, 8)
    assert training_state.rebalance_batch(made, first, 3).training.gradient_accumulation_steps == 4


def test_changes_name_lost_gained_and_moved_hosts_and_new_shares_of_the_batch() -> None:
    first = Allocation.of(hosts(4, 2), config(32), sites=["a"] * 8)
    assert training_state.changes(first, first) == []
    then = Allocation.of(["h0", "h0", "h1", "h9", "h9", "\x1b[2J"], config(32, 2), first, ["b"] * 6)
    ranks = "ranks on 4 hosts, a step of each with at most"
    assert training_state.changes(first, then) == [
        "lost: host h1 (1 rank), host h2 (2 ranks), host h3 (2 ranks)",
        r"gained: host \x1b[2J (1 rank), host h9 (2 ranks)",
        f"shares of the global batch: 6 {ranks} 2 x 3 sequences; before 8 {ranks} 1 x 4 sequences",
        "host h0 is at site b; before a",
        "host h1 is at site b; before a",
    ]
    more = Allocation.of(hosts(4, 2), config(32, 4), first)
    assert training_state.changes(first, more) == [
        f"shares of the global batch: 8 {ranks} 4 x 1 sequence; before 8 {ranks} 1 x 4 sequences"
    ]
    for count, end in ((9, "host h7 (1 rank), host h8 (1 rank)"), (10, "host h8 (1 rank) and 1 more")):
        many = Allocation.of(hosts(count), config(32))
        assert training_state.changes(many, Allocation.of(["h0"], config(32)))[0].endswith(end)
