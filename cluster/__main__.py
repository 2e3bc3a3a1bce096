"""Command line of what machines can do: ``python -m cluster COMMAND``.

A command imports what it needs when it runs, so that --help and a wrong option cost no second.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from console.commands import Commands
from console.interruption import end_in_order
from console.program import complain, say, say_json

app = Commands()


@app.command(name="devices")
def _devices() -> None:
    """List the devices of the facts file: dense peak rates, memory, links one way, power."""
    from cluster.devices import devices

    say(
        f"{'device':16}{'bf16':>8}{'fp8':>8} TFLOP/s{'memory':>8} GB{'':6}GB/s{'link':>6} GB/s{'host':>6} GB/s{'power':>8}"
    )
    for each in devices():
        fp8 = f"{each.fp8_tflops:.0f}" if each.fp8_tflops else "-"
        say(
            f"{each.name:16}{each.bf16_tflops:8.0f}{fp8:>8}{'':8}{each.memory_gb:8.0f}{'':3}{each.memory_gb_s:10.0f}"
            f"{each.link_gb_s:6.0f}{'':5}{each.host_gb_s:6.0f}{'':5}{each.tdp_w:6.0f} W"
        )
    say()
    for each in devices():
        say(f"{each.name}: {each.link}; {each.source}")


@app.command(name="predict")
def _predict(
    accelerator: str | None = None,
    nodes: int = 1,
    gpus_per_node: int = 8,
    batch: Annotated[
        int | None, arg(help="Global batch size; of those published at this scale the fastest if none.")
    ] = None,
    interconnect: str = "",
    networking: str = "",
    round: str | None = None,
    cluster: Path | None = None,
    json: FlagCreatePairsOff[bool] = False,
    table: Path | None = None,
    out: Path | None = None,
) -> None:
    """Predict the time to train BERT to 0.720, with an 80 % interval, split into its parts.

    Args:
        accelerator: Its name, such as H100-SXM; `devices` lists those that are known.
        nodes: How many.
        gpus_per_node: Accelerators in each; sockets where the accelerator is CPU.
        interconnect: Of the accelerators of a node, in words: "NVLINK BRIDGE" between cards counts.
        networking: Of the nodes, in words: "8x ConnectX-7 IB NDR 400Gb/s".
        round: Round of MLPerf Training whose software and recipes are used, the newest if none.
        cluster: The file of a probe, in place of what stands above: its devices and hosts, and the network as it was
            measured.
        json: Print one JSON document.
        table: A CSV file of machines to predict instead, with the columns of published_results.csv.
        out: Where to write that table with the predictions.
    """
    from cluster.devices import device_named
    from cluster.published.cost_model import TimedRun
    from cluster.published.machine import describe_machine
    from cluster.published.prediction import as_document, as_lines, predict, usual_run

    if table is not None or out is not None:
        if table is None or out is None or accelerator is not None or cluster is not None or json:
            raise ValueError("--table and --out go together, without --accelerator, --cluster and --json")
        _predict_table(table, out)
        return
    if cluster is not None:
        from cluster.published.probed import machine_of
        from cluster.view import read_view

        # The file of a probe describes the machine whole; a second description could only contradict it.
        if accelerator is not None or interconnect or networking:
            raise ValueError(
                "--cluster says all of the machine, without --accelerator, --interconnect and --networking"
            )
        machine = machine_of(read_view(cluster))
    elif accelerator is not None:
        machine = describe_machine(device_named(accelerator), nodes, gpus_per_node, interconnect, networking)
    else:
        raise ValueError("no --accelerator given; `python -m cluster devices` lists those that are known")
    # Without a batch size, one with which published runs near this scale reached the target.
    prediction = predict(usual_run(machine, round) if batch is None else TimedRun(machine, batch, round))
    if json:
        say_json(as_document(prediction))
        return
    for line in as_lines(prediction):
        say(line)


def _predict_table(table: Path, out: Path) -> None:
    from cluster.published.prediction_table import predict_table

    rows = predict_table(table, out)
    # All rows are worked off first: a row that cannot be predicted leaves its cells empty and is no reason to stop.
    for row in rows:
        if row.prediction is None:
            complain(f"{table}: row {row.number} is left empty: {row.reason}", "warning")
    say(f"{out}: {sum(row.prediction is not None for row in rows):,} of {len(rows):,} rows predicted")


@app.command(name="calibrate")
def _calibrate(out: Path) -> None:
    """Fit the cost model to the published results again, which takes some half a minute of a processor.

    Args:
        out: Where to write what `cluster/published/calibration.json` holds.
    """
    from cluster.published.calibration import calibrate, to_json
    from console.files import write_atomically

    made, _ = calibrate()
    write_atomically(out, to_json(made).encode())
    say(f"{out}: {len(made.parameters)} parameters")


@app.command
def probe(
    out: Path,
    data: Path | None = None,
    seconds: float = 30.0,
    limit: float = 60.0,
    hosts: tuple[str, ...] = (),
) -> int:
    """Measure hosts, devices and links, and name what is slow: exit status 1 then. One process, or one a device.

    Args:
        out: The file to write, such as cluster.json.
        data: Also time the reading of this folder, on every rank.
        seconds: About how long it may take, 5 or more; a second look, where something is suspicious, takes up to as long
            again, and a busy machine takes longer.
        limit: Seconds within which all processes must have come.
        hosts: Names of the hosts in the order of their nodes, to name those that do not come; under Slurm not needed.
    """
    from cluster.probe.command import probe as measure

    return measure(out, data, seconds, limit, hosts)


@app.command
def show(view: Positional[Path], out: Path | None = None) -> None:
    """Print what a probe found, and write a page beside it: links, switches, devices, and what is slow.

    Args:
        view: The file of a probe, such as cluster.json.
        out: The page to write; by default the file's name with .html.
    """
    from cluster.display.page import write_page
    from cluster.display.terminal import print_view
    from cluster.view import read_view

    found = read_view(view)
    print_view(found)
    page = out or view.with_suffix(".html")
    write_page(found, page)
    say(page)


@app.command(name="place")
def _place(
    view: Positional[Path],
    nodes: int | None = None,
    group: int = 1,
    tasks_per_node: int = 1,
    out: Path | None = None,
) -> None:
    """Order hosts so that neighbours in the order are neighbours in the network: a file for srun, node ranks for torchrun.

    Args:
        view: cluster.json, as `probe` writes it.
        nodes: Hosts to take; all of them unless given.
        group: Consecutive hosts that communicate the most, such as the stages of a pipeline.
        tasks_per_node: Lines for each host in the file.
        out: File for `SLURM_HOSTFILE`, which srun and sbatch read with `--distribution=arbitrary`.
    """
    from cluster.placement import cost, place
    from cluster.view import read_view
    from console.files import write_atomically

    seen = read_view(view)
    if tasks_per_node < 1:
        raise ValueError(f"--tasks-per-node is {tasks_per_node}, expected at least 1")
    paths = [host.switches for host in seen.hosts]
    order = place(paths, len(paths) if nodes is None else nodes, group)
    width = max(len(seen.hosts[host].name) for host in order)
    say(f"{'node rank':>9}  {'host':{width}}  switches, from the top to the leaf")
    for number, host in enumerate(order):
        say(f"{number:9}  {seen.hosts[host].name:{width}}  {' / '.join(paths[host])}")
    say()
    # The cost of the first so many hosts of the file is what one gets without placing anything.
    before, after = (cost([paths[host] for host in each], group) for each in (range(len(order)), order))
    # Without switches all orders cost the same, so the table is still right but prefers nothing.
    if seen.switches_from == "unknown":
        say(f"{view} says nothing of switches, so there is no order to prefer")
    say(f"levels that traffic climbs: {after}, in the order of {view} {before}")
    if out is not None:
        lines = [seen.hosts[host].name for host in order for _ in range(tasks_per_node)]
        # The names go into a file that Slurm reads, and come from a file that anyone may have written.
        if strange := [name for name in lines if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)]:
            raise ValueError(f"{view}: a host is called {strange[0]!r}, which is no name for a file of hosts")
        write_atomically(out, "".join(f"{line}\n" for line in lines).encode())
        submit = f"SLURM_HOSTFILE={shlex.quote(str(out))} sbatch --distribution=arbitrary launch/slurm.sub"
        say(f"{out}: {len(lines)} lines; {submit}")


@app.command(name="plan")
def _plan(
    recipe: Positional[str],
    cluster: Path | None = None,
    gpus: int | None = None,
    accelerator: str | None = None,
    networking: str = "",
    out: Path = Path("plan.json"),
) -> None:
    """Choose how to run a recipe: predict all feasible ways, show the best and why the others lose, write a plan.

    Args:
        recipe: Its name, as of bert.train.
        cluster: The file of a probe of the machines, such as cluster.json; without it, facts of devices count.
        gpus: How many devices, in whole nodes; by default those of the recipe, or of the probe.
        accelerator: Name of the devices; by default the recipe's.
        networking: Of the nodes, in words: "8x ConnectX-7 IB NDR 400Gb/s".
        out: File to write, for --plan of a run.
    """
    from cluster.plan.command import plan

    plan(recipe, cluster, gpus, accelerator, networking, out)


@app.command(name="tune")
def _tune(
    recipe: Annotated[Positional[str], arg(metavar="RECIPE")],
    settings: Annotated[Positional[tuple[str, ...]], arg(metavar="-- SETTINGS")] = (),
    seconds: float = 120.0,
) -> None:
    """Find with what ./run_and_time.sh runs a recipe fastest on this machine, and keep it: it takes that from then on.

    Args:
        recipe: The recipe to tune, such as tiny_cpu.
        settings: Settings of the recipe, as in a run, after "--".
        seconds: About how long measuring may take.
    """
    from cluster.tuning.tune import tune

    tune(recipe, settings, seconds)


@app.command(name="scale")
def _scale(
    recipe: Positional[str],
    accelerator: str | None = None,
    gpus_per_node: int = 8,
    networking: str = "",
    out: Path | None = None,
    page: Path | None = None,
) -> None:
    """Draw a recipe's time to train against the number of accelerators, to 16,384, with published points and what takes it.

    Args:
        recipe: Its name, as of bert.train; each number of accelerators gets the best plan for it.
        accelerator: Name of the devices; by default the recipe's.
        gpus_per_node: Accelerators in each node.
        networking: Of the nodes, in words: "8x ConnectX-7 IB NDR 400Gb/s".
        out: CSV file to write.
        page: HTML page to write.
    """
    from cluster.plan.command import draw_scale

    draw_scale(recipe, accelerator, gpus_per_node, networking, out, page)


@app.command
def whatif(metrics: Positional[Path], cluster: Path | None = None) -> None:
    """Say where the time of a run went, and what it would have been without this or that, in seconds of its result.

    Args:
        metrics: Records of the run, metrics_N.jsonl beside its result.
        cluster: The file of a probe of the cluster that it ran on, for the cost of uneven links.
    """
    from cluster.view import read_view
    from cluster.whatif import read_metrics, report

    for line in report(read_metrics(metrics), read_view(cluster) if cluster else None):
        say(line)


def main() -> int:
    """Run the command; returns the exit status."""
    return app.main("python -m cluster")


if __name__ == "__main__":
    # Before the command and its imports, so that a signal then ends it in order, too.
    end_in_order()
    sys.exit(main())
