"""Choice of this run's reduction strategy: the configured strategy, or the fastest one on these machines."""

import math
import time

import torch

from bert.configuration.sections import ReductionStrategy, TrainingConfig
from bert.optimizer import FlatParameters
from bert.parallel.mesh import all_reduce_, barrier
from bert.parallel.reduction.gradients import Communicators, Reduction

_ENOUGH_S = 3.0
_ROUNDS = 4


def choose(config: TrainingConfig, flat: FlatParameters, communicators: Communicators) -> tuple[ReductionStrategy, str]:
    """Return this run's reduction strategy, the same on all ranks, and the reason for it.

    Call it only at start-up, because measuring zeroes the gradients.

    ``auto`` measures flat and hierarchical if they differ here. It never chooses the sharded strategies: they save memory,
    and the time of their sums alone does not show whether they are faster. The time of a round is the slowest rank's time.
    Each strategy is judged by its best round, because the first round opens connections. No round begins after
    ``_ENOUGH_S`` seconds.
    """
    if communicators.world is None:
        return "flat", "one rank"
    if config.reduction != "auto":
        return config.reduction, "as set"
    if communicators.rail is None or communicators.node is None:
        return "flat", "one host" if communicators.rail is None else "one rank a host"
    strategies: tuple[ReductionStrategy, ...] = ("flat", "hierarchical")
    settings = config.reduce_dtype, config.bucket_bytes
    reductions = [Reduction(flat, communicators, each, *settings) for each in strategies]
    # Every round sums the same memory, so any values other than zeros would grow from round to round.
    flat.gradients_N.zero_()
    device = flat.gradients_N.device
    best, spent = [math.inf] * len(strategies), 0.0
    for _ in range(_ROUNDS):
        times = torch.zeros(len(strategies), dtype=torch.float64, device=device)
        # Rounds alternate between strategies, so that a disturbance on the machine slows all of them.
        for place, reduction in enumerate(reductions):
            barrier(communicators.world)  # late ranks must not count as slow sums
            begin = time.perf_counter()
            reduction.finish()
            # On a GPU, ``finish`` makes only the stream wait for the sums, not the host.
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[place] = time.perf_counter() - begin
        all_reduce_(times, "max")  # over all data groups, so that all ranks choose the same strategy
        best = list(map(min, best, times.tolist()))
        spent += times.sum().item()
        if spent > _ENOUGH_S:  # equal on all ranks
            break
    for reduction in reductions:
        # If it stayed open, its hooks on the parameters would run in every backward pass.
        reduction.close()
    shown = ", ".join(f"{each} {1000 * seconds:.1f} ms" for each, seconds in zip(strategies, best, strict=True))
    return strategies[best.index(min(best))], shown
