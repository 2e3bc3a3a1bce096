"""Edits that turn a valid log into a log of other software, of several processes, or of a run that died."""

import re
from collections.abc import Callable

from compliance.log.record import TOKEN
from compliance.log.rules import LAST_MS
from tests.compliance.log_edits import (
    Edit,
    delete,
    edit,
    epoch_nums,
    in_turn,
    later,
    lines_of,
    metadata,
    on_line,
    time_of,
    value,
)
from tests.compliance.run_logs import START_MS, log_of, without_chain

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
ACCURACIES = {"closed": (0.36, 0.648, 0.756), "open": (0.15, 0.27, 0.315)}


def brief(*accuracies: float, division: str = "closed", batch: int | None = None, seed: int = 1234) -> str:
    """Return a log without digests and without records of weights, which ruleset 5.0.0 does not require."""
    log = log_of(accuracies or ACCURACIES[division], division, seed=seed, global_batch_size=batch, step_ms=1000)
    return delete("weights_initialization")(without_chain(log.decode()))


def evaluated_at(*samples: int) -> Edit:
    return in_turn(epoch_nums(*samples), value("train_samples", samples[-1]))


def at_steps(*steps: int, batch: int = 6912) -> Edit:
    """Return an edit that replaces the log by one with evaluations `steps` samples apart (schedule: 225,000)."""
    counts = [sum(steps[: index + 1]) for index in range(len(steps))]
    return lambda _: evaluated_at(*counts)(brief(*[0.5] * (len(steps) - 1), 0.73, batch=batch))


def of(*accuracies: float) -> Edit:
    """Return an edit that replaces the log by a log with these accuracies."""
    return lambda _: brief(*accuracies)


def each_time(change: Callable[[int], int]) -> Edit:
    return lambda text: re.sub(r'(?<="time_ms": )\d+', lambda found: str(change(int(found[0]))), text)


def timed(key: str, time_ms: int, nth: int = 0) -> Edit:
    return edit(key, lambda fields: fields.update(time_ms=time_ms), nth)


def stamped(key: str, other: str, by_ms: int) -> Edit:
    """Return an edit that sets the time of a record to the time of another record plus `by_ms`."""
    return lambda text: timed(key, time_of(lines_of(text, other)[0]) + by_ms)(text)


def after(key: str, *inserted: str) -> Edit:
    """Return an edit that inserts, after the record of `key`, the first records of other keys, with this record's time."""

    def apply(text: str) -> str:
        copies = [lines_of(text, other)[0] for other in inserted]
        stamp = str(time_of(lines_of(text, key)[0]))
        return on_line(
            key, lambda line: line + "".join(re.sub(r"(?<=time_ms\": )\d+", stamp, each) for each in copies)
        )(text)

    return apply


def until(text: str, key: str, nth: int = 0) -> str:
    """Return the beginning of the log up to the `nth` record of `key`."""
    last = lines_of(text, key)[nth]
    return text[: text.index(last) + len(last)]


def died(key: str, gap_ms: int, nth: int = 0, again: Edit | None = None, seed: int = 1234) -> Edit:
    """Return an edit that cuts the log after a record of `key`, and appends a whole log, `gap_ms` later, like a restart."""
    shift = each_time(lambda ms: ms + gap_ms)
    whole = in_turn(again, shift) if again else shift
    return lambda text: until(text, key, nth) + "Traceback (most recent call last):\n" + whole(brief(seed=seed))


def silent(key: str, ms: int) -> Edit:
    """Return an edit like `died`, but the whole log begins `ms` after the last record before the cut."""
    return lambda text: died(key, ms + time_of(lines_of(text, key)[0]) - time_of(text.splitlines()[0]))(text)


def lines_from(start: float, end: float = 1.0) -> Edit:
    """Return an edit that keeps the lines from `start` to `end`, given as fractions of the number of lines."""

    def apply(text: str) -> str:
        lines = text.splitlines(keepends=True)
        return "".join(lines[int(start * len(lines)) : int(end * len(lines))])

    return apply


