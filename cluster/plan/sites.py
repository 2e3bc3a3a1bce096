"""Choice of `training.site_steps` for hosts in several sites, which only slow links join."""

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from bert.configuration.config import Config
from bert.parallel.mesh import are_whole_copies
from bert.parallel.sites import BLOCK
from cluster.model.memory import model_shares
from cluster.model.rates import Rates, Target
from cluster.model.step import PredictedStep, predict_run, predict_step
from cluster.model.work import BUCKET_BYTES, Work
from cluster.plan.search import Candidate, Found, table_settings
from cluster.published.fitted import ring_share
from cluster.view import View
from compliance.log.schedule import evaluation_interval
from console.text import counted, duration

MOST_STEPS = 128
WORTH = 1.1
"""Minimum ratio of the time of a step over all ranks to the time of a step within a site. Below this ratio, the gain does
not justify weights that differ between sites."""
EXCHANGED_BYTES = 1 + 4 / BLOCK
"""Bytes that an exchange in int8 sends for each parameter: one byte, and a part of the fp32 scale of its block."""


def choose_site_steps(
    config: Config, work: Work, target: Target, found: Found, view: View
) -> tuple[Candidate, list[str]]:
    """Return the best way to run on the sites of a view, and lines that explain it.

    ``site_steps`` is the smallest power of two for which the exchange ends within `TrainingConfig.site_delay` steps. If it
    does not divide the number of steps between two evaluations, a smaller power is chosen.
    """
    best = found.best[0]
    lines = [f"{len(view.sites)} sites: a step over all ranks takes {_ms(best.step)}"]
    if config.log.division == "closed":
        return best, [f"{lines[0]}; training.site_steps stays 1, because larger values need the open division"]
    ways = [*_steps_in_site(work, target, found, view)]
    if not ways:
        return best, [f"{lines[0]}; training.site_steps stays 1, because every plan spreads model copies over sites"]
    step, way = min(ways, key=lambda each: each[0].total)
    seconds, batch = _exchange_seconds(work, view), way.strategy.global_batch_size
    lines[0] += f", a step within a site {_ms(step)}, and an exchange between sites {duration(seconds)}"
    powers = [1 << power for power in range(MOST_STEPS.bit_length())]
    delays = {each: replace(config.training, site_steps=each).site_delay for each in powers}
    needed = next((each for each in powers[1:] if seconds <= delays[each] * step.total), MOST_STEPS)
    interval = work.interval_samples or evaluation_interval(batch)
    site_steps = max(each for each in powers if each <= needed and (each == 1 or interval % (each * batch) == 0))
    if site_steps < needed:
        multiple = f"a multiple of {needed} x {batch:,}"
        lines.append(f"training.site_steps {needed} is possible only if evaluation.interval_samples is {multiple}")
    late = max(0.0, seconds - delays[site_steps] * step.total)
    step = replace(step, reduce=step.reduce + late / site_steps)
    if site_steps == 1 or best.step.total <= WORTH * step.total:
        return best, [*lines, "training.site_steps stays 1"]
    own, first = (table_settings(each, target.world_size) for each in (way, best))
    changes = "".join(f", {name} {value}" for name, value in own.items() if value != first[name])
    fits = f"takes {duration(late)} longer than" if late else "fits into"
    delay = counted(delays[site_steps], "step")
    lines.append(f"training.site_steps {site_steps}{changes}: an exchange {fits} {delay}, so a step takes {_ms(step)}")
    if not view.sites_stated:
        lines.append("set MLPERF_BERT_SITE on each host to its site")
    strategy, rates = replace(way.strategy, site_steps=site_steps), target.rates[way.strategy.precision]
    run = predict_run(work, strategy, rates, step, way.schedule.samples)
    return replace(way, strategy=strategy, step=step, run=run), lines


def _ms(step: PredictedStep) -> str:
    return f"{1000 * step.total:,.2f} ms"


def _steps_in_site(work: Work, target: Target, found: Found, view: View) -> Iterator[tuple[PredictedStep, Candidate]]:
    """Yield (predicted step within the largest site, candidate) for candidates without a model copy that spans sites."""
    # All precisions of a probe have the same rates, so take the first.
    rates = rates_in_site(next(iter(target.rates.values())), view)
    for each in found.ranked:
        parallel, batch = each.strategy.parallel, each.strategy.global_batch_size
        if all(are_whole_copies(parallel, len(hosts), target.ranks_per_node) for hosts in view.sites.values()):
            strategy = replace(each.strategy, global_batch_size=batch * rates.nodes // target.nodes)
            yield predict_step(work, strategy, rates), each


def rates_in_site(whole: Rates, view: View) -> Rates:
    """Return the rates of the largest site by itself, given the rates of all ranks.

    Collectives within hosts keep their measured times. The times of the other collectives are scaled so that an all-gather
    takes as long as a ring over the median path of the slowest site.
    """
    hosts = max(map(len, view.sites.values()))
    curves = {key: curve for key, curve in whole.collectives.items() if key[1] == "node"}
    if hosts == 1:
        # Name the curves "world", because `Rates.collective` looks for "world" if a scope contains all ranks.
        return replace(whole, nodes=1, collectives=curves | {(key[0], "world"): each for key, each in curves.items()})
    inside = view.links_of_sites(between_sites=False)
    of_sites = [[each for each in inside if view.ranks[each.source].host in site] for site in view.sites.values()]
    per_byte = max(median(each.seconds_per_byte for each in links) for links in of_sites if links)
    # Convert to the rate of a host: a ring over all ranks uses all of its network cards. Rings along rails share them.
    per_byte *= len(view.hosts) / len({each.source for each in view.links_of(between_hosts=True)})
    wait = (hosts - 1) * median(each.latency_s for each in inside)
    world, rail = ring_share(hosts * whole.ranks) * per_byte, ring_share(hosts) * per_byte * whole.ranks
    for (operation, scope), curve in whole.collectives.items():
        if scope != "node":
            ring = wait + BUCKET_BYTES * (world if scope == "world" else rail)
            factor = ring / whole.collectives["all-gather", scope].seconds(BUCKET_BYTES)
            points = tuple((size, factor * seconds) for size, seconds in curve.points)
            curves[operation, scope] = replace(curve, points=points)
    return replace(whole, nodes=hosts, collectives=curves)


def _exchange_seconds(work: Work, view: View) -> float:
    """Return the seconds of an exchange, in which each site sends the change of its weights to all other sites.

    All senders send at once. The change is cut into as many equal pieces as the largest site has senders. The site with the
    fewest senders takes the longest, because its senders send several pieces each.
    """
    across = view.links_of_sites(between_sites=True)
    ends = {each.source for each in across}
    senders = [sum(view.ranks[end].host in hosts for end in ends) for hosts in view.sites.values()]
    [share] = model_shares(work.model)
    sent = EXCHANGED_BYTES * share.elements * math.ceil(max(senders) / min(senders)) / max(senders)
    # Use the slowest path, because hosts may share a link, and the probe measured with another number of senders at once.
    return sent * (len(view.sites) - 1) * max(each.seconds_per_byte for each in across)
