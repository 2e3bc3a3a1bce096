"""Train, check and report: the program behind ``./run_and_time.sh [RECIPE] [RUNS] [-- --section.field value ...]``.

If another launcher (torchrun, srun or mpirun) starts it, it becomes one process of a single run. ``--prepare RECIPE`` makes
and checks what a run needs. ``--verdict RESULT_FILE...`` judges finished runs. run_and_time.sh holds the help text.
"""

import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bert.configuration.config import Config
from bert.configuration.recipes import RECIPES
from bert.launch.binding import become_rank
from bert.launch.layout import has_gpus, layout_of, parse_whole_number, whole_number
from bert.launch.series import Nodes, Series, judge
from bert.launch.supervision import Stopped, Supervisor, announce
from bert.parallel.environment import is_rank
from bert.train import parse, refused, without_option
from console.files import lock_file
from console.interruption import ignore_signals
from console.program import accept_any_text, answer_version
from console.text import did_you_mean

ANSWERED = 10
"""Exit status of --prepare if its settings contain --help, --print-config or --dry-run, after which no run starts."""
_MODES = ("--prepare", "--verdict")
_OPTIONS = ("--help", "--version", *_MODES)
_USAGE = "./run_and_time.sh [RECIPE] [RUNS] [-- settings]"


@dataclass(frozen=True)
class Command:
    """A parsed command line."""

    mode: str
    """--prepare, --verdict, or "" to train."""
    arguments: list[str]
    """Arguments of `bert.train`, or the result files of --verdict."""
    runs: int = 1


def parse_command(words: Sequence[str]) -> Command:
    """Parse the command line. Raises ``ValueError`` for an unexpected word, a wrong number or a missing result file."""
    mode, words = (words[0], words[1:]) if words and words[0] in _MODES else ("", words)
    if mode == "--verdict":
        expected = "expected results/<system>/bert/result_<n>.txt"
        if not words:
            raise ValueError(f"--verdict: no result file given, {expected}")
        for word in words:
            if not Path(word).is_file():
                raise ValueError(f"--verdict: there is no file {word!r}, {expected}")
        return Command(mode, list(words))
    first_option = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    named, settings = list(words[:first_option]), list(words[first_option:])
    most = 1 if mode else 2
    if len(named) > most:
        raise ValueError(f"unexpected argument {named[most]!r}: expected {_USAGE}")
    if settings and settings[0] == "--":
        del settings[0]
    elif settings and settings[0] in _MODES:
        raise ValueError(f"{settings[0]} must be the first argument")
    elif settings and (close := did_you_mean(settings[0], _OPTIONS)) and settings[0] not in _OPTIONS:
        raise ValueError(f"there is no option {settings[0]}{close}")
    runs = parse_whole_number("RUNS", named[1], 1) if len(named) > 1 else 1
    # Default to tiny_cpu, unless --config or --plan gives a file, which names the recipe.
    in_file = any(without_option(name, settings)[0] for name in ("--config", "--plan"))
    return Command(mode, [*(named[:1] or ([] if in_file else ["tiny_cpu"])), *settings], runs)


def read_nodes(*, starts: bool) -> Nodes:
    """Return the nodes that NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT describe.

    Raises ``ValueError`` for a wrong value or, if this node ``starts`` processes, for a missing value.
    """
    count, rank = whole_number("NNODES", 1, 1), whole_number("NODE_RANK", 0, 0)
    if rank >= count:
        raise ValueError(
            f"NODE_RANK is {rank}, but NNODES is {count}: set NODE_RANK to a number below NNODES, or leave both out"
        )
    if count == 1:
        return Nodes()
    if starts and not (os.environ.get("NODE_RANK") and os.environ.get("MASTER_ADDR")):
        raise ValueError(f"NNODES is {count}, but NODE_RANK or MASTER_ADDR is not set: set both on every node")
    return Nodes(count, rank, os.environ.get("MASTER_ADDR", ""), whole_number("MASTER_PORT", 29500, 1, 65535))


def main(words: Sequence[str]) -> int:
    supervisor = Supervisor()
    try:
        supervisor.receive_signals()
        accept_any_text()
        answer_version(words)
        command = parse_command(words)
        if command.mode == "--verdict":
            return judge([Path(word) for word in command.arguments], supervisor)
        if not command.mode and is_rank():
            become_rank(command.arguments)
        return _start(command, supervisor)
    except Stopped:
        return supervisor.status
    except (ValueError, OSError) as error:
        return refused(error)
    finally:
        ignore_signals()


def _start(command: Command, supervisor: Supervisor) -> int:
    prepares = command.mode == "--prepare"
    nodes = read_nodes(starts=not prepares)
    clear_caches = whole_number("CLEAR_CACHES", 1, 0, 1) == 1
    try:
        config = parse(command.arguments)
    except SystemExit:  # `parse` exits after it has printed the answer to --help or --print-config
        if prepares:
            return ANSWERED
        raise
    layout = layout_of(config)
    if config.log.tensorboard is not None:
        _install("tensorboard", supervisor)
    if config.recipe == "tiny_cpu":
        _make_demo_data(config)
    series = Series(config, command.arguments, command.runs, nodes, layout, clear_caches)
    if prepares or config.dry_run:
        status = series.prepare(supervisor)
        return ANSWERED if prepares and config.dry_run and not status else status
    return series.train(supervisor)


def _install(extra: str, supervisor: Supervisor) -> None:
    """Install the packages that pyproject.toml lists under ``extra`` into .venv, unless they are already installed."""
    extras = (*(["dali"] if has_gpus() else []), extra)
    script = 'source launch/venv.sh && prepare_venv "$@"'

    def stop(process: int, number: int, _: int) -> None:
        os.kill(process, number)  # say nothing here: the bash script prints that it was interrupted

    status = supervisor.run(["bash", "-euo", "pipefail", "-c", script, "run_and_time.sh", *extras], stop=stop)
    if status:
        raise SystemExit(status)


def _make_demo_data(config: Config) -> None:
    """Make the data of the recipe tiny_cpu, or verify them if they exist. Do nothing if the run reads only other data."""
    own = RECIPES["tiny_cpu"]().data
    if config.data.train != own.train and config.data.evaluation != own.evaluation:
        return
    from dataloading.__main__ import demo  # import it here: the import is slow, and other recipes do not need it

    announce("data of tiny_cpu: prose of the standard library")
    folder, lock = own.train.parent, None
    with suppress(OSError):  # without write access, existing data are only verified
        folder.parent.mkdir(exist_ok=True)
        lock = lock_file(folder.with_suffix(".lock"), patience_s=math.inf)  # wait for a process that is making the data
    try:
        demo(folder, own.vocab)
    finally:
        if lock is not None:
            os.close(lock)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
