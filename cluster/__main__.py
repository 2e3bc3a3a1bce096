"""Command line: ``python -m cluster COMMAND``. Commands import what they need when they run, so that --help is fast."""

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import FlagCreatePairsOff, Positional

from console.commands import Commands
from console.program import complain, say, say_json
from console.text import counted, did_you_mean

if TYPE_CHECKING:
    from bert.configuration.config import Config

app = Commands()


@app.command
def _devices() -> None:
    """List the known devices with their vendors' figures: dense peak rates, memory, links (one way) and power."""
    from cluster.devices import devices

    say(f"{'device':16}  TFLOP/s bf16   fp8  memory GB  GB/s  link GB/s  host     W  a node  source")
    for each in devices():
        fp8 = f"{each.fp8_tflops:.0f}" if each.fp8_tflops else "-"
        say(
            f"{each.name:16}{each.bf16_tflops:14.0f}{fp8:>6}{each.memory_gb:11.0f}{each.memory_gb_s:6.0f}"
            f"{each.link_gb_s:11.0f}{each.host_gb_s:6.0f}{each.tdp_w:6.0f}{each.per_node:8}  {each.link}; {each.source}"
        )


@app.command
def _predict(
    accelerator: str | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    batch: int | None = None,
    interconnect: str = "",
    networking: str = "",
    round: str | None = None,
    cluster: Path | None = None,
    measured: str | None = None,
    table: Path | None = None,
    json: FlagCreatePairsOff[bool] = False,
) -> int:
    """Predict the time to train BERT to the target 0.720, with an 80 % interval, from published results.

    Args:
        accelerator: Name of the accelerator, such as H100-SXM; `devices` lists the known ones.
        nodes: Number of nodes. By default 1, or if logs are given as --measured, enough for the ranks that they state.
        gpus_per_node: Accelerators of each node, or sockets if the accelerator is a CPU; by default as listed by `devices`.
        batch: Global batch size. By default, the fastest batch size that was published at this scale.
        interconnect: Links between the accelerators of a node, in words. For PCIe cards, "NVLINK BRIDGE" adds bridges.
        networking: Network of a node, in words, such as "8x ConnectX-7 IB NDR 400Gb/s".
        round: Round of MLPerf Training whose software and recipes are assumed; by default v5.0, the last with BERT.
        cluster: File that `probe` wrote. It replaces the options that describe the machines.
        measured: Measured minutes, or a results folder or log of closed runs, to compare with the prediction.
        table: CSV file with a machine in each row, in place of all other options. Exit status 1 if a row has no prediction.
        json: Print one JSON document.
    """
    from cluster.devices import describe_machine, device_named
    from cluster.published.cost_model import LAST_ROUND, TimedRun
    from cluster.published.measured import Measured, agreed, compare, read_measured
    from cluster.published.measured import as_lines as measured_lines
    from cluster.published.prediction import as_document, as_lines, machine_of, predict, usual_run

    described = (accelerator, nodes, gpus_per_node, interconnect or None, networking or None)
    if table is not None:
        from cluster.published.table import predict_table

        if {*described, batch, round, cluster, measured, json} != {None, False}:
            raise ValueError("--table describes the machines and prints CSV: omit all other options")
        text, rows, refused = predict_table(table)
        sys.stdout.buffer.write(text.encode())
        if refused:
            complain(f'{table}: no prediction for {refused} of {counted(rows, "row")}; the column "reason" says why')
        return int(refused > 0)
    found = None if measured is None else read_measured(measured)
    stated = found or Measured()
    if cluster is not None:
        from cluster.view import read_view

        if any(each is not None for each in described):
            raise ValueError("--cluster describes the machines: omit --accelerator and options about nodes and links")
        machine = machine_of(read_view(cluster))
        agreed("--cluster", machine.device.name, stated.accelerator)
    else:
        name = agreed("--accelerator", accelerator and device_named(accelerator).name, stated.accelerator)
        if name is None:
            raise ValueError("no --accelerator given; `python -m cluster devices` lists the known ones")
        device = device_named(name)
        per_node = min(device.per_node, stated.ranks or device.per_node) if gpus_per_node is None else gpus_per_node
        nodes = -(-(stated.ranks or 1) // max(1, per_node)) if nodes is None else nodes
        machine = describe_machine(device, nodes, per_node, interconnect, networking)
    agreed("product of --nodes and --gpus-per-node", machine.accelerators, stated.ranks)
    batch = agreed("--batch", batch, stated.batch)
    round = LAST_ROUND if round is None else round
    prediction = predict(usual_run(machine, round) if batch is None else TimedRun(machine, batch, round))
    comparison = compare(found, prediction) if found else None
    if json:
        say_json(as_document(prediction) | ({"measured": comparison} if comparison else {}))
        return 0
    for line in [*as_lines(prediction), *(measured_lines(comparison) if comparison else [])]:
        say(line)
    return 0


@app.command
def _calibrate(out: Path) -> None:
    """Fit the cost model to the published results again, which takes half a minute.

    Args:
        out: File to write; `cluster/published/calibration.json` is the shipped file.
    """
    import msgspec

    from cluster.published.calibration import calibrate
    from console.files import require_writable, write_atomically

    require_writable(out)
    made, _ = calibrate()
    write_atomically(out, msgspec.json.encode(made) + b"\n")
    say(f"{out}: {len(made.parameters)} parameters")


@app.command
def probe(out: Path, seconds: float = 30.0, limit: float = 60.0) -> int:
    """Measure hosts, devices and links, and name the slow or broken ones. Exit status 1 if there are any.

    Run one process per device with a launcher such as srun.

    Args:
        out: File to write, such as cluster.json.
        seconds: Approximate duration, at least 1. If something looks slow, a second measurement follows.
        limit: Seconds within which all processes must have connected.
    """
    from cluster.probe.command import probe as measure

    return measure(out, seconds, limit)


@app.command
def show(view: Positional[Path], out: Path | None = None) -> None:
    """Print what a probe found, and write a page that shows links, switches, devices and outliers.

    Args:
        view: File that `probe` wrote, such as cluster.json.
        out: HTML page to write; by default the name of the probe's file with the suffix .html.
    """
    from cluster.display import lines, render
    from cluster.view import read_view
    from console.files import write_atomically

    found = read_view(view)
    page = out or view.with_suffix(".html")
    write_atomically(page, render(found).encode())
    for line in lines(found):
        say(line)
    say(page)


@app.command
def _place(
    view: Positional[Path],
    nodes: int | None = None,
    group: int = 1,
    tasks_per_node: int = 1,
    out: Path | None = None,
) -> None:
    """Order hosts so that neighbours in the order are neighbours in the network.

    Args:
        view: File that `probe` wrote, such as cluster.json.
        nodes: Number of hosts to choose; by default all.
        group: Number of consecutive hosts that communicate the most with each other, such as the stages of a pipeline.
        tasks_per_node: Number of lines that the file of --out has for each host.
        out: File for `SLURM_HOSTFILE`, which srun and sbatch read with `--distribution=arbitrary`.
    """
    from cluster.placement import cost, place
    from cluster.view import read_view
    from console.files import write_atomically

    if tasks_per_node < 1:
        raise ValueError(f"--tasks-per-node is {tasks_per_node}, expected at least 1")
    seen = read_view(view)
    paths, names = seen.paths, [host.name for host in seen.hosts]
    order = place(paths, len(paths) if nodes is None else nodes, group)
    width = max(map(len, names))
    say(f"{'node rank':>9}  {'host':{width}}  switches, from the top to the leaf")
    for number, host in enumerate(order):
        say(f"{number:9}  {names[host]:{width}}  {' / '.join(paths[host])}")
    say()
    before, after = (cost([paths[host] for host in each], group) for each in (range(len(order)), order))
    if not any(paths):
        say(f"{view} states no switches, so no order is better than another")
    say(f"switch levels that traffic climbs in this order: {after}; in the order of {view}: {before}")
    if out is not None:
        # These names come from an untrusted file. Reject names that Slurm could misread.
        if strange := [name for name in names if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)]:
            raise ValueError(f"{view}: the host name {strange[0]!r} is invalid: use letters, digits and . _ -")
        lines = [f"{names[host]}\n" for host in order for _ in range(tasks_per_node)]
        write_atomically(out, "".join(lines).encode())
        submit = f"SLURM_HOSTFILE={shlex.quote(str(out))} sbatch --distribution=arbitrary launch/slurm.sub"
        say(f"{out}: {counted(len(lines), 'line')}; {submit}")