def side_by_side(processes: int, interleaved: bool) -> Edit:
    """Return an edit that repeats every record as if several processes had logged it, in turn or phase by phase."""

    def apply(text: str) -> str:
        lines = text.splitlines(keepends=True)
        cut = len(until(text, "start_warmup_step").splitlines())
        begin = [line for line in lines[:cut] for _ in range(processes)] if interleaved else lines[:cut] * processes
        return "".join(begin + [line for line in lines[cut:] for _ in range(processes)])

    return apply


def evaluated_offline(text: str) -> str:
    """Move all evaluations behind the training. Each keeps its time stamp, which is the time of its checkpoint."""
    moved = ("eval_accuracy", "train_samples", "eval_samples", "run_stop")
    rest = [line for line in text.splitlines(True) if any(f'"key": "{key}"' in line for key in moved)]
    training = delete("eval_start", "eval_stop", *moved)(text)
    end_ms = time_of(lines_of(text, "eval_accuracy")[-1])
    stamped = in_turn(timed("run_stop", end_ms), timed("train_samples", end_ms), timed("eval_samples", end_ms))
    return stamped(timed("block_stop", end_ms, -1)(training + "".join(rest)))


def extended(accuracy: float) -> Edit:
    """Return an edit that adds training after run_stop, as for a measurement of power."""

    def apply(text: str) -> str:
        added = "".join(lines_of(text, key)[-1] for key in ("block_start", "block_stop", "eval_start"))
        result = value("eval_accuracy", accuracy)(lines_of(text, "eval_accuracy")[-1])
        return text + each_time(lambda ms: ms + HOUR_MS)(added + result)

    return apply


def untrained(text: str) -> str:
    """Add an evaluation of the untrained model before the first block."""
    start = lines_of(text, "block_start")[0]
    zero = {"time_ms": time_of(start), "value": 0.34, "metadata": {"epoch_num": 0}}
    result = edit("eval_accuracy", lambda fields: fields.update(zero))(lines_of(text, "eval_accuracy")[0])
    return text.replace(start, result + start, 1)


def published(text: str) -> str:
    """Imitate large submissions: an init_start per rank, one block, no eval_start, floats, packed counts, line prefixes."""
    text = in_turn(
        delete("eval_start", "eval_stop", "quality_target", "eval_interval_samples", "submission_status"),
        *[delete("block_stop", nth=0), delete("block_start", nth=-1)] * 2,
        value("num_warmup_steps", 10000.0),
        value("start_warmup_step", -9500.0),
        metadata("eval_accuracy", "epoch_num", 299_800, 1),
    )(text)
    first = lines_of(text, "init_start")[0]
    statistics = edit("run_stop", lambda fields: fields.update(key="tracked_stats", value={}, time_ms=LAST_MS - 1))
    text = text.replace(first, first + later("init_start", -3)(first) + first)
    return (text + statistics(lines_of(text, "run_stop")[0])).replace(TOKEN, f"0: {TOKEN}")


def epoch_unclosed(text: str) -> str:
    start = lines_of(text, "block_start")[0]
    epoch = start.replace("block_start", "epoch_start").replace("first_epoch_num", "epoch_num")
    return text.replace(start, epoch + start, 1)


def odd_key(text: str) -> str:
    """Insert before run_stop a record with an early time whose key is a terminal escape sequence."""
    odd = edit("seed", lambda fields: fields.update(key="\x1b[2J" + "x" * 500, time_ms=START_MS))
    return text.replace(stop := lines_of(text, "run_stop")[0], odd(lines_of(text, "seed")[0]) + stop)


def stopped_early(text: str) -> str:
    """Move run_stop before the last evaluation."""
    lines = text.splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if '"eval_start"' in line)
    return "".join([*lines[:last], timed("run_stop", time_of(lines[last]))(lines[-1]), *lines[last:-1]])
