"""Predicted steps, compared with calculations by hand and with the cost model of published results."""

from dataclasses import astuple, replace
from itertools import product
from math import exp
from typing import Any, get_args

import numpy as np
import pytest
import torch

from bert.configuration.recipes import tiny_cpu
from bert.configuration.sections import ModelConfig
from bert.model import BertForPreTraining
from bert.optimizer import lamb_segments
from cluster.devices import describe_machine, device_named
from cluster.model.memory import model_shares
from cluster.model.rates import ACCESSES, LAUNCHES, SEQUENCE_BYTES, Curve, Rates, rates_of_machine, rates_of_view
from cluster.model.step import Activity, least_step, pipeline_seconds, predict_run, predict_step, simulate
from cluster.model.work import BUCKET_BYTES, TERMS, Computation, MicroBatches, Strategy, Work, parts_of, wikipedia_work
from cluster.published.calibration import calibration
from cluster.published.cost_model import TimedRun, run_time, step_parts
from cluster.published.fitted import link_rate, network_rate, sequence_time
from cluster.view import Contention, Operation, Scope
from tests.cluster.test_view import made_up

LENGTHS = np.random.default_rng(0).integers(8, 129, 4096).astype(np.uint16)
TINY = Work(tiny_cpu().model, LENGTHS, LENGTHS // 8 + 1, evaluation_sequences=200, samples=96_000)
KINDS = {kind: (1e-6,) * len(terms) for kind, terms in TERMS.items() if kind != "linear"}
COSTS = KINDS | {"linear fp32": (1e-6, 1e-10, 1e-9, 1e-9), "linear bf16": (1e-6, 5e-11, 1e-9, 1e-9)}


def rates(nodes: int = 2, ranks: int = 2, seconds_per_byte: float = 1e-9, **changes: object) -> Rates:
    curve = Curve(((0.0, 1e-4), (1e9, 1e-4 + 1e9 * seconds_per_byte)), share=0.5)
    curves = dict.fromkeys(product(get_args(Operation), get_args(Scope)), curve)
    return replace(Rates(nodes, ranks, 1e9, COSTS, curves), **changes)  # type: ignore[arg-type]


def test_16_bit_attention_times_apply_only_to_16_bit_runs() -> None:
    dry, wet = (Computation("attention", (1.0, 0.0, 0.0, 0.0), dropout=dropout) for dropout in (False, True))
    names = ("attention", "attention with dropout", "attention bf16", "attention bf16 with dropout")
    costs = {name: (float(cost), 0.0, 0.0, 0.0) for cost, name in enumerate(names)}
    timed, before = rates(costs=costs), rates(costs={name: costs[name] for name in names[:2]})
    for precision, expected in (("fp32", [0.0, 1.0]), ("bf16", [2.0, 3.0]), ("fp8", [2.0, 3.0])):
        assert [timed.seconds(each, precision) for each in (dry, wet)] == expected
        assert [before.seconds(each, precision) for each in (dry, wet)] == [0.0, 1.0]


@pytest.mark.parametrize("tensor", [2, 4])
def test_tensor_parallel_ranks_exchange_the_rows_counted_by_hand(tensor: int) -> None:
    """The first of two layers gathers and scatters all tokens. The last layer does so once, then only with its queries."""
    strategy = Strategy(16, tensor=tensor)
    sizes = TINY.micro_batches(strategy, 4, 0)
    assert sizes.tokens_AR.shape == (1, 4 // tensor)
    free, dear = (predict_step(TINY, strategy, rates(1, 4, each), steps=1) for each in (0.0, 1e-6))
    tokens, masked = float(sizes.tokens_AR.mean()), float(sizes.masked_AR.mean())
    rows = masked + sizes.sequences
    exchanged = 2 * (tokens + 4 * tokens + tokens + 4 * rows + masked) * 4 * 128
    ring = (1 - 1 / tensor) / (1 - 1 / 4)
    assert dear.forward_backward - free.forward_backward == pytest.approx(1e-6 * ring * exchanged)
    # On CPUs, ranks implement a reduce-scatter as an all-to-all.
    for demand, scatter in ((0.0, "reduce-scatter"), (0.5, "all-to-all")):
        found = predict_step(TINY, strategy, simple_rates(1, 4, demand=demand), steps=1).forward_backward
        by_byte = 1e-9 * (NS_PER_BYTE["all-gather", "world"] + NS_PER_BYTE[scatter, "world"])
        assert found == pytest.approx(ring * exchanged / 2 * by_byte)
    # The update sums the gradients of replicated parameters: position and segment embeddings, norms, output biases, pooler,
    # transform and classifier.
    shared = 130 * 128 + 256 + 2 * 6 * 128 + 2 * 128**2 + 258 + 4 * 128 + 14
    assert dear.update - free.update == pytest.approx(1e-6 * ring * 4 * shared)
    full = replace(strategy, recompute="full")
    free, dear = (predict_step(TINY, full, rates(1, 4, each), steps=1).forward_backward for each in (0.0, 1e-6))
    # The backward pass repeats the two all-gathers and two reduce-scatters of the layer's forward pass.
    assert dear - free == pytest.approx(1e-6 * ring * (exchanged + 4 * tokens * 4 * 128))


@pytest.mark.parametrize("virtual_stages", [1, 2])
@pytest.mark.parametrize("micro_batches", [4, 12])
def test_pipeline_bubbles_follow_the_formula_of_1f1b_and_interleaving(micro_batches: int, virtual_stages: int) -> None:
    strategy = Strategy(micro_batches, micro_batches, pipeline=4, virtual_stages=virtual_stages)
    compute_PAR, none_P = np.ones((4, micro_batches, 1)), np.zeros(4)
    [seconds] = pipeline_seconds(compute_PAR, none_P, 1.0, strategy, sharing=1.0)
    assert 1 - micro_batches / seconds == pytest.approx(3 / (virtual_stages * micro_batches + 3))
    [shared] = pipeline_seconds(compute_PAR, none_P, 1.0, strategy, sharing=4.0)
    assert shared == micro_batches, "an idle rank leaves its processors to the others"
    crowded, paired = (pipeline_seconds(compute_PAR, np.full(4, 2.0), 10.0, strategy, sharing=each) for each in (16, 4))
    assert crowded == paired, "the ranks of one stage still share processors"
    [waiting] = pipeline_seconds(compute_PAR, np.array([1.0, 2.0, 2.0, 1.0]), 0.1, strategy, sharing=1.0)
    assert waiting > seconds + 0.2 * micro_batches


NOTHING = {kind: (0.0,) * len(terms) for kind, terms in TERMS.items() if kind != "linear"}
NOTHING |= {f"linear {precision}": (0.0,) * 4 for precision in ("fp32", "bf16", "fp8")}
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
NS_PER_BYTE: dict[Any, int] = dict(zip(product(get_args(Operation), get_args(Scope)), PRIMES, strict=True))


def simple_rates(nodes: int, ranks: int, scale: float = 1.0, **changes: Any) -> Rates:
    """Return rates with only the costs in ``changes``. Each collective takes a different prime number of ns per byte."""
    curves = {way: Curve(((0.0, 0.0), (1e9, scale * each)), share=0.5) for way, each in NS_PER_BYTE.items()}
    changes["costs"] = NOTHING | changes.get("costs", {})
    return replace(Rates(nodes, ranks, 1e9, NOTHING, curves), **changes)


REDUCTIONS = {
    "flat": (1, "", "all-reduce world 1"),
    "hierarchical": (1, "", "reduce-scatter node 1, all-reduce rail .5, all-gather node 1"),
    "sharded": (2, "all-gather node 1", "reduce-scatter node 1, all-reduce rail .5"),
    "sharded_world": (4, "all-gather world 1", "reduce-scatter world 1"),
    "sharded_world in fp8": (4, "all-gather world 1", "reduce-scatter world 1"),
    "flat of bf16": (1, "", "all-to-all world .5, all-gather world .5"),
    "hierarchical of bf16": (1, "", "all-to-all node .5, all-to-all rail .25, all-gather rail .25, all-gather node .5"),
}
"""Optimizer-state shards on two nodes of two ranks, then the collectives that gather weights and that sum gradients, each
with the share of the vector that it sends."""


@pytest.mark.parametrize("name", REDUCTIONS)
def test_each_reduction_takes_the_time_of_its_collectives(name: str) -> None:
    """The only bucket overlaps with nothing: weights arrive before the forward pass, and sums follow the backward pass."""
    shards, gathers, sums = REDUCTIONS[name]

    def seconds(messages: str, size: float) -> float:
        ways = [each.split() for each in messages.split(", ") if each]
        return sum(1e-9 * NS_PER_BYTE[operation, scope] * float(part) * size for operation, scope, part in ways)

    settings: dict[str, Any] = {"reduction": name.split()[0]}
    settings |= {"precision": "fp8"} if "fp8" in name else {"reduce_dtype": name.split()[-1]} if "bf16" in name else {}
    alone = simple_rates(2, 2, micro_batch_s=0.03, costs={"lamb": (1e-3, 1e-5, 1e-9), "batch": (0.01, 0.001)})
    found = predict_step(TINY, Strategy(16, 2, bucket_bytes=2**30, **settings), alone, steps=1)
    vector, elements = 4 * 579_136, 579_136  # padded to a multiple of 16 for each of four ranks
    update = 1e-3 + (1e-5 * 42 + 1e-9 * elements) / shards + 2 * seconds(gathers, 16 * 42 * shards)
    gathering = seconds(gathers, vector)
    in_update = gathering if "fp8" in name else 0.0
    expected = (0.0, 0.06, gathering - in_update + seconds(sums, vector), update + in_update)
    assert astuple(found) == pytest.approx(expected)


def test_messages_overlap_with_computations_and_share_processors() -> None:
    def message(seconds: float, share: float) -> list[Activity]:
        return [Activity(seconds, needs=1, share=share)]

    two, alone = [Activity(1.0), Activity(2.0)], [Activity(1.0)]
    waiting = [Activity(0.0, needs=1), Activity(1.0, needs=1), Activity(1.0, needs=2)]
    for computations, messages, demand, expected in (
        (two, message(1.5, 0.0), 0.0, (3.0, 3.0, 0.0)),
        (two, [*message(2.5, 0.0), Activity(1.0, needs=2)], 0.0, (3.0, 4.5, 0.0)),
        # Computations wait for the messages that they need. Only the wait of a computation of 0 seconds is returned.
        (waiting, [Activity(2.0), Activity(3.0)], 0.0, (6.0, 6.0, 2.0)),
        # Computation and message each demand all processors, so each gets half of them until one ends.
        ([*alone, *alone], message(1.0, 1.0), 1.0, (3.0, 3.0, 0.0)),
        # A message that needs a quarter of the processors gets them at once and slows computing down accordingly.
        ([*alone, Activity(1.5)], message(1.0, 0.25), 1.0, (2.75, 2.75, 0.0)),
        # Computing needs a quarter of the processors, so a message that could use all processors gets three quarters.
        ([*alone, Activity(4.0)], message(1.5, 1.0), 0.25, (5.0, 5.0, 0.0)),
        (alone, message(1.5, 1.0), 0.25, (1.0, 2.5, 0.0)),
    ):
        assert simulate(computations, messages, demand) == pytest.approx(expected)


@pytest.mark.parametrize("scale", [0.001, 0.01, 0.05, 1.0])
@pytest.mark.parametrize("steps", [1, 3])
def test_each_bucket_overlaps_with_the_remaining_forward_or_backward_pass(scale: float, steps: int) -> None:
    """The embeddings, a layer, and the last layer with the heads take 10 ms forward and 20 ms backward each."""
    alone = simple_rates(2, 2, scale, micro_batch_s=0.09)
    # The parts of the vector in order: decoder's bias and embeddings (to 148992), two layers (to 347264, 545536), heads.
    sizes, ends = (179_136, 179_136, 179_136, 41_728), (0.04, 0.02, 0.0, 0.0)
    for reduction, gather in (("flat", False), ("sharded_world", True)):
        arrived, now, first = [0.0], 0.0, 0.0
        if gather:
            for size in reversed(sizes):
                arrived.append(arrived[-1] + 4e-9 * size * scale * NS_PER_BYTE["all-gather", "world"])
            first = arrived[1]
        for needed in (2, 3, 4):
            now = max(now, arrived[needed] if gather else 0.0) + 0.01
        now, last = now + 0.06 + 0.09 * (steps - 1), arrived[-1]
        way = ("reduce-scatter" if gather else "all-reduce", "world")
        for size, before_end in zip(sizes, ends, strict=True):
            last = max(last, now - before_end) + 4e-9 * size * scale * NS_PER_BYTE[way]
        strategy = Strategy(48, steps, reduction=reduction, bucket_bytes=4 * sizes[0])  # type: ignore[arg-type]
        found = predict_step(TINY, strategy, alone, steps=1)
        assert (found.forward_backward, found.reduce) == pytest.approx((now - first, last - now + first))


@pytest.mark.parametrize("demand", [0.5, 1.0])
@pytest.mark.parametrize("sharing", [1.0, 2.0, 4.0])
def test_ranks_wait_for_data_and_for_the_slowest_rank(demand: float, sharing: float) -> None:
    """A token takes 1 us. Assembling a batch takes 1 s, which adds to the computation if all processors are busy."""
    costs = {"embedding": (0.0, 1e-6 / 128, 0.0), "batch": (0.2, 0.05)}
    crowded = simple_rates(2, 2, 0.0, demand=demand, sharing=sharing, mean=0.9, last=1.01, costs=costs)
    tokens_R = TINY.micro_batches(Strategy(16), 4, 0).tokens_AR[0]
    work = 1e-6 * np.sort(tokens_R) + (1.0 if demand == 1 else 0.0)
    # Ranks are slowed down by ``sharing`` while all of them compute, and by less when some have finished.
    parts = [1.0, *(max(1.0, sharing * rest / 4) / sharing for rest in (3, 2, 1))]
    last = max(float(np.diff(work, prepend=0.0) @ parts), 1.01 * work.mean())
    found = predict_step(TINY, Strategy(16), crowded, steps=1)
    expected = (0.0 if demand == 1 else 1.0 - work.mean(), 0.9 * work.mean(), last - 0.9 * work.mean(), 0.0)
    assert astuple(found) == pytest.approx(expected)
    assert predict_step(TINY, Strategy(4), replace(crowded, nodes=1, ranks=1), steps=1).reduce == 0, "alone"


@pytest.mark.parametrize(("virtual", "neighbours"), [(1, 2), (2, 4)])
@pytest.mark.parametrize(
    ("precision", "demand", "size"), [("fp32", 0.0, 4), ("bf16", 0.0, 2), ("bf16", 0.5, 4), ("fp32", 1.0, 4)]
)
def test_a_pipelined_step_adds_up_bubbles_messages_and_reduction(
    virtual: int, neighbours: int, precision: Any, demand: float, size: int
) -> None:
    """Eight ranks on four nodes hold two copies of four stages. A stage computes 10 ms for each of eight micro-batches."""
    work = Work(replace(tiny_cpu().model, num_hidden_layers=8), LENGTHS, LENGTHS // 8 + 1)
    costs = {"lamb": (1e-3, 1e-5, 1e-9), "batch": (0.0, 0.01)}
    alone = simple_rates(4, 2, 0.001, micro_batch_s=0.01, mean=0.9, demand=demand, costs=costs)
    strategy = Strategy(64, 8, precision, pipeline=4, virtual_stages=virtual)
    tokens = float(work.micro_batches(strategy, 8, 0).tokens_AR.mean())
    sent = 1e-12 * NS_PER_BYTE["all-gather", "rail"] / (1 - 1 / 4)
    message = sent * tokens * 128 * size
    busy = [8 * (0.01 + each * message) for each in (neighbours - 1, neighbours, neighbours, neighbours - 1)]
    through = busy[1] + (sum(busy) - busy[1]) / 8 / virtual
    # Two data groups share a node's links. A ring of two sends 1/2 of a vector, the measured ring of eight 7/8. The first
    # stage is the largest.
    elements, word = 147_968 + 2 * 198_272, sent * 4 * 1024 * 128
    total = 0.5 / (7 / 8) * 2 * 4 * elements * 1e-12 * NS_PER_BYTE["all-reduce", "world"]
    update = 1e-3 + 1e-5 * (5 + 2 * 14) + 1e-9 * elements + word
    # Busy processors assemble the batch before they compute.
    waiting, through = (0.64 - 0.072, through) if demand < 1 else (0.0, through + 0.64)
    expected = (waiting, 0.072, through - 0.072 + word + total, update)
    assert astuple(predict_step(work, strategy, alone, steps=1)) == pytest.approx(expected)
    assert least_step(work, strategy, alone).total == pytest.approx(0.04)


EVALUATIONS = [(1, 1, 4, 121 / 4), (4, 1, 1, 50), (2, 2, 4, 121 / 4)]


@pytest.mark.parametrize(("world", "pipeline", "batches", "calls"), EVALUATIONS)
def test_an_evaluation_takes_the_time_of_its_forward_passes(
    world: int, pipeline: int, batches: int, calls: float
) -> None:
    """Ranks divide 200 sequences into equal batches of at most 64. Each of the 121 lengths occurs in one batch only."""
    assert TINY.distinct_lengths == 121
    costs = {"embedding": (0.0, 1e-6 / 128, 0.0), "attention": (1e-3, 0.0, 0.0, 0.0)}
    alone = simple_rates(1, world, 0.0, micro_batch_s=0.02, start_s=7.0, costs=costs)
    work, strategy = replace(TINY, interval_samples=1000), Strategy(16, pipeline, pipeline=pipeline)
    run = predict_run(work, strategy, alone, predict_step(work, strategy, alone), samples=9_001)
    # The last layer calls attention for each sequence.
    first, last = 1e-6 * 50 * float(LENGTHS.mean()) + 1e-3 * calls, 1e-3 * 50
    seconds = batches * (0.02 + first + last)
    if pipeline == 2:
        # The slower stage is always busy. The faster stage adds the time of one batch, before or after it.
        longer, shorter = sorted((0.02 + first, 0.02 + last), reverse=True)
        seconds = batches * longer + shorter
    assert run.parts["evaluation"] == pytest.approx(10 * seconds / 3)
    assert (run.samples, run.steps, run.parts["start"]) == (9_001, 563, 7.0)
    assert run.total == pytest.approx(sum(run.parts.values()))


def waits_and_rates(rates: Rates, operation: Operation = "all-gather") -> dict[str, float]:
    """Return the latency of a collective in each scope, as "SCOPE wait", and its seconds per byte, as "SCOPE"."""
    ways = {scope: [rates.collective(operation, scope, size)[0] for size in (0.0, 1e9)] for scope in get_args(Scope)}
    waits = {f"{scope} wait": wait for scope, (wait, _) in ways.items()}
    return waits | {scope: (seconds - wait) / 1e9 for scope, (wait, seconds) in ways.items()}


@pytest.mark.parametrize("name", ["H100-SXM", "B200", "L40S", "Gaudi2"])
def test_collectives_between_nodes_use_the_network_if_links_end_at_the_node(name: str) -> None:
    p, machine = calibration().parameters, describe_machine(device_named(name), 4, 8)
    found, link, network = rates_of_machine(machine), link_rate(p, machine), network_rate(p, machine)
    buckets = 4 * 336.2e6 / BUCKET_BYTES
    waits = {"node wait": exp(p["launch"]) / 1406}
    waits |= dict.fromkeys(("rail wait", "world wait"), exp(p["network_latency"]) * 2 / buckets)
    expected = {"node": 7 / 8 / link, "rail": 3 / 4 * 8 / network, "world": 31 / 32 / min(link, network)}
    assert waits_and_rates(found) == pytest.approx(waits | expected)
    doubled = {scope: 2 * per_byte for scope, per_byte in expected.items()}
    assert waits_and_rates(found, "all-reduce") == pytest.approx(waits | doubled)
    # On each node, two data groups of four ranks share the network, and their rings are shorter.
    shorter = {"node": 6 / 7, "rail": 1, "world": 30 / 31}
    halved = {scope: shorter[scope.split()[0]] * seconds for scope, seconds in (waits | expected).items()}
    assert waits_and_rates(found.of_data_groups(2)) == pytest.approx(halved | {"world": 2 * halved["world"]})
    alone = describe_machine(device_named("A30"), 2, 1, networking="8x 400Gb/s")
    assert waits_and_rates(rates_of_machine(alone))["world"] == pytest.approx(1 / 2 / network_rate(p, alone)), (
        "no link in a node of one"
    )
    update = 30 / (0.8e9 * machine.device.memory_gb_s)
    assert (found.start_s, found.costs["lamb"]) == (exp(p["start"]), pytest.approx((0, 0, update)))
    sequence = sum(sequence_time(p, machine.device, False))
    assert found.micro_batch_s == pytest.approx(exp(p["launch"]) + exp(p["half_batch"]) * sequence)


def test_collectives_in_a_rack_use_the_link_that_joins_its_trays() -> None:
    p, device = calibration().parameters, device_named("GB200")
    rack, racks = describe_machine(device, 18, 4), describe_machine(device, 36, 4)
    slow_racks = describe_machine(device, 36, 4, networking="1x 100Gb/s Ethernet")
    found, two, two_slow = (rates_of_machine(each) for each in (rack, racks, slow_racks))
    link, network, slow = link_rate(p, rack), network_rate(p, racks), network_rate(p, slow_racks)
    assert (found.nodes, found.ranks, two.nodes) == (18, 4, 36)
    launch, latency = exp(p["launch"]) / 1406, exp(p["network_latency"]) / (4 * 336.2e6 / BUCKET_BYTES)
    expected = {"node": 3 / 4 / link, "rail": 17 / 18 / link, "world": 71 / 72 / link}
    waits = {"node wait": launch, "rail wait": launch, "world wait": 0.0}
    assert waits_and_rates(found) == pytest.approx(expected | waits)
    waits |= {"rail wait": latency + launch, "world wait": latency}
    for rates, between in ((two, network), (two_slow, slow)):
        across = {"rail": 35 / 36 * max(1 / link, 4 / between), "world": 143 / 144 * max(1 / link, 1 / between)}
        assert waits_and_rates(rates) == pytest.approx(expected | across | waits)
    # Data groups have links of their own in a rack, and share the network between racks.
    assert waits_and_rates(found.of_data_groups(2))["world"] == pytest.approx(35 / 36 / link)
    assert waits_and_rates(two.of_data_groups(4))["world"] == pytest.approx(35 / 36 * max(1 / link, 4 / network))
    assert waits_and_rates(two_slow.of_data_groups(2))["world"] == pytest.approx(2 * 71 / 72 / slow)
    # Stages on different trays of a rack send at the speed of the fast link.
    assert found.message_seconds(1, 8, 1e9) == pytest.approx(launch + 1e9 / link)


def test_elements_and_segments_of_bert_large_equal_those_of_the_model() -> None:
    [large] = model_shares(ModelConfig())
    assert large.elements == pytest.approx(336.2e6, rel=0.001)
    with torch.device("meta"):
        assert large.segments == len(lamb_segments(BertForPreTraining(ModelConfig())).sizes)
    assert list(large.ends) == sorted(large.ends)
    assert sum(bucket.stop - bucket.start for bucket in large.buckets(8, BUCKET_BYTES)) == large.padded(8)


def test_both_cost_models_agree_on_bert_large_within_a_tenth() -> None:
    parameters = calibration().parameters
    for name, nodes, batch in (("H100-SXM", 1, 768), ("H100-SXM", 8, 4608), ("A100-SXM4-80GB", 1, 448)):
        run = TimedRun(describe_machine(device_named(name), nodes, 8), batch)
        precision = "fp8" if run.uses_fp8 else "bf16"
        strategy = Strategy(batch, precision=precision, reduction="sharded_world")
        found = wikipedia_work(), strategy, rates_of_machine(run.machine, precision)
        step = predict_step(*found)
        assert step.total == pytest.approx(sum(step_parts(parameters, run).values()), rel=0.1)
        assert predict_run(*found, step).total == pytest.approx(run_time(parameters, run).total, rel=0.1)


def test_assumed_traffic_and_launches_follow_from_the_computations() -> None:
    work = wikipedia_work()

    def counted(sizes: MicroBatches, costs: dict[str, tuple[float, ...]]) -> float:
        embedding, layer, last = parts_of(work.model, sizes)
        alone = Rates(1, 1, 0.0, costs)
        return float(sum(np.sum(alone.seconds(each, "bf16")) for each in [*embedding, *layer * 23, *last]))

    bytes_moved = {kind: (0.0, 2 * times, 0.0, 0.0)[: len(TERMS[kind])] for kind, times in ACCESSES.items()}
    launches = {kind: (8.0, 0.0, 0.0, 0.0)[: len(TERMS[kind])] for kind in ACCESSES}
    many, one = work.micro_batches(Strategy(4096), 1, 0), work.typical(1)
    moved = counted(many, bytes_moved | {"linear bf16": (0.0,) * 4})
    assert moved / 4096 == pytest.approx(SEQUENCE_BYTES, rel=1e-6)
    assert counted(one, launches | {"linear bf16": (6.0, 0.0, 0.0, 0.0)}) == LAUNCHES


def test_recomputation_repeats_forward_passes_of_inner_layers_only() -> None:
    """Only the first of two layers is recomputed: its whole forward pass, or all of it except the linear layers."""
    alone, small = rates(1, 1), ("attention", "norm", "gelu")
    layer = parts_of(TINY.model, TINY.micro_batches(Strategy(16), 1, 0))[1]
    plain = predict_step(TINY, Strategy(16), alone, steps=1).forward_backward
    for mode, kinds in (("selective", small), ("full", (*small, "linear"))):
        again = sum(float(np.sum(alone.seconds(each))) for each in layer if each.kind in kinds) / 3
        found = predict_step(TINY, Strategy(16, recompute=mode), alone, steps=1)  # type: ignore[arg-type]
        assert found.forward_backward - plain == pytest.approx(again)


def test_rates_from_a_probe_reproduce_its_times_and_contention() -> None:
    found = rates_of_view(made_up())
    assert float(found.seconds(Computation("gelu", (1.0, 524288.0)))) == pytest.approx(1e-3)
    assert found.collective("all-reduce", "world", 131072)[0] == pytest.approx(1.6e-4 + 2e-4 / 3)
    with pytest.raises(ValueError, match="rate of norm"):
        found.seconds(Computation("norm", (1.0, 1.0)))
    with pytest.raises(ValueError, match=r"no rate of all-gather \(node\)"):
        found.collective("all-gather", "node", 1.0)[0]
    contention = Contention(processors=16, threads=1, alone_s=0.01, together_s=0.02, mean_s=0.015, last_s=0.03)
    crowded = rates_of_view(replace(made_up(), contention=contention))
    assert (crowded.nodes, crowded.ranks, crowded.memory_bytes, crowded.demand) == (4, 2, 2**37, 0.5)
    assert (crowded.sharing, crowded.mean, crowded.last) == pytest.approx((2.0, 0.75, 1.5))
    assert crowded.collective("all-reduce", "world", 1.0)[1] == pytest.approx(3e-4 / (16 * 3.6e-4))
    busy = replace(made_up().collectives[0], points=((8, 1e-4, 3e-4), (9, 1e-4, 3e-4)))
    all_busy = rates_of_view(replace(made_up(), contention=replace(contention, processors=2), collectives=(busy,)))
    assert all_busy.collective("all-reduce", "world", 1.0)[1] == 1
    noisy = replace(contention, alone_s=0.03, mean_s=0.021, last_s=0.019)
    own = rates_of_view(replace(made_up(), contention=noisy, backend="nccl"))
    assert (own.memory_bytes, own.demand, own.sharing, own.mean, own.last) == (2**38, 0, 1, 1, 1)


def test_a_curve_interpolates_extrapolates_and_never_falls() -> None:
    curve = Curve(((10.0, 1.0), (20.0, 3.0), (40.0, 2.0), (50.0, 6.0)))
    seconds = {0: 1.0, 10: 1.0, 15: 2.0, 20: 3.0, 30: 3.0, 41: 2.4, 50: 6.0, 60: 10.0}
    assert {size: curve.seconds(size) for size in seconds} == pytest.approx(seconds)


def test_indivisible_batches_indivisible_ranks_and_missing_fp8_are_refused() -> None:
    with pytest.raises(ValueError, match=r"global_batch_size is 30.* multiple of 4"):
        predict_step(TINY, Strategy(30), rates())
    with pytest.raises(ValueError, match=r"parallel\.tensor is 3"):
        predict_step(TINY, Strategy(30, tensor=3), rates())
    with pytest.raises(ValueError, match="A100"):
        rates_of_machine(describe_machine(device_named("A100-SXM"), 1, 8), "fp8")
