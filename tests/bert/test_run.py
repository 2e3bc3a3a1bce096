"""A whole run of one rank in this process, with a clock that moves only in the parts whose time is measured."""

import contextlib
import io
import math
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file

import bert.run
from bert.checkpoints.trained import stated_evaluation
from bert.checkpoints.training_state import checkpoint_folders
from bert.configuration.recipes import tiny_cpu
from bert.evaluation import Evaluator
from bert.execution.phases import PhaseTracker
from bert.guards.data_guard import DataGuard
from bert.guards.interruption import Interrupted, Interruption
from bert.guards.preflight import batch_sampler
from bert.log.mllog import MLLog
from bert.reporting.intervals import MOST_BAD_INTERVALS, Stragglers
from bert.run import run
from bert.step import TrainingStep
from bert.train import parse
from compliance.log.metrics import Metrics, read_metrics
from compliance.log.reader import read_log
from dataloading.dataset.folder import open_dataset
from tests.bert.conftest import Clock
from tests.bert.small_models import CPU
from tests.conftest import SmallRun

SETTINGS: dict[str, object] = {
    "training__gradient_accumulation_steps": 2,
    "training__max_samples": 88,
    "evaluation__interval_samples": 40,
    "log__interval_steps": 2,
}

BUG = RuntimeError("a bug")


@dataclass
class Done:
    """Status, output and files of a run. Numbers that depend on how the processor rounds are replaced by #."""

    status: int
    output: list[str]
    result: Path
    checkpoints: list[str]

    @property
    def metrics(self) -> Metrics:
        return read_metrics(self.result.with_name(self.result.name.replace("result", "metrics")).with_suffix(".jsonl"))

    @property
    def log(self) -> list[tuple[str, object, dict[str, object]]]:
        """Key, value and metadata of each record."""
        places = ("file", "lineno")
        return [
            (record.key, record.value, {name: value for name, value in record.metadata.items() if name not in places})
            for record in read_log(self.result).records
        ]


Start = Callable[..., Done]