@app.command
def _plan(
    recipe: Positional[str],
    cluster: Path | None = None,
    gpus: int | None = None,
    accelerator: str | None = None,
    networking: str = "",
    out: Path = Path("plan.json"),
) -> None:
    """Find the fastest way to run a recipe: print the best plans and what slows down the others, and write a plan file.

    Args:
        recipe: Recipe of bert.train.
        cluster: File that `probe` wrote on the machines, such as cluster.json. Without it, the prediction uses data sheets.
        gpus: Number of devices, in whole nodes. By default the number of the recipe, or with --cluster that of the probe.
        accelerator: Name of the devices; by default the recipe's.
        networking: Network of a node, in words, such as "8x ConnectX-7 IB NDR 400Gb/s".
        out: Plan file to write, for the option --plan of a run.
    """
    from bert.configuration.run_plan import write_plan
    from cluster.model.rates import target_of
    from cluster.model.work import work_to_plan
    from cluster.plan.search import as_lines, run_plan, search, summary
    from cluster.plan.sites import choose_site_steps
    from cluster.view import read_view
    from console.files import require_writable

    require_writable(out)
    config = _recipe_named(recipe)
    target = target_of(recipe, cluster, gpus, accelerator, networking)
    work = work_to_plan(config)
    found = search(config, work, target)
    best, explained = found.best[0], []
    if cluster is not None and len((view := read_view(cluster)).sites) > 1:
        best, explained = choose_site_steps(config, work, target, found, view)
    # Write before printing, because a reader such as `head` may close the pipe early.
    write_plan(run_plan(config, target, best), out)
    where = f"{counted(target.nodes, 'node')} of {target.ranks_per_node} x {target.device}"
    source = f"as measured in {cluster}" if cluster else "from the data sheet"
    say(f"{recipe} on {where}, {source}: predicted {counted(len(found.ranked), 'way')} to run")
    for line in as_lines(found, target.world_size):
        say(line)
    say()
    for line in explained:
        say(line)
    say(summary(best))
    say(f"{out}: ./run_and_time.sh {recipe} -- --plan {shlex.quote(str(out))}")


