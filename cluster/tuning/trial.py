"""Rank of a trial: a run up to where its clock would start, then as many training steps as it is asked for.

    python -m cluster.tuning.trial RECIPE [--section.field value ...]

Standard input has a line for each window: steps that are not timed, and steps that are. The answer on standard output is a
line of JSON. Started as training is, by the environment of a launcher. It leaves no log, no checkpoint and no weights.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from bert.checkpoints.world import World
from bert.configuration.config import Config
from bert.configuration.sections import CheckpointConfig
from bert.cuda_graphs import CudaCapturer
from bert.guards.interruption import Interruption
from bert.guards.preflight import check
from bert.log.mllog import MLLog
from bert.loop import Run
from bert.parallel.collectives import barrier
from bert.parallel.mesh import Mesh, join_mesh, leave_mesh
from bert.setup import build_run, capturing
from bert.train import parse
from cluster.tuning.group import Pace
from console.program import complain


def main(arguments: Sequence[str]) -> int:
    """Build the run, say that it is ready, and train on demand until standard input ends."""
    # Answers get a descriptor of their own before standard output is taken from the run.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a run prints is not for who asks
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = _leaving_nothing(parse(arguments), Path(folder))
            mesh = join_mesh(config.training.device)
            with capturing(config, mesh) as capturer:
                run = _built(config, mesh, capturer)
                answers.write("{}\n")
                # The wait for a line is also the wait between windows: a process that reads takes no processor.
                for line in sys.stdin:
                    untimed, timed = map(int, line.split())
                    # Steps before the window use up what was read ahead while others had the machine.
                    _window(run, mesh, untimed)
                    answers.write(json.dumps(asdict(_window(run, mesh, timed))) + "\n")
                run.loader.close()
                run.reporter.__exit__(None, None, None)
    except (ValueError, OSError) as error:
        complain(error)
        return 2
    finally:
        leave_mesh()
    return 0


def _leaving_nothing(config: Config, folder: Path) -> Config:
    seed = 0 if config.training.seed is None else config.training.seed  # all choices train on the same batches
    return replace(
        config,
        training=replace(config.training, seed=seed),
        log=replace(config.log, results=folder, run=None, tensorboard=None),
        checkpoint=CheckpointConfig(),
        resume=None,
        save_checkpoint=None,
        dry_run=False,
    )


def _built(config: Config, mesh: Mesh, capturer: CudaCapturer | None) -> Run:
    inputs = check(config, mesh.world_size)
    inputs.metrics.parent.mkdir(parents=True)
    assert config.training.seed is not None
    world = World.of(mesh.hosts, config)
    return build_run(
        config, inputs, mesh, MLLog(None), Interruption(), world, config.training.seed, resumed=None, capturer=capturer
    )


def _window(run: Run, mesh: Mesh, steps: int) -> Pace:
    """Train some steps in a row, and return the pace of this rank."""
    run.stopwatch.reset()
    # All ranks begin together.
    barrier()
    begin, tokens = time.perf_counter(), 0
    for _ in range(steps):
        with run.stopwatch.time("data_wait"):
            micro_batches = next(run.loader)
        tokens += sum(batch.tokens for batch in micro_batches)
        run.step(micro_batches)
    # Work may still be queued on the GPU.
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    barrier()
    return Pace(time.perf_counter() - begin, tokens, run.stopwatch.take()["data_wait"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
