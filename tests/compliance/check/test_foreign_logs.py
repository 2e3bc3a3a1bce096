"""Logs as strangers bring them: two attempts in one file, records of every process, other formats, other units."""

import bz2
import gzip
import io
import json
import lzma
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from compliance.check.checker import check_file
from compliance.log import reader, rules
from compliance.log.findings import Finding, Verdict
from compliance.log.reader import STDIN, read_log
from compliance.log.record import TOKEN
from compliance.submission.check import accepted, check_paths
from tests.compliance.log_edits import (
    Edit,
    delete,
    edit,
    epoch_nums,
    in_turn,
    later,
    lines_of,
    log_after,
    metadata,
    on_line,
    repeat,
    time_of,
    value,
)
from tests.compliance.run_logs import log_of, without_chain

HOUR_MS = 3_600_000


def brief(*accuracies: float, batch: int | None = None, seed: int = 1234, start_ms: int | None = None) -> str:
    """Return a closed log without digests and without records of weights, which ruleset 5.0.0 does not require."""
    options = {} if start_ms is None else {"start_ms": start_ms}
    log = log_of(accuracies or (0.5, 0.6, 0.73), seed=seed, global_batch_size=batch, step_ms=1000, **options)
    return delete("weights_initialization")(without_chain(log.decode()))


@pytest.fixture
def checked(tmp_path: Path):
    def check(content: str | bytes, ruleset: str = "5.0.0") -> Verdict:
        path = tmp_path / "result_0.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return check_file(path, ruleset)

    return check


def shifted(text: str, by_ms: int) -> str:
    """Return the log with later times."""
    lines = [line.partition(TOKEN)[2] for line in text.splitlines()]
    records = [json.loads(line) for line in lines]
    return "".join(f"{TOKEN}{json.dumps(each | {'time_ms': each['time_ms'] + by_ms})}\n" for each in records)


def until(text: str, key: str, nth: int = 0) -> str:
    """Return the beginning of the log up to the `nth` record of `key`."""
    last = lines_of(text, key)[nth]
    return text[: text.index(last) + len(last)]


# Two attempts


DEATHS: dict[str, tuple[str, int, int]] = {
    "before init_start": ("cache_clear", 0, HOUR_MS),
    "before the first setting": ("init_start", 0, HOUR_MS),
    "after three settings": ("submission_platform", 0, 60_000),
    "after the batch size": ("global_batch_size", 0, 60_000),
    "after all settings": ("eval_interval_samples", 0, HOUR_MS),
    "after initialisation": ("init_stop", 0, 1_000_000),
    "in training": ("eval_accuracy", 1, 1_000_000),
    "after success": ("run_stop", 0, 1_000_000),
}


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("seed", [1234, 77])
def test_a_second_attempt_is_one_finding_wherever_the_first_one_died(checked, death: str, seed: int) -> None:
    key, nth, gap_ms = DEATHS[death]
    first = until(brief(), key, nth) + "Traceback (most recent call last):\n"
    verdict = checked(first + shifted(brief(seed=seed), gap_ms))
    [finding] = verdict.findings
    line = 1 + len(first.splitlines())
    assert (finding.severity, finding.line, verdict.is_one_run) == ("error", line, False)
    assert f"two attempts in one file: the second begins on line {line}" in finding.found


@pytest.mark.parametrize(("death", "silence_ms"), [("init_start", 30 * 60_000), ("global_batch_size", 10_000)])
def test_how_long_a_silence_parts_two_attempts(checked, death: str, silence_ms: int) -> None:
    """Before the first setting, the limit of the initialisation does; after it, ten seconds do."""
    first = until(brief(), death)
    lines = first.splitlines()
    for silence, is_parted in ((silence_ms - 1, False), (silence_ms, True)):
        gap_ms = silence + time_of(lines[-1]) - time_of(lines[0])
        found = checked(first + shifted(brief(seed=77), gap_ms)).findings
        assert any("two attempts" in finding.found for finding in found) is is_parted


def after(key: str, *inserted: str, nth: int = 0) -> Edit:
    """Return an edit that inserts copies of the first records of other keys, with the time of the record of `key`."""

    def apply(text: str) -> str:
        def changed(line: str) -> str:
            time_ms = json.loads(line[len(TOKEN) :])["time_ms"]
            copies = [json.loads(lines_of(text, other)[0][len(TOKEN) :]) | {"time_ms": time_ms} for other in inserted]
            return line + "".join(f"{TOKEN}{json.dumps(copy)}\n" for copy in copies)

        return on_line(key, changed, nth)(text)

    return apply