def _recipe_named(name: str) -> "Config":
    """Return the named recipe. Raises ``ValueError`` if it is unknown or if its settings depend on its data."""
    from bert.configuration.recipes import RECIPES
    from bert.derived_settings import DERIVATIONS

    if name not in RECIPES:
        raise ValueError(
            f"unknown recipe {name!r}: expected one of {', '.join(RECIPES)}{did_you_mean(name, list(RECIPES))}"
        )
    if name in DERIVATIONS:
        raise ValueError(
            f"{name} derives its settings from its data when it starts, so it cannot be planned: choose another recipe"
        )
    return RECIPES[name]()


@app.command
def _scale(
    recipe: Positional[str],
    accelerator: str | None = None,
    gpus_per_node: int | None = None,
    networking: str = "",
    out: Path | None = None,
) -> None:
    """Predict a recipe's time to train with the best plan for each number of accelerators, from one node to 16,384.

    Args:
        recipe: Recipe of bert.train.
        accelerator: Name of the devices; by default the recipe's.
        gpus_per_node: Accelerators of each node; by default as listed by `devices`.
        networking: Network of a node, in words, such as "8x ConnectX-7 IB NDR 400Gb/s".
        out: HTML page to write, with curves and published results.
    """
    from cluster.plan.scaling import draw_scale
    from console.files import require_writable

    if out is not None:
        require_writable(out)
    draw_scale(_recipe_named(recipe), accelerator, gpus_per_node, networking, out)


@app.command
def whatif(metrics: Positional[Path]) -> None:
    """Show where a run's time went, and how much removing each bottleneck would save.

    Args:
        metrics: Metrics of the run: the file metrics_N.jsonl beside its log.
    """
    from cluster.whatif import read_run, report

    for line in report(read_run(metrics)):
        say(line)


def main() -> int:
    return app.main("python -m cluster")


if __name__ == "__main__":
    sys.exit(main())