@pytest.fixture
def start(small_run: SmallRun, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that trains once and returns the run's status, output and files."""
    guards: list[DataGuard] = []
    monkeypatch.setattr(bert.run, "DataGuard", lambda folders: guards.append(DataGuard(folders)) or guards[-1])
    monkeypatch.setattr(bert.run, "require_private_cache", None)  # only Triton on a GPU needs it

    def train(
        at_update: Callable[[TrainingStep, int], object] = lambda *_: None, *flags: str, **changes: object
    ) -> Done:
        clock.begin(at_update)
        number = len(list(tmp_path.glob("r/*/*/result_*.txt")))
        # Take a copy, because earlier runs in this process may have opened the data before this run's clock starts.
        data = shutil.copytree(small_run.folder, Path(tempfile.mkdtemp(dir=tmp_path)), dirs_exist_ok=True)
        arguments = [*replace(small_run, folder=data).arguments(tmp_path / "r", **SETTINGS | changes), *flags]
        said, result = io.StringIO(), tmp_path / f"r/tiny_cpu/bert/result_{number}.txt"
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = run(parse(arguments), arguments)
        lines = said.getvalue().replace(str(tmp_path), "TMP").splitlines()
        masked = [re.sub(r"(loss|accuracy|perplexity|best) [\d.]+|(?<=\()\d+(?=/)", r"\1 #", line) for line in lines]
        folders = checkpoint_folders(tmp_path / "c") if (tmp_path / "c").exists() else []
        return Done(status, masked, result, [folder.name for folder in folders])

    yield train
    for guard in guards:
        guard._armed = False  # a run that has not started would guard its files to the end of this process


def step_line(step: int, tokens_per_s: int, eta: str) -> str:
    """A step waits 0.5 s (11.1 %) for data and computes for 2 x 1.5 + 1 s, so 16 sequences per step are 3.6 per second."""
    return (
        f"step {step:>6}  samples {16 * step:>9}   4500.0 ms       3.6 seq/s {tokens_per_s:>10} tok/s  wait 11.1 %  loss #  "
        f"lr {5e-5 * (step - 1):.2e}  eta {eta}"
    )


def eval_line(step: int, rest: str = "target 0.9000") -> str:
    return f"eval {step:>6}  samples {16 * step:>9}  accuracy #  ( #/173)  {rest}  7.00 s"


def test_a_resumed_run_ends_with_the_weights_of_the_whole_run(
    start: Start, small_run: SmallRun, tmp_path: Path
) -> None:
    """The resumed run repeats the whole run's last steps, and ends with the same weights to the last bit."""
    ways = {"checkpoint__folder": tmp_path / "c", "checkpoint__every_steps": 4, "save_checkpoint": tmp_path / "whole"}
    done = start(**ways)
    config = parse(small_run.arguments(tmp_path, **SETTINGS))
    train = open_dataset(small_run.folder / "train")
    plan = batch_sampler(config, train, 1, seed=7)
    tokens = [sum(int(train.lengths[micro.indices].sum()) for micro in plan.rank_batches(step, 0)) for step in range(6)]
    rates = [round(each / 4.5) for each in (sum(tokens[:2]) / 2, *tokens[2:])]
    end = ("end: aborted after 96 samples and", "aborted: TMP/r/tiny_cpu/bert/result_")
    assert (done.status, done.checkpoints) == (1, ["step_00000004"])
    assert done.output == [
        "log in TMP/r/tiny_cpu/bert/result_0.txt",
        "at most 6 steps of 16 sequences, 2 evaluations of 50: about 0:34",  # 4 s for each of 6 + 0.4 x 100 / 16 steps
        step_line(2, rates[0], "at most 0:16"),  # 32 samples took 9 s, and 88 - 32 remain
        step_line(3, rates[1], "at most 0:11"),
        eval_line(3),
        step_line(4, rates[2], "at most 0:09"),
        step_line(5, rates[3], "at most 0:03"),
        eval_line(5),
        step_line(6, rates[4], "at most 0:00"),
        f"{end[0]} 41.0 s",
        f"{end[1]}0.txt",
    ]
    resumed = start(resume=tmp_path / "c", save_checkpoint=tmp_path / "resumed")
    assert resumed.output == [
        "log in TMP/r/tiny_cpu/bert/result_1.txt",
        "at most 2 steps of 16 sequences, 1 evaluation of 50: about 0:13",
        step_line(5, rates[3], "at most 0:02"),
        eval_line(5),
        step_line(6, rates[4], "at most 0:00"),
        f"{end[0]} 16.0 s",
        f"{end[1]}1.txt (resumed: no timed result)",
    ]
    whole, again = load_file(tmp_path / "whole"), load_file(tmp_path / "resumed")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in again.items())
    one, other = ([structs.replace(step, time_s=0.0) for step in each.metrics.steps[-2:]] for each in (done, resumed))
    assert one == other
    assert f"# resumed from: {tmp_path}/c/step_00000004\n" in resumed.result.read_text()
    assert resumed.log[-4:-1] == [*done.log[-4:-2], ("eval_samples", 50, {})]