@pytest.mark.parametrize(
    "change",
    [
        after("global_batch_size", "init_start", "init_start"),  # processes that start after the settings of the first
        after("seed", "init_start", "seed", "init_start", "seed"),  # every process logs its seed
        after("init_start", "cache_clear", "init_start"),
        after("cache_clear", "cache_clear", "cache_clear"),
        in_turn(after("submission_org", "init_start"), after("global_batch_size", "submission_org")),
        in_turn(repeat("init_start"), later("init_start", HOUR_MS // 4, 0)),  # the clock of one process is ahead
        in_turn(repeat("cache_clear"), later("cache_clear", -HOUR_MS // 3)),
        later("cache_clear", -HOUR_MS),  # caches dropped before a queue
    ],
)
def test_late_processes_are_no_second_attempt(checked, change: Edit) -> None:
    verdict = checked(change(brief()))
    assert not any("attempts" in finding.found for finding in verdict.findings)
    assert verdict.is_one_run


@pytest.mark.parametrize("form", ["line by line", "one after the other in each phase"])
def test_records_of_every_process_are_one_finding(checked, form: str) -> None:
    text = brief()
    lines = text.splitlines(keepends=True)
    cut = len(until(text, "start_warmup_step").splitlines())
    begin, end = lines[:cut], [line for line in lines[cut:] for _ in range(3)]
    interleaved = form == "line by line"
    verdict = checked("".join([line for line in begin for _ in range(3)] if interleaved else begin * 3) + "".join(end))
    [finding] = verdict.findings
    assert finding.found.startswith("3 processes have logged the whole run")
    assert (finding.severity, verdict.is_one_run) == ("error", False)


# Other formats


def in_json(text: str) -> str:
    return "".join(json.dumps({"log": line, "stream": "stdout"}) + "\n" for line in text.splitlines())


def as_python(text: str) -> str:
    return "".join(f"{TOKEN}{json.loads(line[len(TOKEN) :])!r}\n" for line in text.splitlines())


FORMATS: dict[str, Callable[[str], str | bytes]] = {
    "no space after the token": lambda text: text.replace(TOKEN, TOKEN.strip()),
    "marker of 2018": lambda text: text.replace(TOKEN, ":::MLPv0.5.0 bert "),
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-16 without a mark": lambda text: text.encode("utf-16-le"),
    "gzip": lambda text: gzip.compress(text.encode()),
    "xz": lambda text: lzma.compress(text.encode()),
    "bzip2": lambda text: bz2.compress(text.encode()),
    "a description": lambda _: json.dumps({"submitter": "Example"}, indent=2),
    "metrics": lambda _: '{"event": "run", "recipe": "tiny"}\n',
    "nothing": lambda _: "",
    "container log": in_json,
    "Python": as_python,
}


def test_a_file_of_another_kind_gets_one_finding_that_says_what_it_is(checked) -> None:
    found = {name: checked(change(brief())).findings for name, change in FORMATS.items()}
    said = "".join(f"{name} => {'; '.join(map(str, findings))}\n" for name, findings in found.items())
    assert said == Path(__file__).with_name("formats.txt").read_text()


# Compressed logs and standard input


def tar(content: bytes) -> bytes:
    with tarfile.open(fileobj=(out := io.BytesIO()), mode="w") as archive:
        info = tarfile.TarInfo("result_0.txt")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


UNPACKED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "plain": (lambda log: log, ""),
    "compressed": (gzip.compress, ""),
    "two members": (lambda log: gzip.compress(log[:5000]) + gzip.compress(log[5000:]), ""),
    "cut off": (lambda log: gzip.compress(log)[:-20], "damaged (Compressed file ended"),
    "wrong checksum": (lambda log: gzip.compress(log)[:-8] + bytes(8), "damaged (CRC check failed"),
    "rubbish behind it": (lambda log: gzip.compress(log) + b"rubbish", "damaged (Not a gzipped file"),
    "damaged": (lambda log: gzip.compress(log)[:100] + b"rubbish" * 1000, "damaged (Error"),
    "compressed twice": (lambda log: gzip.compress(gzip.compress(log)), "after unpacking, it is compressed by gzip"),
    "an archive": (lambda log: gzip.compress(tar(log)), "after unpacking, it is a tar archive"),
    "too large": (lambda log: gzip.compress(log + bytes(2**22)), "after unpacking, a file of more than 1 MiB"),
    "empty": (lambda _: b"", "it is empty"),
}


@pytest.mark.parametrize("form", UNPACKED)
@pytest.mark.parametrize("piped", [False, True])
def test_compressed_logs_and_standard_input(
    form: str, piped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, words = UNPACKED[form]
    path = tmp_path / "result_0.txt.gz"
    path.write_bytes(change(brief().encode()))
    monkeypatch.setattr(reader, "MAX_LOG_BYTES", 2**20)
    with path.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        verdict = check_file(STDIN if piped else path)
    assert str(verdict.path) == ("<stdin>" if piped else str(path))
    assert (verdict.official, verdict.ours) == (("fail", "fail") if words else ("pass", "pass"))
    assert [words in finding.found for finding in verdict.findings] == ([True] if words else [])


def test_standard_input_is_read_once_and_from_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", None)
    for paths, words in (([STDIN], "zcat"), ([STDIN, STDIN], "only once")):
        with pytest.raises(ValueError, match=words):
            check_paths(paths)
    # Standard input is in no folder, so no passing folder excuses its log.
    folder = Verdict(Path(), "5.0.0", "pass", (), None, None, part="folder")
    error = Finding(None, "", "log format", "no record; expected the log of a run", "copy it again")
    assert not accepted([folder, Verdict(reader.STDIN_NAME, "5.0.0", "fail", (error,), None, None)])


# Times and other numbers


def hurried(text: str) -> str:
    """Return the log with a run of milliseconds."""
    lines = [json.loads(line[len(TOKEN) :]) for line in text.splitlines()]
    start = next(line["time_ms"] for line in lines if line["key"] == "run_start")
    timed = [line | {"time_ms": min(line["time_ms"], start + (line["time_ms"] - start) // 1000)} for line in lines]
    return "".join(f"{TOKEN}{json.dumps(line)}\n" for line in timed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ms: ms // 1000, "counts seconds"),
        (lambda ms: ms * 1000, "counts microseconds"),
        (lambda ms: ms * 1_000_000, "counts nanoseconds"),
        (lambda ms: ms - 1_700_000_000_000, "time_ms 0: no time"),
    ],
)
@pytest.mark.parametrize("keys", [("run_start",), ()])
def test_a_time_in_another_unit_is_one_error(
    checked, change: Callable[[int], int], words: str, keys: tuple[str]
) -> None:
    text = brief()
    for key in keys or {json.loads(line[len(TOKEN) :])["key"] for line in text.splitlines()}:
        for nth in range(len(lines_of(text, key))):
            text = edit(key, lambda fields: fields.update(time_ms=change(fields["time_ms"])), nth)(text)
    verdict = checked(text)
    [finding] = verdict.findings
    assert finding.severity == "error"
    assert (words if not keys or "no time" not in words else "time_ms 421000") in finding.found
    assert read_log(verdict.path).run.seconds is None


def test_settings_that_are_stamped_0_are_one_error_under_the_ruleset_of_the_log(tmp_path: Path) -> None:
    stamp = [
        edit(key, lambda fields: fields.update(time_ms=0)) for key in ("submission_org", "submission_status", "seed")
    ]
    (tmp_path / "result_0.txt").write_text(in_turn(*stamp)(brief()))
    verdict = check_file(tmp_path / "result_0.txt", rules.AUTO)
    [finding] = verdict.findings
    assert (finding.severity, finding.key, finding.more, verdict.ruleset) == ("error", "submission_org", 2, "5.0.0")


NUMBERS: list[Edit] = [
    *(value("opt_base_learning_rate", number) for number in (1e-6, 9.9e-7, 0.1, 0.11, 4.25)),
    *(value("global_batch_size", 448 * 512), value("opt_lamb_epsilon", 0.5), value("opt_lamb_epsilon", 0.01)),
    *(value("eval_accuracy", number, -1) for number in (0.8, 0.80001, 0.97)),
    *(value("gradient_accumulation_steps", number) for number in (448, 449)),
    *(value("eval_samples", number) for number in (9_999, 10_001, 19_999, 20_000)),
    *(value("seed", seed) for seed in (2**128, 2**128 - 1, 2**64 - 1, -(2**63))),
    *(value("train_samples", [450_240]), hurried),
]


def test_numbers_that_no_run_can_have(checked) -> None:
    said = [
        sorted(f"{each.severity}: {each.key}: {each.found}" for each in checked(n(brief())).findings) for n in NUMBERS
    ]
    assert "\n".join(map("; ".join, said)) + "\n" == Path(__file__).with_name("numbers.txt").read_text()


# Rules of one round


@pytest.mark.parametrize(("ruleset", "severity"), [("4.0.0", "error"), ("4.1.0", "warning"), ("5.0.0", "warning")])
def test_a_key_that_the_ruleset_has_dropped_does_not_decide(checked, ruleset: str, severity: str) -> None:
    [finding] = checked(value("submission_status", "Available on-premise")(brief()), ruleset).findings
    assert (finding.key, finding.severity) == ("submission_status", severity)


def test_the_line_of_a_verdict_says_what_the_newest_ruleset_would_miss(tmp_path: Path) -> None:
    (tmp_path / "result_0.txt").write_text(delete("opt_lamb_epsilon")(log_with_weights()))
    verdict = check_file(tmp_path / "result_0.txt", rules.AUTO)
    assert (verdict.passed, verdict.ruleset) == (True, "2.0.0")
    assert "ruleset 2.0.0 (5.0.0 would fail it: opt_lamb_epsilon: no record" in verdict.summary
    assert check_file(tmp_path / "result_0.txt", "2.0.0").missed == ""


def log_with_weights() -> str:
    return without_chain(log_of((0.5, 0.6, 0.73), step_ms=1000).decode())


def test_the_division_may_come_late_only_in_old_rounds(tmp_path: Path) -> None:
    text = log_with_weights()
    line = lines_of(text, "submission_division")[0]
    (tmp_path / "result_0.txt").write_text(text.replace(line, "") + line)
    verdict = check_file(tmp_path / "result_0.txt", rules.AUTO)
    assert (verdict.ruleset, verdict.official) == ("1.1.0", "pass")


# Evaluations


PACKED = 6912
"""A batch size whose rules' interval is 225,000 samples."""


def at_samples(*steps: int, batch: int = PACKED) -> str:
    """Return a log whose evaluations are `steps` samples apart."""
    counts = [sum(steps[: index + 1]) for index in range(len(steps))]
    text = brief(*[0.5] * (len(steps) - 1), 0.73, batch=batch)
    return in_turn(epoch_nums(*counts), value("train_samples", counts[-1]))(text)


@pytest.mark.parametrize(
    ("steps", "outcome"),
    [
        ((225_000 + PACKED - 1, *[225_000 - PACKED, 225_000 + PACKED] * 4), "pass"),
        ((231_000, 220_000, 238_000, 212_500, 238_500), "pass"),  # each count within one batch
        ((*[204_000, 196_000] * 4, 212_000), "warning"),  # the interval of a neighbouring batch size
        ((225_000, 225_000, 225_000 + 2 * PACKED + 1, 225_000), "error"),
        ((225_000, 225_000, 450_000, 225_000), "error"),
    ],
)
def test_packed_batches_may_put_each_count_a_batch_off(checked, steps: tuple[int, ...], outcome: str) -> None:
    verdict = checked(at_samples(*steps))
    findings = [finding for finding in verdict.findings if finding.rule == "TR 24.4"]
    assert {finding.severity for finding in findings} == (set() if outcome == "pass" else {outcome})
    if outcome == "error":
        place = lines_of(verdict.path.read_text(), "eval_accuracy")[2]
        assert f'"epoch_num": {sum(steps[:3])}' in place
        assert findings[0].found.startswith(f"evaluation at {sum(steps[:3])} samples, {steps[2]} after the last")
        assert findings[0].line == 1 + verdict.path.read_text().splitlines(keepends=True).index(place)


def test_a_run_that_went_on_after_its_target_is_said(checked) -> None:
    verdict = checked(brief(0.5, 0.721, 0.722, 0.73))
    [finding] = verdict.findings
    assert (finding.severity, finding.key) == ("warning", "eval_accuracy")
    assert "evaluation 2 reached the target, and the run went on to evaluation 4" in finding.found
    assert read_log(verdict.path).run.converged_samples() == 300_160


def extended(text: str, accuracy: float) -> str:
    """Return a log whose training goes on after run_stop, as for the power meter."""
    added = "".join(lines_of(text, key)[-1] for key in ("block_start", "block_stop", "eval_start"))
    result = value("eval_accuracy", accuracy)(lines_of(text, "eval_accuracy")[-1])
    return text + shifted(added + result, HOUR_MS)


def test_a_run_may_be_extended_for_the_power_meter(checked) -> None:
    verdict = checked(extended(brief(), 0.74))
    [finding] = verdict.findings
    assert (finding.severity, finding.more) == ("warning", 3)
    assert "logged after run_stop" in finding.found
    assert verdict.official == "pass"
    assert read_log(verdict.path).run.accuracy == 0.73
    errors = checked(extended(value("eval_accuracy", 0.71, -1)(brief()), 0.74)).errors
    assert ["last accuracy 0.71000" in error.found for error in errors] == [True]


def test_a_count_of_samples_in_another_record_does_not_replace_a_good_one(checked) -> None:
    near = in_turn(log_after("seed", "d_batch_size", 56), metadata("block_stop", "samples_count", 450_000, -1))
    each_block = in_turn(*(metadata("block_stop", "samples_count", 150_080, nth) for nth in range(4)))
    for text in (near(brief()), each_block(brief(0.5, 0.6, 0.7, 0.73))):
        assert checked(text).findings == ()