def test_the_log_states_the_settings_and_the_counts(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow ranks are found by each rank's own time, which does not include exchanges with ranks of its model copy."""
    own_seconds = []
    monkeypatch.setattr(Stragglers, "add", lambda _, seconds: own_seconds.append(seconds) or [])
    done = start(
        lambda step, _: setattr(step.stopwatch, "exchanged", step.stopwatch.exchanged + 0.25),
        "--log.cache-cleared",
        log__organization="own", log__platform="machine", log__status="cloud",
        optimizer__beta_1=0.8, optimizer__beta_2=0.99, optimizer__epsilon=2e-6, optimizer__weight_decay_rate=0.02,
        optimizer__max_grad_norm=0.5, optimizer__num_warmup_steps=3, optimizer__start_warmup_step=-1,
        optimizer__learning_rate_training_steps=30, training__max_steps=3, training__gradient_accumulation_steps=4,
    )  # fmt: skip
    settings = {
        **{"cache_clear": True, "init_start": None, "submission_benchmark": "bert", "submission_division": "open"},
        **{"submission_org": "own", "submission_platform": "machine", "submission_status": "cloud", "seed": 7},
        **{"global_batch_size": 16, "d_batch_size": 4, "gradient_accumulation_steps": 4, "max_sequence_length": 48},
        **{"max_predictions_per_seq": 8, "opt_name": "lamb", "opt_base_learning_rate": 0.005, "opt_lamb_epsilon": 2e-6},
        **{"opt_epsilon": 2e-6, "opt_lamb_beta_1": 0.8, "opt_lamb_beta_2": 0.99, "opt_lamb_weight_decay_rate": 0.02},
        **{"opt_lamb_learning_rate_decay_poly_power": 1.0, "opt_gradient_clip_norm": 0.5, "num_warmup_steps": 3},
        **{"opt_learning_rate_training_steps": 30, "opt_learning_rate_warmup_steps": 3, "start_warmup_step": -1},
        **{"eval_interval_samples": 40, "quality_target": 0.9},
    }
    logged = [(key, value) for key, value, _ in done.log if key != "weights_initialization"]
    assert sorted(logged[: len(settings)]) == sorted(settings.items())
    [evaluation] = done.metrics.evaluations
    at = {"epoch_num": 48, "samples_count": 48}
    begin, end = ({"first_epoch_num": 1, "epoch_count": 1}, {"first_epoch_num": 1, "samples_count": 48})
    assert done.log[-10:] == [
        ("block_start", None, begin | {"samples_count": 0}),
        ("block_stop", None, end),
        ("eval_start", None, at),
        ("eval_accuracy", pytest.approx(evaluation.correct / 173), at),
        ("eval_stop", None, at),
        ("block_start", None, begin | {"samples_count": 48}),
        ("block_stop", None, end),
        ("train_samples", 48, {}),
        ("eval_samples", 50, {}),
        ("run_stop", None, {"status": "aborted"}),
    ]
    first, last = done.metrics.steps
    assert (first.time_s, first.forward_backward_ms, first.update_ms, first.reduce_ms) == (15.0, 6000.0, 1000.0, 0.0)
    assert last.masked_lm_loss == pytest.approx(math.log(200), rel=0.05)
    assert last.next_sentence_loss == pytest.approx(math.log(2), rel=0.05)
    assert last.loss == pytest.approx(last.masked_lm_loss + last.next_sentence_loss)
    assert (evaluation.time_s, evaluation.eval_s, evaluation.samples) == (29.5, 7.0, 48)
    assert (last.site_bytes, own_seconds) == (0, [[0.0], [6.25]])


def test_a_target_that_is_just_reached_ends_the_run(start: Start, tmp_path: Path) -> None:
    """Without a target, a run ends at its limit and saves the weights of its best evaluation."""
    missed = start(training__max_steps=3)
    [evaluation] = missed.metrics.evaluations
    done = start(evaluation__target=evaluation.correct / evaluation.count)
    assert missed.status == 1
    assert (done.status, done.log[-1]) == (0, ("run_stop", None, {"status": "success"}))
    assert done.output[-2:] == ["end: success after 48 samples and 20.5 s", "success: TMP/r/tiny_cpu/bert/result_1.txt"]
    to_the_end = {"evaluation__target": None, "training__max_samples": 80, "save_checkpoint": tmp_path / "best"}
    done = start(**to_the_end)
    assert done.status == 0
    assert done.output[1] == "5 steps of 16 sequences, 2 evaluations of 50: about 0:30"
    assert done.output[-3:-1] == [eval_line(5, "perplexity #  best #"), "end: success after 80 samples and 36.5 s"]
    evaluations = done.metrics.evaluations
    best = max(evaluations, key=lambda found: found.masked_lm_accuracy)
    stated = stated_evaluation(tmp_path / "best")
    assert stated is not None
    assert (stated.samples, stated.correct) == (best.samples, best.correct)


def test_a_run_enters_its_phases_in_order(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two warm-up steps and reading ahead come first. "checkpoint_write" is ignored: it occurs only if the disk is slow."""
    done: list[str] = []
    for owner, name in ((PhaseTracker, "enter"), (Evaluator, "read_ahead")):
        real = getattr(owner, name)
        noted = lambda *given, real=real: done.append(*(given[1:] or ["read ahead"])) or real(*given)  # noqa: E731
        monkeypatch.setattr(owner, name, noted)
    start(checkpoint__folder=tmp_path / "c", checkpoint__every_steps=2, training__max_steps=3)
    compute = ["forward_backward", "update"]
    step = ["data_wait", *compute]
    expected = [*2 * compute, "read ahead", *2 * step, "statistics", "checkpoint", *step, "statistics", "evaluation"]
    assert [name for name, _ in groupby(done) if name != "checkpoint_write"] == expected


def test_the_time_limit_ends_the_run_at_the_first_report_after_it(start: Start) -> None:
    """9.0 s are not more than 0.15 minutes, but 13.5 s are."""
    done = start(training__max_minutes=0.15, log__interval_steps=1)
    assert (done.status, done.output[-2]) == (1, "end: aborted after 48 samples and 13.5 s")
    assert [key for key, _, _ in done.log].count("eval_start") == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_a_checkpoint_after_the_interval(start: Start, tmp_path: Path, number: int) -> None:
    folder = tmp_path / "c"
    done = start(lambda _, step: step == 1 and signal.raise_signal(number), checkpoint__folder=folder)
    assert (done.status, done.checkpoints) == (128 + number, ["step_00000002"])
    assert f"# stopped by {signal.Signals(number).name}\n" in done.result.read_text()
    assert (folder / ".lock").is_file(), "other runs are kept out"
    assert done.output[-3] == "end: aborted after 32 samples and 9.0 s"
    assert done.output[-1].startswith("to continue: python -m bert.train tiny_cpu --model.num-hidden-layers 2 ")
    assert done.output[-1].endswith("--training.gradient-accumulation-steps 2 --checkpoint.folder TMP/c --resume TMP/c")
    again = start(resume=folder, training__seed=None, training__gradient_accumulation_steps=4, training__max_steps=3)
    assert ("seed", 7, {}) in again.log
    assert ("gradient_accumulation_steps", 4, {}) in again.log, "as the user asks"
    shares = "1 rank on 1 host, a step of each with at most"
    line = f"shares of the global batch: {shares} 4 x 4 sequences; before {shares} 2 x 8 sequences"
    assert again.output[1] == line
    assert f"# {line}\n" in again.result.read_text()
    alone = start(lambda _, step: step == 1 and signal.raise_signal(number))
    assert alone.output[-1] == "aborted: TMP/r/tiny_cpu/bert/result_2.txt"
    with pytest.raises(Interrupted, match=f"stopped by {signal.Signals(number).name}"):
        start(lambda _, step: step == 3 and [signal.raise_signal(number) for _ in range(2)])
    log = read_log(tmp_path / "r/tiny_cpu/bert/result_3.txt")
    assert [record.key for record in log.records][-4:] == ["block_stop", "train_samples", "eval_samples", "run_stop"]
    fault = f"# ended by a fault: stopped by {signal.Signals(number).name}\n"
    assert fault in (tmp_path / "r/tiny_cpu/bert/result_3.txt").read_text()


def test_sigusr1_stops_a_run_like_sigterm_but_is_no_second_signal(start: Start) -> None:
    """launch/slurm.sub cannot know whether Slurm has sent SIGTERM to the ranks, or will send it afterwards."""
    for numbers in ([signal.SIGUSR1] * 2, [signal.SIGTERM, signal.SIGUSR1], [signal.SIGUSR1, signal.SIGTERM]):
        done = start(lambda _, step, numbers=numbers: step == 1 and [signal.raise_signal(number) for number in numbers])
        assert done.status == 128 + signal.SIGTERM
        assert "# stopped by SIGTERM\n" in done.result.read_text()
    interruption = Interruption()
    with pytest.raises(Interrupted):  # before training, a run stops at once
        signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)  # it may then finish its cleanup
    assert interruption.number == signal.SIGTERM


def test_a_missed_target_is_no_failure_for_a_launcher_that_reads_the_log(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm would end all ranks at once, and torchrun would report a crash."""
    ways = {"training__max_steps": 1, "evaluation__interval_samples": 16, "evaluation__target": 0.99}
    assert start(**ways).status == 1
    monkeypatch.setenv("MLPERF_BERT_CLAIM", str(tmp_path / "claim"))
    assert start(**ways).status == 0


def test_a_run_ends_without_new_checkpoints_if_gradients_remain_nan(start: Start, tmp_path: Path) -> None:
    def spoil(step: TrainingStep, number: int) -> None:
        if number > 3:
            step.flat.gradients_P[5] = math.nan

    ways = {"checkpoint__folder": tmp_path / "c", "checkpoint__every_steps": 1}
    done = start(spoil, **ways, log__interval_steps=3, evaluation__interval_samples=960, training__max_samples=960)
    assert (done.status, done.checkpoints) == (1, ["step_00000003", "step_00000002"])
    lines = [line.split("loss")[1] for line in done.output if line.startswith("step")]
    assert len(lines) == 3 + MOST_BAD_INTERVALS
    assert lines[2:4] == [
        " #  lr 1.00e-04  eta at most 4:16",
        " #  lr 1.00e-04  eta at most 4:12  WARNING: 1 skipped, gradients not finite",
    ]
    assert all(line.endswith("WARNING: 1 skipped, gradients not finite") for line in lines[4:])
    assert "  lr 0.00e+00  eta " in start(lambda step, _: spoil(step, 9), training__max_steps=3).output[2]
    assert done.output[-3:-1] == [
        "warning at step 13: ending the run: no step of the last 10 intervals had finite gradients",
        "end: aborted after 208 samples and 58.5 s",
    ]


def test_a_restarted_run_resumes_without_the_setting_resume(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's count of restarts or checkpoints of the same job show a restart. Under torchrun, a regular status is 0."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    first = start(training__max_steps=3, checkpoint__folder=tmp_path / "c", checkpoint__every_steps=2)
    assert first.status == 0
    for place, (name, value) in enumerate((("RESTART_COUNT", "1"), ("MAX_RESTARTS", "3"), ("RUN_ID", "other"))):
        folder = shutil.copytree(tmp_path / "c", tmp_path / f"c{place}")  # this process still locks the original
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
        ways = {"checkpoint__folder": folder, "training__gradient_accumulation_steps": 4, "training__max_steps": 3}
        if name == "RUN_ID":
            with pytest.raises(ValueError, match="holds checkpoints of another run: set resume"):
                start(**ways)
            continue
        done = start(**ways)
        monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)  # now only checkpoints of the same job show it
        assert done.output[-1].endswith("(resumed: no timed result)")
        assert ("d_batch_size", 8, {}) in done.log
        assert ("gradient_accumulation_steps", 2, {}) in done.log


def test_random_seeds_have_31_bits_and_the_claim_file_holds_the_path_of_the_log(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLPERF_BERT_CLAIM", str(tmp_path / "a claim"))
    monkeypatch.setattr(os, "urandom", lambda _: b"\xff\x01\x00\xff")
    done = start(training__seed=None, training__max_steps=1, evaluation__interval_samples=16)
    assert ("seed", 0xFF00_01FF // 2, {}) in done.log
    assert (tmp_path / "a claim").read_text() == f"{done.result}\n"


def test_a_dry_run_says_that_the_run_is_ready_and_writes_no_log(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = ["tiny_cpu: ready, results would go to TMP/r/tiny_cpu/bert/result_0.txt"]
    done = start(print, "--dry-run")
    assert (done.status, done.output, done.result.exists()) == (0, ready, False)
    if not torch.cuda.is_available():
        warning = "warning: training.device is cuda, but PyTorch sees no GPU here: this run needs a machine with GPUs"
        assert start(print, "--dry-run", training__device="cuda").output == [warning, *ready]
        monkeypatch.setenv("MLPERF_BERT_CLAIM", "file")  # means that a run follows on this machine
        with pytest.raises(ValueError, match="is cuda, but PyTorch sees no GPU here"):
            start(print, "--dry-run", training__device="cuda")


def test_several_steps_per_site_need_several_sites_or_elasticity(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"training__site_steps": 2, "evaluation__interval_samples": 32, "training__max_steps": 2}
    with pytest.raises(ValueError, match=r"site_steps is 2, but all ranks are at one site: set MLPERF_BERT_SITE"):
        start(**ways)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    ways["training__gradient_accumulation_steps"] = 3  # elastic runs may divide the batch unevenly
    assert start(**ways).output[0] == "one site: its ranks sum the gradients of every step until another site joins"


def test_run_start_is_logged_between_two_barriers_before_data_are_released(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank may open data before rank 0 has logged run_start, so rank 0 writes it between two barriers."""
    told: list[str] = []
    event, release = MLLog.event, DataGuard.release
    monkeypatch.setattr(bert.run, "barrier", lambda: told.append("barrier"))
    monkeypatch.setattr(
        MLLog, "event", lambda log, key, *value, **more: (told.append(key), event(log, key, *value, **more))
    )
    monkeypatch.setattr(DataGuard, "require_untouched", lambda _: told.append("require_untouched"))
    monkeypatch.setattr(DataGuard, "release", lambda guard: (told.append("release"), release(guard)))
    start(training__max_steps=3)
    order = ["init_stop", "require_untouched", "barrier", "run_start", "barrier", "release", "block_start"]
    assert told[:3] == ["barrier", "cache_clear", "init_start"], (
        "no rank creates files before all have passed their checks"
    )
    assert told[told.index("init_stop") :][: len(order)] == order


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (Interrupted(signal.SIGTERM), call.failed("stopped by SIGTERM", 143)),
        (ValueError("wrong"), call.failed("wrong", 2)),
        (OSError(2, "gone", "file"), call.failed("file: gone", 2)),
        (BUG, call.failed("RuntimeError: a bug", error=BUG)),
    ],
)
def test_an_error_ends_all_ranks_with_its_status_and_a_fault_is_written_to_the_log(
    error: Exception, failed: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bert.run, "Watchdog", watchdog := Mock())
    log = MLLog(tmp_path / "log.txt")
    log.event("cache_clear", False)
    log.event("init_start")
    with pytest.raises(type(error)), bert.run._fail_together(tiny_cpu(), CPU, log):
        raise error
    assert watchdog.return_value.method_calls == [failed, call.close()]
    _, seconds, on_fault = watchdog.call_args.args
    on_fault("a link\n  is gone")
    assert seconds == 60.0
    assert "# ended by a fault: a link is gone\n" in (tmp_path / "log.txt").read_text()
    assert read_log(tmp_path / "log.txt").records[-1].metadata["status"] == "aborted"


@pytest.mark.usefixtures("clock")
def test_a_rank_waits_for_its_own_signal_if_another_rank_got_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replaced ``all_reduce_`` returns the sum over two ranks. The other rank has received a signal."""
    interruption = Interruption()
    assert not bert.run._stopped_for_others(interruption, CPU), "no rank has got a signal"
    monkeypatch.setattr(bert.run, "all_reduce_", lambda signals: signals + 1)
    monkeypatch.setattr(bert.run, "_OWN_SIGNAL_S", 0.15)
    assert bert.run._stopped_for_others(interruption, CPU)
    monkeypatch.setattr(bert.run, "_OWN_SIGNAL_S", 1e9)
    interruption.defer()
    threading.Timer(0.05, signal.raise_signal, [signal.SIGTERM]).start()
    assert not bert.run._stopped_for_others(interruption, CPU)


def test_micro_batches_without_a_cuda_graph_cause_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MLLog(tmp_path / "log.txt") as log:
        bert.run._note_uncaptured(0, CPU, log)
        bert.run._note_uncaptured(1234, CPU, log)
    text = "warning: 1,234 of the ranks' micro-batches ran without a CUDA graph, and slower, because"
    assert capsys.readouterr().err.startswith(text)
    assert (tmp_path / "log.txt").read_text().count(f"# {text}") == 1
